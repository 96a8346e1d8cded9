"""Intel Neural Compressor's public functions, as far as `gaudi_spec/quant/inc.py` calls them.

Read in the release 3.10 of `neural-compressor-pt`, module `neural_compressor.torch.quantization`.
"""

API = {
    "FP8Config.from_json_file": "filename",
    "prepare": "model, quant_config, inplace=True, example_inputs=None",
    "convert": "model, quant_config=None, inplace=True, **kwargs",
    "finalize_calibration": "model",
    "load": "model_name_or_path, original_model=None, format='default', device='cpu', **kwargs",
}
SCALE_METHODS = """unit_scale hw_aligned_single_scale maxabs_hw maxabs_pow2 maxabs_arbitrary
    maxabs_hw_opt_weight maxabs_pow2_opt_weight act_maxabs_hw_weights_pcs_maxabs_pow2
    act_maxabs_hw_weights_pcs_opt_pow2 act_maxabs_pow2_weights_pcs_maxabs_pow2
    act_maxabs_pow2_weights_pcs_opt_pow2""".split()
KEYS = (
    """method mode observer dump_stats_path scale_method blocklist use_qdq scale_format""".split()
)
