"""`gaudi-spec bench steps`: what each step of a cycle costs, and what building graphs costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from ..errors import GaudiSpecError


def with_sums(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with what only this command shows: the sum of the parts, a drafted token."""
    k, plain = row["num_assistant_tokens"], row["contender"] == "plain"
    more: dict[str, Any] = {"plain_step_ms": row.get("cycle_ms")} if plain else {}
    if row.get("draft_ms") is not None:
        more["draft_token_ms"] = row["draft_ms"] / k
        more["parts_ms"] = row["draft_ms"] + row["verify_ms"]
    return {**row, **more}


def starts(models: list[str], k: int) -> dict[str, dict[str, float]]:
    """Starts the main program with graphs in two new processes, the second finding the cache.

    Args:
        models: Flags of `gaudi-spec generate` that name the models and the device.
        k: K.

    Returns:
        For "cold" and "from the cache": seconds of building graphs, and of the whole process.
    """
    command = [sys.executable, "-m", "gaudi_spec", "generate", *models, "--torch_compile", "-q"]
    command += ["--prompt", "Once upon a time", "--max_new_tokens", "16", "--warmup", "0"]
    command += ["--n_iterations", "1"]
    if "--assistant_model" in models:
        command += ["--num_assistant_tokens", str(k)]
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "from the cache"):
            begin = time.perf_counter()
            done = subprocess.run(
                [*command, "--compile_cache", cache], capture_output=True, text=True, check=False
            )
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise GaudiSpecError(f"A start could not be timed: {reason}")
            built = json.loads(done.stdout.splitlines()[-1])["graphs"]["seconds"]
            seconds = time.perf_counter() - begin
            found[name] = {"build_seconds": built, "process_seconds": seconds}
    return found
