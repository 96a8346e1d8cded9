"""Where files are kept that were made once and serve again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Returns `$GAUDI_SPEC_CACHE`, or else `~/.cache/gaudi_spec`."""
    return Path(os.environ.get("GAUDI_SPEC_CACHE") or "~/.cache/gaudi_spec").expanduser()
