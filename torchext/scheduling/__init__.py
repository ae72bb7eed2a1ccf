"""Who runs next and where: policies, and a simulator that tries them on recorded jobs.

Everything here is pure: no processes, no sockets, and no files but those that `read_trace` and `read_cluster` read.
"""

from torchext.scheduling.cluster_file import parse_cluster, read_cluster
from torchext.scheduling.explain import Plan, PlannedStart, PlannedWait, explain_starts, plan
from torchext.scheduling.metrics import summarize
from torchext.scheduling.placements import TypeAware, comparative_advantage, fastest_type, packed, spread
from torchext.scheduling.plots import plot
from torchext.scheduling.policies import (
    FIFO,
    LAS,
    QSSF,
    SJF,
    SRSF,
    EasyBackfill,
    FIFOFirstFit,
    Gavel,
    make_policy,
)
from torchext.scheduling.scheduler import Scheduler
from torchext.scheduling.simulator import (
    Costs,
    Drifts,
    Outage,
    RecordedJob,
    Result,
    Run,
    TableWorld,
    World,
    random_outages,
    simulate,
    teach,
)
from torchext.scheduling.state import ClusterState, Running
from torchext.scheduling.traces import read_trace
from torchext.scheduling.types import (
    Cluster,
    Discipline,
    Explains,
    Forecasts,
    Job,
    Learns,
    Machine,
    Observation,
    Observes,
    Placement,
    Policy,
    SchedulingError,
    Start,
    Steps,
)

__all__ = [
    "FIFO",
    "LAS",
    "QSSF",
    "SJF",
    "SRSF",
    "Cluster",
    "ClusterState",
    "Costs",
    "Discipline",
    "Drifts",
    "EasyBackfill",
    "Explains",
    "FIFOFirstFit",
    "Forecasts",
    "Gavel",
    "Job",
    "Learns",
    "Machine",
    "Observation",
    "Observes",
    "Outage",
    "Placement",
    "Plan",
    "PlannedStart",
    "PlannedWait",
    "Policy",
    "RecordedJob",
    "Result",
    "Run",
    "Running",
    "Scheduler",
    "SchedulingError",
    "Start",
    "Steps",
    "TableWorld",
    "TypeAware",
    "World",
    "comparative_advantage",
    "explain_starts",
    "fastest_type",
    "make_policy",
    "packed",
    "parse_cluster",
    "plan",
    "plot",
    "random_outages",
    "read_cluster",
    "read_trace",
    "simulate",
    "spread",
    "summarize",
    "teach",
]
