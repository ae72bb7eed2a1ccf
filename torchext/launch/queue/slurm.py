"""Slurm's commands, as far as the queue needs them: sbatch, squeue, sinfo, scontrol, scancel; never sacct.

Slurm keeps no accounts on many small clusters, so that sacct knows nothing there. Options that say where jobs may run,
and on whose account, come from the environment of the daemon, as sbatch itself reads them (SBATCH_PARTITION,
SBATCH_ACCOUNT, SBATCH_QOS, ...).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchext.launch.errors import LaunchError

_COMMAND_S = 60.0  # Slurm's own timeouts are shorter
_LATER = ("contact slurm controller", "timed out", "temporarily", "Connection refused")
_USABLE = ("idle", "mixed", "allocated", "completing", "planned")


class SlurmError(LaunchError):
    """A command of Slurm has failed.

    Attributes:
        passing: Whether it may work later: the controller cannot be reached.
    """

    def __init__(self, message: str, *, passing: bool) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass(frozen=True)
class SlurmJob:
    """What squeue says of a job.

    Attributes:
        id: Slurm's number.
        state: PENDING, RUNNING, COMPLETING, CANCELLED, NODE_FAIL, ...
        reason: Why it waits.
        comment: What we called it.
        has_run: Whether it was ever given nodes.
    """

    id: int
    state: str
    reason: str
    comment: str
    has_run: bool

    @property
    def over(self) -> bool:
        """Whether nothing of it runs, or will, as far as Slurm knows."""
        return self.state not in (
            "PENDING",
            "CONFIGURING",
            "RUNNING",
            "COMPLETING",
            "SUSPENDED",
            "STOPPED",
            "SIGNALING",
        )

    @property
    def held(self) -> bool:
        """Whether it waits to be released."""
        return self.state == "PENDING" and self.reason.startswith("JobHeld")


@dataclass(frozen=True)
class SlurmMachine:
    """What sinfo says of a node.

    Attributes:
        name: Its name.
        address: Where Slurm, and other nodes, reach it.
        cpus: CPUs, as Slurm counts them.
        gpus: GPUs.
        gpu_type: Their type; "" if Slurm does not know.
        usable: Whether it takes jobs.
        down: Whether what ran there is lost.
    """

    name: str
    address: str
    cpus: int
    gpus: int
    gpu_type: str
    usable: bool
    down: bool


def jobs() -> list[SlurmJob]:
    """Lists the jobs of this user, those that have ended in the last minutes (MinJobAge) included."""
    printed = _run(["squeue", "--noheader", "--me", "--states=all", "--format=%i|%T|%r|%N|%k"])
    found = []
    for line in printed.splitlines():
        number, state, reason, nodes, comment = line.split("|", 4)
        if number.isdecimal():  # parts of arrays and the like are not ours
            found.append(SlurmJob(int(number), state, reason, comment, bool(nodes)))
    return found


def machines() -> dict[str, SlurmMachine]:
    """Lists nodes, by name."""
    printed = _run(["sinfo", "--noheader", "--Node", "--format=%N|%o|%c|%G|%T"])
    return {machine.name: machine for machine in map(_read_machine, printed.splitlines())}


def _read_machine(line: str) -> SlurmMachine:
    name, address, cpus, resources, state = line.split("|", 4)
    # As in gpu:v100:4(S:0-1),gpu:a100:2 or gpu:8.
    kinds = re.findall(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)", resources)
    word = re.match("[a-z_]*", state.lower())
    assert word is not None
    return SlurmMachine(
        name=name,
        address=address,
        cpus=int(cpus.rstrip("+")),
        gpus=sum(int(count) for _, count in kinds),
        gpu_type=kinds[0][0] if kinds else "",
        usable=word[0] in _USABLE and not state.endswith(("*", "-")),
        down=word[0] in ("down", "fail", "failing"),
    )


def submit_held(
    script: Path,
    *,
    name: str,
    comment: str,
    num_nodes: int,
    cpus_per_node: int,
    gpus_per_node: int,
    env: Mapping[str, str],
) -> int:
    """Submits a job that waits until it is told where to run; returns its number.

    Args:
        script: What it runs, in the folder of the script, with a task on each node. That folder takes its output.
        name: For people.
        comment: For us.
        num_nodes: How many nodes.
        cpus_per_node: CPUs on each.
        gpus_per_node: GPUs on each.
        env: Environment of the job.

    Raises:
        SlurmError: Slurm refuses it, or cannot be reached.
        ValueError: A word or name that the system cannot pass on.
    """
    words = [
        "sbatch",
        "--parsable",
        "--hold",
        "--no-requeue",  # the queue does that
        "--no-kill",  # when a node fails, the queue gives the others their grace
        f"--job-name={name}",
        f"--comment={comment}",
        f"--nodes={num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus_per_node}",
        f"--chdir={script.parent}",
        f"--output={script.parent}/slurm.log",
        "--open-mode=append",
    ]
    words += [f"--gres=gpu:{gpus_per_node}"] if gpus_per_node else []
    # A submitter who is within a job of Slurm has variables that would speak for that job.
    kept = {key: value for key, value in env.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    ours = {key: value for key, value in os.environ.items() if key.startswith("SBATCH_") or key == "SLURM_CONF"}
    printed = _run([*words, str(script)], env={**kept, **ours})
    return int(printed.partition(";")[0])  # NUMBER or NUMBER;CLUSTER


def place(job: int, names: Sequence[str]) -> None:
    """Tells Slurm where a held job will run.

    Raises:
        SlurmError: Slurm refuses, or cannot be reached.
    """
    _run(["scontrol", "update", f"JobId={job}", f"ReqNodeList={','.join(names)}"])


def release(job: int) -> None:
    """Lets a held job run.

    Raises:
        SlurmError: Slurm refuses, or cannot be reached.
    """
    _run(["scontrol", "release", str(job)])


def cancel(job: int, *, only_waiting: bool = False) -> None:
    """Ends a job; with ``only_waiting`` not if it has been given nodes meanwhile.

    Raises:
        SlurmError: Slurm cannot be reached.
    """
    _run(["scancel", "--quiet", *(["--state=PENDING"] if only_waiting else []), str(job)])


def _run(words: Sequence[str], *, env: Mapping[str, str] | None = None) -> str:
    program = shutil.which(words[0])
    if program is None:
        raise SlurmError(f"there is no {words[0]} on PATH: is this a machine of a Slurm cluster?", passing=False)
    try:
        done = subprocess.run(
            [program, *words[1:]],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} has not answered within {_COMMAND_S:g} s", passing=True) from None
    except OSError as error:
        raise SlurmError(f"cannot run {program}: {error}", passing=error.errno != errno.E2BIG) from None
    if done.returncode != 0:
        said = done.stderr.strip() or f"status {done.returncode}"
        raise SlurmError(f"{words[0]}: {said}", passing=any(word in said for word in _LATER))
    return done.stdout
