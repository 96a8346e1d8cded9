"""Everything a user can set, as one frozen dataclass that checks itself; YAML in and out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .errors import ConfigError
from .yamlfile import check_keys, read_yaml

MAX_ASSISTANT_TOKENS = 32
MAX_NGRAM_SIZE = 32
DEFAULT_ASSISTANT_TOKENS = 5
DEFAULT_CONFIDENCE = 0.4  # Transformers' own
DEVICES = ("hpu", "cuda", "cpu", "hpu-emulated")  # "auto" takes the first one that is there
SCHEDULES = ("auto", "constant", "heuristic", "heuristic_transient", "confidence")
FORWARD_OPTIONS = (
    "attn_softmax_bf16",
    "use_flash_attention",
    "flash_attention_recompute",
    "flash_attention_fast_softmax",
)
QUANT_SCHEMES = ("auto", "none", "int8", "int8wo", "int4wo", "fp8")
KV_DTYPES = ("auto", "bf16", "fp8", "int8")
# Heads decide between almost equal tokens, routers between experts; no layer's weights count for as
# much as those of values, which are few.
UNQUANTIZED = ("lm_head", "embed_out", "gate", "router", "shared_expert_gate", "v_proj")


class Quant(NamedTuple):
    """How one model is quantized; see the fields of `SpecConfig`."""

    scheme: str = "auto"
    exclude: tuple[str, ...] = UNQUANTIZED
    kv_dtype: str = "auto"


def refuse_quant(quant: Quant, role: str) -> None:
    """Refuses settings for a "target" or "draft" that is not there.

    Raises:
        ConfigError: They differ from the defaults.
    """
    if quant != Quant():
        raise ConfigError(
            f"{role}_quant, {role}_kv_dtype and {role}_quant_exclude need a {role} model: "
            "give an assistant_model, or leave them out."
        )


@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """Settings that Transformers' `GenerationConfig` has no name for.

    Attributes:
        num_assistant_tokens: K, the draft tokens proposed in a cycle, 1 to 32; the most where the
            schedule varies it. None: 5.
        schedule: What chooses K for each cycle, see `schedule.py`: "auto" (by acceptance and
            measured times, 0 among its choices), "constant", "heuristic", "heuristic_transient",
            "confidence". None: "confidence" if `assistant_confidence_threshold` is given,
            "constant" if `num_assistant_tokens` is, as in Transformers, and else "auto".
        assistant_confidence_threshold: With the schedule "confidence", a row's proposals end with
            the first token that the draft gave less probability than this, 0 to 1. None: 0.4.
        drafter: What proposes tokens: "model" (the draft model), "ngram" (prompt lookup, without a
            draft model), "combined" (prompt lookup, the draft model where nothing matches), or
            the name of an installed plug-in. "auto": the draft model if one is given.
        max_matching_ngram_size: Longest n-gram that prompt lookup matches, 1 to 32.
        verifier: How drafted tokens are verified where tokens are drawn. "coupled" gives, token for
            token, the text that plain sampling with the same seed gives; "rejection" accepts more
            drafts and follows the same law, but its text depends on K too. None: "coupled" under
            "auto" and "heuristic", whose K depends on more than the call, so that a seed decides
            the text; else "rejection".
        batch_size: B, the rows that caches and state are allocated for. None: as many as the
            first call brings.
        max_length: Tokens (prompt and new) that one row can hold, for target and draft alike.
            None: sized by the call, rounded up to `length_multiple`.
        length_multiple: Rounding of a row's size when `max_length` is None, so that calls of
            similar length share one set of buffers.
        prefill_chunks: Widths, ascending, in which prompts are fed. A long prompt takes several
            chunks; the last one is padded up to the next width.
        bucket_size: Attention reads the first `bucket_size` cache slots, or twice, four times ...
            as many, whichever covers the longest row: its cost follows the text, not the
            allocation. None: always all slots.
        forward_options: Names of switches of Optimum Habana's forward that are on, such as
            "use_flash_attention"; a family that has no such switch goes without it.
        compile: "graph" captures prefill chunks and cycles as graphs, "eager" does not, "auto"
            means graphs on hpu and cuda and eager on cpu, where a first compile takes long.
        kernels: Which of the device's own kernels models use, see `models/equip.py`: on cpu
            "linear", on hpu "sdpa", "rms_norm", "rope". None: all of them; `()`: PyTorch's only.
        fuse_cycle: Capture a whole cycle as one graph; False: drafting and verification apart.
        sync_every: Cycles run before the host reads their outcomes.
        max_graphs: Graphs that are kept at most; what comes later runs without one, as in Intel's
            `wrap_in_hpu_graph`. None: no limit.
        keep_logits: Copy the logits of every emitted token to the host, for scores and the like.
        strict_shapes: Fail, instead of building it, when a shape is needed that the warm-up has
            not built.
        target_quant: Weights of the target: "int8" (and dynamic 8-bit activations), "int8wo" and
            "int4wo" (weights only), "fp8" (e4m3 weights and activations), "none", or "auto": as
            the checkpoint has them.
        draft_quant: The same for the draft; the two are independent.
        target_quant_exclude: Layers that keep their weights, by name: shell patterns, matched
            with the whole name or its last parts, such as "lm_head" or "layers.0.*".
        draft_quant_exclude: The same for the draft.
        target_kv_dtype: What the target's cache holds: "bf16", "int8" or "fp8" (both with a scale
            for each token and head), or "auto": the model's dtype.
        draft_kv_dtype: The same for the draft.
        allow_untested_models: Accept a decoder whose family is not in the tested list, after a
            self-check of its cached forward against its plain one.

    Raises:
        ConfigError: A value is out of range or of the wrong type.
    """

    num_assistant_tokens: int | None = None
    schedule: str | None = None
    assistant_confidence_threshold: float | None = None
    drafter: str = "auto"
    max_matching_ngram_size: int = 2
    verifier: str | None = None
    batch_size: int | None = None
    max_length: int | None = None
    length_multiple: int = 64
    prefill_chunks: tuple[int, ...] = (16, 64, 256)
    bucket_size: int | None = 256
    forward_options: tuple[str, ...] = ()
    compile: str = "auto"
    kernels: tuple[str, ...] | None = None
    fuse_cycle: bool = True
    sync_every: int = 1
    max_graphs: int | None = None
    keep_logits: bool = False
    strict_shapes: bool = False
    target_quant: str = "auto"
    draft_quant: str = "auto"
    target_quant_exclude: tuple[str, ...] = UNQUANTIZED
    draft_quant_exclude: tuple[str, ...] = UNQUANTIZED
    target_kv_dtype: str = "auto"
    draft_kv_dtype: str = "auto"
    allow_untested_models: bool = False

    def __post_init__(self) -> None:
        if self.num_assistant_tokens is not None:
            self._check_int("num_assistant_tokens", 1, MAX_ASSISTANT_TOKENS)
        self._check_schedule()
        self._check_int("max_matching_ngram_size", 1, MAX_NGRAM_SIZE)
        self._check_int("length_multiple", 1, None)
        self._check_int("sync_every", 1, 1024)
        for name in ("batch_size", "max_length", "bucket_size", "max_graphs"):
            if getattr(self, name) is not None:
                self._check_int(name, 2 if name == "max_length" else 1, None)
        for name in ("allow_untested_models", "fuse_cycle", "keep_logits", "strict_shapes"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}.")
        if not isinstance(self.drafter, str) or not self.drafter:
            raise ConfigError(
                f"drafter must be auto, model, ngram, combined or the name of a plug-in, not "
                f"{self.drafter!r}."
            )
        if self.compile not in ("auto", "graph", "eager"):
            raise ConfigError(f"compile must be auto, graph or eager, not {self.compile!r}.")
        if self.verifier not in (None, "rejection", "coupled"):
            raise ConfigError(f"verifier must be rejection or coupled, not {self.verifier!r}.")
        for field in dataclasses.fields(self):  # YAML has lists
            if isinstance(getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        kernels = self.kernels
        if kernels is not None and not (
            isinstance(kernels, tuple) and all(isinstance(k, str) for k in kernels)
        ):
            raise ConfigError(f"kernels must be a list of names, not {kernels!r}.")
        names = self.forward_options
        if not isinstance(names, tuple) or not all(name in FORWARD_OPTIONS for name in names):
            raise ConfigError(
                f"forward_options must be names of {', '.join(FORWARD_OPTIONS)}, not {names!r}."
            )
        for role in ("target", "draft"):
            self._check_quant(role)
        chunks = self.prefill_chunks
        ints = isinstance(chunks, tuple) and all(type(c) is int and c > 0 for c in chunks)
        if not ints or not chunks or list(chunks) != sorted(set(chunks)):
            raise ConfigError(
                f"prefill_chunks must be ascending widths such as [16, 64, 256], not {chunks!r}."
            )

    def _check_schedule(self) -> None:
        threshold = self.assistant_confidence_threshold
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise ConfigError(
                f"The schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}."
            )
        if threshold is None:
            return
        if type(threshold) not in (int, float) or not 0 <= threshold <= 1:
            raise ConfigError(
                f"assistant_confidence_threshold must be a number from 0 to 1, not {threshold!r}."
            )
        if self.policy != "confidence":
            raise ConfigError(
                "assistant_confidence_threshold is for the schedule 'confidence', not "
                f"{self.policy!r}: give one of them."
            )

    def _check_int(self, name: str, least: int, most: int | None) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < least or (most is not None and value > most):
            span = f"from {least} to {most}" if most else f"of at least {least}"
            raise ConfigError(f"{name} must be a whole number {span}, not {value!r}.")

    @property
    def most_drafts(self) -> int:
        """The largest K that is ever drafted."""
        return self.num_assistant_tokens or DEFAULT_ASSISTANT_TOKENS

    @property
    def policy(self) -> str:
        """The schedule's name, where it is left open too."""
        if self.schedule is not None:
            return self.schedule
        if self.assistant_confidence_threshold is not None:
            return "confidence"
        return "auto" if self.num_assistant_tokens is None else "constant"

    @property
    def verification(self) -> str:
        """The verifier's name, where it is left open too."""
        return self.verifier or ("coupled" if self.policy in ("auto", "heuristic") else "rejection")

    @property
    def confidence(self) -> float | None:
        """The probability that cuts proposals, or None where nothing does."""
        if self.policy != "confidence":
            return None
        given = self.assistant_confidence_threshold
        return DEFAULT_CONFIDENCE if given is None else given

    def _check_quant(self, role: str) -> None:
        for name, known in ((f"{role}_quant", QUANT_SCHEMES), (f"{role}_kv_dtype", KV_DTYPES)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}.")
        name = f"{role}_quant_exclude"
        patterns = getattr(self, name)
        if not isinstance(patterns, tuple) or not all(isinstance(p, str) and p for p in patterns):
            raise ConfigError(f"{name} must be a list of name patterns, not {patterns!r}.")

    def quant(self, role: str) -> Quant:
        """Returns the quantization of the "target", or of the drafter's models ("draft")."""
        names = ("quant", "quant_exclude", "kv_dtype")
        return Quant(*(getattr(self, f"{role}_{name}") for name in names))

    def captures(self, by_default: bool) -> bool:
        """Returns whether graphs are captured on a device that does so `by_default` or not."""
        return self.compile == "graph" or (self.compile == "auto" and by_default)

    def without_draft(self) -> SpecConfig:
        """Returns the settings of plain decoding with the same target."""
        scheme, exclude, kv_dtype = Quant()
        plain = {"draft_quant": scheme, "draft_quant_exclude": exclude, "draft_kv_dtype": kv_dtype}
        return self.replace(drafter="auto", **plain)

    def replace(self, **changes: Any) -> SpecConfig:
        """Returns a copy with `changes` applied and checked."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpecConfig:
        """Builds a config from plain values; an unknown key is an error that names the nearest."""
        check_keys(values, [field.name for field in dataclasses.fields(cls)])
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> SpecConfig:
        """Reads a YAML file.

        Raises:
            ConfigError: The file cannot be read, is not YAML, or holds a bad setting.
        """
        return cls.from_dict(read_yaml(path))

    def to_yaml(self) -> str:
        """Returns YAML that `from_yaml` reads back to an equal config."""
        values = dataclasses.asdict(self)
        lists = {k: list(v) for k, v in values.items() if isinstance(v, tuple)}
        return yaml.safe_dump(values | lists, sort_keys=False)
