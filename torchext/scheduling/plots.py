"""Pictures of a simulation; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchext.scheduling.simulator import Result
from torchext.scheduling.types import SchedulingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_EDGES = 1_000  # bars with white edges; with more of them, the edges would cover the thin ones


def plot(results: Mapping[str, Result]) -> Figure:
    """Draws, for each policy, GPUs in use and jobs waiting over time, and below who ran where (Gantt).

    The Gantt chart has one row per GPU and one colour per tenant, of ten; its legend names the first ten.

    Args:
        results: Name of the policy -> its simulation, at least one.

    Returns:
        A matplotlib figure, tied to no window; ``figure.savefig(path)`` writes it.

    Raises:
        SchedulingError: No results are given.
        ImportError: There is no matplotlib.
    """
    if not results:
        raise SchedulingError("nothing to plot: no results")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'torchext[plots]'", name="matplotlib") from error
    figure = Figure(figsize=(11, 5 * len(results)), layout="constrained")
    rows = figure.subplots(2 * len(results), 1, squeeze=False, sharex=True)[:, 0]
    for (name, result), use, gantt in zip(results.items(), rows[::2], rows[1::2], strict=True):
        _plot_use(use, name, result)
        _plot_gantt(gantt, result)
    return figure


def _hours(result: Result, times_s: np.ndarray) -> np.ndarray:
    """Hours since the first submission."""
    start_s = result.jobs[0].job.submit_s if result.jobs else 0.0
    hours: np.ndarray = (times_s - start_s) / 3600
    return hours


def _count_over_time(at_s: np.ndarray, change: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums up changes: distinct times, and the count from each on."""
    times_s, where = np.unique(at_s, return_inverse=True)
    return times_s, np.cumsum(np.bincount(where, weights=change, minlength=len(times_s)))


def _plot_use(axes: Axes, name: str, result: Result) -> None:
    gpus = np.array([result.jobs[run.job].job.num_gpus for run in result.runs])
    starts_s = np.array([run.start_s for run in result.runs])
    ends_s = np.array([run.end_s for run in result.runs])
    at_s, used = _count_over_time(np.concatenate([starts_s, ends_s]), np.concatenate([gpus, -gpus]))
    total = sum(machine.num_gpus for machine in result.cluster.machines)
    axes.fill_between(_hours(result, at_s), used, step="post", alpha=0.5, linewidth=0)
    axes.set(title=name, ylabel=f"GPUs in use, of {total}", ylim=(0, total))
    axes.margins(x=0)

    submit_s = np.array([r.job.submit_s for r in result.jobs])
    displaced_s = np.array([run.end_s for run in result.runs if run.outcome != "finished"])
    joins_s = np.concatenate([submit_s, displaced_s])
    at_s, waiting = _count_over_time(
        np.concatenate([joins_s, starts_s]), np.concatenate([np.ones(len(joins_s)), -np.ones(len(starts_s))])
    )
    beside = axes.twinx()
    beside.step(_hours(result, at_s), waiting, where="post", color="black", linewidth=0.7)
    beside.set(ylabel="jobs waiting")
    beside.set_ylim(bottom=0)


def _plot_gantt(axes: Axes, result: Result) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    offsets = np.cumsum([0, *(machine.num_gpus for machine in result.cluster.machines)])
    axes.set(xlabel="hours", ylabel="GPU", ylim=(0, offsets[-1]))
    axes.margins(x=0)
    tenants = {tenant: i for i, tenant in enumerate(sorted({r.job.tenant for r in result.jobs}))}
    rows = _Rows(result)
    boxes: list[tuple[float, float, float, float]] = []
    colors: list[str] = []
    for run in sorted(result.runs, key=lambda run: run.start_s):
        for machine, num_gpus in run.placement.gpus:
            for row in rows.take(machine, num_gpus, run.start_s, run.end_s):
                boxes.append((run.start_s, run.end_s, offsets[machine] + row, offsets[machine] + row + 1))
                colors.append(f"C{tenants[result.jobs[run.job].job.tenant] % 10}")
    left, right, bottom, top = np.array(boxes).reshape(-1, 4).T
    left, right = _hours(result, left), _hours(result, right)
    corners = np.stack([left, bottom, left, top, right, top, right, bottom], axis=1).reshape(-1, 4, 2)
    width = 0.4 if len(boxes) <= _MOST_EDGES else 0.0
    axes.add_collection(PolyCollection(list(corners), facecolors=colors, edgecolors="white", linewidths=width))
    axes.autoscale_view(scaley=False)
    if len(tenants) > 1:
        named = list(tenants)[:10]
        handles = [Patch(color=f"C{tenants[tenant]}", label=tenant or "(none)") for tenant in named]
        title = "tenant" if len(tenants) <= 10 else f"tenant, 10 of {len(tenants)}; colours repeat"
        axes.legend(handles=handles, title=title, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")


class _Rows:
    """Gives runs rows of their machine: the simulator counts GPUs and does not name them."""

    def __init__(self, result: Result) -> None:
        self._free_from_s = [[-np.inf] * machine.num_gpus for machine in result.cluster.machines]

    def take(self, machine: int, num_gpus: int, start_s: float, end_s: float) -> list[int]:
        free_from_s = self._free_from_s[machine]
        rows = [row for row, free_s in enumerate(free_from_s) if free_s <= start_s][:num_gpus]
        for row in rows:
            free_from_s[row] = end_s
        return rows
