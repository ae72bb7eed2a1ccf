"""Who runs next and where: policies, and a simulator that tries them on recorded jobs.

Everything here is pure: no processes, no sockets, and no files but those that `read_trace` and `read_cluster` read.
"""

from torchext.scheduling.placements import TypeAware, comparative_advantage, fastest_type, packed, spread
from torchext.scheduling.state import ClusterState, Running
from torchext.scheduling.types import (
    Cluster,
    Discipline,
    Forecasts,
    Job,
    Learns,
    Machine,
    Placement,
    Policy,
    SchedulingError,
    Start,
    Steps,
)

__all__ = [
    "Cluster",
    "ClusterState",
    "Discipline",
    "Forecasts",
    "Job",
    "Learns",
    "Machine",
    "Placement",
    "Policy",
    "Running",
    "SchedulingError",
    "Start",
    "Steps",
    "TypeAware",
    "comparative_advantage",
    "fastest_type",
    "packed",
    "spread",
]
