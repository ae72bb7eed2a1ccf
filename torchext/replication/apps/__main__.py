"""``python -m torchext.replication.apps``."""

from __future__ import annotations

import sys

from torchext.replication.apps.cli import main

sys.exit(main(sys.argv[1:]))
