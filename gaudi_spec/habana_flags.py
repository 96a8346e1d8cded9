"""Every flag of Optimum Habana's `run_generation.py`, and what becomes of it here.

These tables drive the parser, the refusals, the warning and docs/run_generation.md. A flag is
honoured, refused by name, or accepted without effect where it cannot change what is generated.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from .config import FORWARD_OPTIONS
from .errors import UnsupportedOptionError

# Flags that `flags.py` has, with Optimum Habana's defaults.
SHARED: dict[str, Any] = dict(
    device="hpu",
    model_name_or_path=None,
    bf16=False,
    max_new_tokens=100,
    max_input_tokens=0,
    batch_size=1,
    warmup=3,
    n_iterations=5,
    use_kv_cache=False,
    use_hpu_graphs=False,
    do_sample=False,
    top_k=None,
    seed=27,
    prompt=None,
    bad_words=None,
    assistant_model=None,
    num_return_sequences=1,
    token=None,
    model_revision="main",
    output_dir=None,
    bucket_size=-1,
    use_chat_template=False,
    torch_compile=False,
    ignore_eos=True,
    temperature=1.0,
    top_p=1.0,
    trust_remote_code=False,
    attn_implementation="eager",
)
# Where a shared flag is not quite the same.
DIFFERENCES = {
    "device": "default here: `auto`, a card where there is one",
    "batch_size": "there, prompts after the first are dropped by default",
    "use_kv_cache": "there, a draft needs it",
    "max_input_tokens": "there, prompts are padded to it too, and data sets cut to 16 by default",
    "temperature": "default here: the checkpoint's value, as there, where this flag is not read",
    "top_p": "default here: the checkpoint's value, as there, where this flag is not read",
    "top_k": "default here: the checkpoint's value; there, all tokens",
    "attn_implementation": "there, eager",
}

_KERNEL = "the attention kernel is the one of --attn_implementation"
_PROCESS = "there is one process with one device; leave it out"
_QUANTIZED = (
    "leave it out: GPTQ, AWQ and FP8 checkpoints say so themselves, and --target_quant or "
    "`gaudi-spec quantize` quantizes others"
)

HONOURED = {
    "dataset_name": "prompts from a .jsonl, .json, .csv or .txt file, or, with the package "
    "datasets, from a data set by name or directory; each once, in order",
    "column_name": "column of the data set (default: the first with text)",
    "dataset_max_samples": "prompts taken of the data set; negative: all",
    "run_partial_dataset": "stop after --n_iterations batches of the data set",
    "book_source": "text file whose first --max_input_tokens words are the prompt of every row; "
    "nothing is downloaded",
    "simulate_dyn_prompt": "prompt lengths, in turn: prompts are cut, or their last token repeated",
    "trust_remote_code_tokenizer": "run code that comes with the tokenizer, but no other",
    "show_graphs_count": "print how many graphs were built",
    "profiling_steps": "cycles that are traced, into ./hpu_profile",
    "profiling_warmup_steps": "cycles before those",
    "profiling_record_shapes": "shapes of tensors in the trace",
    "profile_whole_sequences": "trace iterations, not cycles",
    "reuse_cache": "always so: caches are allocated once",
    "bucket_internal": "always so: attention reads a window of the cache",
    "reduce_recompile": "always so: no shape depends on a prompt",
    "trim_logits": "always so: prompts are read without the head",
    "force_static_compile": "always so: every graph has static shapes",
    "sdp_on_bf16": "let PyTorch's own attention reduce in bfloat16",
    **dict.fromkeys(
        FORWARD_OPTIONS,
        "with --optimum_habana; a warning without it, or without a "
        "switch of that name in the family",
    ),
}
NO_EFFECT = {
    "input_embeds": "a prompt's embeddings are made from its tokens, which a draft needs as tokens",
    "limit_hpu_graphs": "prompts are read by a few graphs of fixed width",
    "clear_hpu_graphs_cache": "the set of graphs does not grow",
    "const_serialization_path": "weights stay where they were loaded",
    "use_flex_attention": _KERNEL,
    "flash_attention_causal_mask": _KERNEL,
    "attn_batch_split": "as there, on one card",
    "decode_attn_batch_split": "as there, on one card",
    "regional_compile": "layers are compiled once anyway where the compiler can do that",
    "cache_size_limit": "graphs are compiled once each, however many they are",
    "dynamo_specialize_float": "no graph depends on a Python number",
    "dynamo_allow_unspec_int_on_nn_module": "on by default, as there",
    "verbose_workers": "there are no other processes",
}
REFUSED = {
    "mlcommons_dataset": "reading a pickle runs code in it; write the prompts to a .jsonl file and "
    "give that as --dataset_name",
    "num_beams": "text is greedy or sampled, never that of beams; leave it out",
    "penalty_alpha": "contrastive search cannot be verified; leave it out",
    "force_words": "words can be forced by beams only; leave it out",
    "disk_offload": "models must fit on the device; leave it out",
    "peft_model": "adapters are not applied; merge it with peft's merge_and_unload, and save",
    "local_rank": _PROCESS,
    "parallel_strategy": _PROCESS,
    "load_quantized_model_with_autogptq": _QUANTIZED,
    "load_quantized_model_with_autoawq": _QUANTIZED,
    "load_quantized_model_with_inc": _QUANTIZED,
    "local_quantized_inc_model_path": _QUANTIZED,
    "quantize_with_bnb": _QUANTIZED,
    "save_quantized_model_with_inc": _QUANTIZED,
    "saved_model_path": _QUANTIZED,
    "pt2e_save": _QUANTIZED,
    "pt2e_path": _QUANTIZED,
    "pt2e_quant_dtype": _QUANTIZED,
}
# Default and arguments of the flags that take a value; all others are switches.
_INT, _TEXT = {"type": int}, {"type": str}
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dataset_name": (None, _TEXT),
    "column_name": (None, _TEXT),
    "dataset_max_samples": (-1, _INT),
    "mlcommons_dataset": (None, _TEXT),
    "book_source": (False, {"nargs": "?", "const": True, "metavar": "FILE"}),
    "simulate_dyn_prompt": (None, {"type": int, "nargs": "*", "metavar": "TOKENS"}),
    "num_beams": (1, _INT),
    "penalty_alpha": (None, {"type": float}),
    "force_words": (None, {"nargs": "+"}),
    "profiling_steps": (0, _INT),
    "profiling_warmup_steps": (0, _INT),
    "const_serialization_path": (None, _TEXT),
    "flash_attention_fast_softmax": (None, {"nargs": "?", "const": True}),
    "attn_batch_split": (1, _INT),
    "decode_attn_batch_split": (1, _INT),
    "cache_size_limit": (None, _INT),
    "dynamo_allow_unspec_int_on_nn_module": (True, {"action": "store_true"}),
    "peft_model": (None, _TEXT),
    "local_rank": (0, _INT),
    "parallel_strategy": ("none", {"choices": ("tp", "ep", "none")}),
    "local_quantized_inc_model_path": (None, _TEXT),
    "saved_model_path": ("inc_quantized_model", _TEXT),
    "pt2e_path": (None, _TEXT),
    "pt2e_quant_dtype": ("fp8_143", {"choices": ("int8", "fp8_143", "fp8_152")}),
}
_SWITCH = (False, {"action": "store_true"})
_SHORT = {"const_serialization_path": ("--csp",)}


class Flag(NamedTuple):
    """A flag that `flags.py` does not have; `verdict` is "honoured", "no effect" or "refused"."""

    name: str
    verdict: str
    note: str
    default: Any
    arguments: dict[str, Any]


def flags() -> Iterator[Flag]:
    """Yields every flag of the tables."""
    tables = {"honoured": HONOURED, "no effect": NO_EFFECT, "refused": REFUSED}
    for verdict, table in tables.items():
        for name, note in table.items():
            yield Flag(name, verdict, note, *VALUES.get(name, _SWITCH))


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a parser that has the shared ones."""
    group = parser.add_argument_group("Optimum Habana's other flags")
    for flag in flags():
        note = flag.note if flag.verdict == "honoured" else f"{flag.verdict}: {flag.note}"
        group.add_argument(
            f"--{flag.name}",
            *_SHORT.get(flag.name, ()),
            default=flag.default,
            help=note.replace("%", "%%"),
            **flag.arguments,
        )


