"""Compare learned order and placement with what is not learned, on the same jobs, and time a decision.

    python tests/benchmarks/dual.py --trace philly.csv --from 2017-10-16 [--windows 10] [--policy-file FILE]
    python tests/benchmarks/dual.py --trace philly.csv itp/*.csv --from 2017-10-16 --cluster 20x8 --world tables
    python tests/benchmarks/dual.py --trace philly.csv --from 2017-10-16 --cluster 20x8 --world tables --preemptive
    python tests/benchmarks/dual.py --trace philly.csv --from 2017-10-16 --fees out.png
    python tests/benchmarks/dual.py --time

Each window is a piece of the trace, thinned at random to the load asked for; in the synthetic world each also has a
world of its own. All contenders play the same windows, taught by the jobs that ended before. The table gives the mean
JCT, its 99th percentile and that of the slowdown, and the differences of the first and the last to the reference
contender's, window by window, in per cent, with a 95 % interval of their mean (Student's t). Those marked * are told
what no scheduler knows: `oracle` true speeds, `sjf` and `srsf` true durations; none can be better than `nobody waits`,
where each job runs at once, on the machine that is fastest for it. `no bound` lets jobs wait for ever. `patient` waits
for machines that are fast for the job, as untrained agents do. Agents are those that come with torchext, or those of
--policy-file, whole and without one part or the other. A trace that has no jobs in the time asked for is used whole, as
those of ITP are, whose dates are not known.

--whole 8: no job of a window is left out; instead, the cluster has as many machines of 8 GPUs as make the load, or as
the largest jobs need (then jobs come faster). Those of one batch, which tell most about each other, stay together.

--preemptive: jobs may be stopped, and saving and loading takes a minute each; the reference is the better of las and
qssf; `slowdown counts` gives up completion time for a lower slowdown. --fees draws cost against JCT as prices count
more. --time: 10,000 waiting jobs, 1,000 machines; CPU time of one process.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from torchext.scheduling import (
    LAS,
    QSSF,
    SJF,
    SRSF,
    Cluster,
    ClusterState,
    Costs,
    Job,
    Placement,
    Policy,
    RecordedJob,
    Result,
    packed,
    parse_cluster,
    read_trace,
    simulate,
    summarize,
    synthetic,
    teach,
)
from torchext.scheduling.dual.heuristic import SpeedLearner, by_machine_mean, by_rwgp, by_type_mean
from torchext.scheduling.dual.networks import Agents
from torchext.scheduling.dual.placing import Advantage
from torchext.scheduling.dual.policy import Dual, PreemptiveDual
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


def oracle(episode: Episode) -> SpeedLearner:
    assert episode.world_seed is not None
    world = synthetic.SyntheticWorld(episode.cluster, episode.world_seed, episode.jobs[0].job.submit_s)
    return SpeedLearner(lambda cluster: Advantage(_Truth(world)))


class _AllKnowing(SpeedLearner):
    """Is told true durations, too."""

    durations_s: dict[str, float]

    def order(self, jobs: Sequence[Job], state: ClusterState) -> Sequence[float]:
        return [self.durations_s[job.id] * job.num_gpus for job in jobs]


def all_knowing(episode: Episode) -> Policy:
    policy = _AllKnowing(oracle(episode).placing)
    policy.durations_s = durations_s(episode)
    return policy


class _Sure:
    """A process that does not tell how sure it is."""

    def __init__(self, cluster: Cluster) -> None:
        self._model = RWGP(cluster)

    def observe(self, observation: Observation) -> None:
        self._model.observe(observation)

    def predict(self, job_class: str, now_s: float) -> Prediction:
        mean, sd = self._model.predict(job_class, now_s)
        return Prediction(mean, np.zeros_like(sd))


def dual(agents: Agents, **options: object) -> Make:
    return lambda episode: Dual(agents, budget_s=math.inf, **options)  # type: ignore[arg-type]


def untrained(placing: Callable[[Cluster], Advantage], **options: object) -> Make:
    return dual(Agents(), order_learned=False, placement_learned=False, placing=placing, **options)


def durations_s(episode: Episode) -> dict[str, float]:
    return {r.job.id: r.duration_s for r in episode.jobs}


def contenders(options: argparse.Namespace) -> tuple[tuple[str, ...], dict[str, Make]]:
    """Returns the names of the references, and all."""
    agents = load_policy(options.policy_file)
    is_synthetic = options.world == "synthetic"
    if options.preemptive:
        return ("las", "qssf"), {
            "qssf": lambda episode: QSSF(),
            "las": lambda episode: LAS(),
            "srsf*": lambda episode: SRSF(durations_s(episode)),
            "dual, preemptive": lambda episode: PreemptiveDual(agents, budget_s=math.inf),
            "dual, slowdown counts": lambda episode: PreemptiveDual(agents, budget_s=math.inf, slowdown_s=3600.0),
        }
    if is_synthetic:
        reference = "machine mean, comparative"
        chosen: dict[str, Make] = {
            "packed": placing(lambda c: _Packed(MeanModel(c, per_machine=False))),
            "type mean": placing(lambda c: Advantage(MeanModel(c, per_machine=False), 0.0)),
            "type mean, comparative": placing(by_type_mean),
            "machine mean": placing(lambda c: Advantage(MeanModel(c, per_machine=True), 0.0)),
            reference: placing(by_machine_mean),
            "RWGP": placing(lambda c: Advantage(RWGP(c), 0.0, 0.5)),
            "RWGP, comparative": placing(by_rwgp),
            "RWGP, without its sd": placing(lambda c: Advantage(RWGP(c))),
            "oracle*, comparative": oracle,
            "oracle* of durations, too": all_knowing,
            "machine mean, patient": untrained(by_machine_mean),
            "RWGP, patient": untrained(by_rwgp),
        }
    else:
        reference = "qssf"
        chosen = {
            "qssf": lambda episode: QSSF(),
            "sjf*": lambda episode: SJF(durations_s(episode)),
            "dual, untrained": untrained(by_rwgp),
            "dual, untrained, no bound": untrained(by_rwgp, patience_s=math.inf),
        }
    chosen["dual"] = dual(agents)
    if is_synthetic:
        chosen["dual, order alone"] = dual(agents, placement_learned=False)
        chosen["dual, placement alone"] = dual(agents, order_learned=False)
        chosen["dual, no RWGP"] = dual(agents, placing=by_machine_mean)
        chosen["dual, no sd"] = dual(agents, placing=lambda c: Advantage(_Sure(c)))
    chosen["dual, no communication"] = dual(agents, communicate=False)
    return (reference,), chosen


def play(episode: Episode, policy: Policy, costs: Costs | None = None) -> Result:
    begin_s = episode.jobs[0].job.submit_s
    teach(policy, episode.earlier, begin_s)
    world = None
    if episode.world_seed is not None:
        world = synthetic.SyntheticWorld(episode.cluster, episode.world_seed, begin_s)
    return simulate(episode.jobs, episode.cluster, policy, world=world, costs=costs)


def unhindered_s(episode: Episode) -> np.ndarray:
    """Completion times were each job alone, on the machine that is fastest for it as it comes, (num_jobs,)."""
    times_s = np.array([r.duration_s for r in episode.jobs])
    if episode.world_seed is None:
        return times_s
    world = synthetic.SyntheticWorld(episode.cluster, episode.world_seed, episode.jobs[0].job.submit_s)
    machines = range(len(episode.cluster.machines))
    best = [max(world.machine_speed(r.job.job_class, i, r.job.submit_s) for i in machines) for r in episode.jobs]
    return times_s / np.array(best)


def compare(
    episodes: list[Episode], references: tuple[str, ...], chosen: dict[str, Make], costs: Costs | None
) -> dict[str, dict[str, list[float]]]:
    report: dict[str, dict[str, list[float]]] = {}
    for episode in episodes:
        for name, make in chosen.items():
            summary = summarize(play(episode, make(episode), costs))
            row = report.setdefault(name, {"jct_h": [], "p99_h": [], "p99_slowdown": []})
            row["jct_h"].append(summary["jct_s"]["mean"] / 3600)
            row["p99_h"].append(summary["jct_s"]["p99"] / 3600)
            row["p99_slowdown"].append(summary["slowdown"]["p99"])
        times_h = unhindered_s(episode) / 3600
        bound = report.setdefault("nobody waits*", {"jct_h": [], "p99_h": [], "p99_slowdown": []})
        bound["jct_h"].append(float(times_h.mean()))
        bound["p99_h"].append(float(np.percentile(times_h, 99)))
        bound["p99_slowdown"].append(1.0)
    reference = min(references, key=lambda name: statistics.fmean(report[name]["jct_h"]))
    heads = f"JCT against {reference:25} p99 slowdown               p99 of JCT"
    print(f"{'':26} {'JCT h':>7} {'p99 h':>7} {'p99 slowdown':>13}   {heads}")
    for name, row in report.items():
        means = [statistics.fmean(row[key]) for key in ("jct_h", "p99_h", "p99_slowdown")]
        others = report[reference]
        against = "   ".join(difference(row[key], others[key]) for key in ("jct_h", "p99_slowdown", "p99_h"))
        against = "" if name == reference else against
        print(f"{name:26} {means[0]:7.2f} {means[1]:7.1f} {means[2]:13.1f}   {against}".rstrip())
    return report


def difference(ours: list[float], theirs: list[float]) -> str:
    """Mean difference in per cent, window by window, and its 95 % interval."""
    low, mean, high = interval([100 * (mine / other - 1) for mine, other in zip(ours, theirs, strict=True)])
    return f"{mean:+6.1f} %  " + f"({low:+.1f} to {high:+.1f})".ljust(16)


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
        state.start(Job(f"r{i}", 0.0, 8), Placement(((i, 8),))).speed = 1.0
    state.now_s = 21_000.0
    jobs = [Job(f"w{i}", i / 10, 2 ** (i % 8), f"t{i % 12}", f"class{i // 8 % 8}") for i in range(10_000)]
    spent_ms = []
    for _ in range(rounds):
        begin = time.process_time()
        policy.order(jobs, state)
        spent_ms.append(1000 * (time.process_time() - begin))
    spent_ms = sorted(spent_ms[1:])  # in the first, jobs are described
    return {"p10": spent_ms[len(spent_ms) // 10], "median": statistics.median(spent_ms)}


def fitting_cluster(trace: Sequence[RecordedJob], num_gpus: int, load: float) -> Cluster:
    """Makes a cluster that a trace keeps no busier than wanted, of at least twice the GPUs of its largest job."""
    span_s = trace[-1].job.submit_s - trace[0].job.submit_s
    asked = sum(r.duration_s * r.job.num_gpus for r in trace) / span_s
    needed = max(asked / load, 2 * max(r.job.num_gpus for r in trace))
    return Cluster.uniform(math.ceil(needed / num_gpus), num_gpus)


def draw(path: Path, options: argparse.Namespace) -> list[Episode]:
    everything = read_trace(path)
    is_synthetic = options.world == "synthetic"
    if is_synthetic:
        everything = synthetic.classify(everything, options.seed)
    trace = [r for r in everything if options.begin_s <= r.job.submit_s < options.end_s] or everything
    earlier = [r for r in everything if r.job.submit_s < trace[0].job.submit_s]
    cluster = fitting_cluster(trace, options.whole, options.load) if options.whole else options.cluster
    return [
        draw_episode(
            trace,
            cluster,
            np.random.default_rng([options.seed, window]),
            num_jobs=options.jobs,
            load=options.load,
            is_synthetic=is_synthetic,
            earlier=earlier,
        )
        for window in range(options.windows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", default=[])
    parser.add_argument("--from", dest="begin_s", type=parse_time, default=-math.inf)
    parser.add_argument("--to", dest="end_s", type=parse_time, default=math.inf)
    parser.add_argument("--cluster", type=parse_cluster, default="synthetic:15")
    parser.add_argument("--whole", type=int, metavar="G", help="of machines of G GPUs, as many as needed")
    parser.add_argument("--world", choices=("synthetic", "tables"), default="synthetic")
    parser.add_argument("--preemptive", action="store_true")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy-file", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these contenders, and the reference")
    parser.add_argument("--fees", type=Path)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, object] = {}
    if options.time:
        report["decision_ms"] = time_decision()
        print(report)
    for path in options.trace:
        episodes = draw(path, options)
        if options.fees:
            report["fees"] = draw_fees(episodes, options.fees)
            continue
        print(f"\n{path.name}: {options.windows} windows of about {options.jobs} jobs, load {options.load:g}")
        references, chosen = contenders(options)
        if options.only:
            chosen = {name: make for name, make in chosen.items() if name in references or name in options.only}
        report[path.name] = compare(episodes, references, chosen, Costs(60.0, 60.0) if options.preemptive else None)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
