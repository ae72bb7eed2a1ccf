"""The words of the queue: what is submitted, what runs where, and what becomes of it."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchext.launch.errors import LaunchError


class JobState(str, enum.Enum):
    """What a job is doing. Ended ones can be put back in line with ``requeue``."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing will happen to it by itself."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class Why(str, enum.Enum):
    """Why a run is asked to end."""

    CANCEL = "cancelled"
    PREEMPT = "preempted"
    PREEMPT_CANCEL = "cancelled while being preempted"
    REQUEUE = "requeued"
    PEER = "another of its nodes failed"

    @property
    def makes_room(self) -> bool:
        """Whether the slots of the run are promised to others already; its job is in line again, or cancelled."""
        return self in (Why.PREEMPT, Why.PREEMPT_CANCEL)


@dataclass(frozen=True)
class Submission:
    """A job as the user describes it.

    Args:
        name: For people.
        user: Who submits; jobs of one user are one tenant for policies.
        options: Words of ``torchext run`` up to the script.
        command: The script and its arguments.
        python: Interpreter that runs it.
        cwd: Working directory.
        env: Environment.
        num_nodes: On how many machines.
        nproc_per_node: Processes, and so slots, on each; None: as many as the largest machine has.
        grace_s: How long workers may take to save when the job is stopped.
        min_nodes: With how many of its nodes a run goes on when others are lost; None: with all.
        rendezvous: Further settings of how nodes meet, as ``--rdzv-conf`` takes them.
        estimate_s: The user's guess of the running time.
        deadline_s: When it should have ended, in seconds since 1970.
        job_class: Kind of work, the key of speeds in the cluster file.
        priority: The highest are served first.
        max_price_per_gpu_hour: Runs on no machine that costs more.
        retries: How many failures are followed by another run.
    """

    name: str
    user: str
    options: tuple[str, ...]
    command: tuple[str, ...]
    python: str
    cwd: str
    env: Mapping[str, str]
    num_nodes: int
    nproc_per_node: int | None
    grace_s: float
    min_nodes: int | None = None
    rendezvous: str = ""
    estimate_s: float | None = None
    deadline_s: float | None = None
    job_class: str = ""
    priority: int = 0
    max_price_per_gpu_hour: float | None = None
    retries: int = 0

    def to_json(self) -> str:
        """Writes it for the wire and the database."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Submission:
        """Reads what `to_json` has written.

        Raises:
            LaunchError: It is something else.
        """
        try:
            fields = json.loads(text)
            made = cls(**{**fields, "options": tuple(fields["options"]), "command": tuple(fields["command"])})
        except (ValueError, TypeError, KeyError) as error:
            raise LaunchError(f"this is no job as torchext {_version()} writes it: {error}") from None
        made.check()
        return made

    def check(self) -> None:
        """Refuses numbers that make no sense.

        Raises:
            LaunchError: There is one; says which.
        """
        if self.num_nodes < 1:
            raise LaunchError(f"a job needs at least one node, got {self.num_nodes}")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.num_nodes:
            raise LaunchError(f"--min-nodes must be from 1 to the {self.num_nodes} of --nnodes, got {self.min_nodes}")
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise LaunchError(f"a job needs at least one process per node, got {self.nproc_per_node}")
        if not 0 <= self.grace_s < math.inf:
            raise LaunchError(f"the grace must be finite and not negative, got {self.grace_s} s")
        if not self.command:
            raise LaunchError("a job needs a script")


def _version() -> str:
    from torchext import __version__

    return __version__


@dataclass(frozen=True)
class PartKey:
    """One node's part of one run of a job."""

    job: int
    run: int
    node: int  # place among the nodes of the run, 0 for that of rank 0

    def __str__(self) -> str:
        return f"{self.job}.{self.run}.{self.node}"

    def folder(self, root: Path) -> Path:
        """Where its files are, below the folder of its machine."""
        return root / str(self.job) / f"run-{self.run}" / f"node-{self.node}"

    @classmethod
    def parse(cls, text: str) -> PartKey:
        """Reads what ``str`` has given."""
        job, run, node = map(int, text.split("."))
        return cls(job, run, node)


@dataclass(frozen=True)
class Part:
    """What a machine is told to start.

    Args:
        key: Which part.
        words: Words of ``torchext run``.
        python: Interpreter.
        cwd: Working directory.
        env: Environment, complete.
        grace_s: As in `Submission`.
        slots: Which slots (GPUs) of the machine it gets.
        machines: Names of all machines of its run, by place.
        holds_store: Whether it holds the store of its run and so says where that is.
    """

    key: PartKey
    words: tuple[str, ...]
    python: str
    cwd: str
    env: Mapping[str, str]
    grace_s: float
    slots: tuple[int, ...]
    machines: tuple[str, ...]
    holds_store: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Part:
        """Reads what `to_dict` has given."""
        return cls(
            **{
                **fields,
                "key": PartKey(**fields["key"]),
                "words": tuple(fields["words"]),
                "slots": tuple(fields["slots"]),
                "machines": tuple(fields["machines"]),
            }
        )


@dataclass(frozen=True)
class Request:
    """What a run asks of a machine, as far as that is known before it is placed.

    Args:
        key: The first of its parts.
        python: Interpreter.
        env: Environment of all its parts, complete.
        num_nodes: On how many machines.
        num_slots: Slots on each.
    """

    key: PartKey
    python: str
    env: Mapping[str, str]
    num_nodes: int
    num_slots: int


class PartState(str, enum.Enum):
    """What is seen of a part on its machine."""

    ABSENT = "absent"  # never started there
    RUNNING = "running"
    ENDED = "ended"  # with a status
    LOST = "lost"  # gone without one: killed, or the machine went down
    UNKNOWN = "unknown"  # the machine cannot be asked at present

    @property
    def idle(self) -> bool:
        """Whether nothing of it runs, as far as is known."""
        return self in (PartState.ENDED, PartState.LOST, PartState.ABSENT)


@dataclass(frozen=True)
class PartReport:
    """What a machine says about a part.

    Args:
        state: What it is doing.
        status: Exit status of ``torchext run`` once it has ended.
        endpoint: Where the store of the run is, once that is known and if this part holds it.
    """

    state: PartState
    status: int | None = None
    endpoint: str | None = None
