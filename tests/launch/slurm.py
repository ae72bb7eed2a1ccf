"""A Slurm of this machine alone, for tests: four emulated nodes, with daemons, keys and files of their own.

Debian: ``apt-get install slurm-wlm munge``. No accounting, no cgroups, no service of the system is touched.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

from tests import leaks

NODES = ("node0", "node1", "node2", "node3")
_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue")
_UP_WITHIN_S = 120.0

_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0,sched_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
KillWait=30
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def _missing() -> str | None:
    """Says what this machine lacks for a Slurm of its own; None: nothing."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return f"Slurm needs a user with a name, and {os.geteuid()} has none"
    path = _path()
    lacking = [name for name in _NEEDED if shutil.which(name, path=path) is None]
    return f"needs {', '.join(lacking)} (Debian: apt-get install slurm-wlm munge)" if lacking else None


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """A Slurm for tests, which are skipped where it is not installed, or does not start, with its own words."""
    lacking = _missing()
    if lacking is not None:
        pytest.skip(lacking)
    with contextlib.ExitStack() as stack:
        try:
            slurm = stack.enter_context(Slurm(folder))
        except NotUpError as error:
            pytest.skip(str(error))
        yield slurm


class NotUpError(Exception):
    """This machine's Slurm does not start; the message has what its daemons have said."""


class Slurm:
    """Use it in a ``with`` block, which ends all its daemons.

    Args:
        folder: For its files.

    Attributes:
        environment: What its clients need to find it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def __enter__(self) -> Slurm:
        folder = self._folder
        for name in ("munge", "state", *(f"spool/{node}" for node in NODES)):
            (folder / name).mkdir(mode=0o700, parents=True)
        ports = [self._port() for _ in range(1 + len(NODES))]
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        user = pwd.getpwuid(os.geteuid()).pw_name
        (folder / "slurm.conf").write_text(_CONF.format(host=host, ports=ports, user=user, folder=folder, nodes=nodes))
        (folder / "munge" / "key").write_bytes(os.urandom(1024))
        (folder / "munge" / "key").chmod(0o400)
        try:
            munge = [f"--{what}={folder}/munge/{what.partition('-')[0]}" for what in ("socket", "pid-file", "log-file")]
            munge += [f"--key-file={folder}/munge/key", f"--seed-file={folder}/munge/seed"]
            self._start("munged", "--foreground", "--force", *munge)
            self._wait((folder / "munge" / "socket").exists)
            self._start("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
            for node in NODES:
                self.start_node(node)
            self._wait(lambda: self.call("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == "4")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            if isinstance(error, (AssertionError, subprocess.TimeoutExpired)):
                raise NotUpError(f"Slurm does not start here: {error}") from None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.call("scancel", "--signal=KILL", "--full", f"--user={pwd.getpwuid(os.geteuid()).pw_name}")
        while alive := self._processes():
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        for daemon in self._daemons.values():
            daemon.wait()
        self._stack.close()

    def _processes(self) -> set[int]:
        """Live processes of its daemons and jobs."""
        found = leaks.marked_processes(f"SLURM_CONF={self.environment['SLURM_CONF']}")
        return {pid for pid in found if leaks.state(pid) not in ("", "Z")}

    def call(self, *words: str) -> str:
        """Runs one of Slurm's own commands; returns what it prints."""
        done = subprocess.run(
            words, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, "-f", str(self._folder / "slurm.conf"), name=node)

    def wait_until_idle(self) -> None:
        """Blocks until no job is left, and no process of one."""
        self._wait(lambda: not self.call("squeue", "--noheader"))
        self._wait(lambda: not any(_is_of_job(pid) for pid in self._processes()))

    def kill_node(self, node: str) -> None:
        """The daemon of the node is killed, and the controller notices, as it does after its timeout."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def _start(self, program: str, *words: str, name: str = "") -> None:
        with open(self._folder / f"{name or program}.out", "ab") as output:
            self._daemons[name or program] = subprocess.Popen(
                [program, *words],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _port(self) -> int:
        """A port that nobody else gets: bound without listening, so that who asks for it by name and reuses it does."""
        holder = self._stack.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        return port

    def _wait(self, condition: object) -> None:
        assert callable(condition)
        deadline = time.monotonic() + _UP_WITHIN_S
        while not condition():
            ended = {name: daemon.returncode for name, daemon in self._daemons.items() if daemon.poll() is not None}
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"Slurm is not as it should be; ended {ended}\n{self._words()}")
            time.sleep(0.05)

    def _words(self) -> str:
        """The last that each daemon has said."""
        files = sorted(self._folder.glob("*.out"))
        return "\n".join(f"{file.stem}: {file.read_text(errors='replace')[-400:].strip()}" for file in files)


def _is_of_job(pid: int) -> bool:
    try:
        within = b"\0SLURM_JOB_ID=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # it has ended
    return within or "slurmstepd" in leaks.command(pid)
