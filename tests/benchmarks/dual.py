"""Compare learned order and placement with what is not learned, on the same jobs, and time a decision.

    python tests/benchmarks/dual.py --trace philly.csv --from 2017-10-16 [--windows 10] [--policy-file FILE]
    python tests/benchmarks/dual.py --trace philly.csv --from 2017-10-16 --cluster 20x8 --world tables
    python tests/benchmarks/dual.py --trace philly.csv --from 2017-10-16 --fees out.png
    python tests/benchmarks/dual.py --time

Each window is a piece of the trace, thinned at random to the load asked for; in the synthetic world each also has a
world of its own. All contenders play the same windows. The table gives the mean JCT, its 99th percentile, and the
difference of the mean JCT to the reference contender's, window by window, in per cent, with a 95 % interval of its mean
(Student's t). `oracle` is told true speeds, `sjf` true durations. With --policy-file, agents from torchext train-policy
take part, and what is left of them without one part or the other. --fees draws cost against JCT as prices count more.
--time: 10,000 waiting jobs, 1,000 machines; CPU time of one process.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from torchext.scheduling import (
    QSSF,
    SJF,
    Cluster,
    ClusterState,
    Job,
    Placement,
    Policy,
    Result,
    packed,
    parse_cluster,
    read_trace,
    simulate,
    summarize,
    synthetic,
    teach,
)
from torchext.scheduling.dual.heuristic import SpeedLearner, by_machine_mean, by_type_mean
from torchext.scheduling.dual.networks import Agents
from torchext.scheduling.dual.placing import Advantage
from torchext.scheduling.dual.policy import Dual
from torchext.scheduling.dual.policy_file import load_policy
from torchext.scheduling.dual.rollout import Episode, draw_episode
from torchext.scheduling.dual.rwgp_model import RWGP
from torchext.scheduling.dual.speeds import MeanModel, Prediction
from torchext.scheduling.state import ANY_MACHINE
from torchext.scheduling.traces import parse_time
from torchext.scheduling.types import Observation

Make = Callable[[Episode], Policy]


class _Packed(Advantage):
    """Knows nothing of speeds."""

    def __call__(self, job: Job, state: ClusterState, among: int = ANY_MACHINE) -> Placement | None:
        return packed(job, state, among)


@dataclass
class _Truth:
    """Is told true speeds, as of every ten minutes."""

    world: synthetic.SyntheticWorld

    def __post_init__(self) -> None:
        self._known: dict[tuple[str, int], Prediction] = {}

    def observe(self, observation: Observation) -> None:
        pass

    def predict(self, job_class: str, now_s: float) -> Prediction:
        key = (job_class, int(now_s // 600))
        if key not in self._known:
            if len(self._known) > 1000:
                self._known.clear()
            speeds = [self.world.machine_speed(job_class, i, now_s) for i in range(len(self.world.cluster.machines))]
            self._known[key] = Prediction(np.log(speeds), np.zeros(len(speeds)))
        return self._known[key]


def placing(make: Callable[[Cluster], Advantage]) -> Make:
    return lambda episode: SpeedLearner(make)


def oracle(episode: Episode) -> Policy:
    assert episode.world_seed is not None
    world = synthetic.SyntheticWorld(episode.cluster, episode.world_seed, episode.jobs[0].job.submit_s)
    return SpeedLearner(lambda cluster: Advantage(_Truth(world)))


def dual(agents: Agents, **options: object) -> Make:
    return lambda episode: Dual(agents, budget_s=math.inf, **options)  # type: ignore[arg-type]


def contenders(is_synthetic: bool, policy_file: Path | None) -> tuple[str, dict[str, Make]]:
    """Returns the name of the reference, and all."""
    if is_synthetic:
        reference = "machine mean, comparative"
        chosen: dict[str, Make] = {
            "packed": placing(lambda c: _Packed(MeanModel(c, per_machine=False))),
            "type mean": placing(lambda c: Advantage(MeanModel(c, per_machine=False), 0.0)),
            "type mean, comparative": placing(by_type_mean),
            "machine mean": placing(lambda c: Advantage(MeanModel(c, per_machine=True), 0.0)),
            reference: placing(by_machine_mean),
            "RWGP": placing(lambda c: Advantage(RWGP(c), 0.0, 0.5)),
            "RWGP, comparative": placing(lambda c: Advantage(RWGP(c), optimism=0.5)),
            "RWGP, without its sd": placing(lambda c: Advantage(RWGP(c))),
            "oracle, comparative": oracle,
        }
    else:
        reference = "qssf"
        chosen = {
            "qssf": lambda episode: QSSF(),
            "sjf": lambda episode: SJF({r.job.id: r.duration_s for r in episode.jobs}),
        }
    if policy_file is not None:
        agents = load_policy(policy_file)
        chosen.update(
            {
                "dual": dual(agents),
                "dual, order alone": dual(agents, placement_learned=False),
                "dual, placement alone": dual(agents, order_learned=False),
                "dual, no communication": dual(agents, communicate=False),
            }
        )
        if is_synthetic:
            chosen["dual, no RWGP"] = dual(agents, placing=by_machine_mean)
            chosen["dual, no sd"] = dual(agents, placing=lambda c: Advantage(RWGP(c)))
    return reference, chosen


def play(episode: Episode, policy: Policy) -> Result:
    begin_s = episode.jobs[0].job.submit_s
    teach(policy, episode.earlier, begin_s)
    world = None
    if episode.world_seed is not None:
        world = synthetic.SyntheticWorld(episode.cluster, episode.world_seed, begin_s)
    return simulate(episode.jobs, episode.cluster, policy, world=world)


def compare(episodes: list[Episode], reference: str, chosen: dict[str, Make]) -> dict[str, dict[str, list[float]]]:
    report: dict[str, dict[str, list[float]]] = {}
    for episode in episodes:
        for name, make in chosen.items():
            summary = summarize(play(episode, make(episode)))
            row = report.setdefault(name, {"jct_h": [], "p99_h": [], "p99_slowdown": []})
            row["jct_h"].append(summary["jct_s"]["mean"] / 3600)
            row["p99_h"].append(summary["jct_s"]["p99"] / 3600)
            row["p99_slowdown"].append(summary["slowdown"]["p99"])
    print(f"{'':26} {'JCT h':>7} {'p99 h':>7} {'p99 slowdown':>13}   JCT against {reference}")
    for name, row in report.items():
        pairs = zip(row["jct_h"], report[reference]["jct_h"], strict=True)
        low, middle, high = interval([100 * (ours / theirs - 1) for ours, theirs in pairs])
        means = [statistics.fmean(row[key]) for key in ("jct_h", "p99_h", "p99_slowdown")]
        against = "" if name == reference else f"{middle:+6.1f} %  ({low:+.1f} to {high:+.1f})"
        print(f"{name:26} {means[0]:7.2f} {means[1]:7.1f} {means[2]:13.0f}   {against}")
    return report


def interval(values: list[float]) -> tuple[float, float, float]:
    """95 % interval of the mean, and the mean between."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return math.nan, mean, math.nan
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean, mean + half


