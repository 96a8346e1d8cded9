"""`gaudi-spec doctor`: asks the machine, runs the checks of `environment.py`, prints them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from . import environment
from .environment import Check, Env, Facts
from .helptext import HelpFormatter

SINGLE = (
    environment.mode,
    environment.recipe_cache,
    environment.collectives,
    environment.tensor_cache,
    environment.metrics_file,
    environment.int64,
)


def main(argv: list[str]) -> int:
    """Runs the program; returns 0, or 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        prog="gaudi-spec doctor",
        description="Check what is installed and set, without a model.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    devices = ("auto", "cpu", "cuda", "hpu")
    parser.add_argument("--device", default="auto", choices=devices, help="what to check for")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    checks = examine(os.environ, gather(args.device))
    problems = sum(check.status == "problem" for check in checks)
    if args.json:
        print(json.dumps({"problems": problems, "checks": [check._asdict() for check in checks]}))
    else:
        print(*checks, sep="\n")
    return 1 if problems else 0


def examine(env: Env, facts: Facts) -> list[Check]:
    """Returns the result of every check, in the order of the report."""
    return [
        *environment.packages(env, facts),
        *environment.hardware(env, facts),
        *environment.bridge(env, facts),
        *(check(env, facts) for check in SINGLE),
        *environment.files(env, facts),
    ]


def gather(requested: str = "auto") -> Facts:
    """Asks the machine; what fails while it is asked becomes a fact too."""
    affinity = getattr(os, "sched_getaffinity", None)
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "optimum_habana": _version("optimum-habana"),
        "pin": _pin("optimum-habana", "transformers"),
        "requested": requested,
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "hl_smi": shutil.which("hl-smi") is not None,
        "writable": _writable,
    }
    try:
        facts.update(_device(requested))
    except ImportError as error:  # no PyTorch
        facts.update(device=None, hardware=None, why=_line(error))
    return Facts(**facts)


def _device(requested: str) -> dict[str, Any]:
    """Returns the facts about the first device that can be used, as "auto" would choose it."""
    import torch

    from .device import DEVICES, linear

    devices: dict[str, Any] = DEVICES  # the protocol does not have what only a card is asked
    reasons: dict[str, str] = {}
    chosen = None
    for name in devices if requested == "auto" else (requested,):
        try:
            reason = devices[name].missing()
        except Exception as error:  # a package that is there and cannot be imported
            reason = _line(error)
        if reason is None:
            chosen = name
            break
        reasons[name] = reason
    facts: dict[str, Any] = {
        "bridge": devices["hpu"].version(),
        "device": chosen,
        "why": " ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        "threads": torch.get_num_threads(),
        "hardware": None,
    }
    if chosen is not None:
        try:
            device = devices[chosen]()
            facts["bridge_lazy"] = device.bridge_lazy() if chosen == "hpu" else None
            facts.update(memory=device.memory(), hardware=device.describe())
            facts["kernel"] = linear.missing() if chosen == "cpu" else None
        except Exception as error:  # a card that another process holds
            facts["why"] = f"{facts['why']} {chosen}: {_line(error)}".strip()
    return facts


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _pin(package: str, dependency: str) -> str | None:
    """Returns the versions of `dependency` that an installed package asks for."""
    if _version(package) is None:
        return None
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in metadata.requires(package) or ()]
    plain = (w for w in wanted if w.name == dependency and w.marker is None)
    return next((str(w.specifier) for w in plain), None)


def _writable(path: str) -> bool:
    """Returns whether the nearest directory on the way to `path` that exists can be written."""
    place = Path(path).expanduser()
    nearest = next(p for p in (place, *place.absolute().parents) if p.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
