"""States on disk: what a standby writes there, and how a restart finds it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from torchext._native import standby as native
from torchext.standby import tree as trees
from torchext.standby.errors import CorruptStateError, NoStateError, StateMismatchError
from torchext.standby.images import Budget, record_of
from torchext.standby.jobs import Job

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sQQ")  # magic, bytes of JSON, bytes of the tree
MAGIC = b"TXP1"  # how such a file begins
_NUM_KEPT = 2  # the one before stays until the next has been there for a while


@dataclass(frozen=True)
class State:
    """A state as it was committed.

    Attributes:
        step: Of which step.
        world_size: Of how many ranks.
        tree: The state; its tensors are its own and on the CPU. A reader of the standby gets the rank's own parts of
            DTensors, as plain tensors.
    """

    step: int
    world_size: int
    tree: Any


def folder_of(directory: str | Path, job: str) -> Path:
    """Where the states of a job lie: a folder ``step-...`` for each, with a file ``rank-...`` of each rank."""
    return Path(directory) / quote(job, safe="")


def steps(directory: str | Path, job: str) -> list[int]:
    """The steps that are there whole, in order."""
    with contextlib.suppress(FileNotFoundError):
        names = [path.name for path in folder_of(directory, job).iterdir()]
        return sorted(int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit())
    return []


def load(
    directory: str | Path,
    job: str,
    *,
    rank: int,
    world_size: int | None = None,
    step: int | None = None,
    find_mesh: trees.FindMesh | None = None,
) -> State:
    """Reads a state; ``step`` None: the last. For ``find_mesh`` see `tree.load`.

    Raises:
        NoStateError: It is not there.
        StateMismatchError: It is that of another number of ranks.
        CorruptStateError: The file is not as it was written.
    """
    found = steps(directory, job)
    if not found or (step is not None and step not in found):
        wanted = "no state" if step is None else f"no step {step}"
        raise NoStateError(f"{folder_of(directory, job)} holds {wanted} of job {job!r}, only {found or 'nothing'}")
    folder = folder_of(directory, job) / f"step-{found[-1] if step is None else step}"
    path = folder / f"rank-{rank}"
    try:
        state = read_file(path, find_mesh)
    except FileNotFoundError as error:
        num_ranks = len(list(folder.iterdir()))
        raise StateMismatchError(f"{folder} has ranks 0 to {num_ranks - 1}, rank {rank} was asked for") from error
    except CorruptStateError as error:
        raise CorruptStateError(f"{error}; remove its folder to go on without") from error
    if world_size is not None and state.world_size != world_size:
        raise StateMismatchError(
            f"{folder} is of {state.world_size} ranks, this program has {world_size}; go on with as many, or use "
            "another job name"
        )
    return state


def read_file(path: Path, find_mesh: trees.FindMesh | None = None) -> State:
    """Reads the state of one rank from its file. For ``find_mesh`` see `tree.load`.

    Raises:
        CorruptStateError: The file is not as it was written.
    """
    try:
        with path.open("rb") as file:
            words, tree, entries = _read(file)
    except (ValueError, struct.error, KeyError) as error:
        raise CorruptStateError(f"{path} is not as it was written: {error}") from error
    return State(words["step"], words["world_size"], trees.load(tree, entries.__getitem__, find_mesh))


def head_of(words: dict[str, Any], tree: bytes) -> bytes:
    """How the file of a state begins; the bytes of its entries follow.

    Args:
        words: ``step``, ``world_size``, ``entries`` as (number, size, checksum) of each, and their ``record``.
        tree: The pickle that refers to the entries.
    """
    text = json.dumps(words).encode()
    return _HEADER.pack(MAGIC, len(text), len(tree)) + text + tree


def _read(file: Any) -> tuple[dict[str, Any], bytes, dict[int, torch.Tensor]]:
    magic, text_bytes, tree_bytes = _HEADER.unpack(file.read(_HEADER.size))
    if magic != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not {MAGIC!r}")
    words = json.loads(file.read(text_bytes))
    tree = file.read(tree_bytes)
    if record_of(words["step"], tree, words["entries"]) != words["record"]:
        raise ValueError("the commit record does not fit")
    entries = {}
    for number, size, checksum in words["entries"]:
        entries[number] = torch.empty(size, dtype=torch.uint8)
        if file.readinto(entries[number].numpy().data) != size:
            raise ValueError("it is cut off")
        if native.checksum(entries[number].data_ptr(), size) != checksum:
            raise ValueError(f"entry {number} has another checksum")
    return words, tree, entries


class Persister:
    """Writes states of one job to disk, in a thread of its own; training waits for a copy in memory at most.

    A step is there whole or not at all: its folder gets its name once all files are on the disk. Steps that come
    while one is written are left out, but for the last.

    Args:
        job: Whose.
        directory: Where, on the standby's host.
        every_n_commits: How many steps have to come to count before the next is written.
        budget: What the copy is taken from.
        changed: The daemon's condition, which guards the job.
        tell: Called with a sentence when writing fails, and had not failed the time before.
    """

    def __init__(
        self,
        job: Job,
        directory: str,
        every_n_commits: int,
        *,
        budget: Budget,
        changed: threading.Condition,
        tell: Callable[[str], None],
    ) -> None:
        self._directory, self._every_n_commits = directory, every_n_commits
        self._job, self._budget, self._changed, self._tell = job, budget, changed, tell
        self._folder = folder_of(directory, job.name)
        self._wanted = threading.Event()
        self._closed = False
        self._has_failed = False
        self._copies: dict[tuple[int, int], torch.Tensor] = {}  # by rank and entry; kept from one step to the next
        self._step = -1  # the last that was written
        self._thread = threading.Thread(target=self._run, name="torchext-standby-persist", daemon=True)
        self._thread.start()

    def is_for(self, directory: str, every_n_commits: int) -> bool:
        """Whether it does what these say."""
        return (directory, every_n_commits) == (self._directory, self._every_n_commits)

    def step_counts(self) -> None:
        """One more step has come to count; does not wait."""
        if self._job.num_counted % self._every_n_commits == 0:
            self._wanted.set()

    def forget_after(self, step: int) -> None:
        """Training goes on from a step: what is there of later ones is another future."""
        for other in steps(self._directory, self._job.name):
            if other > step:
                self._remove(other)

    def close(self) -> None:
        """Ends the write under way, then the thread. Idempotent."""
        self._closed = True
        self._wanted.set()
        self._thread.join()
        self._budget.give_back(sum(copy.numel() for copy in self._copies.values()))
        self._copies.clear()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed:
                return
            self._wanted.clear()
            try:
                self._persist()
            except Exception as error:  # whatever it is: the thread goes on, and the training hears of it
                logger.warning("job %s: a state could not be written to %s: %s", self._job.name, self._folder, error)
                if not self._has_failed:
                    self._has_failed = True
                    self._tell(f"a state of job {self._job.name!r} could not be written to {self._folder}: {error}")
            else:
                self._has_failed = False

    def _persist(self) -> None:
        found = self._copy()
        if found is None:
            return
        step, ranks = found
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(".step-*"):  # of a standby that died
            shutil.rmtree(path, ignore_errors=True)
        new = self._folder / f".step-{step}-{secrets.token_hex(4)}"
        new.mkdir()
        try:
            for rank, (words, tree) in enumerate(ranks):
                with (new / f"rank-{rank}").open("xb") as file:
                    file.write(head_of(words, tree))
                    for number, _, _ in words["entries"]:
                        file.write(self._copies[rank, number].numpy().data)
                    file.flush()
                    os.fsync(file.fileno())
            _sync(new)
            target = self._folder / f"step-{step}"
            if target.exists():  # of another future
                self._remove(step)
            new.rename(target)
            _sync(self._folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        self._step = step
        self.forget_after(step)
        for old in steps(self._directory, self._job.name)[:-_NUM_KEPT]:
            self._remove(old)

    def _copy(self) -> tuple[int, list[tuple[dict[str, Any], bytes]]] | None:
        """Takes a copy of the step that counts: its header and tree for each rank; None where that was written."""
        with contextlib.ExitStack() as stack:
            for each in self._job.ranks:
                stack.enter_context(each.busy)
            with self._changed:
                step = self._job.book.latest()
                if step is None or step == self._step:
                    return None
                images = [
                    each.images.images[self._job.book.image(rank, step)] for rank, each in enumerate(self._job.ranks)
                ]
            sizes = {
                (rank, number): held.slot.size_bytes
                for rank, image in enumerate(images)
                for number, held in image.entries.items()
            }
            # The first step has come before the second image, which training needs more.
            full = 2 * sum(sizes.values())
            self._allocate(sizes, full - sum(each.images.size_bytes() for each in self._job.ranks))
            ranks = []
            for rank, image in enumerate(images):
                for number, held in image.entries.items():
                    native.copy(self._copies[rank, number].data_ptr(), held.slot.address, held.slot.size_bytes)
                ranks.append((image.header(self._job.world_size), image.tree))
            return step, ranks

    def _allocate(self, sizes: dict[tuple[int, int], int], spare_bytes: int) -> None:
        stale = [key for key, copy in self._copies.items() if sizes.get(key) != copy.numel()]
        for key in stale:
            self._budget.give_back(self._copies.pop(key).numel())
        for key, size in sizes.items():
            if key not in self._copies:
                self._budget.take(size, spare_bytes=max(0, spare_bytes))
                self._copies[key] = torch.empty(size, dtype=torch.uint8)

    def _remove(self, step: int) -> None:
        """In one move, so that no step is ever there in part."""
        gone = self._folder / f".step-{step}-{secrets.token_hex(4)}"
        try:
            (self._folder / f"step-{step}").rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
