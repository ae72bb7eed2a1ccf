"""What is expected of running times: by brute force, piece by piece, and of what it makes an order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from torchext.scheduling import Cluster, ClusterState, Job, Placement
from torchext.scheduling.dual import laws
from torchext.scheduling.dual.laws import LAW_FEATURES, Laws

_EDGES_S = np.exp(np.linspace(math.log(10.0), math.log(40 * 86400.0), 28)).tolist()
_COLUMN = {name: i for i, name in enumerate(LAW_FEATURES)}


def _likeness(a: Job, b: Job) -> float:
    alike = math.exp(-abs(math.log2(a.num_gpus / b.num_gpus))) / (1 + abs(a.submit_s - b.submit_s) / 3600.0)
    return alike if a.tenant == b.tenant else 0.1 * alike


def _bin(time_s: float) -> int:
    return next((i for i, edge_s in enumerate(_EDGES_S) if time_s <= edge_s), 27)


def _span(i: int) -> tuple[float, float]:
    return (_EDGES_S[i - 1] if i else 5.0), _EDGES_S[i]


def _law(job: Job, ended: Sequence[tuple[Job, float]], running: Sequence[tuple[Job, float]]) -> list[float]:
    """Likeness-weighted counts by bin: what ended, the prior, and running jobs' mass given to what is longer."""
    middles = [math.sqrt(low * high) for low, high in map(_span, range(28))]
    prior = [math.exp(-0.5 * (math.log(middle / 3600.0) / 2.0) ** 2) for middle in middles]
    everything = [5.0 * p / sum(prior) for p in prior]
    for _, work_s in ended:
        everything[_bin(work_s)] += 1.0
    counts = [count / sum(everything) + 1e-3 / 28 for count in everything]
    for other, work_s in ended:
        counts[_bin(work_s)] += _likeness(job, other)
    given = counts.copy()
    for other, age_s in running:
        if other.id != job.id and age_s >= 60.0:
            longer = range(_bin(age_s), 28)
            for i in longer:
                given[i] += _likeness(job, other) * counts[i] / sum(counts[k] for k in longer)
    return given


def _left(counts: Sequence[float], done_s: float) -> list[tuple[float, float, float, float]]:
    """(mass, time left, time left at the end of the bin, running time) of the bins that are ahead."""
    rows = []
    for i, count in enumerate(counts):
        low, high = _span(i)
        if high > done_s:
            begin_s = max(low, done_s)
            end_s = max(high, 1.05 * begin_s)
            ahead = math.log(high / begin_s) / math.log(high / low)
            rows.append(
                (
                    count * ahead,
                    max(math.sqrt(begin_s * end_s) - done_s, 5.0),
                    end_s - done_s,
                    math.sqrt(begin_s * end_s),
                )
            )
    return rows


def _index(rows: Sequence[tuple[float, float, float, float]], slowdown_s: float) -> float:
    """Gittins: the least ratio of expected investment to the expected worth of an end, over all spans."""
    least = math.inf
    for k in range(1, len(rows) + 1):
        invested = sum(mass * left_s for mass, left_s, _, _ in rows[:k])
        invested += sum(mass for mass, *_ in rows[k:]) * rows[k - 1][2]
        worth = sum(mass * (1 + slowdown_s / max(time_s, 60.0)) for mass, _, _, time_s in rows[:k])
        least = min(least, invested / worth)
    return least


def _describe(known: Laws, jobs: Sequence[Job], done_s: np.ndarray, state: ClusterState) -> np.ndarray:
    return known.describe(jobs, known.know(jobs)[0], done_s, state)


def _some(seed: int) -> tuple[list[tuple[Job, float]], list[Job], ClusterState, np.ndarray]:
    """Ended jobs with their works, waiting and running jobs, the state, and what each of them has done."""
    random = np.random.default_rng(seed)

    def job(name: str) -> Job:
        return Job(
            name, float(random.uniform(0, 50_000.0)), int(random.choice([1, 2, 4])), str(random.choice(["a", "b"]))
        )

    ended = [(job(f"e{i}"), float(random.lognormal(7.0, 2.0))) for i in range(40)]
    state = ClusterState(Cluster.uniform(4, 8))
    waiting, running = [job(f"w{i}") for i in range(6)], [job(f"r{i}") for i in range(5)]
    for i, other in enumerate(running):
        state.start(other, Placement(((i % 4, other.num_gpus),))).speed = 1.0
        state.running[other.id].progress_s = float(random.choice([30.0, 500.0, 20_000.0]))
    state.recall(waiting[0], 3000.0, 3000.0)
    jobs = [*waiting, *running]
    return ended, jobs, state, np.array([state.progress_s(other) for other in jobs])


