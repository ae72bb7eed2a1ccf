"""``torchext simulate``: tries policies on recorded jobs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchext.scheduling import synthetic
from torchext.scheduling.cluster_file import parse_cluster
from torchext.scheduling.metrics import summarize
from torchext.scheduling.placements import Rule, TypeAware, comparative_advantage, fastest_type, packed, spread
from torchext.scheduling.policies import LEARNED, ORACLES, POLICIES, make_policy
from torchext.scheduling.simulator import Costs, Outage, RecordedJob, Result, random_outages, simulate, teach
from torchext.scheduling.traces import parse_time, read_trace
from torchext.scheduling.types import Cluster, SchedulingError

_DAYS_S = 10 * 365 * 86400.0  # times below are counted from the start of a trace, not from 1970
_PLACEMENTS: dict[str, Rule] = {
    "packed": packed,
    "spread": spread,
    "fastest": TypeAware(fastest_type),
    "comparative": TypeAware(comparative_advantage),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status: 0, or 1 when an input cannot be used."""
    options = _arguments().parse_args(argv)
    try:
        _run(options)
    except (SchedulingError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"torchext simulate: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    if options.plot:
        _check_plot(Path(options.plot))
    cluster = parse_cluster(options.cluster)
    try:
        everything = read_trace(options.trace)
    except OSError as error:
        raise SchedulingError(f"--trace: cannot read {options.trace!r}: {error.strerror}") from None
    trace = [r for r in everything if options.begin_s <= r.job.submit_s < options.end_s]
    if not trace:
        first, last = everything[0].job.submit_s, everything[-1].job.submit_s
        raise SchedulingError(
            f"--from, --to: no job of {options.trace} was submitted then; "
            f"it has jobs from {_date(first)} to {_date(last)}"
        )
    durations_s = {r.job.id: r.duration_s for r in trace}
    policies = {
        name: make_policy(
            name,
            durations_s=durations_s,
            placement=_PLACEMENTS.get(options.placement),
            policy_file=options.policy_file,
            budget_s=math.inf,
        )
        for name in options.policy
    }
    costs = Costs(options.checkpoint, options.restart, options.checkpoint_every)
    if options.world == "synthetic":
        trace = synthetic.classify(trace, options.seed)
    outages = _outages(options, cluster, trace)
    results: dict[str, Result] = {}
    for name, policy in policies.items():
        teach(policy, everything, options.begin_s)
        world = None
        if options.world == "synthetic":
            world = synthetic.SyntheticWorld(cluster, options.seed, trace[0].job.submit_s)
        results[name] = simulate(trace, cluster, policy, outages=outages, costs=costs, world=world)
    summaries = {name: summarize(result) for name, result in results.items()}
    if options.json:
        print(json.dumps(summaries, indent=2))
    else:
        print(_table(summaries))
    if options.plot:
        from torchext.scheduling.plots import plot

        plot(results).savefig(options.plot)


def _check_plot(path: Path) -> None:
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise SchedulingError(f"--plot: the name must end in .png, .pdf or .svg, got {str(path)!r}")
    if not path.parent.is_dir():
        raise SchedulingError(f"--plot: there is no folder {str(path.parent)!r} to write {path.name} into")


def _outages(options: argparse.Namespace, cluster: Cluster, trace: list[RecordedJob]) -> list[Outage]:
    if options.mtbf is None:
        return []
    return random_outages(
        cluster,
        mean_up_s=options.mtbf,
        mean_down_s=options.mttr,
        start_s=trace[0].job.submit_s,
        # Beyond the last submission, as jobs still run and wait then.
        until_s=max(r.job.submit_s + r.duration_s for r in trace),
        seed=options.seed,
    )


def _table(summaries: dict[str, dict[str, Any]]) -> str:
    """Lays out the metrics, a line per policy."""
    head = ["policy", "jobs", "JCT h", "median", "p99", "slowdown", "slowdown p99", "util", "makespan h", "stops"]
    lines = [head]
    some = next(iter(summaries.values()))
    priced = any(summary["fees"] for summary in summaries.values())
    dated = some["lateness_s"] is not None
    shared = len(some["tenants"]) > 1
    head += ["fairness"] * shared + ["fees"] * priced + ["late h", "late %"] * dated
    for name, summary in summaries.items():
        jct, slowdown = summary["jct_s"], summary["slowdown"]
        line = [name + ("*" if name in ORACLES else ""), str(summary["num_jobs"])]
        line += [_hours(jct[key]) for key in ("mean", "median", "p99")]
        line += [f"{slowdown[key]:.1f}" for key in ("mean", "p99")]
        line += [f"{summary['utilisation']:.3f}", _hours(summary["makespan_s"])]
        line += [str(summary["num_displaced"] + summary["num_failed"])]
        line += [f"{summary['fairness']:.3f}"] * shared + [f"{summary['fees']:.0f}"] * priced
        if dated:
            line += [_hours(summary["lateness_s"]["mean"]), f"{100 * summary['lateness_s']['share_late']:.1f}"]
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    formats = [f"{{:{'<' if column == 0 else '>'}{width}}}" for column, width in enumerate(widths)]
    text = "\n".join("  ".join(formats).format(*line) for line in lines)
    if any(name in ORACLES for name in summaries):
        text += "\n* told the true durations"
    if some["num_rejected"]:
        text += f"\n{some['num_rejected']} jobs left out: they do not fit on this cluster, even when it is empty"
    return text


def _hours(seconds: float) -> str:
    """Two decimals, and more where these would hide the value."""
    hours = seconds / 3600
    return f"{hours:.2f}" if hours >= 0.1 or not hours else f"{hours:.2g}"


def _date(time_s: float) -> str:
    """As --from and --to take it; the seconds themselves in traces that count from 0."""
    if time_s < _DAYS_S:
        return f"{time_s:g} s"
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchext simulate",
        description="Replays recorded jobs under scheduling policies and compares them.",
        epilog="The table gives means unless it says otherwise. JCT: from submission to end; slowdown: JCT over "
        "duration; util: share of all GPU-hours held, from the first submission to the last end. Jobs that ended "
        "before --from teach the policies that forecast.",
    )
    names = ", ".join([*POLICIES, *LEARNED])
    oracles = ", ".join(ORACLES)
    parser.add_argument("--trace", required=True, metavar="FILE", help="recorded jobs: Philly, ITP or plain CSV")
    parser.add_argument("--cluster", required=True, metavar="FILE|NxG", help="cluster.toml, or N machines with G GPUs")
    parser.add_argument(
        "--world",
        choices=("tables", "synthetic"),
        default="tables",
        help="how fast jobs truly run: as the cluster file says (default), or as in a made-up cluster that drifts, "
        "strange to all policies, where jobs get made-up classes; its machines are --cluster synthetic:N",
    )
    parser.add_argument(
        "--policy", required=True, type=_names, metavar="NAME,...", help=f"{names}; told true durations: {oracles}"
    )
    parser.add_argument(
        "--policy-file", metavar="FILE", help="agents for dual, from torchext train-policy (default: torchext's own)"
    )
    parser.add_argument("--placement", choices=_PLACEMENTS, help="where jobs go (default: the policy's own, or packed)")
    parser.add_argument(
        "--from", dest="begin_s", type=_time, default=-math.inf, metavar="TIME", help="date or seconds: no earlier jobs"
    )
    parser.add_argument(
        "--to", dest="end_s", type=_time, default=math.inf, metavar="TIME", help="only jobs submitted before"
    )
    parser.add_argument("--json", action="store_true", help="print all metrics as JSON instead of a table")
    parser.add_argument("--plot", metavar="FILE", help="draw utilisation and Gantt charts (png, pdf, svg)")
    costs = parser.add_argument_group("costs and failures, in seconds")
    costs.add_argument("--checkpoint", type=_duration, default=0.0, metavar="S", help="to save before a job is stopped")
    costs.add_argument("--restart", type=_duration, default=0.0, metavar="S", help="to load before a job goes on")
    costs.add_argument(
        "--checkpoint-every", type=_positive, default=math.inf, metavar="S", help="what a failure loses at most"
    )
    costs.add_argument("--mtbf", type=_positive, metavar="S", help="mean time between failures of one machine")
    costs.add_argument("--mttr", type=_positive, default=3600.0, metavar="S", help="mean time to repair (default 3600)")
    costs.add_argument("--seed", type=int, default=0, help="of the failures and the synthetic world (default 0)")
    return parser


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    known = [*POLICIES, *LEARNED, *ORACLES]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no policy {name!r}; choose from {', '.join(known)}")
    return names


def _time(text: str) -> float:
    try:
        return parse_time(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a date such as 2017-10-02, or seconds, got {text!r}") from None


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, finite and not negative, got {text!r}")
    return value


def _positive(text: str) -> float:
    value = _duration(text)
    if not value:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
    return value
