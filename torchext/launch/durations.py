"""Times on command lines."""

from __future__ import annotations

import argparse
import math
import re

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Reads a time: seconds, or a number with s, m, h or d behind it. For argparse.

    Raises:
        argparse.ArgumentTypeError: It is none, or negative.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)([smhd]?)", text.strip())
    if match is None or not math.isfinite(float(match[1])):
        raise argparse.ArgumentTypeError(f"expected a time such as 90, 90s, 5m or 1.5h, got {text!r}")
    return float(match[1]) * _UNITS_S[match[2]]
