"""Tiny checkpoints on disk, with a word-level tokenizer, for tests of loading and the command."""

from __future__ import annotations

from pathlib import Path

import toys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


def make(root: Path) -> tuple[Path, Path]:
    """Writes a target and a partly right draft, and returns their directories."""
    return save(root / "target", toys.target()), save(root / "draft", toys.drafts()["noisy"])
