"""Compare what speed models say of machines with what was measured, and time the one used for placement.

    python tests/benchmarks/speeds.py --data DIR [--seeds 10] [--json out.json]
    python tests/benchmarks/speeds.py --data DIR --held-out [--seeds 10]
    python tests/benchmarks/speeds.py --time [--machines 1000] [--classes 4]

DIR holds pal/*.csv (rutwik-n-jain/blox-pal, MIT) and alibaba_minibatch/*.csv (alibaba/clusterdata, CC BY 4.0).

PAL: nodes of two clusters, ResNet and BERT on each. Half of the (node, class) cells are hidden, at random, and foretold
from the others; racks are known. Alibaba: the mini-batch times of ten workers of a job, predicted ten steps ahead from
the last forty. All models learn their parameters from what is shown, and from nothing else. Values are log speeds, per
class (or job) less their mean and over their sd. RMSE is of hidden cells' means, NLL per cell, coverage of 90 %
intervals. `node mean` is a mean per node and class, drawn towards the node's and the class's; `plain GP` has a squared
exponential kernel with one length for each of node, rack, class and time.

What a fit believes of classes beforehand (`classes_sd`) is one number, and it was chosen on such data. --held-out tells
what that is worth elsewhere: it chooses the number by NLL on one cluster (or on two jobs), from a grid, and shows the
other one with it, both ways round.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchext.scheduling.dual.rwgp import (
    Observations,
    Posterior,
    WalkKernel,
    aggregate,
    cliques,
    fit,
    nearest,
    safe_cholesky,
    walks,
)


class Data(NamedTuple):
    """Rows of observations, and of cells to predict, with the mean of `count` observations each."""

    seen: Observations
    hidden: Observations
    count: Tensor
    racks: list[str]
    num_classes: int
    now_s: float


Predicted = tuple[Tensor, Tensor]  # means and variances of the hidden cells' means


class PlainGP(torch.nn.Module):
    """Squared exponential over (node, rack, class, time), noise; parameters by marginal likelihood."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self._racks = torch.tensor([sorted(set(data.racks)).index(rack) for rack in data.racks])
        self.log_length = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.log_signal = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.log_noise = torch.nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))
        self._time_scale = float(data.seen.time_s.std()) or 1.0

    def kernel(self, one: Observations, other: Observations) -> Tensor:
        differs = [
            one.machine[:, None] != other.machine[None],
            self._racks[one.machine][:, None] != self._racks[other.machine][None],
            one.job_class[:, None] != other.job_class[None],
        ]
        squares = [part.double() for part in differs]
        squares.append(((one.time_s[:, None] - other.time_s[None]) / self._time_scale).square())
        distance = sum(s * torch.exp(-2 * length) for s, length in zip(squares, self.log_length, strict=True))
        return torch.exp(self.log_signal - 0.5 * distance)

    def likelihood(self, seen: Observations, count: Tensor) -> Tensor:
        factor = safe_cholesky(self.kernel(seen, seen) + torch.diag(torch.exp(self.log_noise) / count))
        white = torch.linalg.solve_triangular(factor, seen.value[:, None], upper=False)
        return -0.5 * white.square().sum() - factor.diagonal().log().sum()

    def learn(self, seen: Observations, count: Tensor) -> None:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        for _ in range(_FIT_STEPS):
            optimizer.zero_grad()
            prior = sum(parameter.square().sum() for parameter in self.parameters()) / 18
            (prior - self.likelihood(seen, count)).backward()
            optimizer.step()

    @torch.no_grad()
    def predict(self, seen: Observations, count: Tensor, hidden: Observations, hidden_count: Tensor) -> Predicted:
        noise = torch.exp(self.log_noise)
        factor = safe_cholesky(self.kernel(seen, seen) + torch.diag(noise / count))
        across = torch.linalg.solve_triangular(factor, self.kernel(seen, hidden), upper=False)
        white = torch.linalg.solve_triangular(factor, seen.value[:, None], upper=False)
        variance = torch.exp(self.log_signal) - across.square().sum(0) + noise / hidden_count
        return (across.T @ white)[:, 0], variance


