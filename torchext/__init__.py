"""PyTorch training extensions: each part can be used alone, on programs that people already have.

Importing this package is cheap and needs only torch, numpy and einops. The subpackages are imported when they
are first named, so that one part's optional requirements never concern the user of another.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchext import callbacks as callbacks
    from torchext import losses as losses
    from torchext import scheduling as scheduling

__version__ = "0.1.0"

__all__ = ["__version__", "callbacks", "losses", "scheduling"]

_SUBPACKAGES = frozenset({"callbacks", "losses", "scheduling"})


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
