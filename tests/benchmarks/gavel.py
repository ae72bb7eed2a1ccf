"""Run Gavel's simulator and ours on the same jobs, with first-in-first-out, and compare speeds and completion times.

    git clone https://github.com/stanford-futuredata/gavel && make -C gavel/scheduler rpc_stubs
    python tests/benchmarks/gavel.py --gavel gavel --python PYTHON [--jobs 200] [--rounds 3]

PYTHON is an interpreter with what Gavel needs (cvxpy, ecos, matrix_completion, scikit-learn, grpcio, grpcio-tools,
psutil, pandas, func_timeout). Jobs are made up: Poisson arrivals at a load of about 0.8 on 8 machines of 4 GPUs, of one
kind of work, so that both simulators know how long each takes. Gavel decides every six minutes and gives whole rounds,
we at each event, so its completion times are longer by parts of rounds, and by the waits that follow from these. Times
are CPU time of the simulation alone, ours of several in a row; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from torchext.scheduling import Cluster, Job, RecordedJob, make_policy, simulate, summarize

_MACHINES, _GPUS = 8, 4
_KIND = "ResNet-18 (batch size 32)"
_ROUND_S = 360
_REPEATS = 50

# Run in Gavel's folder by its interpreter: its own driver, with a clock around the simulation.
_DRIVER = """
import sys, time
sys.path.insert(0, ".")
sys.argv = ["driver", *sys.argv[1:]]
import scheduler
inner = scheduler.Scheduler.simulate
def timed(*args, **more):
    begin = time.process_time()
    try:
        return inner(*args, **more)
    finally:
        print("simulated in", time.process_time() - begin)
scheduler.Scheduler.simulate = timed
import runpy
runpy.run_path("scripts/drivers/simulate_scheduler_with_trace.py", run_name="__main__")
"""


def make_jobs(num_jobs: int) -> list[RecordedJob]:
    random = np.random.default_rng(0)
    gpus = random.choice([1, 2, 4], size=num_jobs, p=[0.7, 0.15, 0.15])
    durations_s = np.clip(random.lognormal(8.5, 1.0, num_jobs), 600, 86400)
    between_s = (gpus * durations_s).sum() / (0.8 * _MACHINES * _GPUS * num_jobs)
    submit_s = np.cumsum(random.exponential(between_s, num_jobs))
    return [
        RecordedJob(Job(f"j{i}", float(submit_s[i]), int(gpus[i]), gpus_per_node=int(gpus[i])), float(durations_s[i]))
        for i in range(num_jobs)
    ]


def write_trace(jobs: list[RecordedJob], path: Path, steps_per_s: dict[int, float]) -> None:
    lines = []
    for recorded in jobs:
        job = recorded.job
        steps = round(recorded.duration_s * steps_per_s[job.num_gpus])
        fields = (_KIND, "true", ".", "--n", 0, steps, job.num_gpus, 1, -1, job.submit_s)
        lines.append("\t".join(map(str, fields)))
    path.write_text("\n".join(lines) + "\n")


def run_gavel(checkout: Path, python: str, trace: Path) -> tuple[float, float]:
    """Returns seconds and the mean completion time in hours."""
    words = ["-t", str(trace), "-p", "fifo", "-c", f"{_MACHINES * _GPUS}:0:0", "--seed", "0"]
    words += ["--num_gpus_per_server", f"{_GPUS}:1:1", "--time_per_iteration", str(_ROUND_S)]
    command = [python, "-W", "ignore", "-c", _DRIVER, *words]
    done = subprocess.run(
        command, cwd=checkout / "scheduler", capture_output=True, text=True, timeout=3600, check=False
    )
    spent = re.search(r"simulated in (\S+)", done.stdout)
    mean = re.search(r"Average job completion time: (\S+) seconds", done.stdout)
    if spent is None or mean is None:
        raise SystemExit(f"Gavel did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(spent[1]), float(mean[1]) / 3600


def run_ours(jobs: list[RecordedJob]) -> tuple[float, float]:
    """Returns seconds and the mean completion time in hours."""
    begin = time.process_time()
    for _ in range(_REPEATS):
        result = simulate(jobs, Cluster.uniform(_MACHINES, _GPUS), make_policy("fifo"))
    spent_s = (time.process_time() - begin) / _REPEATS
    return spent_s, summarize(result)["jct_s"]["mean"] / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gavel", type=Path, required=True, help="a checkout")
    parser.add_argument("--python", required=True, help="an interpreter with what it needs")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = json.loads((options.gavel / "scheduler" / "simulation_throughputs.json").read_text())["v100"]
    steps_per_s = {gpus: table[f"('{_KIND}', {gpus})"]["null"] for gpus in (1, 2, 4)}
    jobs = make_jobs(options.jobs)
    rates: dict[str, list[float]] = {"Gavel": [], "torchext": []}
    means: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "jobs.trace"
        write_trace(jobs, trace, steps_per_s)
        for _ in range(options.rounds):
            for name, (spent_s, mean_h) in (
                ("Gavel", run_gavel(options.gavel, options.python, trace)),
                ("torchext", run_ours(jobs)),
            ):
                rates[name].append(len(jobs) / spent_s)
                means[name] = mean_h
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:9} {median:12,.1f} jobs/s ({min(values):,.1f} to {max(values):,.1f}); JCT {means[name]:.3f} h")
    ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["torchext"], rates["Gavel"], strict=True))
    longer_min = 60 * (means["Gavel"] - means["torchext"])
    print(f"ratio of speeds: {ratio:,.0f}; with Gavel, jobs take {longer_min:.1f} min longer on average")


if __name__ == "__main__":
    main()
