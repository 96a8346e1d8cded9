"""Writes docs/benchmarks.md from docs/benchmarks/*.json; `--measure` makes these files first.

python docs/make_benchmarks.py             the page, from the files that are there
python docs/make_benchmarks.py --measure   the files too: on a machine where nothing else runs
python docs/make_benchmarks.py --measure steps throughput    only these; `auto` for all of auto_*
python docs/make_benchmarks.py --measure perf_config         the block `measured` of MEASURED_FILE

`{unrelated}` and `{looping}` in a command are checkpoints that are made for the run, see `MODELS`.
"""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gaudi_spec.bench import report
from gaudi_spec.bench.flags import parser
from gaudi_spec.models import compact
from gaudi_spec.perf_config import PerfConfig
from gaudi_spec.results import write_text
from gaudi_spec.zoo import DRAFT, FULL, resolve

DOCS = Path(__file__).parent
MEASURED_FILE = DOCS.parent / "perf_configs" / "smollm2_135m_cpu_fp32.yaml"
FILE = "perf_config"  # the name of measuring it
AUTO = (
    "--num_assistant_tokens auto,1,4 --batch_size 1 --num_prompts 2 --max_new_tokens 128 -r 3 "
    "--bf16 --baselines none"
)
PAIR = "--model smollm2-135m-instruct --assistant_model smollm2-135m-draft"
QUANT = (
    "--bf16 --drafter ngram --set target_quant=none,int8 --modes graph --num_assistant_tokens 4,8 "
    "--input_len 32 --max_new_tokens 32 --baselines none --no_start_times"
)
RUNS = {
    "steps": f"steps {PAIR} --bf16 --input_len 32 --max_new_tokens 32",
    "throughput": f"sweep {PAIR} --bf16 --torch_compile --set fuse_cycle=false "
    "--num_assistant_tokens 1 --by_kind --kinds advice,chat --max_new_tokens 32 -r 2",
    "lookup": f"throughput {PAIR} --bf16 --drafter ngram --num_assistant_tokens 3 --by_kind "
    "--kinds summarise,edit --max_new_tokens 96 --baselines assisted",
    "auto_large": "sweep --model smollm2-135m-instruct --assistant_model smollm2-135m-instruct "
    f"--kinds advice {AUTO}",
    "auto_unrelated": "sweep --model smollm2-135m-instruct --assistant_model {unrelated} "
    f"--kinds advice {AUTO}",
    "auto_perfect": f"sweep --model {{looping}} --drafter ngram --kinds advice {AUTO}",
    "int8": f"steps --model smollm2-135m-instruct {QUANT}",
    "int8_1b": f"steps --model random-llama-1b {QUANT}",
}
AUTOS = [name for name in RUNS if name.startswith("auto_")]
TITLES = {
    "steps": "What a step costs",
    "throughput": "Throughput by kind of prompt",
    "lookup": "Prompt lookup, without a draft model",
    "auto_large": "K by itself: the target as its own draft",
    "auto_unrelated": "K by itself: a draft that knows nothing",
    "auto_perfect": "K by itself: a draft that costs nothing and is right",
    "int8": "8-bit weights and activations",
    "int8_1b": "8-bit weights and activations, 1 B random weights",
}

NOTES = {
    "auto_unrelated": "`{unrelated}` has the shape of the packaged draft and random weights.",
    "auto_perfect": "`{looping}` is the target without attention: its text must run in circles, so "
    "prompt lookup is right as soon as one is closed. A step costs what the target's does.",
}


def main(argv: list[str]) -> int:
    """Runs the program."""
    measure, given = "--measure" in argv, [a for a in argv if a != "--measure"]
    names = [name for word in given for name in (AUTOS if word == "auto" else [word])]
    unknown = [name for name in names if name not in (*RUNS, FILE)]
    if unknown or (names and not measure):
        print(
            f"usage: make_benchmarks.py [--measure [auto|{'|'.join([*RUNS, FILE])} ...]]",
            file=sys.stderr,
        )
        return 2
    for name in (names or [*RUNS, FILE]) if measure else ():
        measure_file() if name == FILE else run(name)
    if any(files()):
        (DOCS / "benchmarks.md").write_text(page(), encoding="utf-8")
    return 0


