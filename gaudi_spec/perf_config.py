"""Files for `--config`: settings, flags, environment and figures of one pair on one machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .config import SpecConfig
from .device import found
from .errors import ConfigError
from .yamlfile import check_keys, read_yaml

BLOCKS = ("environment", "flags", "needs", "plan", "projected", "measured")
PLAN = ("hardware", "cards", "target_quant", "draft_quant")
NEEDS = {
    "cards": "a target split over several cards, which this version cannot run",
    "fp8": "--target_quant_config, a file that `gaudi-spec quantize` makes on the card",
    "whisper": "encoder-decoder models, which this version cannot run",
}


@dataclasses.dataclass(frozen=True)
class PerfConfig:
    """One file. What is no block of these is a setting of `SpecConfig`.

    Attributes:
        path: Where it was read.
        settings: Settings of the engine.
        environment: Variables that must be set before Python starts, on hpu.
        flags: Flags of `run_generation` by name, without dashes.
        needs: What it takes besides this version and these flags; keys of `NEEDS`.
        plan: What `gaudi-spec plan` is told besides, see `PLAN`.
        projected: What it says; never measured.
        measured: Figures of a run, with machine and date.
    """

    path: Path
    settings: SpecConfig
    environment: dict[str, str]
    flags: dict[str, Any]
    needs: list[str]
    plan: dict[str, Any]
    projected: dict[str, Any]
    measured: dict[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> PerfConfig:
        """Reads a file.

        Raises:
            ConfigError: It cannot be read, or a key or value is wrong; names the nearest key.
        """
        values = read_yaml(path)
        check_keys(values, [*(f.name for f in dataclasses.fields(SpecConfig)), *BLOCKS])
        blocks = {name: values.pop(name, None) or {} for name in BLOCKS}
        needs = blocks.pop("needs") or []
        if not isinstance(needs, list):
            raise ConfigError(f"needs must be a list, not {needs!r}.")
        check_keys(dict.fromkeys(map(str, needs)), list(NEEDS))
        check_keys(blocks["plan"], PLAN)
        for name, block in blocks.items():
            if not isinstance(block, dict):
                raise ConfigError(f"{name} must be a mapping of names to values, not {block!r}.")
        return cls(Path(path), SpecConfig.from_dict(values), needs=needs, **blocks)

    def arguments(self, defaults: Mapping[str, Any]) -> list[str]:
        """Returns the flags as command line arguments.

        Args:
            defaults: Every flag that the program has, with its default value.

        Raises:
            ConfigError: The program has no such flag.
        """
        check_keys(self.flags, [name for name in defaults if name != "config"])
        arguments = []
        for name, value in self.flags.items():
            if value is False:
                arguments += [f"--no-{name}"] if defaults[name] is True else []
            else:
                given = value if isinstance(value, list) else [] if value is True else [value]
                arguments += [f"--{name}", *map(str, given)]
        return arguments

    def check_runnable(self, device: str, quantized: bool = False) -> None:
        """Refuses to run what this version, or this process, cannot.

        Args:
            device: Name of the device that was asked for.
            quantized: Whether a file of Neural Compressor's for the target is given.

        Raises:
            ConfigError: Names what is lacking.
        """
        lacking = [NEEDS[need] for need in self.needs if need != "fp8" or not quantized]
        if lacking:
            raise ConfigError(
                f"{self.path} needs {'; and '.join(lacking)}. Its figures are projections "
                f"(gaudi-spec plan --config {self.path})."
            )
        unset = {
            name: value
            for name, value in self.environment.items()
            if os.environ.get(name) != str(value)
        }
        if unset and found(device) == "hpu":
            wanted = " ".join(f"{name}={shlex.quote(str(v))}" for name, v in unset.items())
            raise ConfigError(
                f"{self.path} needs {wanted} in the environment before Python starts: put it in "
                "front of the command."
            )

    def with_block(self, name: str, values: Mapping[str, Any]) -> str:
        """Returns the file's text with another block of that name, the rest as it is."""
        text = self.path.read_text(encoding="utf-8")
        block = yaml.safe_dump({name: dict(values)}, sort_keys=False, width=100)
        kept = re.sub(rf"^{name}:.*\n(?:[ #].*\n)*", "", text, flags=re.M)
        return kept.rstrip("\n") + "\n" + block


def parse(program: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses arguments, those of a `--config` file before the given ones, which win.

    Args:
        program: A parser that has `--config` and `--device`.
        argv: Arguments.

    Raises:
        ConfigError: The file is wrong, or this process cannot run it.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    path = first.parse_known_args(argv)[0].config
    if path is None:
        args = program.parse_args(argv)
        path = args.config  # abbreviated
        if path is None:
            return args
    file = PerfConfig.read(path)
    defaults = {action.dest: action.default for action in program._actions}
    args = program.parse_args([*file.arguments(defaults), *argv])
    file.check_runnable(args.device, bool(args.target_quant_config))
    return args
