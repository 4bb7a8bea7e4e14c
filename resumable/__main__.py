"""`python -m resumable`: the same as the command `resumable`."""

import sys

from .cli import main

sys.exit(main())
