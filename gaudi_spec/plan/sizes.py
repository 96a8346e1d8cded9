"""The sizes of a model from its config alone: its modules are built without storage and counted."""

from __future__ import annotations

import copy
import difflib
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq
from transformers.pytorch_utils import Conv1D

from .. import zoo
from ..errors import CheckpointError, ConfigError, UnsupportedModelError
from ..models import compact
from ..models.hf import HFCausalLM
from ..models.support import check_supported, max_positions

_TABLE = Path(__file__).with_name("models.yaml")


@dataclass(frozen=True)
class Sizes:
    """What memory and step times depend on; counts are of elements.

    Attributes:
        name: As given.
        layers: Decoder layers.
        parameters: All weights.
        buffers: Bytes of what is stored besides.
        linear: Weights of the decoder layers' matrices, which is what quantization packs.
        table: Weights of which a step reads a few rows: an input table that is not also the head.
        encoder: Weights that run once for each input, not in a step.
        vocab: V.
        kv: Cache elements of one slot, keys and values of all layers.
        cross: Elements of one row that attention to the encoder keeps besides.
        kv_heads: Key and value heads of a layer.
        heads: Query heads.
        hidden: Width.
        intermediate: Width inside the MLP.
        positions: Most tokens that a sequence may have, or None.
    """

    name: str
    layers: int
    parameters: int
    buffers: int
    linear: int
    table: int
    encoder: int
    vocab: int
    kv: int
    cross: int
    kv_heads: int
    heads: int
    hidden: int
    intermediate: int
    positions: int | None

    @property
    def read(self) -> int:
        """Weights that a step reads."""
        return self.parameters - self.table - self.encoder


def published() -> dict[str, dict[str, Any]]:
    """Returns the shipped table by every name: a config's values, and total `parameters`."""
    result: dict[str, dict[str, Any]] = {}
    for name, values in yaml.safe_load(_TABLE.read_text("utf-8")).items():
        names = [name, *values.pop("also", ())]
        result |= dict.fromkeys(names, values)
    return result


def config_of(name: str) -> Any:
    """Returns the config of a model in the shipped table, a local directory, or on the hub.

    Raises:
        ConfigError: There is no such model.
        CheckpointError: The directory has no readable config.
    """
    compact.register()
    table = published()
    if name in table:
        values = {k: v for k, v in table[name].items() if k not in ("parameters", "model_type")}
        return AutoConfig.for_model(table[name]["model_type"], **values)
    path = str(zoo.PACKAGED) if name == zoo.DRAFT else os.path.expanduser(name)
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:
        if os.path.isdir(path):
            raise CheckpointError(f"{name} has no config.json that can be read.") from error
        near = difflib.get_close_matches(name, table, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known without the hub: {', '.join(table)}."
        raise ConfigError(
            f"Cannot find the config of {name}, neither as a directory nor on the hub: {hint}"
        ) from error


def skeleton(config: Any) -> nn.Module:
    """Returns the model of a config, without storage."""
    auto = AutoModelForSpeechSeq2Seq if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return auto.from_config(config)
    except (KeyError, ValueError) as error:
        raise UnsupportedModelError(
            f"A model of type {config.model_type} is neither a causal language model nor Whisper."
        ) from error


@functools.cache
def sizes(name: str, role: str = "target") -> Sizes:
    """Returns the sizes of a model by name.

    Raises:
        ConfigError: See `config_of`.
        UnsupportedModelError: Its state cannot be kept in slots; `role` is for the message.
    """
    config = config_of(name)
    model = skeleton(config)
    counted = weights(model)
    if config.is_encoder_decoder:
        if config.model_type != "whisper":
            raise UnsupportedModelError(f"{name} is an encoder-decoder other than Whisper.")
        width, layers = config.d_model, config.decoder_layers
        attention = {
            "layers": layers,
            "kv": 2 * layers * width,
            "cross": 2 * layers * width * config.max_source_positions,
            "kv_heads": config.decoder_attention_heads,
            "heads": config.decoder_attention_heads,
            "hidden": width,
            "intermediate": config.decoder_ffn_dim,
            "positions": config.max_target_positions,
        }
    else:
        check_supported(model, role, allow_untested=True)
        heads, dim = geometry(config)
        attention = {
            "layers": config.num_hidden_layers,
            "kv": 2 * config.num_hidden_layers * heads * dim,
            "cross": 0,
            "kv_heads": heads,
            "heads": config.num_attention_heads,
            "hidden": config.hidden_size,
            "intermediate": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            "positions": max_positions(config),
        }
    return Sizes(name=name, vocab=config.vocab_size, **counted, **attention)


def geometry(config: Any) -> tuple[int, int]:
    """Returns heads and width of what a layer caches, as the engine's own adapter finds them.

    The adapter runs one layer on tensors without storage.
    """
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with FakeTensorMode():
        cache = HFCausalLM(AutoModelForCausalLM.from_config(config), 1, 1).cache
    _, heads, dim = cache.keys[0].shape
    return heads, dim


def weights(model: Any) -> dict[str, int]:
    """Counts a model's weights by what happens to them; keys as in `Sizes`."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    inside = set(encoder.modules()) if encoder is not None else set()
    matrices = [
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and module not in inside
    ]
    return {
        "parameters": _count(model),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
        "linear": sum(matrices),
        "table": 0 if table.weight is head.weight else table.weight.numel(),
        "encoder": _count(encoder) if encoder is not None else 0,
    }


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
