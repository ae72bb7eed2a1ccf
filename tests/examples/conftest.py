"""Makes the examples importable as they import each other when run: by their bare names, from their own folder."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

if str(EXAMPLES) not in sys.path:  # pytest's `pythonpath` would do this for every test of the project
    sys.path.insert(0, str(EXAMPLES))
