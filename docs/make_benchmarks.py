"""Writes docs/benchmarks.md from docs/benchmarks/*.json; `--measure` makes these files first.

python docs/make_benchmarks.py             the page, from the files that are there
python docs/make_benchmarks.py --measure   the files too: on a machine where nothing else runs
python docs/make_benchmarks.py --measure steps throughput    only these
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from gaudi_spec.bench import report

DOCS = Path(__file__).parent
PAIR = "--model smollm2-135m-instruct --assistant_model smollm2-135m-draft"
RUNS = {
    "steps": f"steps {PAIR} --bf16 --input_len 32 --max_new_tokens 32",
    "throughput": f"sweep {PAIR} --bf16 --torch_compile --set fuse_cycle=false "
    "--num_assistant_tokens 1 --by_kind --kinds advice,chat --max_new_tokens 32 -r 2",
    "lookup": f"throughput {PAIR} --bf16 --drafter ngram --num_assistant_tokens 3 --by_kind "
    "--kinds summarise,edit --max_new_tokens 96 --baselines assisted",
}
TITLES = {
    "steps": "What a step costs",
    "throughput": "Throughput by kind of prompt",
    "lookup": "Prompt lookup, without a draft model",
}


def main(argv: list[str]) -> int:
    """Runs the program."""
    measure, names = "--measure" in argv, [a for a in argv if a != "--measure"]
    unknown = [name for name in names if name not in RUNS]
    if unknown or (names and not measure):
        print(f"usage: make_benchmarks.py [--measure [{'|'.join(RUNS)} ...]]", file=sys.stderr)
        return 2
    for name in (names or RUNS) if measure else ():
        run(name)
    if any(files()):
        (DOCS / "benchmarks.md").write_text(page(), encoding="utf-8")
    return 0


def run(name: str) -> None:
    """Measures one table."""
    command = [sys.executable, "-m", "gaudi_spec", "bench", *shlex.split(RUNS[name])]
    with tempfile.TemporaryDirectory() as work:
        made = Path(work, "made")
        quiet = {"stdout": subprocess.DEVNULL}  # the files have it all
        subprocess.run([*command, "--output_dir", str(made)], check=True, **quiet)
        result = json.loads((made / "results.json").read_text(encoding="utf-8"))
    result["command"] = f"gaudi-spec bench {RUNS[name]}"
    path = DOCS / "benchmarks" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(report.dumps(result), encoding="utf-8")


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
        parts += [f"## {TITLES[path.stem]}", report.markdown(result)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
