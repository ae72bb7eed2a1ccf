"""The dispatcher against machines that are made up: what it decides, keeps, and takes up again after a crash.

Machines check what they are told: no slot twice, no part twice, no two runs of one job at a time.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchext.launch.errors import LaunchError
from torchext.launch.queue.clock import Clock
from torchext.launch.queue.dispatcher import Dispatcher
from torchext.launch.queue.store import Store
from torchext.launch.queue.types import JobState, Part, PartKey, PartReport, PartState, Submission
from torchext.scheduling import LAS, Cluster, Machine, Policy, make_policy

_LITTLE = (0.0011, 1e9)  # of service, in GPU-seconds: the first moments of a run are enough to leave the first queue
_CLUSTER = Cluster((Machine("a", 2), Machine("b", 2, price_per_gpu_hour=2.0), Machine("c", 1)))


def _submission(
    num_nodes: int = 1,
    nproc: int | None = 1,
    *,
    retries: int = 0,
    priority: int = 0,
    max_price: float | None = None,
    min_nodes: int | None = None,
) -> Submission:
    return Submission(
        name="job",
        user="me",
        options=("--tee", "3"),
        command=("train.py", "--lr", "1"),
        python="python",
        cwd="/",
        env={"A": "B"},
        num_nodes=num_nodes,
        nproc_per_node=nproc,
        grace_s=7.0,
        retries=retries,
        priority=priority,
        max_price_per_gpu_hour=max_price,
        min_nodes=min_nodes,
        rendezvous="last_call_timeout=1",
    )


class _Crash(BaseException):
    """The dispatcher's process is killed here."""


class _World:
    """All machines: what runs there, what has ended. Outlives dispatchers."""

    def __init__(self) -> None:
        self.parts: dict[PartKey, tuple[str, Part]] = {}
        self.reports: dict[PartKey, PartReport] = {}
        self.asked: set[PartKey] = set()
        self.crash_in = 0  # the how manieth effect from now on is the last; 0: none

    def step(self) -> None:
        """A moment at which the dispatcher may be killed."""
        if self.crash_in:
            self.crash_in -= 1
            if not self.crash_in:
                raise _Crash

    def running(self) -> list[PartKey]:
        return [key for key, report in self.reports.items() if report.state is PartState.RUNNING]

    def can_succeed(self) -> list[PartKey]:
        """Those whose peers have all been started: the nodes of a run wait for each other."""
        return [
            key for key in self.running() if all(PartKey(key.job, key.run, n) in self.parts for n in self._nodes(key))
        ]

    def _nodes(self, key: PartKey) -> range:
        words = self.parts[key][1].words
        return range(int(words[words.index("--nnodes") + 1].rpartition(":")[2]))


class _Node:
    def __init__(self, world: _World, name: str, num_slots: int) -> None:
        self._world, self._name, self._num_slots = world, name, num_slots

    def start(self, part: Part) -> None:
        world = self._world
        world.step()
        if part.key in world.parts:
            return
        assert all(0 <= slot < self._num_slots for slot in part.slots)
        for key in world.running():
            there, other = world.parts[key]
            assert there != self._name or not set(other.slots) & set(part.slots), "a slot is used twice"
            assert (key.job, key.run) == (part.key.job, part.key.run) or key.job != part.key.job, "a job runs twice"
        world.parts[part.key] = (self._name, part)
        endpoint = "here:1" if part.holds_store else None
        world.reports[part.key] = PartReport(PartState.RUNNING, endpoint=endpoint)
        world.step()

    def look(self, key: PartKey) -> PartReport:
        return self._world.reports.get(key, PartReport(PartState.ABSENT))

    def end(self, key: PartKey) -> None:
        self._world.step()
        self._world.asked.add(key)

    def read_log(self, key: PartKey, offset: int, size: int) -> bytes:
        return f"log of {key}".encode()[offset : offset + size]


class _CrashingStore(Store):
    """May be cut off before it has written anything, or just after."""

    world: _World

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._connection.execute("PRAGMA synchronous=OFF")  # no power is cut here

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.world.step()
        with super().transaction():
            yield
        self.world.step()


