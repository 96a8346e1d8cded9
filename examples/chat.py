"""A chat with a target and its draft; `--help` lists the flags."""

import sys

from gaudi_spec.chat import main
from gaudi_spec.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
