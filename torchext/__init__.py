"""PyTorch training extensions: each part can be used alone, on programs that people already have.

Importing this package is cheap and needs only torch, numpy and einops. It registers the backend "dfccl" with
`torch.distributed`; nothing of it is loaded before a process group asks for it. The subpackages are imported when they
are first named, so that one part's optional requirements never concern the user of another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchext import callbacks as callbacks
    from torchext import channels as channels
    from torchext import collectives as collectives
    from torchext import launch as launch
    from torchext import losses as losses
    from torchext import replication as replication
    from torchext import scheduling as scheduling
    from torchext import standby as standby
    from torchext.collectives.tags import tag as tag

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "callbacks",
    "channels",
    "collectives",
    "launch",
    "losses",
    "replication",
    "scheduling",
    "standby",
    "tag",
]

_SUBPACKAGES = frozenset(
    {"callbacks", "channels", "collectives", "launch", "losses", "replication", "scheduling", "standby"}
)


def _create_dfccl(options: Any, backend_options: Any) -> Any:
    from torchext.collectives.create import create

    return create(options, backend_options)


def _register_dfccl() -> None:
    # A side effect that no other way of registering avoids: while any backend is registered, torch 2.13 leaves the
    # default backend of groups made as "cpu:gloo" unset (distributed_c10d._new_process_group_helper compares the
    # upper-case name of the first plugin with lower-case values, and so skips the branch for gloo). They work, but call
    # themselves "undefined" and warn when destroyed; "gloo", and anything with nccl, is not affected.
    try:
        import torch.distributed as dist
    except ModuleNotFoundError as error:
        if error.name != "torch":  # without it, the parts that do not need it still work
            raise
        return
    if dist.is_available() and not hasattr(dist.Backend, "DFCCL"):
        dist.Backend.register_backend("dfccl", _create_dfccl, extended_api=True, devices=["cpu"])


_register_dfccl()


def __getattr__(name: str) -> Any:
    if name == "tag":
        return importlib.import_module("torchext.collectives.tags").tag
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES, "tag"})
