"""Runs a function on N real ranks: separate processes whose results, exceptions and deaths come back to the test.

A test module defines ``def program(rank: Rank, *args)`` at module level. Where all ranks should succeed:

    values = run_ranks(program, 4, backend="gloo")

Where a rank is to die, or the test acts while they run:

    with start_ranks(program, 3, store="tcp", deadline_s=20) as ranks:
        ranks.wait_for(1, "in step 3")              # program calls rank.announce("in step 3")
        ranks.kill(1, signal.SIGKILL)
        outcomes = ranks.wait()
    assert outcomes[1].signal == signal.SIGKILL

Nothing of a rank stays behind: at the end of the block each rank is killed with all that it started, and when the test
process itself dies, its ranks notice and end. (Without /proc, what has left its rank's session is not found.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import select
import shutil
import signal
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal

from tests import leaks
from tests.fork_server import ENVIRONMENT, MARKER, fork_servers

if TYPE_CHECKING:  # the server imports it
    import torch.distributed as dist

# At the deadline a rank gets this signal: it writes the stacks of all its threads and dies of it. Programs under test
# leave it alone.
_DUMP_SIGNAL = signal.SIGVTALRM
_DUMP_S = 20.0  # for writing those stacks, on a slow machine
_GRACE_S = 5.0  # for the other ranks to end once one has failed, in `run_ranks`: they usually wait for it
_SURVIVORS_S = 15.0  # for helper processes that end by themselves once their rank has


class RanksError(Exception):
    """Not all ranks returned; the message says for each what became of it."""


# --- In the test process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        rank: Which one.
        pid: Its process.
        kind: ``"returned"``; ``"raised"`` an exception; ``"exited"`` by itself before its function ended; was
            ``"killed"`` by a signal; or was still running when its time was up (``"timed out"``).
        value: What the function returned.
        error: The exception that it raised, as far as it can be pickled; else a RuntimeError with its text.
        traceback: That exception's traceback in the rank, as text.
        exitcode: Exit status of the process; None where a signal ended it.
        signal: The signal that ended it; None otherwise. Set too where the rank was killed because its time was up.
        stack: For one that timed out, where each of its threads was. Empty if it was stopped (SIGSTOP).
        output: What it wrote to its standard output and error.
    """

    rank: int
    pid: int
    kind: Literal["returned", "raised", "exited", "killed", "timed out"]
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None
    signal: signal.Signals | None = None
    stack: str = ""
    output: str = ""

    def __str__(self) -> str:
        words = f"rank {self.rank} {self.kind}"
        if self.kind == "exited":
            words += f" with status {self.exitcode}"
        elif self.kind == "killed" and self.signal is not None:
            words += f" by {self.signal.name}"
        parts = [
            words,
            self.traceback,
            self.stack,
            self.kind != "returned" and self.output and f"output:\n{self.output}",
        ]
        return "\n".join(part.rstrip() for part in parts if part)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 60.0,
    store: Literal["file", "tcp"] | None = None,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on each rank and waits for all; see `start_ranks` for the arguments.

    Once a rank has failed the others get five more seconds: they usually wait for it.

    Returns:
        What each rank returned.

    Raises:
        RanksError: A rank did not return, or left processes behind.
    """
    with start_ranks(fn, world_size, *args, deadline_s=deadline_s, store=store, backend=backend, env=env) as ranks:
        return ranks.values()


def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = 60.0,
    store: Literal["file", "tcp"] | None = None,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Ranks:
    """Starts ``fn(rank, *args)`` on each of ``world_size`` new processes and returns at once.

    Args:
        fn: A function at the top level of an importable module; gets a `Rank` first.
        world_size: How many ranks.
        *args: Further arguments, the same for all ranks; pickled.
        deadline_s: From now; whoever runs longer is killed with all that it started.
        store: Gives each rank a `torch.distributed` store: ``"file"``, or ``"tcp"``, which the test process serves, so
            that it outlives any rank. None: no store, or a file store where ``backend`` asks for one.
        backend: Initialises the default process group with it before ``fn`` and destroys it after.
        env: Further environment variables of the ranks.
    """
    return Ranks(fn, world_size, args, deadline_s=deadline_s, store=store, backend=backend, env=env or {})


class Ranks:
    """Running ranks; made by `start_ranks`. Use it in a ``with`` block. Not thread-safe."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: Sequence[Any],
        *,
        deadline_s: float,
        store: Literal["file", "tcp"] | None,
        backend: str | None,
        env: Mapping[str, str],
    ) -> None:
        payload = pickle.dumps((fn, tuple(args)))  # first of all: what cannot be sent is the caller's mistake
        fork_servers()  # so that their start is not a part of the first ranks' time
        self._mark = uuid.uuid4().hex
        self._folder = Path(tempfile.mkdtemp(prefix="torchext-ranks-"))
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._served: dist.TCPStore | None = None
        self._processes: list[_Process] = []
        self._outcomes: list[Outcome] | None = None
        try:
            self._start(world_size, payload, store or ("file" if backend is not None else None), backend, env)
        except BaseException:
            self.close()
            raise

    def _start(
        self, world_size: int, payload: bytes, store: str | None, backend: str | None, env: Mapping[str, str]
    ) -> None:
        if store == "tcp":
            import torch.distributed as dist

            self._served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (self._folder / "payload").write_bytes(payload)
        job = {
            "world_size": world_size,
            "backend": backend,
            "store": store,
            "port": self._served.port if self._served is not None else None,
            "timeout_s": self._deadline_s,
        }
        (self._folder / "job.json").write_text(json.dumps(job))
        environment = {**os.environ, **ENVIRONMENT, MARKER: self._mark, **env}
        for rank in range(world_size):
            self._processes.append(_Process(rank, self._folder, environment))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process of each rank, dead ones included."""
        return [process.child.pid for process in self._processes]

    def kill(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one rank, not to what it has started. Does nothing to a dead one."""
        self._processes[rank].child.send_signal(number)

    def wait_for(self, rank: int, event: str, timeout_s: float | None = None) -> None:
        """Blocks until the rank has called ``announce(event)``; at once if it has done so before.

        Raises:
            RanksError: It ended first, or the time (by default until the deadline) is up.
        """
        end = self._deadline if timeout_s is None else min(self._deadline, time.monotonic() + timeout_s)
        process = self._processes[rank]
        while event not in process.announced:
            if not process.read_announcements(end - time.monotonic()):
                state = "is still running" if process.child.poll() is None else "has ended"
                raise RanksError(
                    f"rank {rank} {state} and has not announced {event!r}, only {sorted(process.announced)}\n"
                    + process.output()
                )

    def release(self, event: str, ranks: Sequence[int] | None = None) -> None:
        """Lets the ranks (all, or these) go on that call ``wait_for(event)``, now or later. Skips dead ones."""
        for rank in range(len(self._processes)) if ranks is None else ranks:
            self._processes[rank].send(event)

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Blocks until each rank has ended; kills those who run at the deadline, or ``timeout_s`` from now if sooner.

        Returns:
            One outcome for each rank; no failure of a rank raises here.
        """
        if timeout_s is not None:
            self._deadline = min(self._deadline, time.monotonic() + timeout_s)
        return self._wait(grace_s=None)

    def values(self) -> list[Any]:
        """Blocks like `wait` but less than five seconds once a rank has failed.

        Returns:
            What each rank returned.

        Raises:
            RanksError: A rank did not return, or left processes behind.
        """
        outcomes = self._wait(grace_s=_GRACE_S)
        failed = [outcome for outcome in outcomes if outcome.kind != "returned"]
        if failed:
            # The first to fail is the likely cause: exceptions and deaths before those who waited in vain.
            failed.sort(key=lambda outcome: outcome.kind == "timed out")
            text = "\n\n".join(str(outcome) for outcome in failed)
            raise RanksError(
                f"{len(failed)} of {len(outcomes)} ranks failed (deadline {self._deadline_s:g} s)\n\n{text}"
            ) from failed[0].error
        survivors = self._survivors()
        if survivors:
            raise RanksError("the ranks left processes behind: " + "; ".join(map(leaks.command, survivors)))
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Kills the ranks and all that they have started, and removes their files. Idempotent."""
        for process in self._processes:
            process.kill_group()
        for process in self._processes:
            process.close()
        # Those that left their rank's group; one at its end may still be starting another.
        while survivors := self._left():
            for pid in survivors:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        self._served = None  # its server thread and port end with it
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, grace_s: float | None) -> list[Outcome]:
        if self._outcomes is None:
            self._wait_for_exits(grace_s)
            late = [process for process in self._processes if process.child.poll() is None]
            for process in late:
                process.ask_for_stacks()
            for process in late:
                process.end_by_stacks(_DUMP_S)
            self._outcomes = [process.outcome(timed_out=process in late) for process in self._processes]
        return self._outcomes

    def _wait_for_exits(self, grace_s: float | None) -> None:
        end = self._deadline
        failed = False
        while running := [process for process in self._processes if process.child.poll() is None]:
            if grace_s is not None and not failed and any(process.has_failed() for process in self._processes):
                failed = True
                end = min(end, time.monotonic() + grace_s)
            left_s = end - time.monotonic()
            if left_s <= 0:
                return
            # Whichever ends first: while no rank may cut the wait short, the longest wait is until the deadline.
            running[0].child.wait(left_s if grace_s is None or failed else min(left_s, 0.1))

    def _survivors(self) -> set[int]:
        end = time.monotonic() + _SURVIVORS_S
        while survivors := self._left():
            if time.monotonic() > end:
                break
            time.sleep(0.01)  # the end of what is not our child is announced to nobody
        return survivors

    def _left(self) -> set[int]:
        """Live processes that the ranks have started, those that they were forked from not excepted."""
        left = leaks.marked_processes(f"{MARKER}={self._mark}")
        for server in fork_servers():
            left |= server.forks_in_sessions_of(set(self.pids))
        return left


