"""The parts of torchext that an installation may lack."""

from __future__ import annotations

import importlib


def require_native() -> None:
    """Makes sure that the C++ core is there; call it before ``from torchext import _native``.

    Raises:
        ImportError: It was not built, or cannot be loaded here; the message says how to get it.
    """
    try:
        importlib.import_module("torchext._native")
    except ImportError as error:
        raise ImportError(
            f"this needs the native core, which this installation of torchext lacks ({error}); install a C++20 "
            "compiler (g++ >= 10, clang >= 10 or MSVC 2019) and the headers of this Python, then install torchext "
            "from source again, as with pip install -e . in a checkout",
            name="torchext._native",
        ) from error
