"""Tiny random models whose greedy text is not degenerate, and references to compare with.

A default initialisation makes tiny models repeat one token, and every equality test would pass
vacuously; so weights are drawn wide, and `reference` checks what it returns.
"""

from __future__ import annotations

import copy
import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gaudi_spec.drafters.base import Drafter, Proposal
from gaudi_spec.models import compact
from gaudi_spec.schedule import Auto, Schedule

compact.register()
VOCAB = 97
_LLAMA = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_SLIDING = dict(_LLAMA, head_dim=8, sliding_window=8)
_HALF = ["sliding_attention", "full_attention"]
_MOE = dict(_LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_GPT2 = dict(n_embd=32, n_layer=2, n_head=4)

# name -> (model type, config values)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", _LLAMA),
    "llama-mha": ("llama", dict(_LLAMA, num_key_value_heads=4)),
    "llama-tied": ("llama", dict(_LLAMA, tie_word_embeddings=True)),
    "qwen2": ("qwen2", _LLAMA),
    "qwen2-window": (
        "qwen2",
        dict(_LLAMA, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ),
    "qwen3": ("qwen3", dict(_LLAMA, head_dim=8)),
    "qwen2-moe": ("qwen2_moe", dict(_MOE, shared_expert_intermediate_size=32)),
    "qwen3-moe": ("qwen3_moe", dict(_MOE, head_dim=8)),
    "mistral": ("mistral", dict(_LLAMA, sliding_window=None)),
    "mistral-window": ("mistral", dict(_LLAMA, sliding_window=8)),
    "mixtral": ("mixtral", dict(_LLAMA, num_local_experts=4, sliding_window=None)),
    "gemma": ("gemma", dict(_LLAMA, head_dim=8)),
    "gemma2": (
        "gemma2",
        dict(_SLIDING, layer_types=_HALF, query_pre_attn_scalar=8, attn_implementation="eager"),
    ),
    "gemma3": ("gemma3_text", dict(_SLIDING, layer_types=_HALF, query_pre_attn_scalar=8)),
    "phi": ("phi", dict(_LLAMA, num_key_value_heads=4)),
    "phi3": ("phi3", dict(_LLAMA, sliding_window=None)),
    "phi3-window": ("phi3", dict(_LLAMA, sliding_window=8)),
    "gpt2": ("gpt2", _GPT2),
    "gpt-neox": (
        "gpt_neox",
        dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
    ),
    "gptj": ("gptj", dict(_GPT2, rotary_dim=8, attn_implementation="eager")),
    "opt": (
        "opt",
        dict(
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        ),
    ),
    "falcon": (
        "falcon",
        dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True),
    ),
    "falcon-new": (
        "falcon",
        dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
        ),
    ),
    "starcoder2": ("starcoder2", dict(_LLAMA, sliding_window=None)),
    "starcoder2-window": ("starcoder2", dict(_LLAMA, sliding_window=8)),
    "gpt-bigcode": ("gpt_bigcode", _GPT2),
    "stablelm": ("stablelm", _LLAMA),
    "cohere": ("cohere", dict(_LLAMA, logit_scale=1.0)),
    "granite": ("granite", _LLAMA),
    "olmo": ("olmo", _LLAMA),
    "olmo2": ("olmo2", _LLAMA),
    "smollm3": ("smollm3", _LLAMA),
    "compact-llama": ("compact_llama", dict(_LLAMA, kept_vocab_size=80)),
}


