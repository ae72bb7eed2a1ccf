"""``torchext train-policy``: trains the agents of the policy ``dual``."""

from __future__ import annotations

import argparse
import importlib
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchext
from torchext.scheduling import synthetic
from torchext.scheduling.cluster_file import parse_cluster
from torchext.scheduling.dual.policy_file import require_safetensors, save_policy
from torchext.scheduling.dual.rollout import Episode, draw_episode
from torchext.scheduling.dual.train import Options, Training, Validation, run
from torchext.scheduling.simulator import RecordedJob
from torchext.scheduling.traces import parse_time, read_trace
from torchext.scheduling.types import Cluster, SchedulingError

_VALIDATED = 4  # episodes of each trace on each cluster

_Report = Callable[[int, dict[str, float]], None]


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status: 0, or 1 when an input cannot be used."""
    options = _arguments().parse_args(argv)
    try:
        _train(options, ["torchext", "train-policy", *argv])
    except (SchedulingError, OSError, ImportError) as error:
        print(f"torchext train-policy: {error}", file=sys.stderr)
        return 1
    return 0


def _train(options: argparse.Namespace, command: list[str]) -> None:
    if not options.out.parent.is_dir():
        raise SchedulingError(f"--out: there is no folder {str(options.out.parent)!r} to write {options.out.name} into")
    require_safetensors()
    clusters = [parse_cluster(name) for name in options.cluster]
    is_synthetic = options.world == "synthetic"
    recorded = [read_trace(path) for path in options.trace]
    if is_synthetic:
        recorded = [synthetic.classify(trace, options.seed) for trace in recorded]
    traces = [[r for r in trace if options.begin_s <= r.job.submit_s < options.end_s] for trace in recorded]
    given = {field.name: getattr(options, field.name) for field in fields(Options) if hasattr(options, field.name)}
    training = Training(traces, clusters, is_synthetic=is_synthetic, options=Options(**given))
    episodes = _validation(options, recorded, clusters, is_synthetic)
    validation = Validation(episodes, training.options) if episodes else None
    checkpoint = options.out.with_name(options.out.name + ".checkpoint")
    if options.resume:
        training.resume(checkpoint)
    elif checkpoint.exists():
        raise SchedulingError(f"{checkpoint} is there already: go on from it with --resume, or remove it")
    torch.set_num_threads(1)  # matrices are small, and more threads would make results depend on their number
    report, close = _reports(options.log_dir)
    try:
        agents = run(
            training,
            checkpoint=checkpoint,
            every=options.checkpoint_every,
            validation=validation,
            report=report,
        )
    finally:
        close()
    made_by = {"command": shlex.join(command), "torchext": torchext.__version__, "torch": torch.__version__}
    save_policy(options.out, agents, made_by)
    print(f"{options.out}: try it with torchext simulate --policy dual --policy-file {options.out}")


def _validation(
    options: argparse.Namespace, recorded: list[list[RecordedJob]], clusters: list[Cluster], is_synthetic: bool
) -> list[Episode]:
    """Draws the episodes that decide which agents are kept: of the traces that have jobs in that time."""
    begin_s, end_s = options.validate_from, options.validate_to
    if begin_s is None:
        return []
    cut = [
        (
            [r for r in trace if r.job.submit_s < begin_s],
            [r for r in trace if begin_s <= r.job.submit_s < end_s],
        )
        for trace in recorded
    ]
    cut = [(earlier, trace) for earlier, trace in cut if len(trace) > 1]
    if not cut:
        raise SchedulingError("--validate-from, --validate-to: no trace has two jobs of that time")
    return [
        draw_episode(
            trace,
            cluster,
            np.random.default_rng([options.seed, number, 1]),
            num_jobs=options.jobs,
            load=options.last_load,
            is_synthetic=is_synthetic,
            earlier=earlier,
        )
        for earlier, trace in cut
        for cluster in clusters
        for number in range(_VALIDATED)
    ]


def _reports(log_dir: Path | None) -> tuple[_Report, Callable[[], None]]:
    """Makes the progress report, and what ends it."""
    begin_s = time.monotonic()

    def line(iteration: int, said: dict[str, float]) -> None:
        words = "  ".join(f"{name} {value:.4g}" for name, value in said.items())
        print(f"{time.monotonic() - begin_s:7.0f} s  iteration {iteration}: {words}", file=sys.stderr, flush=True)

    if log_dir is None:
        return line, lambda: None
    try:
        writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(log_dir))
    except ImportError as error:
        raise ImportError("--log-dir needs tensorboard: pip install 'torchext[policy]'", name="tensorboard") from error

    def curves(iteration: int, said: dict[str, float]) -> None:
        line(iteration, said)
        for name, value in said.items():
            writer.add_scalar(name, value, iteration)

    return curves, writer.close


def _arguments() -> argparse.ArgumentParser:
    usual = Options()
    parser = argparse.ArgumentParser(
        prog="torchext train-policy",
        description="Trains the agents of the policy dual, which order and place jobs, in the simulator.",
        epilog="A line per iteration goes to standard error; gain is the share of the heuristic's cost that the agents "
        "save while they still try things out. A checkpoint is kept beside the policy, to go on from with --resume, "
        "with the same outcome, to the bit on the same machine.",
    )
    parser.add_argument("--trace", required=True, nargs="+", metavar="FILE", help="recorded jobs to learn from")
    parser.add_argument(
        "--cluster",
        required=True,
        nargs="+",
        metavar="FILE|NxG",
        help="cluster.toml, NxG, or synthetic:N; each simulation draws one, and one of the traces",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the policy, a safetensors file")
    parser.add_argument(
        "--world", choices=("tables", "synthetic"), default="tables", help="as torchext simulate has it"
    )
    parser.add_argument("--from", dest="begin_s", type=_time, default=-math.inf, metavar="TIME", help="no earlier jobs")
    parser.add_argument("--to", dest="end_s", type=_time, default=math.inf, metavar="TIME", help="only jobs before")
    parser.add_argument(
        "--validate-from",
        type=_time,
        metavar="TIME",
        help="whenever a checkpoint is written, try the agents on later jobs too, and keep those that do best there",
    )
    parser.add_argument("--validate-to", type=_time, default=math.inf, metavar="TIME", help="and only on jobs before")
    parser.add_argument("--seed", type=int, default=usual.seed, help="decides all that is drawn (default 0)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint beside --out")
    parser.add_argument("--checkpoint-every", type=_count, default=10, metavar="N", help="iterations (default 10)")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="curves for TensorBoard")
    how = parser.add_argument_group("how to train")
    for name, what in [
        ("iterations", "how many"),
        ("episodes", "simulations in each iteration"),
        ("jobs", "in each simulation, about"),
    ]:
        default = getattr(usual, name)
        how.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{what} (default {default})")
    for name, what in [
        ("first-load", "load of the first simulations"),
        ("last-load", "load from half of the iterations on"),
        ("learning-rate", "of Adam"),
        ("fee-weight", "job-seconds that one unit of fees counts"),
        ("late-weight", "job-seconds that one second of lateness counts"),
    ]:
        default = getattr(usual, name.replace("-", "_"))
        how.add_argument(f"--{name}", type=_number, default=default, metavar="X", help=f"{what} (default {default:g})")
    return parser


def _time(text: str) -> float:
    try:
        return parse_time(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a date such as 2017-10-02, or seconds, got {text!r}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number, not negative, got {text!r}")
    return value
