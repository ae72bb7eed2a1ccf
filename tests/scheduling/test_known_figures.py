"""Average completion times on the Philly trace, against those of an independent simulator for the same window."""

from __future__ import annotations

import pytest

from tests.scheduling.recorded import recorded
from torchext.scheduling import Cluster, RecordedJob, make_policy, read_trace, simulate, summarize
from torchext.scheduling.traces import parse_time

# Jobs submitted from 2 October 2017 until before 30 October; 79 machines of 8 GPUs, a load of 0.95. Hours.
_BOUND = 2.90  # nobody ever waits
_FIGURES = {"fifo-firstfit": 3.61, "qssf": 3.42, "las": 3.13, "sjf": 3.32, "srsf": 3.01}


@pytest.fixture(scope="module")
def october() -> list[RecordedJob]:
    trace = read_trace(recorded("cluster/philly_2017-09_to_2017-11-05.csv"))
    begin_s, end_s = parse_time("2017-10-02"), parse_time("2017-10-30")
    return [r for r in trace if begin_s <= r.job.submit_s < end_s]


def test_window_is_the_one_of_the_figures(october: list[RecordedJob]) -> None:
    service_s = sum(r.duration_s * r.job.num_gpus for r in october)
    assert len(october) == 46_070
    assert service_s / (79 * 8 * 28 * 86400) == pytest.approx(0.95, abs=0.001)
    assert sum(r.duration_s for r in october) / len(october) / 3600 == pytest.approx(_BOUND, abs=0.005)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "qssf")) for n in _FIGURES])
def test_average_completion_time_is_within_three_percent(name: str, october: list[RecordedJob]) -> None:
    policy = make_policy(name, durations_s={r.job.id: r.duration_s for r in october})
    result = simulate(october, Cluster.uniform(79, 8), policy)
    assert summarize(result)["jct_s"]["mean"] / 3600 == pytest.approx(_FIGURES[name], rel=0.03)