def build(
    family: str = "llama", seed: int = 0, vocab: int = VOCAB, scale: float | None = None, **changes
):
    """Returns a tiny random model of `family` in eval mode; `changes` go to its config."""
    kind, values = FAMILIES[family]
    values = dict(vocab_size=vocab, max_position_embeddings=256, pad_token_id=0) | values | changes
    attention = values.pop("attn_implementation", "sdpa")
    values.setdefault("tie_word_embeddings", False)  # a tied head likes to repeat its input
    values.update(bos_token_id=1, eos_token_id=changes.get("eos_token_id"))
    config = AutoConfig.for_model(kind, **values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                std = scale or (1.0 if "embed" in name or "wte" in name else 0.4)
                weight.normal_(0, std)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = changes.get("eos_token_id")
    return model


def noisy(model, amount: float = 0.05, seed: int = 1):
    """Returns a copy of `model` with noise of `amount` relative size: a partly right draft."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * amount * weight.std() if weight.numel() > 1 else 0)
    return other


@functools.cache
def target(family: str = "llama"):
    """Returns the shared target of a family; tests must not change it.

    It is the first random model whose greedy text for `PROMPTS` is varied and free of near-ties.
    """
    for seed in range(60):
        model = build(family, seed)
        texts = [greedy(model, prompt, NEW) for prompt in PROMPTS]
        varied = all(len(set(text.tolist())) >= 8 for text in texts)
        if varied and all(gaps(model, p, t).min() > 1e-3 for p, t in zip(PROMPTS, texts)):
            return model
    raise AssertionError(f"no sound toy found for {family}")


@functools.cache
def references(family: str = "llama") -> list[torch.Tensor]:
    """Returns the target's own greedy text of `NEW` tokens for each of `PROMPTS`."""
    return [greedy(target(family), prompt, NEW) for prompt in PROMPTS]


@functools.cache
def drafts(family: str = "llama"):
    """Returns the three drafts of a family: itself, a noisy copy, an unrelated model."""
    model = target(family)
    return {"self": model, "noisy": noisy(model), "unrelated": build(family, seed=77)}


def drafted(name: str | None, family: str = "llama"):
    """Returns `(draft model or None, drafter)` by name.

    "self", "noisy" and "unrelated" are draft models, "combined-self" and so on put prompt lookup
    before one, "ngram" is prompt lookup alone, None is plain decoding.
    """
    if name in (None, "ngram"):
        return None, name or "auto"
    drafter, _, model = name.rpartition("-")
    return drafts(family)[model], drafter or "auto"


@functools.cache
def repetitive():
    """Returns a target whose next token depends on the last one only, so its texts run in circles.

    A look-up is right there as soon as the circle is closed; the circles are not short.
    """
    for seed in range(60):
        model = build("llama", seed)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
        texts = [greedy(model, prompt, 2 * NEW) for prompt in PROMPTS]
        circles = [len(set(text[NEW:].tolist())) for text in texts]
        sound = all(gaps(model, p, t).min() > 1e-3 for p, t in zip(PROMPTS, texts))
        if sound and min(circles) >= 6 and max(circles) <= 12:
            return model
    raise AssertionError("no sound toy found")


def prompts(*lengths: int, seed: int = 3, vocab: int = VOCAB) -> list[torch.Tensor]:
    """Returns random prompts of these lengths without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator) for n in lengths]


PROMPTS = prompts(1, 2, 9, 17, 30)
NEW = 40


@torch.no_grad()
def greedy(model, prompt: torch.Tensor, new: int) -> torch.Tensor:
    """Returns `new` greedy tokens of Transformers' own `generate`, without end of text."""
    ids = prompt[None]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :]


@torch.no_grad()
def gaps(model, prompt: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
    """Returns, for each token of `continuation`, the gap between the two largest logits `[N]`."""
    ids = torch.cat([prompt, continuation])[None]
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    best = logits.float().topk(2, -1).values
    return best[:, 0] - best[:, 1]


def assert_equal_rows(got, want) -> None:
    """Asserts that two lists of token rows are equal, naming the first token that is not."""
    assert len(got) == len(want), f"{len(got)} rows, not {len(want)}"
    for row, (ours, other) in enumerate(zip(got, want)):
        ours, other = torch.as_tensor(ours).tolist(), torch.as_tensor(other).tolist()
        shared = min(len(ours), len(other))
        at = next((i for i in range(shared) if ours[i] != other[i]), shared)
        assert ours == other, (
            f"row {row}, token {at}: {ours[at : at + 4]}, not {other[at : at + 4]}"
        )


class Turns(Schedule):
    """A schedule that takes its K from `sizes` in turn, over and over."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self._turns = frozenset(sizes), sizes

    def choose(self, cycle: int, costs) -> int:
        """Returns K of the given cycle."""
        return self._turns[cycle % len(self._turns)]


class Told(Auto):
    """`auto` that is told what cycles take, in plain steps by K, instead of reading a clock."""

    def __init__(self, most: int, times: dict[int, float]) -> None:
        super().__init__(most)
        self.times = times

    def choose(self, cycle: int, costs) -> int:
        """Returns what `Auto` chooses by these times."""
        return super().choose(cycle, costs._replace(seconds=self.times, catch_up=0.0))

    def learn(self, k: int, rows, seconds: float) -> None:
        """Pays these times."""
        super().learn(k, rows, self.times[k])


class ScriptedDrafter(Drafter):
    """Proposes, in cycle c and row r, `right[c][r]` tokens of the row's text, then wrong ones.

    Args:
        texts: Each row's whole sequence, prompt and reference.
        right: Right tokens for each cycle and row.
    """

    def __init__(self, texts: list[torch.Tensor], right: list[list[int]]) -> None:
        self._texts, self._right = [text.tolist() + [0] * 40 for text in texts], right
        self._cycle = 0

    def reset(self, kept=()) -> None:
        """Starts the script again."""
        self._cycle = self.forwards = 0

    def propose(self, state, k: int):
        """Returns the script's proposals; there is room for all."""
        rows = []
        for text, n_right, length in zip(
            self._texts, self._right[self._cycle], state.length.tolist()
        ):
            tokens = text[length : length + k]
            rows.append([t if i < n_right else (t + 1) % VOCAB for i, t in enumerate(tokens)])
        self._cycle += 1
        return Proposal(torch.tensor(rows), torch.full_like(state.length, k))

    def committed(self, lengths: list[int], k: int) -> None:
        """Counts k proposals as k calls."""
        self.forwards += k


def assert_sound(continuation: torch.Tensor, distinct: int = 8) -> None:
    """Asserts that a greedy reference is varied enough for an equality to mean something."""
    assert len(set(continuation.tolist())) >= distinct, continuation.tolist()


def left_pad(rows: list[torch.Tensor], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `(input_ids, attention_mask)`, both `[B, W]`, padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    return ids, mask


def right_pad(rows: list[torch.Tensor], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `(input_ids, attention_mask)`, both `[B, W]`, padded on the right."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return ids, mask