def by_cell(seen: Observations, num_classes: int) -> tuple[Observations, Tensor]:
    """Means by (machine, class, time) and how many observations each is of."""
    key = torch.stack([seen.machine * num_classes + seen.job_class, seen.time_s.view(torch.int64)])
    unique, row, count = torch.unique(key, dim=1, return_inverse=True, return_counts=True)
    value = torch.zeros(unique.shape[1], dtype=torch.float64).index_add(0, row, seen.value) / count
    machine = torch.div(unique[0], num_classes, rounding_mode="floor")
    return Observations(machine, unique[0] % num_classes, value, unique[1].view(torch.float64)), count.double()


def node_mean(data: Data) -> Predicted:
    """y = class + node + (node, class) + noise, each normal; variances by likelihood on a grid."""
    cells, count = by_cell(data.seen._replace(time_s=torch.zeros_like(data.seen.time_s)), data.num_classes)
    within = data.seen.value - _value_of(cells, data)
    noise = float(within.square().sum()) / max(len(within) - len(cells.value), 1) + 1e-6
    same = (cells.machine[:, None] == cells.machine[None]).double()
    best: tuple[float, float, float] = (-math.inf, 0.0, 0.0)
    for node in np.geomspace(0.01, 3.0, 12):
        for own in np.geomspace(0.01, 3.0, 12):
            factor = safe_cholesky(node * same + torch.diag(own + noise / count))
            white = torch.linalg.solve_triangular(factor, cells.value[:, None], upper=False)
            value = float(-0.5 * white.square().sum() - factor.diagonal().log().sum())
            best = max(best, (value, float(node), float(own)))
    _, node, own = best
    inverse = torch.linalg.inv(node * same + torch.diag(own + noise / count))
    across = node * (data.hidden.machine[:, None] == cells.machine[None]).double()
    across += own * (
        (data.hidden.machine[:, None] == cells.machine[None])
        & (data.hidden.job_class[:, None] == cells.job_class[None])
    )
    variance = node + own - (across @ inverse * across).sum(1) + noise / data.count
    return across @ inverse @ cells.value, variance


def _value_of(cells: Observations, data: Data) -> Tensor:
    where = {key: i for i, key in enumerate(zip(cells.machine.tolist(), cells.job_class.tolist(), strict=True))}
    keys = zip(data.seen.machine.tolist(), data.seen.job_class.tolist(), strict=True)
    return cells.value[[where[key] for key in keys]]


def rwgp(longest: int, alike: bool = False, **options: float) -> Callable[[Data], Predicted]:
    def predict(data: Data) -> Predicted:
        kernel, seen = walk_kernel(data, longest, alike), data.seen
        fit(kernel, seen, data.now_s, num_steps=_FIT_STEPS, **options)  # type: ignore[arg-type]
        return predict_by(kernel, data)

    return predict


def walk_kernel(data: Data, longest: int, alike: bool) -> WalkKernel:
    """Cluster, rack, and if asked for nearest in running time by a first posterior, as the online model has it."""
    num = len(data.racks)
    graphs = [cliques([0] * num), cliques(data.racks)]
    first = WalkKernel(torch.stack([walks(g, longest) for g in graphs]), data.num_classes, noise_sd=0.5, memory_s=1e9)
    profiles = Posterior(first, aggregate(first, data.seen, data.now_s)).mean
    if alike:
        graphs.append(nearest(profiles, 4))
    paths = torch.stack([walks(graph, longest) for graph in graphs])
    return WalkKernel(paths, data.num_classes, noise_sd=0.5, memory_s=float(data.now_s - data.seen.time_s.min()) + 1.0)


@torch.no_grad()
def predict_by(kernel: WalkKernel, data: Data) -> Predicted:
    posterior = Posterior(kernel, aggregate(kernel, data.seen, data.now_s))
    where = (data.hidden.machine, data.hidden.job_class)
    return posterior.mean[where], posterior.variance[where] + torch.exp(kernel.log_noise) / data.count


def plain_gp(data: Data) -> Predicted:
    cells, count = by_cell(data.seen, data.num_classes)
    model = PlainGP(data)
    model.learn(cells, count)
    return model.predict(cells, count, data.hidden, data.count)


