"""Time the simulator and single decisions of the scheduler.

    python tests/benchmarks/scheduling.py [--trace FILE --cluster 79x8 --from 2017-10-02 --to 2017-10-30]
        [--policy qssf,las] [--rounds 5] [--json out.json]

Without a trace, 40,000 made-up jobs on 80 machines of 8 GPUs, at a load of about 0.95. An event is a submission, a
start, a stop, a failure, a repair or a rise of score. Decisions: 10,000 waiting jobs and 1,000 machines, all full;
`incremental` is one job that ends and the decision that follows, `full` is the same for a policy whose scores may
change at any time, so that all jobs are scored and sorted again. Times are CPU time of one process, medians over
rounds, policies taking turns, with garbage collection off as timeit has it.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from torchext.scheduling import (
    LAS,
    QSSF,
    Cluster,
    ClusterState,
    FIFOFirstFit,
    Job,
    Policy,
    RecordedJob,
    Scheduler,
    make_policy,
    read_trace,
    simulate,
    summarize,
)
from torchext.scheduling.cluster_file import parse_cluster
from torchext.scheduling.traces import parse_time


@dataclass(frozen=True)
class Unsettled(FIFOFirstFit):
    """FIFO that does not promise to keep its scores, as a learned policy would not."""

    settled: ClassVar = False


def made_up_trace(num_jobs: int, num_gpus: int, load: float) -> list[RecordedJob]:
    random = np.random.default_rng(0)
    gpus = random.choice([1, 2, 4, 8, 16, 32], size=num_jobs, p=[0.8, 0.06, 0.07, 0.05, 0.015, 0.005])
    durations_s = np.minimum(random.lognormal(7.0, 2.0, num_jobs), 7 * 86400.0)
    between_s = (gpus * durations_s).sum() / (load * num_gpus * num_jobs)
    submit_s = np.cumsum(random.exponential(between_s, num_jobs))
    tenants = random.integers(0, 12, num_jobs)
    return [
        RecordedJob(Job(f"j{i}", float(submit_s[i]), int(gpus[i]), f"t{tenants[i]}"), float(durations_s[i]))
        for i in range(num_jobs)
    ]


def time_simulation(trace: list[RecordedJob], cluster: Cluster, name: str) -> tuple[float, float]:
    """Returns events/s and the mean JCT in hours."""
    policy = make_policy(name, durations_s={r.job.id: r.duration_s for r in trace})
    gc.collect()
    gc.disable()
    begin = time.process_time()
    result = simulate(trace, cluster, policy)
    spent_s = time.process_time() - begin
    gc.enable()
    return result.num_events / spent_s, summarize(result)["jct_s"]["mean"] / 3600


def full_cluster(policy: Policy) -> Scheduler:
    """1,000 machines of 8 GPUs, full of 1-GPU jobs, and 10,000 jobs of 64 shapes waiting."""
    scheduler = Scheduler(policy, ClusterState(Cluster.uniform(1000, 8)))
    for i in range(8000):
        scheduler.submit(Job(f"r{i}", float(i), 1))
    scheduler.decide()
    for i in range(10_000):
        scheduler.submit(Job(f"w{i}", 8000.0 + i, 2 ** (i % 8), f"t{i % 12}", f"class{i // 8 % 8}"))
    scheduler.state.now_s = 20_000.0
    scheduler.decide()
    return scheduler


def time_incremental(policy: Policy) -> float:
    """Returns milliseconds per end of a job with the decision that follows."""
    scheduler = full_cluster(policy)
    spent_s = []
    for running in list(scheduler.state.running.values())[:200]:
        scheduler.state.now_s += 1.0
        begin = time.process_time()
        scheduler.finish(running.job)
        scheduler.decide()
        spent_s.append(time.process_time() - begin)
    return 1000 * statistics.median(spent_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--cluster", type=parse_cluster, default="80x8")
    parser.add_argument("--from", dest="begin_s", type=parse_time, default=float("-inf"))
    parser.add_argument("--to", dest="end_s", type=parse_time, default=float("inf"))
    parser.add_argument("--policy", default="fifo-firstfit,qssf,las,srsf,easy-backfill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cluster = options.cluster
    if options.trace is None:
        trace = made_up_trace(40_000, sum(machine.num_gpus for machine in cluster.machines), load=0.95)
    else:
        trace = [r for r in read_trace(options.trace) if options.begin_s <= r.job.submit_s < options.end_s]

    measured: dict[str, list[float]] = {}
    for round_number in range(options.rounds + 1):
        for name in options.policy.split(","):
            events_per_s, jct_h = time_simulation(trace, cluster, name)
            if round_number:  # the first warms up
                measured.setdefault(f"{name}: events/s (JCT {jct_h:.2f} h)", []).append(events_per_s)
        decisions: dict[str, Callable[[], float]] = {
            "decision, incremental, qssf: ms": lambda: time_incremental(QSSF()),
            "decision, incremental, las: ms": lambda: time_incremental(LAS()),
            "decision, full: ms": lambda: time_incremental(Unsettled()),
        }
        for what, measure in decisions.items():
            value = measure()
            if round_number:
                measured.setdefault(what, []).append(value)

    print(f"Python {platform.python_version()}, {platform.machine()}, {len(trace)} jobs, {options.rounds} rounds")
    for what, values in measured.items():
        median = statistics.median(values)
        print(f"{what:45} {median:12,.2f}   ({min(values):,.2f} to {max(values):,.2f})")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
