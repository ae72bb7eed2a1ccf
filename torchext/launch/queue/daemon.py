"""The daemon: keeps a dispatcher going and answers requests, one JSON object per line.

It may be killed at any moment: jobs go on, and the next daemon of the folder finds them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hmac
import json
import logging
import math
import os
import secrets
import signal
import socket
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchext.launch.errors import LaunchError
from torchext.launch.folders import lock, write_whole
from torchext.launch.queue.dispatcher import Dispatcher
from torchext.launch.queue.node import LocalNode, Node
from torchext.launch.queue.remote import NotYet, RemoteNode
from torchext.launch.queue.slurm_engine import NUM_HELD, SlurmEngine, discover
from torchext.launch.queue.store import JobRow, RunRow, Store
from torchext.launch.queue.types import JobState, PartKey, Submission
from torchext.scheduling import Cluster, Machine, make_policy

logger = logging.getLogger(__name__)

SOCKET = "queue.sock"
_TICK_S = 0.1
_AGAIN_S = 1.0  # after the disk was full or failed
_LONGEST_LINE = 1 << 24  # an environment may be large
_LONGEST_PATH = 107  # of a Unix socket


def this_machine() -> tuple[Cluster, tuple[str, ...] | None]:
    """Makes a cluster of this machine: its GPUs, else a slot for each CPU; says, too, how the GPUs are called."""
    name = socket.gethostname() or "localhost"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        logger.warning("there is no torch here, which would know of GPUs: a slot for each CPU")
    else:
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = tuple(visible.split(",")) if visible else tuple(map(str, range(count)))
            return Cluster((Machine(name, count),)), devices
    return Cluster((Machine(name, len(os.sched_getaffinity(0))),)), None


class Daemon:
    """One queue. Made and run in one thread.

    Args:
        folder: Where it keeps everything; one daemon per folder.
        cluster: The machines; None: this one.
        policy: Name of the policy.
        engine: Who runs the jobs: ``local``, this machine, for all of the cluster; ``nodes``, node agents; ``slurm``.
        lease_s: How long jobs of a node agent go on when it or its machine is silent.

    Raises:
        LaunchError: Another daemon runs in the folder, or what it holds does not fit the cluster.
    """

    def __init__(
        self,
        folder: Path,
        *,
        cluster: Cluster | None = None,
        policy: str = "qssf",
        engine: str = "local",
        lease_s: float = 300.0,
    ) -> None:
        folder = folder.absolute()  # jobs have other working directories
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        held = lock(folder / "daemon.lock")
        if held is None:
            raise LaunchError(f"a queue runs in {folder} already (torchext queue ls --queue {folder})")
        self._held = held
        with contextlib.ExitStack() as undone:
            undone.callback(os.close, held)
            self._store = Store(folder / "queue.sqlite")
            undone.callback(self._store.close)
            self._agents = self._store.agents()
            self._remote: dict[str, RemoteNode] = {}
            self._slurm: SlurmEngine | None = None
            self._nodes: Mapping[str, Node]
            if engine == "slurm":
                cluster = cluster or discover()
                self._slurm = SlurmEngine(folder / "slurm", cluster)
                undone.callback(self._slurm.close)
                self._nodes = self._slurm.nodes
            else:
                devices = None
                if cluster is None:
                    cluster, devices = this_machine()
                names = [machine.name for machine in cluster.machines]
                if engine == "nodes":
                    self._remote = {name: RemoteNode(name, lease_s, self._agents.get(name)) for name in names}
                    self._nodes = self._remote
                else:
                    self._nodes = {name: LocalNode(folder / "machines" / name, devices=devices) for name in names}
            self._cluster = cluster
            self._policy = policy
            self._dispatcher = self._make_dispatcher()
            undone.pop_all()  # all went well
        self._wake = asyncio.Event()
        self._stopping = False
        self._operations: Mapping[str, Callable[..., Any]] = {
            "ping": lambda: {"policy": policy, "pid": os.getpid()},
            "stop": self._stop,
            "submit": lambda job: self._dispatcher.submit(Submission.from_json(job)),
            "cancel": lambda job: self._dispatcher.cancel(job),
            "requeue": lambda job: self._dispatcher.requeue(job),
            "drain": lambda machine, now=False: self._dispatcher.drain(machine, now=now),
            "undrain": lambda machine: self._dispatcher.undrain(machine),
            "jobs": self._list,
            "job": self._describe,
            "machines": lambda: self._dispatcher.machines(),
            "plan": lambda: dataclasses.asdict(self._dispatcher.plan()),
            "log": self._read_log,
            "sync": self._sync,
        }

    async def run(self, *, listen: str | None = None, ready: Callable[[str], None] = lambda url: None) -> None:
        """Serves until told to stop, by SIGTERM, SIGINT or a request; jobs go on.

        Args:
            listen: HOST:PORT to take requests at besides the socket in the folder; these need the token.
            ready: Called with the address once requests are taken.

        Raises:
            LaunchError: The address cannot be had.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        path = self._folder / SOCKET
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise LaunchError(f"the path of the socket is too long for this system: {path}; choose a shorter --folder")
        path.unlink(missing_ok=True)  # of a daemon that was killed; we hold the lock
        before = os.umask(0o177)
        try:
            servers = [await asyncio.start_unix_server(self._serve_local, path, limit=_LONGEST_LINE)]
        finally:
            os.umask(before)
        url = f"unix:{path}"
        try:
            if listen is not None:
                servers.append(await self._listen(listen))
                url += f" tcp://{':'.join(map(str, servers[-1].sockets[0].getsockname()[:2]))}"
            ready(url)
            while not self._stopping:
                await self._tick()
        finally:
            for server in servers:
                server.close()
            path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Lets go of the folder. Idempotent."""
        if self._held >= 0:
            if self._slurm is not None:
                self._slurm.close()
            self._store.close()
            os.close(self._held)
            self._held = -1

    async def _tick(self) -> None:
        pause_s = _TICK_S
        try:
            for name, node in self._nodes.items():
                self._dispatcher.set_away(name, node.away)
            self._dispatcher.tick()
            for name, remote in self._remote.items():
                remote.forget(self._dispatcher.open_parts(name).keys())
            if self._slurm is not None:
                self._slurm.keep(self._dispatcher.open_parts(), self._dispatcher.upcoming(NUM_HELD))
        except (OSError, sqlite3.Error) as error:
            # What is in memory may differ from what is stored; the latter is right, as after a crash.
            logger.error("cannot go on (%s); trying again from what is stored", error)
            pause_s = _AGAIN_S
            with contextlib.suppress(OSError, sqlite3.Error):
                self._dispatcher = self._make_dispatcher()
        self._wake.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause_s)

    def _make_dispatcher(self) -> Dispatcher:
        made = Dispatcher(self._store, self._cluster, make_policy(self._policy), self._nodes, folder=self._folder)
        for name, node in self._nodes.items():
            made.set_away(name, node.away)
        for name, remote in self._remote.items():
            for key, grace_s in made.open_parts(name).items():
                remote.expect(key, grace_s)
        return made

    def _stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def _listen(self, address: str) -> asyncio.Server:
        host, _, port = address.rpartition(":")
        if not self._token():
            write_whole(self._folder / "token", secrets.token_urlsafe(32))
        try:
            return await asyncio.start_server(self._serve_remote, host, int(port), limit=_LONGEST_LINE)
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot listen at {address!r} (HOST:PORT; port 0 for any): {error}") from error

    def _token(self) -> str:
        """What remote clients have to know; empty, which lets nobody in, where there is none."""
        try:
            return (self._folder / "token").read_text().strip()
        except FileNotFoundError:
            return ""

    async def _serve_local(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._serve(reader, writer, token=None)

    async def _serve_remote(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._serve(reader, writer, token=self._token())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str | None) -> None:
        try:
            while line := await reader.readline():
                answer = self._answer(line, token)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
                if answer.get("refused"):
                    return
        except (ConnectionError, ValueError) as error:  # ValueError: a line beyond the limit
            logger.warning("lost a client: %s", error)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            writer.close()

    def _answer(self, line: bytes, token: str | None) -> dict[str, Any]:
        try:
            request = json.loads(line)
            given = str(request.pop("token", ""))
            if token is not None and not (token and hmac.compare_digest(given.encode(), token.encode())):
                words = "this queue needs its token, which is in its folder: set TORCHEXT_QUEUE_TOKEN"
                return {"error": words, "refused": True}
            operation = self._operations[request.pop("op")]
            result = operation(**request)
        except LaunchError as error:
            return {"error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            logger.exception("a request was not understood")
            return {"error": f"not understood ({error!r}); are client and queue of one version?"}
        except (OSError, sqlite3.Error) as error:
            with contextlib.suppress(OSError, sqlite3.Error):
                self._dispatcher = self._make_dispatcher()
            return {"error": f"the queue cannot keep this: {error}"}
        self._wake.set()
        return {"result": result}

    def _list(self, ended_within_s: float | None = None) -> dict[str, Any]:
        rows = self._dispatcher.jobs(math.inf if ended_within_s is None else ended_within_s)
        return {"now_s": self._dispatcher.now_s(), "jobs": [_row(row) for row in rows]}

    def _describe(self, job: int, plan: bool = True) -> dict[str, Any]:
        row = self._dispatcher.job(job)
        described = _row(row)
        described["submission"] = json.loads(row.submission.to_json())
        described["submission"].pop("env")  # may hold secrets
        described["runs"] = [_run(run) for run in self._dispatcher.runs(job)]
        described["now_s"] = self._dispatcher.now_s()
        if plan and row.state is JobState.WAITING:
            waits = {wait.job_id: wait for wait in self._dispatcher.plan().waits}
            if str(job) in waits:
                described["waits"] = dataclasses.asdict(waits[str(job)])
        return described

    def _read_log(self, job: int, run: int, node: int, offset: int, size: int) -> dict[str, Any]:
        if offset < 0 or size < 0:
            raise LaunchError(f"a log is read from an offset and for a size of at least 0, got {offset} and {size}")
        try:
            data, more = self._dispatcher.read_log(PartKey(job, run, node), offset, min(size, 1 << 20))
        except NotYet:
            return {"data": "", "more": True, "again": True}
        return {"data": base64.b64encode(data).decode(), "more": more, "again": False}

    def _sync(self, machine: str, agent: str, **told: Any) -> dict[str, Any]:
        node = self._remote.get(machine)
        if node is None:
            names = ", ".join(self._remote)
            raise LaunchError(
                f"this queue has no machine {machine!r} to join, only {names} (--name)"
                if names
                else "this queue runs all jobs on its own machine; start it with --engine nodes"
            )
        answer = node.sync(agent=agent, **told, open_parts=set(self._dispatcher.open_parts(machine)))
        if self._agents.get(machine) != agent:  # kept before it can start anything
            self._store.set_agent(machine, agent)
            self._agents[machine] = agent
        return answer


def _row(row: JobRow) -> dict[str, Any]:
    asked = row.submission
    return {
        "id": row.id,
        "name": asked.name,
        "user": asked.user,
        "state": row.state.value,
        "reason": row.reason,
        "num_nodes": asked.num_nodes,
        "nproc_per_node": asked.nproc_per_node,
        "priority": asked.priority,
        "submit_s": row.submit_s,
        "end_s": row.end_s,
        "num_runs": row.num_runs,
        "run_s": row.run_s,
    }


def _run(run: RunRow) -> dict[str, Any]:
    described = dataclasses.asdict(run)
    described["why"] = None if run.why is None else run.why.value
    return described
