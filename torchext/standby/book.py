"""Who may write which image, and which step counts: the rules of the standby, without memory, sockets or time.

Each rank has two images. A step counts once every rank has sealed it whole, so the image that holds the step which
counts is never written to, and a rank that is ahead waits for the others before it gives up its way back. It need not
wait for a rank that has left the step out, as one does whose commit was dropped or that had no connection: steps only
grow, so such a step can never count, and its image is written again.

A restart replaces the processes of all ranks, one after the other. What they write belongs together only if they are of
the same term: a term begins when a rank gets another process although the one before has written in this term. Every
rank is claimed before the first step of a term ends, as `Replicator.restore` and the callback do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchext.standby.errors import FencedError, NoStateError, StandbyError


@dataclass(frozen=True, order=True)
class Record:
    """A whole image.

    Attributes:
        term: Of which set of processes.
        step: The step whose state it is.
    """

    term: int
    step: int


@dataclass
class _Member:
    run: str | None = None  # the process that owns the rank
    term: int | None = None  # in which it writes; set when it first does
    fenced: set[str] = field(default_factory=set)
    images: list[Record | None] = field(default_factory=lambda: [None, None])
    writing: tuple[int, int] | None = None  # image, step
    begun: int | None = None  # the last step that the process has begun or waits to begin


class Book:
    """The records of one job. Not thread-safe: its owner holds a lock."""

    def __init__(self, world_size: int) -> None:
        self.members = [_Member() for _ in range(world_size)]
        self.term = 1

    def claim(self, rank: int, run: str) -> int:
        """Makes the process ``run`` the owner of a rank; the one before is fenced for good.

        Returns:
            The present term.

        Raises:
            FencedError: Another process has taken over from this one.
        """
        member = self.members[rank]
        if run in member.fenced:
            raise FencedError(f"another process has taken over rank {rank} from this one; its state counts now")
        if run != member.run:
            if member.run is not None:
                member.fenced.add(member.run)
            if member.term == self.term:
                self.term += 1
            member.run = run
            member.term = None
            member.begun = None
        member.writing = None
        return self.term

    def resume(self, rank: int, run: str, step: int) -> None:
        """Goes back to a step: what the rank wrote beyond it is another future, and does not count any more."""
        member = self._owned(rank, run)
        found = self._record(rank, step)
        member.begun = None
        member.images = [record if record is None or record <= found else None for record in member.images]

    def start_over(self, rank: int, run: str) -> None:
        """Goes on from a state that is not held here: nothing that the rank wrote counts any more."""
        member = self._owned(rank, run)
        member.begun = None
        member.images = [None, None]

    def begin(self, rank: int, run: str, step: int) -> int | None:
        """Starts to write an image.

        Returns:
            Which one, 0 or 1; None as long as it has to wait for other ranks (see `behind`).
        """
        member = self._entered(rank, run)
        member.begun = step
        newest = self.newest(rank)
        if newest is None:
            image = 0
        elif newest in self._common():
            image = 1 - member.images.index(newest)
        elif self._is_passed(rank, newest):
            image = member.images.index(newest)
        else:
            return None
        member.images[image] = None
        member.writing = image, step
        return image

    def begin_ahead(self, rank: int, run: str) -> int | None:
        """Starts to write the image of the next step, whose number is not known yet.

        Returns:
            Which one; `begin` will say the same. None where it might not: then it is too early.
        """
        member = self._entered(rank, run)
        newest = self.newest(rank)
        if newest is None or newest not in self._common():
            return None
        image = 1 - member.images.index(newest)
        member.images[image] = None
        return image

    def seal(self, rank: int, run: str, step: int) -> None:
        """Makes the image that is being written count, in one move."""
        member = self._owned(rank, run)
        if member.writing is None or member.writing[1] != step:
            raise StandbyError(f"rank {rank} seals step {step}, but is writing {member.writing}")
        assert member.term is not None  # set by begin
        member.images[member.writing[0]] = Record(member.term, step)
        member.writing = None

    def drop(self, rank: int, run: str) -> None:
        """Gives up the image that is being written."""
        self._owned(rank, run).writing = None

    def newest(self, rank: int) -> Record | None:
        """The rank's last whole image, whether or not the other ranks have one of that step."""
        return max((record for record in self.members[rank].images if record is not None), default=None)

    def latest(self) -> int | None:
        """The step that counts: every rank has it whole. None before there is one."""
        common = self._common()
        return common[-1].step if common else None

    def steps(self) -> list[int]:
        """Every step that each rank holds whole, the one that counts last."""
        return [record.step for record in self._common()]

    def image(self, rank: int, step: int) -> int:
        """Which image of a rank holds a step.

        Raises:
            NoStateError: None of them.
        """
        return self.members[rank].images.index(self._record(rank, step))

    def behind(self, rank: int) -> list[int]:
        """The ranks that have not sealed what this rank has."""
        newest = self.newest(rank)
        if newest is None:
            return []
        return [other for other, member in enumerate(self.members) if newest not in member.images]

    def _is_passed(self, rank: int, record: Record) -> bool:
        """Whether a rank that lacks the record is beyond its step."""
        begun = [self.members[other].begun for other in self.behind(rank)]
        return any(step is not None and step > record.step for step in begun)

    def _common(self) -> list[Record]:
        """What all ranks hold, in order."""
        held = [{record for record in member.images if record is not None} for member in self.members]
        return sorted(set.intersection(*held))

    def _record(self, rank: int, step: int) -> Record:
        """What a rank holds of a step; what all ranks hold goes before."""
        held = [record for record in self.members[rank].images if record is not None]
        found = [record for record in held if record.step == step]
        if not found:
            steps = sorted(record.step for record in held) or "nothing"
            raise NoStateError(f"the standby does not hold step {step} of rank {rank}, only {steps}")
        common = self._common()
        return max(found, key=lambda record: (record in common, record))

    def _entered(self, rank: int, run: str) -> _Member:
        """The member, which writes in the present term from now on."""
        member = self._owned(rank, run)
        if member.term is None:
            member.term = self.term
            # What earlier processes did not all seal is of no use to anybody.
            common = self._common()
            member.images = [record if record in common else None for record in member.images]
        return member

    def _owned(self, rank: int, run: str) -> _Member:
        member = self.members[rank]
        if member.run != run:
            raise FencedError(f"another process has taken over rank {rank} from this one; its state counts now")
        return member