def pal(folder: Path, cluster: str, seed: int) -> Data:
    rows = []
    for number, job_class in enumerate(("resnet", "bert")):
        path = next(p for p in folder.glob("*.csv") if cluster in p.name and job_class in p.name)
        with path.open() as file:
            for row in csv.DictReader(file):
                if row["perf"] and float(row["perf"]) > 0:
                    rows.append(
                        (f"{row['cabinet']}/{row['node']}", row["cabinet"], number, -math.log(float(row["perf"])))
                    )
    nodes = sorted({row[0] for row in rows})
    racks = {row[0]: row[1] for row in rows}
    machine = torch.tensor([nodes.index(row[0]) for row in rows])
    job_class = torch.tensor([row[2] for row in rows])
    value = torch.tensor([row[3] for row in rows], dtype=torch.float64)
    cell = machine * 2 + job_class
    random = torch.Generator().manual_seed(seed)
    shown = (torch.rand(2 * len(nodes), generator=random) < 0.5)[cell]
    for number in range(2):
        of = job_class == number
        value[of] = (value[of] - value[of & shown].mean()) / value[of].std()
    everything = Observations(machine, job_class, value, torch.zeros(len(rows), dtype=torch.float64))
    seen = Observations(*(part[shown] for part in everything))
    hidden, count = by_cell(Observations(*(part[~shown] for part in everything)), 2)
    return Data(seen, hidden, count, [racks[node] for node in nodes], 2, 0.0)


_FIT_STEPS = 40
_WINDOWS = 8  # of each job of Alibaba's
# Longest walk, and whether there is a graph of machines alike in running time.
_WALKS = {
    "RWGP, no walks": (0, False),
    "RWGP, walks <= 1": (1, False),
    "RWGP, walks <= 3": (3, False),
    "RWGP, alike, <= 1": (1, True),
    "RWGP, alike, <= 3": (3, True),
}
_CLUSTERS = ("frontera", "longhorn")
_CLASSES_SDS = (0.05, 0.15, 0.5, 1.5)
_CHOSEN_WALK = 1
_AHEAD = 10
_WINDOW = 40  # steps that a model is given