def draw_fees(episodes: list[Episode], path: Path) -> list[tuple[float, float, float]]:
    """Plays the RWGP heuristic with prices counting more and more; returns (thrift, fees, JCT h), means."""
    from matplotlib.figure import Figure

    points = []
    for thrift in (0.0, 0.1, 0.25, 0.5, 1.0):
        summaries = []
        for episode in episodes:
            policy = SpeedLearner(lambda cluster, t=thrift: Advantage(RWGP(cluster), optimism=0.5, thrift=t))
            summaries.append(summarize(play(episode, policy)))
        fees = statistics.fmean(s["fees"] for s in summaries)
        jct_h = statistics.fmean(s["jct_s"]["mean"] for s in summaries) / 3600
        points.append((thrift, fees, jct_h))
        print(f"thrift {thrift:4.2f}: fees {fees:8.0f}, JCT {jct_h:.2f} h")
    figure = Figure(figsize=(5, 4))
    axes = figure.add_subplot()
    axes.plot([fees for _, fees, _ in points], [jct_h for _, _, jct_h in points], "o-")
    for thrift, fees, jct_h in points:
        axes.annotate(f" {thrift:g}", (fees, jct_h))
    axes.set(xlabel="fees", ylabel="mean JCT, h", title="As prices count more (thrift), simulated")
    figure.savefig(path)
    return points


def time_decision(rounds: int = 21) -> dict[str, float]:
    """Milliseconds to score 10,000 waiting jobs on 1,000 machines, a few of them free."""
    policy = Dual(Agents(), budget_s=math.inf, patience_s=math.inf)
    state = ClusterState(Cluster.uniform(1000, 8))
    state.now_s = 20_000.0
    for i in range(990):
        state.start(Job(f"r{i}", 0.0, 8), Placement(((i, 8),)))
    jobs = [Job(f"w{i}", i / 10, 2 ** (i % 8), f"t{i % 12}", f"class{i // 8 % 8}") for i in range(10_000)]
    spent_ms = []
    for _ in range(rounds):
        begin = time.process_time()
        policy.order(jobs, state)
        spent_ms.append(1000 * (time.process_time() - begin))
    spent_ms = sorted(spent_ms[1:])  # in the first, jobs are described
    return {"p10": spent_ms[len(spent_ms) // 10], "median": statistics.median(spent_ms)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--from", dest="begin_s", type=parse_time, default=-math.inf)
    parser.add_argument("--to", dest="end_s", type=parse_time, default=math.inf)
    parser.add_argument("--cluster", type=parse_cluster, default="synthetic:15")
    parser.add_argument("--world", choices=("synthetic", "tables"), default="synthetic")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy-file", type=Path)
    parser.add_argument("--fees", type=Path)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, object] = {}
    if options.time:
        report["decision_ms"] = time_decision()
        print(report)
    if options.trace:
        is_synthetic = options.world == "synthetic"
        trace = [r for r in read_trace(options.trace) if options.begin_s <= r.job.submit_s < options.end_s]
        if is_synthetic:
            trace = synthetic.classify(trace, options.seed)
        episodes = [
            draw_episode(
                trace,
                options.cluster,
                np.random.default_rng([options.seed, window]),
                num_jobs=options.jobs,
                load=options.load,
                is_synthetic=is_synthetic,
            )
            for window in range(options.windows)
        ]
        if options.fees:
            report["fees"] = draw_fees(episodes, options.fees)
        else:
            report["windows"] = compare(episodes, *contenders(is_synthetic, options.policy_file))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
