"""Tiny checkpoints on disk, with a word-level tokenizer, for tests of loading and the command."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
import toys
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":"]
WORDS += [f"w{i}" for i in range(len(WORDS), toys.VOCAB)]
TEMPLATE = (
    "<s> {% for m in messages %}{{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
EOS_ID = 67  # in generation_config.json; the toy target emits it in the middle of its texts


def word_tokenizer(words: list[str] = WORDS, **special: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word; the id is the word's place in `words`."""
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>") | special
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")


def byte_tokenizer(text: list[int], eos: int | None = None) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer in which `text` has characters of several bytes.

    Ids that occur once in `text`, side by side, become the bytes of one character each; others
    become letters, pairs of letters and words.
    """
    byte_names = bytes_to_unicode()
    pieces: dict[int, bytes] = {}
    characters = ["\N{EURO SIGN}", "\u00e9", "\N{GRINNING FACE}", "\u4f60", "\u00df"] * 2
    at = 0
    while at < len(text) and characters:
        parts = [bytes([byte]) for byte in characters[0].encode()]
        ids = text[at : at + len(parts)]
        # A byte can be the piece of one id only, and an id have one piece.
        fresh = len(set(ids)) == len(parts) and all(text.count(i) == 1 for i in ids)
        if fresh and not set(parts) & set(pieces.values()):
            pieces.update(zip(ids, parts))
            at += len(ids) + 1
            characters.pop(0)
        elif set(parts) & set(pieces.values()):
            characters.pop(0)
        else:
            at += 1
    letters = string.ascii_lowercase
    names = [*letters, *(f" {a}" for a in letters), *(f"{a}{a}" for a in letters)]
    names += ["\n", ".", " the", "stop", *(f" {a}{a}" for a in letters)]
    free = (name.encode() for name in names)
    vocab = {}
    special = {0: "<pad>", eos: "</s>"}
    for token in range(toys.VOCAB):
        piece = special.get(token) or "".join(
            byte_names[b] for b in pieces.get(token) or next(free)
        )
        vocab[piece] = token
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>"} | ({} if eos is None else {"eos_token": "</s>"})
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def words(*ids: int) -> str:
    """Returns the text of these ids."""
    return " ".join(WORDS[i] for i in ids)


def save(directory: Path, model, tokenizer=None, eos: int | None = EOS_ID) -> Path:
    """Writes a checkpoint and returns its directory; the model is left as it was."""
    kept = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = eos
    model.save_pretrained(directory)
    model.generation_config.eos_token_id = kept
    (tokenizer or word_tokenizer()).save_pretrained(directory)
    return directory


def save_gptq(directory: Path, model, group: int = 32) -> tuple[Path, dict[str, torch.Tensor]]:
    """Writes a checkpoint in GPTQ's 4-bit format; returns it and the weights it stands for."""
    path = save(directory, model)
    state, exact = {}, {}
    for name, weight in load_file(path / "model.safetensors").items():
        if "layers" not in name or weight.dim() != 2:
            state[name] = weight
            continue
        base, (n, k) = name.removesuffix("weight"), weight.shape
        groups = weight.view(n, -1, group)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(1, 15)
        codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
        exact[name] = ((codes - zero[..., None]) * scale[..., None]).view(n, k)
        state[f"{base}qweight"] = _pack(codes.view(n, k).t(), 0)
        state[f"{base}qzeros"] = _pack(zero.t() - 1, 1)
        state[f"{base}scales"] = scale.t().half().contiguous()
        state[f"{base}g_idx"] = (torch.arange(k) // group).int()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    method = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = method | {"sym": False, "true_sequential": True}
    (path / "config.json").write_text(json.dumps(config))
    return path, exact


def _pack(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Puts eight 4-bit codes along `dim` into each int32."""
    eight = codes.long().unflatten(dim, (-1, 8))
    words = sum(eight.select(dim + 1, i) << 4 * i for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


def make(root: Path) -> tuple[Path, Path]:
    """Writes a target and a partly right draft, and returns their directories."""
    return save(root / "target", toys.target()), save(root / "draft", toys.drafts()["noisy"])
