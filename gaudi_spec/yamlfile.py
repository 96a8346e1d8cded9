"""YAML files of settings: read, and checked for unknown keys."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError


def read_yaml(path: str | Path) -> Any:
    """Returns what a YAML file holds, or `{}` if it is empty.

    Raises:
        ConfigError: The file cannot be read or is not YAML.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"Cannot read the config {path}: {reason}") from error


def check_keys(values: Any, known: Sequence[str]) -> None:
    """Refuses what is no mapping, and a key that is not `known`, naming the nearest one.

    Raises:
        ConfigError: See above.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"A config must be a mapping of names to values, not {values!r}.")
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
            raise ConfigError(f"Unknown setting {key!r}: {hint}")