def run(name: str) -> None:
    """Measures one table."""
    with tempfile.TemporaryDirectory() as work:
        words, made = RUNS[name], Path(work, "made")
        for model, make in MODELS.items():
            if model in words:
                path = Path(work, make.__name__)
                make(path)
                words = words.replace(model, str(path))
        command = [sys.executable, "-m", "gaudi_spec", "bench", *shlex.split(words)]
        quiet = {"stdout": subprocess.DEVNULL}  # the files have it all
        subprocess.run([*command, "--output_dir", str(made)], check=True, **quiet)
        result = json.loads((made / "results.json").read_text(encoding="utf-8"))
    result["command"] = f"gaudi-spec bench {RUNS[name]}"
    flags = parser().parse_args(shlex.split(RUNS[name]))
    result["models"] = {"target": flags.model_name_or_path, "draft": flags.assistant_model}
    path = DOCS / "benchmarks" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(report.dumps(result), encoding="utf-8")


def unrelated(directory: Path) -> None:
    """Makes a checkpoint with the shape of the packaged draft and random weights."""
    model, tokenizer = _load(DRAFT)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def looping(directory: Path) -> None:
    """Makes a checkpoint of the target without attention: its text must run in circles.

    The next token depends on the last one alone, at the target's own cost, so prompt lookup is a
    perfect draft that costs nothing as soon as a circle is closed.
    """
    model, tokenizer = _load(FULL)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _load(name: str) -> tuple[Any, Any]:
    compact.register()
    path = resolve(name)
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def measure_file() -> None:
    """Runs the file for this machine as its first line says, and writes its block `measured`."""
    file = PerfConfig.read(MEASURED_FILE)
    program = [sys.executable, "examples/run_generation.py", "--config", str(MEASURED_FILE)]
    with tempfile.TemporaryDirectory() as work:
        quiet = {"stdout": subprocess.DEVNULL, "cwd": DOCS.parent}
        subprocess.run([*program, "--output_dir", work], check=True, **quiet)
        values = json.loads(Path(work, "results.json").read_text(encoding="utf-8"))
    write_text(MEASURED_FILE, file.with_block("measured", measured(values, file)))


def measured(values: dict[str, Any], file: PerfConfig) -> dict[str, Any]:
    """Returns the block: what results.json of a run says, with machine and date."""
    place = values["environment"]
    return {
        "command": f"python examples/run_generation.py --config perf_configs/{file.path.name}",
        "machine": f"{place['hardware']} ({place['device']})",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": f"gaudi-spec {place['gaudi_spec']}, torch {place['torch']}, "
        f"Transformers {place['transformers']}, Python {place['python']}",
        "tokens_per_second": round(values["throughput"], 1),
        "plain_tokens_per_second": round(values["baseline_throughput"], 1),
        "speedup": round(values["speedup"], 2),
        "acceptance_rate": round(values["acceptance_rate"], 3),
        "first_token_ms": round(1000 * values["avg_first_token_latency"], 1),
    }


def files() -> list[Path]:
    """Returns the measured files, in the order of the page."""
    paths = [DOCS / "benchmarks" / f"{name}.json" for name in RUNS]
    return [path for path in paths if path.exists()]


def page() -> str:
    """Returns the page."""
    parts = [
        "# Benchmarks",
        "Made by `make benchmarks` from `docs/benchmarks/*.json`; do not edit. Each section names "
        "its machine, date and command.",
    ]
    for path in files():
        result = json.loads(path.read_text(encoding="utf-8"))
        parts += [f"## {TITLES[path.stem]}", *filter(None, [NOTES.get(path.stem)])]
        parts.append(report.markdown(result, path.stem in AUTOS))
    return "\n\n".join(parts) + "\n"


MODELS = {"{unrelated}": unrelated, "{looping}": looping}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