class _Queue:
    """A dispatcher, and the world that it lives in."""

    def __init__(self, policy: Policy) -> None:
        self.world = _World()
        self._policy = policy
        self._folder = tempfile.TemporaryDirectory(prefix="torchext-queue-")
        self._open()

    def _open(self) -> None:
        folder = Path(self._folder.name)
        self.store = _CrashingStore(folder / "queue.sqlite")
        self.store.world = self.world
        nodes = {machine.name: _Node(self.world, machine.name, machine.num_gpus) for machine in _CLUSTER.machines}
        self.dispatcher = Dispatcher(self.store, _CLUSTER, self._policy, nodes, folder=folder)

    def restart(self) -> None:
        self.world.crash_in = 0
        self.store.close()
        self._open()

    def close(self) -> None:
        self.store.close()
        self._folder.cleanup()

    def end(self, key: PartKey, report: PartReport) -> None:
        self.world.reports[key] = report

    def state(self, job: int) -> JobState:
        return self.dispatcher.job(job).state

    def running(self) -> list[tuple[int, int]]:
        return sorted({(key.job, key.run) for key in self.world.running()})


_DONE = PartReport(PartState.ENDED, status=0)


@pytest.fixture
def queue() -> Iterator[_Queue]:
    made = _Queue(make_policy("fifo-firstfit"))
    yield made
    made.close()


@pytest.fixture
def las_queue() -> Iterator[_Queue]:
    made = _Queue(LAS(thresholds_gpu_s=_LITTLE))
    yield made
    made.close()


def test_a_job_is_started_with_what_it_needs_to_know(queue: _Queue) -> None:
    number = queue.dispatcher.submit(_submission(nproc=2))
    queue.dispatcher.tick()
    machine, part = queue.world.parts[PartKey(number, 1, 0)]
    assert (machine, part.slots, part.cwd, part.grace_s) == ("a", (0, 1), "/", 7.0)
    assert part.words == (
        "--tee",
        "3",
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
        "--grace",
        "7",
        "train.py",
        "--lr",
        "1",
    )
    assert part.env["A"] == "B"
    assert (part.env["TORCHEXT_JOB"], part.env["TORCHEXT_JOB_ID"], part.env["TORCHEXT_RUN"]) == ("job", "1", "1")
    queue.end(part.key, _DONE)
    queue.dispatcher.tick()
    assert queue.state(number) is JobState.DONE
    assert queue.dispatcher.read_log(part.key, 4, 2) == (b"of", False)


def test_the_other_nodes_start_once_the_first_says_where_it_is(queue: _Queue) -> None:
    queue.dispatcher.submit(_submission(num_nodes=2, nproc=2))
    queue.dispatcher.tick()
    assert list(queue.world.parts) == [PartKey(1, 1, 0)]
    queue.dispatcher.tick()
    first, second = (queue.world.parts[PartKey(1, 1, node)][1] for node in range(2))
    assert "localhost:0" in first.words
    assert "here:1" in second.words
    assert first.words[first.words.index("--node-rank") + 1] == "0"
    assert second.words[second.words.index("--node-rank") + 1] == "1"


def test_what_never_fits_is_refused_with_the_reason(queue: _Queue) -> None:
    for asked, reason in [
        (_submission(nproc=3), r"its largest machine has 2 slots \(--nproc-per-node\)"),
        (_submission(num_nodes=3, nproc=2), r"only 2 of its machines have so many slots \(--nnodes\)"),
        (
            _submission(num_nodes=2, nproc=2, max_price=1.0),
            r"too few of its machines cost no more than 1 .*--max-price",
        ),
    ]:
        with pytest.raises(LaunchError, match=reason):
            queue.dispatcher.submit(asked)
    queue.dispatcher.submit(_submission(nproc=None))
    assert queue.dispatcher.job(1).submission.nproc_per_node == 2


def test_failures_use_up_retries_and_losses_do_not(queue: _Queue) -> None:
    number = queue.dispatcher.submit(_submission(retries=1))
    reports = [
        PartReport(PartState.LOST),
        PartReport(PartState.ENDED, status=137),
        PartReport(PartState.ENDED, status=1),
        PartReport(PartState.ENDED, status=2),
    ]
    reasons = []
    for run, report in enumerate(reports, 1):
        queue.dispatcher.tick()
        queue.end(PartKey(number, run, 0), report)
        queue.dispatcher.tick()
        reasons.append(queue.dispatcher.runs(number)[run - 1].outcome)
    assert reasons == [
        "a node or agent was lost; requeued",
        "killed from outside (status 137); requeued",
        "failed with status 1; retry 1 of 1",
        "failed with status 2",
    ]
    assert queue.state(number) is JobState.FAILED
    queue.dispatcher.requeue(number)
    queue.dispatcher.tick()
    assert queue.running() == [(number, 5)]


