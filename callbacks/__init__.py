"""Lightning callbacks over the parts of torchext. Import as ``torchext.callbacks``, never as ``callbacks``.

Lightning is imported when one of them is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchext.callbacks.phantasy import PhantasyCheckpoint as PhantasyCheckpoint
    from torchext.callbacks.stabilizer import StabilizerReplication as StabilizerReplication

__all__ = ["PhantasyCheckpoint", "StabilizerReplication"]

_MODULES = {
    "PhantasyCheckpoint": "torchext.callbacks.phantasy",
    "StabilizerReplication": "torchext.callbacks.stabilizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lightning":
            raise
        raise ImportError(f"{name} needs Lightning: pip install 'torchext[lightning]'", name="lightning") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
