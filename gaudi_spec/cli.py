"""The `gaudi-spec` command: picks the subcommand, and turns errors into one sentence and a code."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from .errors import GaudiSpecError
from .version import __version__

USAGE = """usage: gaudi-spec COMMAND [options]

commands:
  generate   generate text with a target and a draft model
  distill    train a small draft for a target
  plan       memory and expected speed-up of a pair, before it is loaded
  bench      measure a pair against plain decoding and against others
  plot       draw results of bench
  quality    what quantization costs on a text: perplexity, agreement, acceptance
  quantize   measure and convert a model with Intel Neural Compressor
  audit      count compilations, host reads and fallbacks of a pair of models
  doctor     check what is installed and set

`gaudi-spec COMMAND --help` explains a command; `gaudi-spec --version` prints the version."""

_FLAG = re.compile(r"--([a-z][\w-]*)(?:=|$)")


def _show_help(flags: str, argv: list[str]) -> None:
    """Shows help if it is asked for, before the command is imported, and torch with it."""
    if {"-h", "--help"} & set(argv):
        importlib.import_module(f".{flags}", __package__).parser().parse_args(argv)


def generate(argv: list[str]) -> int:
    """Runs the main program."""
    _show_help("flags", argv)
    from .run_generation import main as run

    return run(argv)


def _distill(argv: list[str]) -> int:
    from .distill.command import main as run

    return run(argv)


def _plan(argv: list[str]) -> int:
    _show_help("plan.flags", argv)
    from .plan.command import main as run

    return run(argv)


def _bench(argv: list[str]) -> int:
    _show_help("bench.flags", argv)
    from .bench.command import main as run

    return run(argv)


def _quality(argv: list[str]) -> int:
    from .quality import main as run

    return run(argv)


def _plot(argv: list[str]) -> int:
    from .bench.command import plot as run

    return run(argv)


def _quantize(argv: list[str]) -> int:
    from .quantize import main as run

    return run(argv)


def _audit(argv: list[str]) -> int:
    from .audit import main as run

    return run(argv)


def _doctor(argv: list[str]) -> int:
    from .doctor import main as run

    return run(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "generate": generate,
    "distill": _distill,
    "plan": _plan,
    "bench": _bench,
    "plot": _plot,
    "quality": _quality,
    "quantize": _quantize,
    "audit": _audit,
    "doctor": _doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `gaudi-spec`; returns 0, 1 (failed while running) or 2 (wrong usage)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        print(f"gaudi-spec: unknown command {argv[0]!r}\n{USAGE}", file=sys.stderr)
        return 2
    return run_command(COMMANDS[argv[0]], argv[1:])


def run_command(command: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Runs one command; an expected error becomes one line on standard error.

    Flags may be written with dashes or underscores. `-v` shows the traceback of an error.
    """
    argv = [_underscores(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    try:
        return command(argv)
    except SystemExit as stop:  # argparse: 2 for usage, 0 for --help
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone; nothing to tell them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "-v" in argv or "--verbose" in argv:
            traceback.print_exc()
        if isinstance(error, GaudiSpecError):
            print(f"error: {_by_flags(str(error), argv)}", file=sys.stderr)
            return error.exit_code
        print(f"error: {type(error).__name__}: {error} (-v shows where)", file=sys.stderr)
        return 1


def _by_flags(message: str, argv: Sequence[str]) -> str:
    """Returns `message` with the names of settings that came from flags written as those flags."""
    for flag in dict.fromkeys(match[1] for match in map(_FLAG.match, argv) if match):
        setting = {"stop": "stop_strings", "bad_words": "bad_words_ids"}.get(flag, flag)
        # A name of one word may be a word of the sentence, unless it is its subject.
        where = r"(?<![\w./-])" if "_" in setting else "^"
        message = re.sub(rf"{where}{setting}\b", f"--{flag}", message)
    return message


def _underscores(arg: str) -> str:
    if not _FLAG.match(arg):  # a prompt may begin with dashes, too
        return arg
    name, equals, value = arg.partition("=")
    name = "--" + name[2:].replace("-", "_")
    if name == "--no_ignore_eos":  # argparse's own form of a switch turned off
        name = "--no-ignore_eos"
    return name + equals + value
