"""The agent of one node: torch's, with endings that keep their word."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import time
from string import Template
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from torchext.launch.errors import LaunchError
from torchext.launch.logs import LINE_PREFIX, Logs
from torchext.launch.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

_POLL_S = 0.02  # while waiting for workers to end
_KILLED_S = 10  # for the kernel to end what has been killed


class Agent(LocalElasticAgent):
    """Runs the workers of one node to their end.

    In contrast to torch's own:

    - Workers get one signal and the whole grace, on every path: when the agent is signalled, when a worker or another
      node fails, when the group restarts. What they have started in their process group gets it, too.
    - A node that fails for good, or is gone, ends or restarts the job on all nodes; none waits in vain.
    - A node that is done waits for the others for as long as they live.

    Args:
        spec: What to run; its rendezvous is what `meet` has made.
        logs_specs: Where output goes.
        grace_s: How long workers may take to end.
        job: Name for log lines.
        start_method: For ``--run-path``.
        line_prefix: Template of what stands before each line with ``--tee``; knows ``${job}``, ``${node}``,
            ``${rank}``, ``${local_rank}`` and ``${role_name}``.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        grace_s: float,
        job: str,
        start_method: str = "spawn",
        line_prefix: str | None = None,
    ) -> None:
        super().__init__(spec, logs_specs, start_method=start_method)
        self._grace_s = grace_s
        self._job = job
        self._line_prefix = LINE_PREFIX if line_prefix is None else line_prefix
        self._pcontext: PContext | None = None
        self._ending_by: float | None = None  # when the present workers, asked to end, will be killed
        self._success: RunResult | None = None  # of the present workers, while those of other nodes still run
        self._signalled: signal.Signals | None = None  # the first signal, which ends the run
        self._is_ending_workers = False
        self._in_a_hurry = False  # a SIGINT has come while workers end, or after the signal that ends the run

    # Starting

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handler = worker_group.spec.rdzv_handler
        if isinstance(self._logs_specs, Logs) and isinstance(handler, Rendezvous):
            self._logs_specs.attempt = handler.round
        self._log_line_prefix_template = Template(self._line_prefix).safe_substitute(
            job=self._job, node=worker_group.group_rank
        )
        self._ending_by = None
        self._success = None
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert context is not None
        # torch closes a context in several places, most of them with 30 s of grace, whatever the user has asked for.
        context.close = functools.partial(self._end_workers, context)  # type: ignore[method-assign]
        self._handle_signals()
        return pids

    def _handle_signals(self) -> None:
        """Takes the place of torch's handlers, which throw the agent out of the ending that it has begun."""
        for number in _signals_to_handle():
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received == signal.SIGINT and (self._is_ending_workers or self._signalled is not None):
            self._in_a_hurry = True
        if self._signalled is not None:
            return
        self._signalled = received
        if not self._is_ending_workers:  # else it is raised once they have ended
            self._raise_signal()

    def _raise_signal(self) -> None:
        assert self._signalled is not None
        raise SignalException(f"process {os.getpid()} got signal {self._signalled.name}", self._signalled)

    # Watching

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handler = worker_group.spec.rdzv_handler
        result: RunResult = self._success or super()._monitor_workers(worker_group)
        if not isinstance(handler, Rendezvous):
            return result
        if result.state == WorkerState.SUCCEEDED:
            self._success = result
            handler.mark_done()
            if handler.all_done():
                return result
            # Until all are done this node is as one whose workers run: when others restart, so does it.
            result = RunResult(state=WorkerState.HEALTHY)
        if result.state == WorkerState.HEALTHY:
            self._check_others(handler)
        return result

    def _check_others(self, handler: Rendezvous) -> None:
        if handler.is_closed() and not (self._success and handler.all_done()):
            raise LaunchError(f"another node of job {self._job!r} has failed; see its log")
        lost = handler.lost()
        if lost and handler.num_left() < handler.min_nodes and self._remaining_restarts == 0:
            raise LaunchError(
                f"job {self._job!r} has lost {', '.join(lost)}: of at least {handler.min_nodes} nodes, "
                f"{handler.num_left()} are left, and no restarts (--max-restarts)"
            )

    def _exit_barrier(self) -> None:
        # All are done already, unless it is a rendezvous that cannot tell.
        if not isinstance(self._worker_group.spec.rdzv_handler, Rendezvous):
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    # Ending

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        super()._shutdown(death_sig)  # how long workers have is up to `_end_workers`

    def _end_workers(
        self, context: PContext, death_sig: signal.Signals | None = None, timeout: float | None = None
    ) -> None:
        """Stands in for `PContext.close`: asks once, waits for whole process groups, then kills them.

        A signal that comes meanwhile ends the run once they have ended; SIGINT, the impatient user's, ends the grace.
        """
        self._handle_signals()  # torch may have set its own when it started these workers
        was_signalled = self._signalled is not None
        self._is_ending_workers = True
        try:
            first = self._ending_by is None
            if self._ending_by is None:
                self._ending_by = time.monotonic() + self._grace_s
            if not isinstance(context, SubprocessContext):  # --run-path: torch's own way, which knows no groups
                PContext.close(context, death_sig, math.ceil(self._grace_s))
            else:
                groups = {handler.proc.pid: handler.proc for handler in context.subprocess_handlers.values()}
                if first:
                    for pid in _left(groups):
                        _signal_group(pid, death_sig or signal.SIGTERM)
                while _left(groups) and time.monotonic() < self._ending_by and not self._in_a_hurry:
                    time.sleep(_POLL_S)
                for pid in _left(groups):
                    logger.warning("worker %s has not ended within the grace of %g s: killing it", pid, self._grace_s)
                    _signal_group(pid, signal.SIGKILL)
                PContext.close(context, death_sig, _KILLED_S)  # waits for the last, and for their last words
        finally:
            self._is_ending_workers = False
        if self._signalled is not None and not was_signalled:
            self._raise_signal()


def _signals_to_handle() -> list[signal.Signals]:
    names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    numbers = [getattr(signal, name.strip(), None) for name in names.split(",")]
    return [number for number in numbers if isinstance(number, signal.Signals)]


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended, or are another user's by now
        os.killpg(group, number)


def _left(groups: dict[int, Any]) -> list[int]:
    """Those process groups that still have a member, ended leaders taken note of."""
    left = []
    for pid, leader in groups.items():
        if leader.poll() is None:
            left.append(pid)
            continue
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError:  # another user's: there is somebody, but not for us to wait for
            continue
        left.append(pid)
    return left
