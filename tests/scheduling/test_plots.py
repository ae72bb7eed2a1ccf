from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from torchext.scheduling import SRSF, Cluster, FIFOFirstFit, Job, RecordedJob, Result, SchedulingError, simulate
from torchext.scheduling.plots import plot


@pytest.fixture
def results() -> dict[str, Result]:
    trace = [
        RecordedJob(Job("long", 0.0, 3, "me"), 7200.0),
        RecordedJob(Job("gang", 3600.0, 4, "you"), 1800.0),
        RecordedJob(Job("small", 3600.0, 1, "me"), 3600.0),
    ]
    cluster = Cluster.uniform(2, 2)
    policy = SRSF({r.job.id: r.duration_s for r in trace})
    return {"fifo": simulate(trace, cluster, FIFOFirstFit()), "srsf": simulate(trace, cluster, policy)}


def test_each_policy_gets_use_and_gantt(results: dict[str, Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plot(results)
    use, gantt = figure.axes[0], figure.axes[1]
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["fifo", "srsf"]
    assert use.get_ylim() == gantt.get_ylim() == (0, 4)
    # One bar per GPU: 3 for the long job, 4 for the gang and 1 for the small one.
    assert len(gantt.collections[0].get_paths()) == 8
    assert gantt.get_xlim() == use.get_xlim() == pytest.approx((0, 2.5))
    legend = gantt.get_legend()
    tenants = {recorded.job.tenant for recorded in results["fifo"].jobs}
    assert {text.get_text() for text in legend.get_texts()} == {tenant or "(none)" for tenant in tenants}
    figure.savefig(tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 5000


def test_jobs_that_share_a_machine_do_not_share_rows(results: dict[str, Result]) -> None:
    pytest.importorskip("matplotlib")
    for gantt in plot(results).axes[1:4:2]:
        corners = [path.vertices for path in gantt.collections[0].get_paths()]
        boxes = [(*box.min(axis=0), *box.max(axis=0)) for box in corners]
        for i, (x0, y0, x1, y1) in enumerate(boxes):
            for a0, b0, a1, b1 in boxes[i + 1 :]:
                apart = x1 <= a0 + 1e-9 or a1 <= x0 + 1e-9 or y1 <= b0 + 1e-9 or b1 <= y0 + 1e-9
                assert apart


def test_nothing_to_plot_and_no_matplotlib_are_said(
    results: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SchedulingError, match="no results"):
        plot({})
    real = builtins.__import__

    def without(name: str, *args: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'torchext\[plots\]'"):
        plot(results)