class _Process:
    """One rank as the test process sees it."""

    def __init__(self, rank: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.announced: set[str] = set()
        self._files = _RankFiles(folder, rank)
        self._unread = b""
        commands_in_rank, self._commands = os.pipe()
        self._events, events_in_rank = os.pipe()
        with open(self._files.output, "wb") as output:
            pipes = commands_in_rank, output.fileno(), events_in_rank
            servers = fork_servers()
            self.child = servers[rank % len(servers)].start(folder, rank, environment, pipes)
        os.close(commands_in_rank)
        os.close(events_in_rank)

    def read_announcements(self, timeout_s: float) -> bool:
        """Waits for more of them; False if there are none in time or to come."""
        ready, _, _ = select.select([self._events], [], [], max(0.0, timeout_s))
        data = os.read(self._events, 4096) if ready else b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        self.announced.update(line.decode() for line in lines)
        return bool(data)

    def send(self, event: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, event.encode() + b"\n")

    def has_failed(self) -> bool:
        return self.child.poll() not in (None, 0) or self._files.error_flag.exists()

    def ask_for_stacks(self) -> None:
        self.child.send_signal(_DUMP_SIGNAL)

    def end_by_stacks(self, timeout_s: float) -> None:
        """Waits until it has died of the signal to write its stacks, or makes sure that it dies."""
        # One that was stopped would do it only when continued: then it could act once more after its deadline.
        stopped = leaks.state(self.child.pid) in ("T", "t")
        self.child.wait(0 if stopped else timeout_s)
        self.kill_group()
        self.child.wait()

    def kill_group(self) -> None:
        """Kills a running rank and its group; what a rank has left that ended before is looked for."""
        self.child.send_signal(signal.SIGKILL, group=True)

    def close(self) -> None:
        self.child.wait()
        if self._events >= 0:
            os.close(self._commands)
            os.close(self._events)
            self._events = -1

    def output(self) -> str:
        return self._files.output.read_text(errors="replace")

    def outcome(self, *, timed_out: bool) -> Outcome:
        code = self.child.returncode
        assert code is not None
        result = self._files.load_result()
        kind: Literal["returned", "raised", "exited", "killed", "timed out"]
        if timed_out:
            kind = "timed out"
        elif code < 0:
            kind = "killed"
        elif result is None or code != 0:
            kind = "exited"
        else:
            kind = "raised" if result.error is not None else "returned"
        return Outcome(
            rank=self.rank,
            pid=self.child.pid,
            kind=kind,
            value=result.value if result is not None else None,
            error=result.error if result is not None else None,
            traceback=result.traceback if result is not None else "",
            exitcode=code if code >= 0 else None,
            signal=signal.Signals(-code) if code < 0 else None,
            stack=self._files.stacks.read_text(errors="replace") if timed_out and self._files.stacks.exists() else "",
            output=self.output(),
        )


# --- Between both --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


class _RankFiles:
    """The files through which one rank reports."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.output = folder / f"{rank}.output"
        self.stacks = folder / f"{rank}.stacks"
        self.error_flag = folder / f"{rank}.failed"
        self._result = folder / f"{rank}.result"

    def save_result(self, result: _Result) -> None:
        data = pickle.dumps(result)
        if result.error is not None:
            self.error_flag.touch()
        partial = self._result.with_suffix(".partial")
        partial.write_bytes(data)
        partial.replace(self._result)  # whole or not at all: the rank may be killed at any moment

    def load_result(self) -> _Result | None:
        if not self._result.exists():
            return None
        result = pickle.loads(self._result.read_bytes())
        assert isinstance(result, _Result)
        return result


# --- In a rank -----------------------------------------------------------------------------------------------------


class Rank:
    """What the function under test knows of its place."""

    def __init__(self, rank: int, world_size: int, store: dist.Store | None, link: _Link) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._link = link

    @property
    def store(self) -> dist.Store:
        """The store shared by all ranks; for them alone, the process group uses a part of it apart."""
        if self._store is None:
            raise RanksError('there is no store: pass store="file" or store="tcp"')
        import torch.distributed as dist

        return dist.PrefixStore("test", self._store)

    def announce(self, event: str) -> None:
        """Tells the test that this point is reached; does not wait for it to notice."""
        self._link.announce(event)

    def wait_for(self, event: str, timeout_s: float = 30.0) -> None:
        """Blocks until the test has called ``release(event)``.

        Raises:
            TimeoutError: It has not within ``timeout_s``.
        """
        self._link.wait_for(event, timeout_s)


class _Link:
    """The rank's end of the pipes to the test process."""

    def __init__(self, events: int) -> None:
        os.set_inheritable(events, False)
        self._events = events
        self._changed = threading.Condition()
        self._released: set[str] = set()  # guarded by _changed
        # A duplicate, so that programs which this rank starts do not share the pipe as their standard input.
        self._commands: IO[bytes] = os.fdopen(os.dup(0), "rb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        threading.Thread(target=self._read, name="rank-link", daemon=True).start()

    def announce(self, event: str) -> None:
        os.write(self._events, event.encode() + b"\n")

    def wait_for(self, event: str, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: event in self._released, timeout_s):
                raise TimeoutError(f"the test has not released {event!r} within {timeout_s:g} s")

    def _read(self) -> None:
        for line in self._commands:
            with self._changed:
                self._released.add(line.decode().rstrip("\n"))
                self._changed.notify_all()
        # The end of the pipe is the end of the test process: nobody else is left to end this rank's group.
        os.killpg(0, signal.SIGKILL)


def main_of_rank(folder: Path, rank: int, events: int) -> None:
    """Runs one rank to its end; called in its process alone."""
    files = _RankFiles(folder, rank)
    stacks = open(files.stacks, "w")  # noqa: SIM115  open to the end: the signal may come at any time
    signal.signal(_DUMP_SIGNAL, signal.SIG_DFL)
    # Chained to the default action, death: so the test process knows that all is written once the rank is dead.
    faulthandler.register(_DUMP_SIGNAL, file=stacks, all_threads=True, chain=True)
    faulthandler.enable()  # a crash shows its stack in the rank's output
    link = _Link(events)
    try:
        result = _Result(value=_call(folder, rank, link))
        try:
            files.save_result(result)
        except Exception as error:
            raise RanksError(f"rank {rank} returned what cannot be pickled: {result.value!r:.200}") from error
    except Exception as error:
        _save_error(files, error)


def _save_error(files: _RankFiles, error: Exception) -> None:
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))  # some exceptions can be written but not read back
    except Exception:
        error = RuntimeError(f"{type(error).__qualname__}: {error}")
    files.save_result(_Result(error=error, traceback=text))


