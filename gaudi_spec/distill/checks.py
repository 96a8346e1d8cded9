"""Checks of the arguments of `gaudi-spec distill`, before anything is computed."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..models.support import max_positions, vocabulary
from ..results import check_output_dir
from .student import head_size


def check_fits(target: Any, args: argparse.Namespace) -> None:
    """Checks the arguments against the target, before anything is computed.

    Raises:
        ConfigError: A size that the target does not allow.
    """
    for hidden in args.hidden or ():
        head_size(target.config, hidden)
    read, _ = vocabulary(target)
    if max(args.vocab_subset or [0]) > read:
        raise ConfigError(f"--vocab_subset {max(args.vocab_subset)}: the target has {read} ids.")
    depth = getattr(target.config, "num_hidden_layers", None)
    if depth is not None and max(args.layers) > depth:
        raise ConfigError(
            f"--layers {max(args.layers)}: the target has {depth}, and a draft must cost less."
        )
    longest, most = args.max_input_tokens + args.max_new_tokens, max_positions(target.config)
    if most is not None and longest > most:
        raise ConfigError(
            f"--max_input_tokens and --max_new_tokens are {longest} together, but the target has "
            f"{most} positions."
        )


def check_values(args: argparse.Namespace) -> None:
    """Checks everything that can be checked before a model is loaded.

    Raises:
        ConfigError: What is wrong.
    """
    least = {"layers": 1, "hidden": 1, "vocab_subset": 16, "trial_steps": 1, "tokens": 1}
    least |= {"batch_size": 1, "max_input_tokens": 2, "max_new_tokens": 2, "steps": 1}
    least |= {"train_batch_size": 1, "temperatures": 0, "minutes": 0, "learning_rate": 0}
    for name, lowest in least.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not lowest <= value < math.inf:
                raise ConfigError(f"--{name} must be at least {lowest}, not {value}.")
    if not 0 <= args.seed < 1 << 32:
        raise ConfigError(f"--seed must be from 0 to {(1 << 32) - 1}, not {args.seed}.")
    output = Path(args.output)
    if (output / "config.json").exists() and not (output / "distill.json").exists():
        raise ConfigError(f"{output} holds another model: name another --output.")
    check_output_dir(args.output)
