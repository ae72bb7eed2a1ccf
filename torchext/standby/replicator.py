"""The standby for plain PyTorch loops."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchext.standby import rng
from torchext.standby.errors import StateMismatchError
from torchext.standby.link import Identity
from torchext.standby.options import Mode, OnStandbyLoss, Options, Tracking, Transport, check_count
from torchext.standby.publisher import Publisher
from torchext.standby.tree import later_states


class Stateful(Protocol):
    """What has a state of its own: learning rate schedulers, gradient scalers, averaged models, stateful loaders."""

    def state_dict(self) -> Any:
        """Gives the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes it back."""


@dataclass(frozen=True)
class Restored:
    """What `Replicator.restore` found.

    Attributes:
        step: The step whose state everything has now.
        state: What was given to ``commit(state=)`` at that step.
    """

    step: int
    state: Any


def default_job() -> str:
    """A name for this job that is the same after a restart: torchrun's run id, else the command and its folder."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return run_id
    command = "\0".join([str(Path.cwd()), *sys.argv])
    return f"{Path(sys.argv[0]).name or 'python'}-{hashlib.sha256(command.encode()).hexdigest()[:8]}"


def _optimizers(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    found = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    # Lightning Fabric wraps an optimizer in one that looks like it; hooks are called with the inner one.
    inner = [getattr(each, "optimizer", None) for each in found]
    return [i if isinstance(i, torch.optim.Optimizer) else each for i, each in zip(inner, found, strict=True)]


class Replicator:
    """Keeps a standby's copy of the training state, as of the last step, while training goes on.

    ::

        replicator = Replicator(model, optimizer, standby="local")
        found = replicator.restore()
        for step in range(0 if found is None else found.step + 1, num_steps):
            loss = train_step(model, optimizer, step)
            replicator.commit(step, state={"losses": losses})
        replicator.close()

    Parameters and optimizer state are moved into memory that the standby reads while the next forward and backward
    run; ``optimizer.step()`` waits until it has. The rest of the state (buffers, random number generators, ``extra``,
    ``state``) is copied in `commit`. Change parameters only before `commit`, or in ``optimizer.step()``: a change in
    between costs the commit. After a crash the program starts again, with the same ``job``, and `restore` puts it back
    behind the last commit that was whole: at most one step is done again (mode ``"lag1"``), or none (``"rpo0"``).

    All methods belong to the thread that trains. Processes forked while a replicator is in use share its tensors.

    Args:
        model: A module, or several by name; also as Lightning Fabric's ``setup`` returns it.
        optimizer: One, or several; likewise.
        standby: ``"host:port"`` of a ``torchext standby``, or ``"local"``: one on this host, started if need be; it
            ends with the last training that it was needed for, or ten minutes after one that has crashed.
        job: Name of the job at the standby; None: see `default_job`.
        rank: Rank of this process, which keeps its own state, of DTensors its shards; None: of the default process
            group, else environment variable RANK, else 0.
        world_size: Number of processes; None: of the default process group, else environment variable WORLD_SIZE, else
            1. With several, a step counts once every rank has committed it, so all have to commit the same steps.
        extra: Further objects with a state, by name. Tensors in it are copied at each commit if they have changed.
        mode: ``"lag1"``: the standby pulls a step while the next one runs. ``"rpo0"``: `commit` returns only once the
            standby holds the step; what an optimizer has changed is read as soon as it has stepped, so optimizers that
            each step one parameter within the backward pass leave little to wait for.
        tracking: What of a parameter counts as changed by an optimizer's step: ``"owner"``, all of it where it has a
            gradient; ``"rows"``, the rows of a sparse gradient where the optimizer keeps to them; ``"auto"`` is rows.
            ``"pages"``: the pages that anybody has written to, as the kernel saw it (Linux 6.7 or later, else owner
            and a message); a dense optimizer is slowed down by it without `huge_pages`.
        transport: ``"local"``: the standby, on this host, reads this process's memory; ``"rdma"``: it does so from
            another host, through RDMA devices that have the addresses of their connection (RoCE), with pyverbs (extra:
            rdma); ``"tcp"``; ``"auto"``: the first of these that both sides can, RDMA only where this process
            may lock memory without a limit (``ulimit -l``). What fails later is a lost standby: an RDMA network that is
            cut is tried again, TCP does not take its place.
        on_standby_loss: ``"degrade"``: warn once, train on, catch up when it is back; ``"raise"``.
        timeout: How long to wait for the standby before it counts as lost, in seconds.
        num_streams: Connections that carry the state, for TCP.
        huge_pages: True: 2 MiB pages of hugetlb or an error; None: if the system has some; False: not.
        audit_every_n_steps: After so many steps the commit's checksums are compared with those of the whole state;
            `MissedChangeWarning` names what changed without being tracked. 0: never.
        persist_dir: Where the standby writes states to disk, on its host; `restore` takes one from there if the standby
            has lost it. It warns of a full disk (or raises, see ``on_standby_loss``) and tries again.
        persist_every_n_commits: How often. The last two states stay; a copy in the standby's memory is written.

    Raises:
        ImportError: The native core is missing; the message says how to get it.
        ValueError: An argument cannot be; the message names it.

    Source: "Phantasy: Low-Latency Virtualization-based Fault Tolerance via Asynchronous Prefetching" (IEEE Transactions
    on Computers). There pages of a virtual machine are pulled; here tensors, which the optimizers say to have changed.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        standby: str = "local",
        job: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        extra: Mapping[str, Stateful] | None = None,
        mode: Mode = "lag1",
        tracking: Tracking = "auto",
        transport: Transport = "auto",
        on_standby_loss: OnStandbyLoss = "degrade",
        timeout: float | timedelta = 30.0,
        num_streams: int = 4,
        huge_pages: bool | None = None,
        audit_every_n_steps: int = 0,
        persist_dir: str | Path | None = None,
        persist_every_n_commits: int = 0,
    ) -> None:
        options = Options(
            standby=standby,
            mode=mode,
            tracking=tracking,
            transport=transport,
            on_standby_loss=on_standby_loss,
            timeout=timeout,
            num_streams=num_streams,
            huge_pages=huge_pages,
            audit_every_n_steps=audit_every_n_steps,
            persist_dir=persist_dir,
            persist_every_n_commits=persist_every_n_commits,
        )
        self._models = {"model": model} if isinstance(model, torch.nn.Module) else dict(model)
        self._optimizers = _optimizers(optimizer)
        self._extra = dict(extra or {})
        is_distributed = dist.is_available() and dist.is_initialized()
        if rank is None:
            rank = dist.get_rank() if is_distributed else int(os.environ.get("RANK", "0"))
        if world_size is None:
            world_size = dist.get_world_size() if is_distributed else int(os.environ.get("WORLD_SIZE", "1"))
        world_size, rank = check_count("world_size", world_size, at_least=1), check_count("rank", rank, at_least=0)
        if rank >= world_size:
            raise ValueError(f"rank has to be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        self._publisher = Publisher(
            self._models,
            self._optimizers,
            identity=Identity.of_this_process(job or default_job(), rank, world_size),
            options=options,
            gate_in_optimizers=True,
        )

    def restore(self, step: int | None = None) -> Restored | None:
        """Takes over the job and puts everything back to its last commit; call it on every rank before training.

        Args:
            step: Another one that the standby or the disk still holds; None: the last.

        Returns:
            None where the standby holds nothing of this job: a fresh start.

        Raises:
            StateMismatchError: The state is that of another model or number of ranks; names and shapes are given.
            StandbyLostError: The standby cannot be reached.
            StandbyError: A step was committed already.
        """
        state = self._publisher.resume(step)
        if state is None:
            return None
        tree = state.tree
        self._load("models", self._models, tree["models"])
        self._load("optimizers", dict(enumerate(self._optimizers)), dict(enumerate(tree["optimizers"])))
        self._load("extra", self._extra, tree["extra"])
        rng.restore(tree["rng"])
        return Restored(state.step, tree["state"])

    def commit(self, step: int, *, state: Any = None) -> None:
        """Makes the present state the one that a restart finds; call it after the optimizers' step, on every rank.

        Waits for the standby only where the commit before is still being pulled, or in mode ``"rpo0"``.

        Args:
            step: Number of the step that is done, at least 0; grows from commit to commit.
            state: Whatever else `restore` shall give back, such as a position in the data. Pickled.

        Raises:
            FencedError: Another process has taken over this job: stop.
            StandbyLostError: The standby is lost and ``on_standby_loss="raise"``.
            ValueError: The step cannot be.
        """
        later = self._publisher.ledger.later
        self._publisher.publish(
            check_count("step", step, at_least=0),
            lambda: {
                "models": {name: later(model.state_dict()) for name, model in self._models.items()},
                "optimizers": [later_states(optimizer.state_dict()) for optimizer in self._optimizers],
                "extra": {name: each.state_dict() for name, each in self._extra.items()},
                "rng": rng.collect(),
                "state": state,
            },
        )

    def use_optimizers(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """Takes other optimizers from now on; call it before their first step.

        New parameters of the same optimizers, and tensors that take the place of others, are found without.
        """
        self._publisher.gate()
        self._optimizers = _optimizers(optimizer)
        self._publisher.use_optimizers(self._optimizers)

    def gate(self) -> None:
        """Waits until parameters and optimizer state may be changed; ``optimizer.step()`` does it by itself."""
        self._publisher.gate()

    def close(self) -> None:
        """Waits for the last commit and ends the connection: the training is over. The tensors stay usable. Idempotent.

        A ``with`` block does it too. One that an exception leaves keeps a local standby for the restart.
        """
        self._publisher.close(finished=True)

    def __enter__(self) -> Replicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._publisher.close(finished=error is None)

    @property
    def stats(self) -> dict[str, Any]:
        """``published`` and ``committed`` steps, ``bytes_pulled``, ``stalled_s``, ``arena_bytes``, ``connected``."""
        publisher = self._publisher
        return {
            "published": publisher.step,
            "committed": publisher.committed,
            "bytes_pulled": publisher.bytes_pulled,
            "stalled_s": publisher.stalled_s,
            "arena_bytes": publisher.ledger.arena_bytes,
            "connected": publisher.is_connected,
        }

    @staticmethod
    def _load(what: str, objects: Mapping[Any, Stateful], states: Mapping[Any, Any]) -> None:
        if objects.keys() != states.keys():
            raise StateMismatchError(f"the standby's state has {what} {list(states)}, this program {list(objects)}")
        for name, each in objects.items():
            try:
                each.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateMismatchError(f"{what} {name!r} do not fit the standby's state: {error}") from error
