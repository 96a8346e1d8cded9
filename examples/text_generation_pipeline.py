"""Optimum Habana's run_pipeline.py with a draft model; `--help` lists the flags."""

import sys

from gaudi_spec.cli import run_command
from gaudi_spec.gaudi_pipeline import main

if __name__ == "__main__":
    sys.exit(run_command(main))
