"""Optimum Habana's run_lm_eval.py with a draft model; `--help` lists the flags."""

import sys

from gaudi_spec.cli import run_command
from gaudi_spec.run_lm_eval import main

if __name__ == "__main__":
    sys.exit(run_command(main))