def test_a_job_that_is_lost_again_and_again_is_given_up(queue: _Queue) -> None:
    number = queue.dispatcher.submit(_submission())
    for run in range(1, 5):
        queue.dispatcher.tick()
        queue.end(PartKey(number, run, 0), PartReport(PartState.LOST))
        queue.dispatcher.tick()
    assert queue.state(number) is JobState.FAILED
    assert "as 3 runs before" in queue.dispatcher.job(number).reason


def test_a_failed_node_ends_the_others_and_the_run(queue: _Queue) -> None:
    number = queue.dispatcher.submit(_submission(num_nodes=2, nproc=2))
    queue.dispatcher.tick()
    queue.dispatcher.tick()
    queue.end(PartKey(number, 1, 1), PartReport(PartState.LOST))
    queue.dispatcher.tick()
    assert queue.world.asked == {PartKey(number, 1, 0)}
    queue.end(PartKey(number, 1, 0), PartReport(PartState.ENDED, status=143))
    queue.dispatcher.tick()
    assert queue.running() == [(number, 2)]  # as a loss, so anew


def test_an_elastic_job_goes_on_with_the_nodes_that_are_left(queue: _Queue) -> None:
    number = queue.dispatcher.submit(_submission(num_nodes=3, min_nodes=2))
    queue.dispatcher.tick()
    queue.dispatcher.tick()
    words = queue.world.parts[PartKey(number, 1, 1)][1].words
    assert words[words.index("--nnodes") + 1] == "2:3"
    assert "last_call_timeout=1,is_host=False" in words
    queue.end(PartKey(number, 1, 2), PartReport(PartState.LOST))
    queue.dispatcher.tick()
    assert queue.world.asked == set()
    for node in range(2):
        queue.end(PartKey(number, 1, node), _DONE)
    queue.dispatcher.tick()
    assert queue.state(number) is JobState.DONE
    # Not with fewer, and not without the node that holds the store.
    for lost in ([0], [1, 2]):
        number = queue.dispatcher.submit(_submission(num_nodes=3, min_nodes=2))
        queue.dispatcher.tick()
        queue.dispatcher.tick()
        queue.world.asked.clear()
        for node in lost:
            queue.end(PartKey(number, 1, node), PartReport(PartState.LOST))
        queue.dispatcher.tick()
        assert queue.world.asked == {PartKey(number, 1, node) for node in range(3) if node not in lost}
        for node in range(3):
            queue.end(PartKey(number, 1, node), PartReport(PartState.ENDED, status=143))
        queue.dispatcher.tick()
        queue.dispatcher.cancel(number)
        queue.dispatcher.tick()
        queue.end(PartKey(number, 2, 0), PartReport(PartState.ENDED, status=143))
        queue.dispatcher.tick()


def test_cancel_and_requeue(queue: _Queue) -> None:
    running, waiting = queue.dispatcher.submit(_submission(2, 2)), queue.dispatcher.submit(_submission(2, 2))
    queue.dispatcher.tick()
    queue.dispatcher.cancel(waiting)
    assert queue.state(waiting) is JobState.CANCELLED
    with pytest.raises(LaunchError, match="job 2 has ended already: cancelled"):
        queue.dispatcher.cancel(waiting)
    queue.dispatcher.requeue(running)
    queue.dispatcher.tick()
    assert queue.world.asked == {PartKey(running, 1, 0)}
    queue.end(PartKey(running, 1, 0), PartReport(PartState.ENDED, status=143))
    queue.dispatcher.tick()
    assert queue.running() == [(running, 2)]
    queue.dispatcher.cancel(running)
    with pytest.raises(LaunchError, match="job 1 is being cancelled; requeue it once it has ended"):
        queue.dispatcher.requeue(running)
    queue.dispatcher.tick()
    queue.end(PartKey(running, 2, 0), PartReport(PartState.ENDED, status=143))
    queue.dispatcher.tick()
    assert queue.state(running) is JobState.CANCELLED
    with pytest.raises(LaunchError, match="there is no job 9"):
        queue.dispatcher.cancel(9)


