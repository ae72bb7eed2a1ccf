"""Where in the user's program a collective is called."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

CallSite = tuple[CodeType, int]


def call_site(depth: int = 1) -> CallSite | None:
    """Finds the line of the user's program that is calling: the innermost one outside torch and this package."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "torchext.collectives.")):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None  # called from C++, as by autograd's threads


def told_place(where: str) -> str:
    """Goes after the name of a call: on which group it is, and the line that waits for it."""
    site = call_site(2)
    place = f", at {site[0].co_filename}:{site[1]}" if site is not None else ""
    return f" on {where}{place}" if where else place