def check(args: argparse.Namespace) -> None:
    """Refuses what cannot be honoured, and warns once of what has no effect.

    Raises:
        UnsupportedOptionError: Names the first flag, or variable of the environment.
    """
    given = [flag for flag in flags() if getattr(args, flag.name) != flag.default]
    for flag in given:
        if flag.verdict == "refused":
            raise UnsupportedOptionError(f"--{flag.name} is not supported: {flag.note}.")
    if os.environ.get("WORLD_SIZE", "0") not in ("", "0", "1"):
        raise UnsupportedOptionError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} asks for several processes, which are not "
            "supported yet: start one process, without DeepSpeed."
        )
    idle = [f"--{flag.name} ({flag.note})" for flag in given if flag.verdict == "no effect"]
    if not args.optimum_habana:
        idle += [f"--{name} (without --optimum_habana)" for name in switches(args)]
    if idle:
        print(f"Without effect: {', '.join(idle)}.", file=sys.stderr)


def switches(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the given switches of the forward of Optimum Habana's classes."""
    off = ("none", "false", "0")  # one of them takes a value
    return tuple(name for name in FORWARD_OPTIONS if str(getattr(args, name)).lower() not in off)


# Flags that count wherever models are loaded and run.
COMMON = frozenset(
    """model_name_or_path assistant_model bf16 model_revision token trust_remote_code
    trust_remote_code_tokenizer attn_implementation allow_tokenizer_mismatch allow_untested_models
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size verifier config seed
    device torch_compile compile_cache bucket_size use_kv_cache use_hpu_graphs sdp_on_bf16
    target_quant target_quant_exclude target_kv_dtype target_quant_config draft_quant
    draft_quant_exclude draft_kv_dtype draft_quant_config batch_size warmup verbose quiet
    optimum_habana""".split()
    + list(FORWARD_OPTIONS)
)


def only(args: argparse.Namespace, parser: argparse.ArgumentParser, more: Collection[str]) -> None:
    """Refuses the flags of `run_generation` that a program which has them too cannot honour.

    Args:
        args: Parsed by `parser`.
        parser: The program's.
        more: Flags that it honours besides the `COMMON` ones and those that are always so.
    """
    always = {name for name, note in HONOURED.items() if note.startswith("always so")}
    kept = COMMON | always | NO_EFFECT.keys() | set(more) | {"help"}
    for action in parser._actions:
        if action.dest not in kept and getattr(args, action.dest) != action.default:
            raise UnsupportedOptionError(
                f"--{action.dest} does nothing in {parser.prog}: leave it out."
            )


_PAGE = """# Flags of run_generation

<!-- Written by `python -m gaudi_spec.flags > docs/run_generation.md`; edit the parser instead. -->

`examples/run_generation.py` and `gaudi-spec generate` take every flag of Optimum Habana 1.21.2's
`run_generation.py`, with its default unless the last column names another one.
[migration.md](migration.md) says what else is different.

- **honoured**: does what it says.
- **no effect**: cannot change what is generated here; one warning says so.
- **refused**: an error that names the flag and says what to do; exit code 2.

`QUANT_CONFIG` in the environment is `--target_quant_config`; a `WORLD_SIZE` above 1 is refused.

## Optimum Habana's flags

{theirs}

## Other flags

{ours}
"""


def page(parser: argparse.ArgumentParser) -> str:
    """Returns docs/run_generation.md for a parser with all flags."""
    known = {flag.name: flag for flag in flags()}
    theirs = ["| flag | its default | here | |", "|---|---|---|---|"]
    ours = ["| flag | default | |", "|---|---|---|"]
    for action in parser._actions:
        name, text = action.dest, (action.help or "").replace("%%", "%").replace("|", "\\|")
        spelled = " ".join(f"`{option}`" for option in action.option_strings)
        if name in known:
            flag = known[name]
            theirs.append(f"| {spelled} | `{flag.default}` | {flag.verdict} | {flag.note} |")
        elif name in SHARED:
            if name in DIFFERENCES:
                text = f"{text} ({DIFFERENCES[name]})".strip()
            theirs.append(f"| {spelled} | `{SHARED[name]}` | honoured | {text} |")
        elif name != "help":
            ours.append(f"| {spelled} | `{action.default}` | {text} |")
    return _PAGE.format(theirs="\n".join(theirs), ours="\n".join(ours))
