"""Loads a target, its draft and their tokenizer, and finds what is wrong before any weights move.

Only safetensors are read, and code from a checkpoint runs only if asked for.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import zoo
from .device import Device
from .errors import CheckpointError, ConfigError, UnsupportedModelError
from .models import compact
from .models.support import CAUSAL_CLASSES
from .quant import inc
from .quant.apply import checkpoint_scheme


@dataclass(frozen=True)
class Source:
    """Where a model comes from; fields as in `from_pretrained`.

    Attributes:
        name: Hub name, local directory, or a name known to `zoo`.
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.
        trust_remote_code: Run code that comes with the checkpoint.
        trust_remote_code_tokenizer: Run code that comes with its tokenizer.
    """

    name: str
    revision: str = "main"
    token: str | None = None
    trust_remote_code: bool = False
    trust_remote_code_tokenizer: bool = False

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of every `from_pretrained`."""
        return {
            "revision": self.revision,
            "token": self.token,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass(frozen=True)
class Pair:
    """A loaded target with an optional draft.

    Attributes:
        target: The target model, in eval mode on the device.
        draft: The draft model or None.
        tokenizer: The target's tokenizer, padding on the left.
    """

    target: Any
    draft: Any
    tokenizer: Any


def load_pair(
    target: Source,
    draft: Source | None,
    dtype: torch.dtype,
    device: Device,
    *,
    attn_implementation: str | None = None,
    allow_tokenizer_mismatch: bool = False,
    quant_configs: Mapping[str, str | None] | None = None,
    measuring: str | None = None,
    progress: Any = None,
) -> Pair:
    """Loads both models, after configs and tokenizers have been checked.

    Args:
        target: The target's source.
        draft: The draft's source, or None.
        dtype: Dtype of both models.
        device: Where they go.
        attn_implementation: As in `from_pretrained`; None takes the library's choice.
        allow_tokenizer_mismatch: Go on although the tokenizers differ; the text stays the
            target's own, drafts just rarely fit.
        quant_configs: Neural Compressor's JSON file that converts the "target" or the "draft".
        measuring: Its JSON file that puts observers into the target instead.
        progress: Called with one word for each step.

    Raises:
        ConfigError: A path does not exist, or the tokenizers differ.
        UnsupportedModelError: A checkpoint is not of a causal language model.
        CheckpointError: Files are missing, truncated or of another format.
    """
    compact.register()
    say = progress or (lambda step: None)
    sources = [s for s in (target, draft) if s is not None]
    sources = [dataclasses.replace(s, name=zoo.resolve(s.name)) for s in sources]
    for source in sources:
        _check_config(source)
    say("tokenizer")
    tokenizers = [_tokenizer(source) for source in sources]
    if len(tokenizers) == 2 and not allow_tokenizer_mismatch:
        check_tokenizers(*tokenizers)
    models = []
    configs = {role: path for role, path in (quant_configs or {}).items() if path}
    if configs or measuring:
        device.before_quantized()
    for source, role in zip(sources, ("target", "draft")):
        say(role)
        model = _model(source, dtype, attn_implementation, device)
        if measuring and role == "target":
            model = inc.prepare(model, measuring)
        elif role in configs:
            model = inc.convert(model, configs[role])
        model = model.to(device.torch_device)
        if role in configs:
            device.after_quantized(model)
        models.append(model)
    return Pair(models[0], models[1] if draft else None, tokenizers[0])


def check_tokenizers(target: Any, draft: Any) -> None:
    """Refuses tokenizers that give a token different ids; padding of the vocabularies is fine.

    Raises:
        ConfigError: Names the first token that differs.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    differing = sorted(
        (ours.get(token, 1 << 40), token)
        for token in ours.keys() | theirs.keys()
        if ours.get(token) != theirs.get(token)
    )
    if differing:
        token = differing[0][1]
        raise ConfigError(
            f"The tokenizers differ: {token!r} is {ours.get(token, 'missing')} in the target's and "
            f"{theirs.get(token, 'missing')} in the draft's ({len(differing)} tokens differ); "
            "choose a draft of the same family, or pass --allow_tokenizer_mismatch."
        )


def _check_config(source: Source) -> None:
    looks_local = source.name.startswith((".", "/", "~")) or source.name.count("/") > 1
    if looks_local and not os.path.isdir(os.path.expanduser(source.name)):
        raise ConfigError(f"There is no directory {source.name}: check the path.")
    try:
        config = AutoConfig.from_pretrained(source.name, **source.arguments())
    except Exception as error:
        if os.path.isdir(source.name) and not os.path.exists(f"{source.name}/config.json"):
            raise CheckpointError(
                f"{source.name} is not a model directory: it has no config.json."
            ) from error
        if os.path.isdir(source.name):
            raise CheckpointError(
                f"{source.name} is not a model directory: {_first_line(error)}"
            ) from error
        raise ConfigError(
            f"Cannot find the model {source.name}: it is neither a local directory nor reachable "
            f"on the hub ({_first_line(error)})"
        ) from error
    remote = source.trust_remote_code and getattr(config, "auto_map", None)
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {
        compact.CompactLlamaConfig.model_type: compact.CompactLlamaForCausalLM.__name__
    }
    names = [known.get(config.model_type), *(config.architectures or ())]
    causal = all(str(name).endswith(CAUSAL_CLASSES) for name in names)
    if not causal and not remote:
        raise UnsupportedModelError(
            f"{source.name} is of type {config.model_type}, which is not a causal language model."
        )


def _tokenizer(source: Source) -> Any:
    arguments = source.arguments() | {"padding_side": "left"}
    arguments["trust_remote_code"] |= source.trust_remote_code_tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.name, **arguments)
    except Exception as error:
        if os.path.isdir(source.name) and not list(Path(source.name).glob("*token*")):
            raise CheckpointError(
                f"{source.name} has no tokenizer files: save the tokenizer there too."
            ) from error
        raise CheckpointError(
            f"Cannot load the tokenizer of {source.name}: {_first_line(error)}"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _model(
    source: Source, dtype: torch.dtype, attn_implementation: str | None, device: Device
) -> Any:
    if os.path.isdir(source.name) and not list(Path(source.name).glob("*.safetensors")):
        raise CheckpointError(
            f"{source.name} has no *.safetensors file; other formats, such as .bin, are not "
            "loaded: convert them with model.save_pretrained(directory)."
        )
    newer = tuple(int(x) for x in transformers.__version__.split(".")[:2]) >= (4, 56)
    arguments = {"dtype" if newer else "torch_dtype": dtype, "use_safetensors": True}
    if attn_implementation is not None:
        arguments["attn_implementation"] = attn_implementation
    config = AutoConfig.from_pretrained(source.name, **source.arguments())
    method = checkpoint_scheme(config)
    if inc.loads(method, device.name):
        device.before_quantized()
        model = inc.load(source.name, device.name, **source.arguments())
        model = model.to(dtype) if method in inc.INT4 else model
        device.after_quantized(model)
        return model.eval()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.name, output_loading_info=True, **arguments, **source.arguments()
        )
    except Exception as error:
        raise CheckpointError(
            f"Cannot load the weights of {source.name} (safetensors only): {_first_line(error)} "
            + (
                f"They are quantized ({method}); on cpu and hpu neural-compressor-pt loads such."
                if method in inc.INT4
                else "Check that the files are complete, or download them again."
            )
        ) from error
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise CheckpointError(
            f"The checkpoint {source.name} lacks weights that its config asks for, such as "
            f"{missing[0]}: download it again."
        )
    return model.eval()


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    line = line if len(line) <= 300 else line[:300].rsplit(" ", 1)[0] + " ..."
    return line if line.endswith((".", ")")) else line + "."
