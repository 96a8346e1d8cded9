"""`python -m gaudi_spec` is `gaudi-spec`."""

import sys

from .cli import main

sys.exit(main())