def alibaba(path: Path) -> list[Data]:
    """Windows after the first third, which sets the scale, each with what follows it."""
    with path.open() as file:
        rows = [
            (int(r["worker"]), float(r["time"]), -math.log(float(r["batch_time_norm"]))) for r in csv.DictReader(file)
        ]
    steps = sorted({row[1] for row in rows})
    numbers = {step: float(number) for number, step in enumerate(steps)}
    workers = sorted({row[0] for row in rows})
    machine = torch.tensor([workers.index(row[0]) for row in rows])
    at = torch.tensor([numbers[row[1]] for row in rows], dtype=torch.float64)
    value = torch.tensor([row[2] for row in rows], dtype=torch.float64)
    third = len(steps) // 3
    value = (value - value[at < third].mean()) / value[at < third].std()
    everything = Observations(machine, torch.zeros_like(machine), value, at)

    def window(now: int) -> Data:
        seen = Observations(*(part[(at > now - _WINDOW) & (at <= now)] for part in everything))
        hidden = Observations(*(part[at == now + _AHEAD] for part in everything))
        return Data(
            seen, hidden, torch.ones(len(hidden.value), dtype=torch.float64), [""] * len(workers), 1, float(now)
        )

    nows = range(third, len(steps) - _AHEAD, max(1, (len(steps) - third) // _WINDOWS))
    return [window(now) for now in nows]


def score(predicted: Predicted, data: Data) -> dict[str, float]:
    mean, variance = predicted
    error = data.hidden.value - mean
    return {
        "rmse": float(error.square().mean().sqrt()),
        "nll": float((0.5 * torch.log(2 * math.pi * variance) + 0.5 * error.square() / variance).mean()),
        "coverage": float((error.abs() < 1.645 * variance.sqrt()).double().mean()),
    }


def compare(folder: Path, num_seeds: int) -> dict[str, dict[str, dict[str, float]]]:
    report: dict[str, dict[str, dict[str, float]]] = {}
    contenders: dict[str, Callable[[Data], Predicted]] = {"node mean": node_mean, "plain GP": plain_gp}
    contenders.update({name: rwgp(*how) for name, how in _WALKS.items()})
    for cluster in _CLUSTERS:
        datas = [pal(folder / "pal", cluster, seed) for seed in range(num_seeds)]
        report[f"PAL {cluster}"] = _compare(f"PAL {cluster}", datas, contenders)
    for number in range(1, 5):
        datas = alibaba(folder / "alibaba_minibatch" / f"job_{number}_norm.csv")
        report[f"Alibaba job {number}"] = _compare(f"Alibaba job {number}", datas, contenders)
    return report


def held_out(folder: Path, num_seeds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Chooses the sd of the prior about classes on one half of the data, and shows the other."""
    clusters = [[pal(folder / "pal", cluster, seed) for seed in range(num_seeds)] for cluster in _CLUSTERS]
    jobs = [alibaba(folder / "alibaba_minibatch" / f"job_{number}_norm.csv") for number in range(1, 5)]
    halves = {
        "PAL frontera": (clusters[1], clusters[0]),
        "PAL longhorn": (clusters[0], clusters[1]),
        "Alibaba jobs 1, 2": (jobs[2] + jobs[3], jobs[0] + jobs[1]),
        "Alibaba jobs 3, 4": (jobs[0] + jobs[1], jobs[2] + jobs[3]),
    }
    report = {}
    for where, (seen, hidden) in halves.items():
        nll = {}
        for sd in _CLASSES_SDS:
            predict = rwgp(_CHOSEN_WALK, classes_sd=sd)
            nll[sd] = statistics.fmean(score(predict(data), data)["nll"] for data in seen)
        chosen = min(nll, key=lambda sd: nll[sd])
        print("chosen elsewhere: " + ", ".join(f"{sd:g} ({value:.3f})" for sd, value in nll.items()))
        contenders = {
            "node mean": node_mean,
            "plain GP": plain_gp,
            f"RWGP, sd {chosen:g}": rwgp(_CHOSEN_WALK, classes_sd=chosen),
        }
        report[where] = _compare(where, hidden, contenders)
    return report


def _compare(
    where: str, datas: list[Data], contenders: dict[str, Callable[[Data], Predicted]]
) -> dict[str, dict[str, float]]:
    rows = {name: _mean([score(predict(data), data) for data in datas]) for name, predict in contenders.items()}
    print(f"{where:20}   RMSE    NLL  coverage of 90 %")
    for name, row in rows.items():
        print(f"  {name:18} {row['rmse']:6.3f} {row['nll']:6.3f}  {row['coverage']:.3f}", flush=True)
    return rows


def _mean(scores: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(s[key] for s in scores) for key in scores[0]}


def time_model(num_machines: int, num_classes: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds for a rebuild with every cell seen, for one more observation, and for all means and sds."""
    random = np.random.default_rng(0)
    racks = [i // 8 for i in range(num_machines)]
    kinds = [i * 3 // num_machines for i in range(num_machines)]
    kernel = WalkKernel(torch.stack([walks(cliques(g), 2) for g in ([0] * num_machines, kinds, racks)]), num_classes)
    size = num_machines * num_classes
    cell = torch.arange(size)
    seen = Observations(
        torch.div(cell, num_classes, rounding_mode="floor"),
        cell % num_classes,
        torch.from_numpy(random.normal(0, 0.3, size)),
        torch.zeros(size, dtype=torch.float64),
    )
    cells = aggregate(kernel, seen, 0.0)
    cells = type(cells)(*(part.detach() for part in cells))
    begin = time.process_time()
    posterior = Posterior(kernel, cells)
    rebuilt_ms = 1000 * (time.process_time() - begin)
    extended = []
    for i in range(rounds):
        one = type(cells)(*(part[i : i + 1] for part in cells))
        begin = time.process_time()
        posterior.extend(one)
        posterior.mean.sum()
        posterior.variance.sum()
        extended.append(1000 * (time.process_time() - begin))
    return {"rows": float(size), "rebuild ms": rebuilt_ms, "one observation ms": statistics.median(extended)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, object] = {}
    if options.time:
        report["time"] = time_model(options.machines, options.classes)
        print(report["time"])
    if options.data:
        report.update((held_out if options.held_out else compare)(options.data, options.seeds))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
