"""Intel's public Python API, as far as `gaudi_spec/device/hpu.py` calls it.

Signatures were read in the source of the PyTorch bridge that Intel publishes
(github.com/HabanaAI/gaudi-pytorch-bridge, release 1.19.0; `source` is the file below
python_packages/habana_frameworks/torch) and in the documentation of 1.23. `since` and `until` are
releases where they are known, else None. Nothing here was tried on a card.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One callable.

    Attributes:
        signature: Parameters with their defaults, without `self`.
        returns: Name of the type of what it returns, if that has entries of its own.
        source: File in the published bridge.
        since: First release that is known to have it.
        until: Last release that has it; None while it is not known to be gone.
        modes: Where it does something.
    """

    signature: str
    returns: str | None
    source: str
    since: str | None = None
    until: str | None = None
    modes: str = "lazy, eager"


MODULES = (
    "torch.core",
    "torch.hpex.kernels",
    "torch.hpex.normalization",
    "torch.hpu",
    "torch.hpu.metrics",
    "torch.utils.internal",
)

API = {
    "torch.core.mark_step": Entry(
        "device_str='', sync=False", None, "core/step_closure.py", modes="lazy"
    ),
    "torch.core.hpu_set_env": Entry("model=None", None, "core/quantization.py"),
    "torch.core.hpu_initialize": Entry(
        "model, mark_only_scales_as_const=False, optimizer=None, args=None",
        None,
        "core/quantization.py",
    ),
    "torch.hpu.is_available": Entry("", None, "hpu/__init__.py"),
    "torch.hpu.synchronize": Entry("", None, "hpu/__init__.py"),
    "torch.hpu.get_device_name": Entry("device=None", None, "hpu/__init__.py"),
    "torch.hpu.memory_stats": Entry("device=None", "memory stats", "hpu/memory.py"),
    "torch.hpu.default_stream": Entry("device=None", "Stream", "hpu/streams.py"),
    "torch.hpu.stream": Entry("stream", "StreamContext", "hpu/streams.py"),
    "torch.hpu.HPUGraph": Entry("", "HPUGraph", "hpu/graphs.py", since="1.8", modes="lazy"),
    "HPUGraph.capture_begin": Entry("dry_run=False", None, "hpu/graphs.py", modes="lazy"),
    "HPUGraph.capture_end": Entry("", None, "hpu/graphs.py", modes="lazy"),
    "HPUGraph.replay": Entry("asynchronous=False", None, "hpu/graphs.py", modes="lazy"),
    "torch.hpu.metrics.metric_global": Entry("name", "Metric", "hpu/metrics/metrics.py"),
    "Metric.stats": Entry("", None, "hpu/metrics/metrics.py"),
    # Of a class or a module's value, `returns` is what its attributes belong to.
    "torch.hpex.kernels.FusedSDPA": Entry("", "FusedSDPA", "hpex/kernels/FusedSDPA.py"),
    "FusedSDPA.apply": Entry(
        "q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, softmax_mode='None', "
        "recompute_mode=None, valid_seq_len=None, seq_padding_type='left', "
        "return_dropout_mask=False, return_attn_probs=False",
        None,
        "hpex/kernels/FusedSDPA.py",
    ),
    "torch.hpex.kernels.RotaryPosEmbeddingMode": Entry(
        "", "RotaryPosEmbeddingMode", "hpex/kernels/RotaryPosEmbedding.py"
    ),
    "RotaryPosEmbeddingMode.BLOCKWISE": Entry("", None, "hpex/kernels/RotaryPosEmbedding.py"),
    "torch.hpex.kernels.apply_rotary_pos_emb": Entry(
        "p, cos, sin, position_ids=None, offset=0, mode=None",
        None,
        "hpex/kernels/RotaryPosEmbedding.py",
    ),
    "torch.hpex.normalization.FusedRMSNorm": Entry(
        "", "FusedRMSNorm", "hpex/normalization/FusedRMSNorm.py"
    ),
    "FusedRMSNorm.apply": Entry("data_in, gamma, eps", None, "hpex/normalization/FusedRMSNorm.py"),
    # Not documented, but what other projects ask too.
    "torch.utils.internal.is_lazy": Entry("", None, "utils/internal.py"),
}

# What `memory_stats` returns, in bytes; read in hpu/csrc/bindings.cpp.
MEMORY_KEYS = (
    "Limit InUse MaxInUse NumAllocs NumFrees ActiveAllocs MaxAllocSize TotalSystemAllocs "
    "TotalSystemFrees TotalActiveAllocs"
).split()

# What `stats()` of a metric lists, by the name that `metric_global` takes.
METRICS = {
    "graph_compilation": ("TotalNumber", "TotalTime", "AvgTime"),
    "cpu_fallback": ("TotalNumber", "FallbackOps"),
    "memory_defragmentation": ("TotalNumber", "TotalSuccessful", "AvgTime", "MaxTime"),
}

# `torch.compile(backend="hpu_backend", options=...)`: dynamo/compile_backend/config.py.
BACKEND = "hpu_backend"
OPTIONS = (
    "use_compiled_recipes decomposition_mode keep_input_mutations use_eager_fallback "
    "use_graph_freezing discard_frozen_params remove_unnecessary_clones use_inplace_allreduce "
    "use_inplace_index_copy inference enable_sfg use_cpp_partitioner "
    "enable_allreduce_graph_split force_static_compile reinplace_add reassign_full_copy "
    "reassign_copy_ use_boxed_input"
).split()
