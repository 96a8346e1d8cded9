"""Fields of Optimum Habana's `GaudiGenerationConfig`: honoured, refused, or without effect here.

`docs/optimum_habana.md` has the table.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

from .config import FORWARD_OPTIONS, SpecConfig
from .errors import ConfigError, UnsupportedOptionError
from .models.gaudi import is_gaudi

# What they ask for is so here without them, or is done by the model's own forward; and a note
# that plain calls leave in the model's config.
_INHERENT = frozenset(
    """static_shapes reuse_cache trim_logits bucket_internal reduce_recompile use_fused_rope
    generation_mode""".split()
)
# Cannot matter to the text; a warning says what is done instead.
_WITHOUT_EFFECT = {
    "limit_hpu_graphs": "prefill chunks are few and small, and are captured like all else",
    "flash_attention_causal_mask": "prompts are fed in chunks, which need the explicit mask",
}
# What it takes to leave each of these out.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_flex_attention": (None, False),
    "valid_sequence_lengths": (None,),
    "logits_bf16": (None, False),
    "attn_batch_split": (None, 1),
    "decode_attn_batch_split": (None, 1),
}
_READ = ("ignore_eos", "bucket_size", "clear_hpu_graphs_cache")
GAUDI_FIELDS = frozenset((*_INHERENT, *_WITHOUT_EFFECT, *_REFUSED, *_READ, *FORWARD_OPTIONS))


@dataclass(frozen=True)
class GaudiOptions:
    """What a call asks for by those fields.

    Attributes:
        ignore_eos: An end token ends no row.
        bucket_size: As in `SpecConfig`; None leaves that as it is.
        forward_options: As in `SpecConfig`.
        release: Free the graphs after the call.
    """

    ignore_eos: bool = False
    bucket_size: int | None = None
    forward_options: tuple[str, ...] = ()
    release: bool = False

    def into(self, config: SpecConfig) -> SpecConfig:
        """Returns `config` with what the call says."""
        changes: dict[str, Any] = {}
        if self.bucket_size is not None:
            changes["bucket_size"] = self.bucket_size
        if self.forward_options:
            changes["forward_options"] = self.forward_options
        return config.replace(**changes)


NO_GAUDI_OPTIONS = GaudiOptions()


def gaudi_options(model: Any, config: Any) -> GaudiOptions:
    """Reads the fields of a merged generation config, Optimum Habana's or any other.

    Raises:
        UnsupportedOptionError: A field is set that cannot be honoured; the message names it.
        ConfigError: `bucket_size` is not a whole number.
    """
    for name, neutral in _REFUSED.items():
        value = getattr(config, name, None)
        if not any(value is each for each in neutral):
            raise UnsupportedOptionError(
                f"{name}={value!r} is not supported with an assistant model: leave it out."
            )
    wanted = [name for name in FORWARD_OPTIONS if getattr(config, name, None)]
    if wanted and not is_gaudi(model):
        raise UnsupportedOptionError(
            f"{wanted[0]} is a switch of Optimum Habana's classes, and {type(model).__name__} is "
            "not one of them: leave it out, or call adapt_transformers_to_gaudi() before loading."
        )
    known = inspect.signature(model.forward).parameters
    ignored = {name: "this family has no such switch" for name in wanted if name not in known}
    ignored |= {name: why for name, why in _WITHOUT_EFFECT.items() if getattr(config, name, None)}
    for name, why in ignored.items():
        _tell(name, why)
    size = getattr(config, "bucket_size", None)
    if size is not None and type(size) is not int:
        raise ConfigError(f"bucket_size must be a whole number, not {size!r}.")
    return GaudiOptions(
        ignore_eos=bool(getattr(config, "ignore_eos", None)),
        bucket_size=size if size and size > 0 else None,
        forward_options=tuple(name for name in wanted if name in known),
        release=bool(getattr(config, "clear_hpu_graphs_cache", None)),
    )


_told: set[str] = set()


def _tell(name: str, why: str) -> None:
    """Warns of an option without effect, once in a process."""
    if name not in _told:
        _told.add(name)
        warnings.warn(f"{name} has no effect on speculative decoding: {why}.", stacklevel=5)
