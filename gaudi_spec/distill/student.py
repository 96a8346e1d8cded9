"""The draft to be trained: a small Llama that starts from what the target already knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ..errors import ConfigError
from ..models.compact import CompactLlamaConfig, CompactLlamaForCausalLM
from .teacher import Sample


@dataclass(frozen=True)
class Shape:
    """Size of a draft.

    Attributes:
        layers: Decoder layers.
        hidden: Width, a multiple of the target's head size.
        kept: Ids in its tables; None keeps all and gives a plain Llama.
    """

    layers: int
    hidden: int
    kept: int | None

    def __str__(self) -> str:
        kept = "all ids" if self.kept is None else f"{self.kept} ids"
        return f"{self.layers} layers of {self.hidden}, {kept}"


def expected_counts(sample: Sample, vocab_size: int) -> torch.Tensor:
    """Returns `[V]` float64, how often the target's own distributions expect each id.

    A corpus that holds an id twice by chance has thousands of places where it might have stood.
    """
    live = torch.arange(sample.top_ids.shape[1]) < sample.count[:, None]
    odds = sample.top_logprobs.double().exp() * live[..., None]
    return torch.bincount(sample.top_ids.flatten(), odds.flatten(), vocab_size)


def kept_ids(counts: torch.Tensor, always: Sequence[int], size: int) -> torch.Tensor:
    """Returns the ids `[size]` to keep, ascending: `always`, then by count, then by id.

    Args:
        counts: `[V]`, from `expected_counts`.
        always: Ids such as end of text.
        size: Ids to keep.
    """
    rank = counts.double() - torch.arange(len(counts)) / (len(counts) + 1.0)
    rank[list(always)] = float("inf")
    return rank.topk(min(size, len(counts))).indices.sort().values


def build(target: Any, shape: Shape, kept: torch.Tensor | None, seed: int) -> LlamaForCausalLM:
    """Makes a draft on the CPU in float32.

    Its embeddings are the target's, projected to their main directions if the width differs. If
    the width is the target's and its layers are those of a Llama, layers spread over the target's
    depth are copied too; otherwise they start at random.

    Args:
        target: The target.
        shape: Its size.
        kept: Ids to keep, from `kept_ids`; None for all.
        seed: Seed of what starts at random.

    Raises:
        ConfigError: The width is not a multiple of the target's head size.
    """
    table = target.get_input_embeddings().weight.detach().float().cpu()
    config = _config(target.config, shape, len(table))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = (
            LlamaForCausalLM(LlamaConfig(**config))
            if kept is None
            else CompactLlamaForCausalLM(CompactLlamaConfig(kept_vocab_size=len(kept), **config))
        )
    with torch.no_grad():
        if shape.hidden != table.shape[1]:
            table = table @ torch.linalg.svd(table.T @ table)[0][:, : shape.hidden]
        if kept is not None:
            student.kept.copy_(kept)
            student.model.embed_tokens.row.copy_(_nearest(table, kept))
            table = table[kept]
        student.model.embed_tokens.weight.copy_(table)
        if shape.hidden == target.config.hidden_size:
            _copy_layers(target, student)
    return student.float()


def head_size(target: Any, hidden: int) -> int:
    """Returns the head size of a draft of width `hidden`, which is the target's.

    Raises:
        ConfigError: The width is not a multiple of it.
    """
    dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    if hidden % dim or not hidden:
        raise ConfigError(f"--hidden {hidden} is not a multiple of the target's head size, {dim}.")
    return dim


def _config(target: Any, shape: Shape, vocab_size: int) -> dict[str, Any]:
    dim = head_size(target, shape.hidden)
    heads = shape.hidden // dim
    groups = target.num_attention_heads // (
        getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    )
    wide = getattr(target, "intermediate_size", None) or 4 * target.hidden_size
    rope = getattr(target, "rope_parameters", None) or {}
    theta = getattr(target, "rope_theta", None) or rope.get("rope_theta") or 10000.0
    return {
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": -(-wide * shape.hidden // target.hidden_size // 64) * 64
        if shape.hidden != target.hidden_size
        else wide,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups if heads % groups == 0 else heads,
        "head_dim": dim,
        "max_position_embeddings": getattr(target, "max_position_embeddings", 2048),
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-5),
        "rope_theta": theta,
        "tie_word_embeddings": True,
        **{
            f"{name}_token_id": getattr(target, f"{name}_token_id")
            for name in ("bos", "eos", "pad")
        },
    }


def _nearest(table: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Returns `[V]`, the row of the kept id whose embedding points most nearly the same way."""
    unit = nn.functional.normalize(table, dim=1)
    near = torch.cat([(part @ unit[kept].T).argmax(1) for part in unit.split(4096)])
    near[kept] = torch.arange(len(kept))
    return near


def _copy_layers(target: Any, student: LlamaForCausalLM) -> None:
    body = getattr(target, target.base_model_prefix)
    layers = getattr(body, "layers", ())
    count = len(student.model.layers)
    places = torch.linspace(0, len(layers) - 1, count).round().int().tolist() if layers else []
    for mine, place in zip(student.model.layers, places):
        theirs = layers[place].state_dict()
        shapes = {name: value.shape for name, value in mine.state_dict().items()}
        if shapes == {name: value.shape for name, value in theirs.items()}:
            mine.load_state_dict(theirs)
    norm = getattr(body, "norm", None)
    if norm is not None and set(norm.state_dict()) == {"weight"}:
        student.model.norm.weight.copy_(norm.weight)
