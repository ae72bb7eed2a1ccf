"""A hot standby for training state: after a crash at most one step is done again, and the losses go on bit for bit.

`Replicator` is for plain PyTorch loops, `torchext.callbacks.PhantasyCheckpoint` for Lightning; ``torchext standby`` is
the process that holds the state.

Source: "Phantasy: Low-Latency Virtualization-based Fault Tolerance via Asynchronous Prefetching" (IEEE Transactions on
Computers).
"""

from __future__ import annotations

from torchext.standby.errors import (
    CorruptStateError,
    FencedError,
    NoStateError,
    StandbyError,
    StandbyLostError,
    StateMismatchError,
)
from torchext.standby.publisher import MissedChangeWarning, PersistWarning, StandbyLostWarning
from torchext.standby.replicator import Replicator, Restored

__all__ = [
    "CorruptStateError",
    "FencedError",
    "MissedChangeWarning",
    "NoStateError",
    "PersistWarning",
    "Replicator",
    "Restored",
    "StandbyError",
    "StandbyLostError",
    "StandbyLostWarning",
    "StateMismatchError",
]