def test_a_preempted_job_makes_room_first_and_goes_on_later(las_queue: _Queue) -> None:
    queue = las_queue
    old = queue.dispatcher.submit(_submission(num_nodes=2, nproc=2))
    queue.dispatcher.tick()
    queue.dispatcher.tick()
    new = queue.dispatcher.submit(_submission(nproc=2))
    while not queue.world.asked:  # as soon as the old one has had some service
        queue.dispatcher.tick()
        assert queue.running() == [(old, 1)]  # until it has ended, nothing else starts there
    assert queue.world.asked == {PartKey(old, 1, 0), PartKey(old, 1, 1)}
    assert "stops job 1" in queue.dispatcher.runs(new)[0].explanation
    for node in range(2):
        queue.end(PartKey(old, 1, node), PartReport(PartState.ENDED, status=143))
    queue.dispatcher.tick()
    assert queue.running() == [(new, 1)]
    assert queue.state(old) is JobState.WAITING
    queue.end(PartKey(new, 1, 0), _DONE)
    queue.dispatcher.tick()
    assert queue.running() == [(old, 2)]


def test_a_drained_machine_takes_nothing_and_gives_up_what_it_has(queue: _Queue) -> None:
    number = queue.dispatcher.submit(_submission(nproc=2))
    queue.dispatcher.tick()
    queue.dispatcher.drain("a", now=True)
    queue.dispatcher.tick()
    queue.end(PartKey(number, 1, 0), PartReport(PartState.ENDED, status=143))
    queue.dispatcher.tick()
    assert queue.world.parts[PartKey(number, 2, 0)][0] == "b"
    queue.restart()
    assert [state for _, state, *_ in queue.dispatcher.machines()] == ["drained", "up", "up"]
    queue.dispatcher.undrain("a")
    assert [state for _, state, *_ in queue.dispatcher.machines()] == ["up", "up", "up"]
    with pytest.raises(LaunchError, match="the cluster has no machine 'z', only a, b, c"):
        queue.dispatcher.drain("z")


@pytest.mark.parametrize("leave", ["drain", "away"])
def test_what_has_not_started_leaves_a_machine_that_closes(las_queue: _Queue, leave: str) -> None:
    queue = las_queue
    old = [queue.dispatcher.submit(_submission(nproc=2)) for _ in "ab"]
    queue.dispatcher.tick()
    new = queue.dispatcher.submit(_submission(nproc=2))
    while not queue.world.asked:
        queue.dispatcher.tick()
    (asked,) = queue.world.asked
    machine = queue.world.parts[asked][0]
    assert queue.dispatcher.runs(new)[0].machines == ((machine, 2),)
    if leave == "drain":
        queue.dispatcher.drain(machine)
    else:
        queue.dispatcher.set_away(machine, True)
    queue.dispatcher.tick()
    run = queue.dispatcher.runs(new)[0]
    assert (run.start_s, run.outcome) == (None, f"not started: {machine} takes no new jobs")
    queue.end(asked, PartReport(PartState.ENDED, status=143))
    for _ in range(10):
        queue.dispatcher.tick()
        for key in queue.world.can_succeed():
            queue.end(key, _DONE)
    assert queue.state(new) is JobState.DONE
    assert {queue.world.parts[key][0] for key in queue.world.parts if key.job == new} == {"ab".replace(machine, "")}
    assert all(queue.state(number) is JobState.DONE for number in old)


def test_a_restart_forgets_neither_order_nor_lessons(queue: _Queue) -> None:
    queue._policy = make_policy("qssf")
    queue.restart()
    for _ in range(3):
        number = queue.dispatcher.submit(_submission())
        queue.dispatcher.tick()
        queue.end(PartKey(number, 1, 0), _DONE)
        queue.dispatcher.tick()
    blocked = queue.dispatcher.submit(_submission(num_nodes=2, nproc=2))
    queue.dispatcher.tick()
    queue._policy = make_policy("qssf")
    waiting = queue.dispatcher.submit(_submission(nproc=2))
    queue.dispatcher.tick()
    before = queue.dispatcher.plan()
    queue.restart()
    after = queue.dispatcher.plan()
    assert queue.running() == [(blocked, 1)]
    assert [wait.job_id for wait in after.waits] == [str(waiting)]
    assert after.waits[0].score == pytest.approx(before.waits[0].score, rel=0.01)


def test_the_clock_of_a_queue_never_goes_back() -> None:
    clock = Clock(not_before_s=9e9)  # as after the system's clock was set back
    assert 9e9 <= clock.now_s() <= clock.now_s() < 9e9 + 1000


class _Counted:
    """Stands in for `Clock`: each look takes a millisecond, so that what is decided does not depend on the machine."""

    def __init__(self, not_before_s: float) -> None:
        self._now_s = max(1e9, not_before_s)

    def now_s(self) -> float:
        self._now_s += 1e-3
        return self._now_s