@pytest.mark.parametrize(("seed", "slowdown_s"), [(0, 0.0), (1, 0.0), (2, 600.0)])
def test_laws_are_those_of_the_definition(seed: int, slowdown_s: float) -> None:
    ended, jobs, state, done_s = _some(seed)
    known = Laws(slowdown_s)
    for job, work_s in ended:
        known.finished(job, work_s)
    told = _describe(known, jobs, done_s, state)
    witnesses = [(job, done) for job, done in zip(jobs, done_s, strict=True) if done > 0]
    for job, done, row in zip(jobs, done_s, told, strict=True):
        counts = _law(job, ended, witnesses)
        rows = _left(counts, float(done))
        whole = sum(mass for mass, *_ in rows)
        mean_s = sum(mass * left_s for mass, left_s, _, _ in rows) / whole
        typical = sum(mass * math.log(left_s) for mass, left_s, _, _ in rows) / whole
        assert row[_COLUMN["typical running time"]] == pytest.approx(typical - math.log(3600.0), abs=1e-4)
        assert row[_COLUMN["mean running time"]] == pytest.approx(math.log(mean_s / 3600.0), abs=1e-4)
        assert row[_COLUMN["Gittins' index"]] == pytest.approx(math.log(_index(rows, slowdown_s) / 3600.0), abs=1e-4)
        assert row[_COLUMN["how many jobs it is known from"]] == pytest.approx(math.log1p(sum(counts)), abs=1e-4)
        assert row[_COLUMN["lower decile"]] <= row[_COLUMN["median"]] <= row[_COLUMN["upper decile"]]


def test_what_ends_while_a_job_waits_counts_as_if_it_had_ended_before() -> None:
    ended, jobs, state, done_s = _some(7)
    before, meanwhile = Laws(), Laws()
    _describe(meanwhile, jobs, done_s, state)
    for job, work_s in ended:
        before.finished(job, work_s)
        meanwhile.finished(job, work_s)
    assert _describe(meanwhile, jobs, done_s, state) == pytest.approx(_describe(before, jobs, done_s, state), abs=1e-5)


def test_laws_of_long_queues_are_renewed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, jobs, state, done_s = _some(8)
    short = Laws()
    monkeypatch.setattr(laws, "_MOST_PAIRS", 2 * 4 * 28)  # two jobs at a time
    renewed = Laws()
    first = _describe(renewed, jobs, done_s, state)
    for job, work_s in ended:
        renewed.finished(job, work_s)
        short.finished(job, work_s)
    second = _describe(renewed, jobs, done_s, state)
    assert (second == first).all(1).sum() >= 3  # of the five that wait and have done nothing
    for _ in jobs:
        last = _describe(renewed, jobs, done_s, state)
    monkeypatch.undo()
    assert last == pytest.approx(_describe(short, jobs, done_s, state), abs=1e-5)


def test_a_batch_that_does_not_end_is_taken_to_be_long_and_others_are_not() -> None:
    known, state = Laws(), ClusterState(Cluster.uniform(1, 8))
    for i in range(20):
        known.finished(Job(f"e{i}", -86400.0, 1, "a"), 600.0)
    for i in range(4):
        state.start(Job(f"r{i}", 0.0, 1, "a"), Placement(((0, 1),))).speed = 1.0
    batch, other = Job("b", 60.0, 1, "a"), Job("o", 60.0, 4, "c")
    early = _describe(known, [batch, other], np.zeros(2), state)[:, 0]
    state.now_s = 6 * 3600.0
    late = _describe(known, [batch, other], np.zeros(2), state)[:, 0]
    assert late[0] > early[0] + 1.0
    assert late[1] < early[1] + 0.5


def test_the_index_is_low_while_a_job_may_be_short_and_high_once_it_has_proved_long() -> None:
    known, state = Laws(), ClusterState(Cluster.uniform(1, 8))
    for i in range(100):
        known.finished(Job(f"e{i}", 0.0, 1), 300.0 if i % 2 else 100_000.0)
    jobs = [Job(f"j{i}", 0.0, 1) for i in range(3)]
    for job, done_s in zip(jobs, (0.0, 1000.0, 95_000.0), strict=True):
        state.recall(job, done_s, done_s)
    index = _describe(known, jobs, np.array([0.0, 1000.0, 95_000.0]), state)[:, _COLUMN["Gittins' index"]]
    # To invest 300 s into each of two for one end; all that is missing; little is missing, as far as is known.
    assert math.exp(index[0]) * 3600.0 == pytest.approx(600.0, rel=0.4)
    assert math.exp(index[1]) * 3600.0 == pytest.approx(99_000.0, rel=0.4)
    assert index[2] < index[1]


def test_an_estimate_counts_and_so_does_its_lack() -> None:
    known, state = Laws(), ClusterState(Cluster.uniform(1, 8))
    jobs = [Job("long", 0.0, 1, estimate_s=100_000.0), Job("none", 0.0, 1), Job("short", 0.0, 1, estimate_s=60.0)]
    typical = _describe(known, jobs, np.zeros(3), state)[:, 0]
    assert typical[0] > typical[1] + 2 > typical[2] + 4
    known.rows.forget(["long", "none", "short"])
    assert not known.rows


@pytest.mark.parametrize("work_s", [0.0, 1e-9, 1e9])
def test_extreme_times_leave_finite_numbers(work_s: float) -> None:
    known, state = Laws(), ClusterState(Cluster.uniform(1, 8))
    for i in range(3):
        known.finished(Job(f"e{i}", 0.0, 1), work_s)
    job = Job("j", 1e9, 8, estimate_s=work_s)
    assert np.isfinite(_describe(known, [job, job], np.array([0.0, 1e9]), state)).all()
