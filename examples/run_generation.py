"""Optimum Habana's run_generation.py with a working draft model; `--help` lists the flags."""

import sys

from gaudi_spec.cli import generate, run_command

if __name__ == "__main__":
    sys.exit(run_command(generate))
