"""`python -m resumable`: the same as the command `resumable`."""

import sys

from .cli.app import main

sys.exit(main())
