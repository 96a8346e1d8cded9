"""`--help` that shows what a flag is if it is left out."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.HelpFormatter):
    """Adds a flag's default to its help, if there is one and the text does not name it itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if default is None or default is False or default == argparse.SUPPRESS or "default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list) else "%(default)s"
        return f"{text} (default: {shown})".strip()
