"""What Optimum Habana 1.21.2's text-generation programs accept and write, from their docs."""

SWITCHES = """bf16 use_kv_cache use_hpu_graphs do_sample trim_logits profiling_record_shapes
profile_whole_sequences attn_softmax_bf16 bucket_internal limit_hpu_graphs clear_hpu_graphs_cache
show_graphs_count reuse_cache verbose_workers reduce_recompile use_chat_template use_flex_attention
use_flash_attention flash_attention_recompute flash_attention_causal_mask torch_compile
trust_remote_code trust_remote_code_tokenizer input_embeds run_partial_dataset sdp_on_bf16
save_quantized_model_with_inc pt2e_save load_quantized_model_with_autogptq
load_quantized_model_with_autoawq quantize_with_bnb disk_offload load_quantized_model_with_inc
regional_compile force_static_compile dynamo_specialize_float book_source""".split()
# Flags with a value that is asked for, and their defaults.
VALUES = dict(
    device="hpu",
    model_name_or_path=None,
    max_new_tokens=100,
    max_input_tokens=0,
    batch_size=1,
    warmup=3,
    n_iterations=5,
    local_rank=0,
    dataset_name=None,
    mlcommons_dataset=None,
    column_name=None,
    num_beams=1,
    top_k=None,
    penalty_alpha=None,
    seed=27,
    profiling_warmup_steps=0,
    profiling_steps=0,
    prompt=None,
    bad_words=None,
    force_words=None,
    assistant_model=None,
    peft_model=None,
    num_return_sequences=1,
    token=None,
    model_revision="main",
    output_dir=None,
    bucket_size=-1,
    dataset_max_samples=-1,
    simulate_dyn_prompt=None,
    flash_attention_fast_softmax=None,
    temperature=1.0,
    top_p=1.0,
    const_serialization_path=None,
    parallel_strategy="none",
    saved_model_path="inc_quantized_model",
    pt2e_path=None,
    pt2e_quant_dtype="fp8_143",
    local_quantized_inc_model_path=None,
    attn_batch_split=1,
    decode_attn_batch_split=1,
    cache_size_limit=None,
    attn_implementation="eager",
)
# On by default; the second has no form that turns it off.
ON = ["ignore_eos", "dynamo_allow_unspec_int_on_nn_module"]
SHORT = {"device": "-d", "const_serialization_path": "--csp"}
DEFAULTS = dict.fromkeys(SWITCHES, False) | VALUES | dict.fromkeys(ON, True)

# The block of statistics, in its order; the sixth with --show_graphs_count only.
LABELS = """Input tokens
Throughput (including tokenization) =
Average first token latency         =
Average rest token latency          =
Average end to end latency          =
Number of HPU graphs                =
Memory allocated                    =
Max memory allocated                =
Total memory available              =
Graph compilation duration          =""".splitlines()
# Of results.json; times in seconds.
KEYS = """throughput avg_first_token_latency avg_rest_token_latency avg_e2e_latency input
output""".split()
# What run_pipeline.py prints, with the numbers of the iteration and the row.
PIPELINE_LINES = [
    "Prompt[{i}][{row}]: ",
    "Generated Text[{i}][{row}]: ",
    "Inference Duration (for {n} iterations): ",
    "Throughput: ",
]
# Flags that run_lm_eval.py has besides, and their defaults.
LM_EVAL = dict(
    buckets=[16, 32, 64, 128, 189, 284, 384],
    output_file=None,
    tasks=["hellaswag", "lambada_openai", "piqa", "winogrande"],
    limit=None,
    show_config=False,
    log_samples=False,
    system_instruction=None,
    max_graphs=None,
    gen_kwargs=None,
    num_fewshot=None,
    fewshot_as_multiturn=False,
    metadata=None,
    apply_chat_template=False,
    samples=None,
    confirm_run_unsafe_code=False,
)
