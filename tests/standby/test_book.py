"""The rules of the standby against a model that remembers everything."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchext.standby.book import Book
from torchext.standby.errors import FencedError, StandbyError


class Primaries(RuleBasedStateMachine):
    """Runs of a job, each of which starts, commits, dies, and may come back after another took over.

    The model keeps for each rank everything that was ever sealed, with the images' contents, so it knows what a restart
    has to find: the last step that all ranks sealed.
    """

    @initialize(world_size=st.integers(1, 3))
    def start(self, world_size: int) -> None:
        self.world_size = world_size
        self.book = Book(world_size)
        self.num_runs = 0
        # What each image really holds: (run, step), or None while it is written.
        self.contents: list[list[Any]] = [[None, None] for _ in range(world_size)]
        self.sealed: list[set[tuple[int, int]]] = [set() for _ in range(world_size)]  # (run, step) for each rank
        self.next_step = [0] * world_size
        self.writing: list[tuple[int, int] | None] = [None] * world_size
        self.begun = [-1] * world_size  # the last step of this run that each rank began or waits to begin
        self.promised: list[int | None] = [None] * world_size  # the image that each rank has begun ahead of its step
        self.skipped: set[int] = set()  # steps of this run that some rank left out
        self.restart(fresh=True)

    @rule(fresh=st.booleans())
    def restart(self, fresh: bool) -> None:
        """All processes of the job are replaced, as torchrun does; they resume what counts, or start anew."""
        self.num_runs += 1
        latest = self.book.latest()
        for rank in range(self.world_size):
            self.book.claim(rank, f"run {self.num_runs}")
            if not fresh and latest is not None:
                held = self.contents[rank][self.book.image(rank, latest)]
                assert held[1] == latest
                assert held[0] == self.contents[0][self.book.image(0, latest)][0]  # all of one run
                self.book.resume(rank, f"run {self.num_runs}", latest)
        self.resumed = latest if not fresh else None
        self.is_void = False
        self._start_at(0 if fresh or latest is None else latest + 1)

    @rule(newer_by=st.integers(1, 3))
    def restart_from_disk(self, newer_by: int) -> None:
        """All processes are replaced and go on from the disk, which has a later step than what counts."""
        self.num_runs += 1
        latest = self.book.latest()
        for rank in range(self.world_size):
            self.book.claim(rank, self.run)
            self.book.start_over(rank, self.run)
            assert self.book.latest() is None  # from the first one on
        self.resumed = None
        self.is_void = True
        self._start_at((-1 if latest is None else latest) + newer_by + 1)

    def _start_at(self, step: int) -> None:
        self.counted = self.book.latest()
        self.first = step
        self.next_step = [step] * self.world_size
        self.writing = [None] * self.world_size
        self.begun = [-1] * self.world_size
        self.promised = [None] * self.world_size
        self.skipped = set()

    @rule(
        actions=st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from(["write", "write", "begin", "ahead", "seal", "drop", "skip"]))
        )
    )
    def train(self, actions: list[tuple[int, str]]) -> None:
        for rank, action in actions:
            if action == "write":
                self.begin(rank)
                if self.writing[rank % self.world_size] is not None:
                    self.seal(rank)
            else:
                getattr(self, action)(rank)
            self.what_counts_was_sealed_by_all_and_is_held()
            self.what_counts_never_goes_back_within_a_run()
            self.at_most_one_step_is_lost()

    def ahead(self, rank: int) -> None:
        """An optimizer has stepped: what it changed is read before there is a commit."""
        rank %= self.world_size
        if self.writing[rank] is not None or self.next_step[rank] > min(self.next_step) + 1:
            return
        image = self.book.begin_ahead(rank, self.run)
        if image is not None:
            self.contents[rank][image] = None
            self.promised[rank] = image

    def begin(self, rank: int) -> None:
        rank %= self.world_size
        step = self.next_step[rank]
        # No rank is more than one step ahead: collectives see to that.
        if self.writing[rank] is not None or step > min(self.next_step) + 1:
            return
        self.begun[rank] = step
        image = self.book.begin(rank, self.run, step)
        if image is None:
            # It waits for somebody who can still do it.
            newest = self.book.newest(rank)
            assert newest is not None
            assert (self.num_runs, newest.step) in self.sealed[rank]
            assert all((self.num_runs, newest.step) not in self.sealed[other] for other in self.book.behind(rank))
            assert self.book.behind(rank)
            assert all(self.begun[other] <= newest.step for other in self.book.behind(rank))
            return
        assert self.promised[rank] in (None, image)
        self.promised[rank] = None
        latest = self.book.latest()
        if latest is not None:
            assert self.book.image(rank, latest) != image
        self.contents[rank][image] = None
        self.writing[rank] = image, step

    def seal(self, rank: int) -> None:
        rank %= self.world_size
        writing = self.writing[rank]
        if writing is None:
            with pytest.raises(StandbyError):
                self.book.seal(rank, self.run, self.next_step[rank])
            return
        image, step = writing
        self.contents[rank][image] = (self.num_runs, step)
        self.book.seal(rank, self.run, step)
        self.sealed[rank].add((self.num_runs, step))
        self.writing[rank] = None
        self.next_step[rank] = step + 1

    def drop(self, rank: int) -> None:
        rank %= self.world_size
        if self.writing[rank] is not None:
            self.book.drop(rank, self.run)
            self.writing[rank] = None

    def skip(self, rank: int) -> None:
        """The step is dropped, or the rank has no connection meanwhile: it goes on with the next one."""
        rank %= self.world_size
        if self.next_step[rank] > min(self.next_step) + 1:
            return
        self.drop(rank)
        self.skipped.add(self.next_step[rank])
        self.next_step[rank] += 1

    @precondition(lambda self: self.num_runs > 1)
    @rule(rank=st.integers(0, 2), data=st.data())
    def an_old_process_comes_back(self, rank: int, data: st.DataObject) -> None:
        rank %= self.world_size
        old = f"run {data.draw(st.integers(1, self.num_runs - 1))}"
        before = repr(self.book.members)
        for call in (
            lambda: self.book.claim(rank, old),
            lambda: self.book.begin(rank, old, 10**6),
            lambda: self.book.seal(rank, old, 10**6),
            lambda: self.book.drop(rank, old),
            lambda: self.book.resume(rank, old, 0),
            lambda: self.book.start_over(rank, old),
        ):
            with pytest.raises(FencedError):
                call()
        assert repr(self.book.members) == before

    @rule(rank=st.integers(0, 2))
    def a_process_reconnects(self, rank: int) -> None:
        rank %= self.world_size
        self.book.claim(rank, self.run)
        self.writing[rank] = None
        self.promised[rank] = None

    @property
    def run(self) -> str:
        return f"run {self.num_runs}"

    @invariant()
    def what_counts_was_sealed_by_all_and_is_held(self) -> None:
        if not hasattr(self, "book"):
            return
        latest = self.book.latest()
        if latest is None:
            return
        for rank in range(self.world_size):
            held = self.contents[rank][self.book.image(rank, latest)]
            assert held is not None
            assert held[1] == latest
            assert held in self.sealed[rank]
            assert held[0] == self.contents[0][self.book.image(0, latest)][0]

    @invariant()
    def what_counts_never_goes_back_within_a_run(self) -> None:
        if not hasattr(self, "book"):
            return
        latest = self.book.latest()
        if self.counted is not None:
            assert latest is not None
        ours = [step for step in range(max(self.next_step)) if all((self.num_runs, step) in s for s in self.sealed)]
        if ours:  # the last step that every rank has sealed in this run
            assert latest == ours[-1]
        elif self.resumed is not None or self.is_void:
            assert latest == self.resumed

    @invariant()
    def at_most_one_step_is_lost(self) -> None:
        if not hasattr(self, "book"):
            return
        with contextlib.suppress(StopIteration):
            newest = next(step for step in reversed(range(self.first, min(self.next_step))) if step not in self.skipped)
            assert self.book.latest() == newest


Primaries.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestPrimaries = Primaries.TestCase


def test_a_rank_that_is_ahead_waits_for_the_others() -> None:
    book = Book(2)
    for rank in range(2):
        book.claim(rank, "a")
        assert book.begin(rank, "a", 0) == 0
        book.seal(rank, "a", 0)
    assert book.begin(0, "a", 1) == 1
    book.seal(0, "a", 1)
    assert book.latest() == 0
    assert book.begin(0, "a", 2) is None
    assert book.behind(0) == [1]
    assert book.begin(1, "a", 1) == 1
    book.seal(1, "a", 1)
    assert book.latest() == 1
    assert book.begin(0, "a", 2) == 0


def test_a_step_that_a_rank_leaves_out_does_not_stop_the_others() -> None:
    book = Book(2)
    for rank in range(2):
        book.claim(rank, "a")
        book.begin(rank, "a", 1)
        book.seal(rank, "a", 1)
    assert book.begin(0, "a", 2) == 1
    book.seal(0, "a", 2)
    book.begin(1, "a", 2)
    book.drop(1, "a")
    assert book.begin(0, "a", 3) is None  # rank 1 might write 2 again, for all that is known
    assert book.begin(1, "a", 3) == 1
    book.seal(1, "a", 3)
    assert book.begin(0, "a", 3) == 1  # not 0, which counts
    assert book.latest() == 1
    book.seal(0, "a", 3)
    assert book.latest() == 3


def test_what_is_held_is_named() -> None:
    book = Book(1)
    book.claim(0, "a")
    with pytest.raises(StandbyError, match="does not hold step 3 of rank 0, only nothing"):
        book.image(0, 3)
    book.begin(0, "a", 5)
    book.seal(0, "a", 5)
    with pytest.raises(StandbyError, match=r"only \[5\]"):
        book.image(0, 3)