class _Machine(RuleBasedStateMachine):
    """Users, workers and crashes in any order; at the end, everything must come to its end exactly once."""

    policy = "fifo-firstfit"

    def __init__(self) -> None:
        super().__init__()
        self._patched = pytest.MonkeyPatch()
        self._patched.setattr("torchext.launch.queue.dispatcher.Clock", _Counted)
        las = self.policy == "las"
        self.queue = _Queue(LAS(thresholds_gpu_s=_LITTLE) if las else make_policy(self.policy, budget_s=math.inf))
        self.submitted: set[int] = set()
        self.done_once: set[int] = set()

    def _do(self, action: object, *args: object) -> object:
        try:
            return action(*args)  # type: ignore[operator]
        except LaunchError:
            return None
        except _Crash:
            self.queue.restart()
            return None

    @rule(
        nodes=st.integers(1, 2),
        nproc=st.integers(1, 2),
        retries=st.integers(0, 1),
        priority=st.integers(0, 1),
        elastic=st.booleans(),
    )
    def submit(self, nodes: int, nproc: int, retries: int, priority: int, elastic: bool) -> None:
        min_nodes = 1 if elastic else None
        asked = _submission(nodes, nproc, retries=retries, priority=priority, min_nodes=min_nodes)
        number = self._do(self.queue.dispatcher.submit, asked)
        if isinstance(number, int):
            self.submitted.add(number)

    @rule()
    def tick(self) -> None:
        self._do(self.queue.dispatcher.tick)

    @precondition(lambda self: self.queue.world.running())
    @rule(data=st.data(), kind=st.sampled_from(["done", "failed", "lost", "killed"]))
    def end_a_part(self, data: st.DataObject, kind: str) -> None:
        keys = self.queue.world.can_succeed() if kind == "done" else self.queue.world.running()
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        report = {
            "done": _DONE,
            "failed": PartReport(PartState.ENDED, status=1),
            "killed": PartReport(PartState.ENDED, status=137),
            "lost": PartReport(PartState.LOST),
        }[kind]
        self.queue.end(key, report)

    @rule()
    def obey(self) -> None:
        for key in self.queue.world.running():
            if key in self.queue.world.asked:
                self.queue.end(key, PartReport(PartState.ENDED, status=143))

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), what=st.sampled_from(["cancel", "requeue"]))
    def command(self, data: st.DataObject, what: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.submitted)))
        self._do(getattr(self.queue.dispatcher, what), number)

    @rule(machine=st.sampled_from("abc"), now=st.booleans())
    def drain(self, machine: str, now: bool) -> None:
        self._do(lambda: self.queue.dispatcher.drain(machine, now=now))

    @rule(machine=st.sampled_from("abc"), away=st.booleans())
    def set_away(self, machine: str, away: bool) -> None:
        self._do(self.queue.dispatcher.set_away, machine, away)

    @rule(machine=st.sampled_from("abc"))
    def undrain(self, machine: str) -> None:
        self._do(self.queue.dispatcher.undrain, machine)

    @rule()
    def kill(self) -> None:
        self.queue.restart()

    @rule(steps=st.integers(1, 6))
    def kill_later(self, steps: int) -> None:
        self.queue.world.crash_in = steps

    @invariant()
    def no_job_is_lost(self) -> None:
        known = {row.id for row in self.queue.dispatcher.jobs()}
        assert self.submitted <= known

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            self.queue.close()
            self._patched.undo()

    def _finish(self) -> None:
        self.queue.restart()
        for machine in "abc":
            self.queue.dispatcher.undrain(machine)
        for _ in range(200):
            self.queue.dispatcher.tick()
            self.obey()
            for key in self.queue.world.can_succeed():
                self.queue.end(key, _DONE)
            if all(row.state.ended for row in self.queue.dispatcher.jobs()):
                break
        for row in self.queue.dispatcher.jobs():
            assert row.state.ended, (row, self.queue.dispatcher.runs(row.id))
            assert all(run.outcome is not None for run in self.queue.dispatcher.runs(row.id))
        assert self.queue.dispatcher.plan().waits == ()
        assert all(free == slots for _, _, slots, free, _ in self.queue.dispatcher.machines())


class _PreemptiveMachine(_Machine):
    policy = "las"


class _BackfillingMachine(_Machine):
    policy = "easy-backfill"


_SETTINGS = settings(max_examples=15, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])
for _case in (_Machine, _PreemptiveMachine, _BackfillingMachine):
    _case.TestCase.settings = _SETTINGS
TestFirstFit = _Machine.TestCase
TestPreemptive = _PreemptiveMachine.TestCase
TestBackfilling = _BackfillingMachine.TestCase
