"""Process groups whose collectives cannot deadlock, whatever order each rank issues them in.

Importing `torchext` registers the backend "dfccl"; see `ProcessGroup`.

Source: "Comprehensive Deadlock Prevention for GPU Collective Communication" (DFCCL, EuroSys 2025) and its predecessor
OCCL (arXiv 2303.06324).
"""

from __future__ import annotations

from torchext.collectives.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    PeerLostError,
)
from torchext.collectives.explain import explain, explain_on_signal
from torchext.collectives.options import Options
from torchext.collectives.ordered import OrderedProcessGroup
from torchext.collectives.process_group import ProcessGroup
from torchext.collectives.tags import name_tensors, tag
from torchext.collectives.threads import without_collectives
from torchext.collectives.tracing import merge_traces, trace
from torchext.collectives.wrapping import wrap

__all__ = [
    "CollectiveAbortedError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "Options",
    "OrderedProcessGroup",
    "PeerLostError",
    "ProcessGroup",
    "explain",
    "explain_on_signal",
    "merge_traces",
    "name_tensors",
    "tag",
    "trace",
    "without_collectives",
    "wrap",
]