def _call(folder: Path, rank: int, link: _Link) -> Any:
    job = json.loads((folder / "job.json").read_text())
    world_size: int = job["world_size"]
    fn, args = pickle.loads((folder / "payload").read_bytes())
    timeout = timedelta(seconds=job["timeout_s"])
    store: dist.Store | None = None
    if job["store"] is not None:
        import torch.distributed as dist
    if job["store"] == "file":
        store = dist.FileStore(str(folder / "store"), world_size)
    elif job["store"] == "tcp":
        store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, timeout=timeout)
    with _process_group(job["backend"], store, rank, world_size, timeout):
        return fn(Rank(rank, world_size, store, link), *args)


@contextlib.contextmanager
def _process_group(
    backend: str | None, store: dist.Store | None, rank: int, world_size: int, timeout: timedelta
) -> Iterator[None]:
    if backend is None:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    yield
    # Only after success: with a failed peer, taking the group down could wait for it.
    if dist.is_initialized():
        dist.destroy_process_group()
    # Groups that cycles (DDP) keep alive go here, and their threads with them. A gloo thread that drops its last tensor
    # while the interpreter ends wants the GIL, is ended by Python instead, and takes the process down by SIGABRT
    # (https://github.com/pytorch/pytorch/issues/190489).
    gc.collect()
