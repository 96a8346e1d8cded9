"""A Llama whose tables hold only the ids that its text is made of.

The head is most of a small draft's cost. This one computes logits for `kept_vocab_size` ids and
puts them back where they belong among all `vocab_size`; the others get minus infinity, so their
probability is zero. An id without a row of its own is read as the nearest one that has one.

The file imports nothing of this package: `gaudi-spec distill` copies it into the checkpoints that
it writes, for whoever loads them with `trust_remote_code=True`.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class CompactLlamaConfig(LlamaConfig):
    """A `LlamaConfig` with `kept_vocab_size`, the rows of the embedding table and of the head."""

    model_type = "compact_llama"

    def __init__(self, kept_vocab_size: int = 8192, **kwargs) -> None:
        super().__init__(**kwargs)
        self.kept_vocab_size = kept_vocab_size


class MappedEmbedding(nn.Embedding):
    """An embedding table of N rows for ids 0 .. V-1.

    Attributes:
        row: `[V]` int32, the row that stands for each id.
    """

    def __init__(self, vocab_size: int, rows: int, dim: int) -> None:
        super().__init__(rows, dim)
        self.register_buffer("row", torch.arange(vocab_size, dtype=torch.int32) % rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns `[B, T, H]` for ids `[B, T]`."""
        rows = self.row.index_select(0, ids.reshape(-1)).view(ids.shape)
        return super().forward(rows.long())


class CompactLlamaForCausalLM(LlamaForCausalLM):
    """See the module; takes and returns what a `LlamaForCausalLM` of `vocab_size` ids does.

    Attributes:
        kept: `[N]` int32, the id of each row of the head.
    """

    config_class = CompactLlamaConfig

    def __init__(self, config: CompactLlamaConfig) -> None:
        super().__init__(config)
        rows = config.kept_vocab_size
        self.model.embed_tokens = MappedEmbedding(config.vocab_size, rows, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self.register_buffer("kept", torch.arange(rows, dtype=torch.int32))
        self.post_init()

    @functools.wraps(LlamaForCausalLM.forward)  # callers read its signature
    def forward(self, *args, labels=None, **kwargs):
        """Returns logits `[B, T, V]`, minus infinity at ids that were left out."""
        output = super().forward(*args, **kwargs)
        some = output.logits
        full = some.new_full((*some.shape[:-1], self.config.vocab_size), float("-inf"))
        output.logits = full.index_copy(-1, self.kept.long(), some)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
        return output


def register() -> None:
    """Makes Transformers' auto classes know the family, so that no remote code is needed."""
    AutoConfig.register(CompactLlamaConfig.model_type, CompactLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(CompactLlamaConfig, CompactLlamaForCausalLM, exist_ok=True)
