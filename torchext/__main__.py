"""``python -m torchext``: the same as the console script ``torchext``."""

import sys

from torchext.cli import main

sys.exit(main())
