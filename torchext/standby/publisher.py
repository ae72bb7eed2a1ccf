"""When the standby may read and when the optimizers may write: commits, the gate, and what to do in trouble."""

from __future__ import annotations

import logging
import operator
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchext._optional import require_native
from torchext.standby.errors import (
    FencedError,
    NoStateError,
    StandbyError,
    StandbyLostError,
    StateMismatchError,
)

require_native()

from torchext.standby import persist, rdma  # noqa: E402
from torchext.standby import tree as trees  # noqa: E402
from torchext.standby.connect import Reconnect, open_link  # noqa: E402
from torchext.standby.ledger import Ledger, Publication  # noqa: E402
from torchext.standby.link import Identity, Link  # noqa: E402
from torchext.standby.options import Options  # noqa: E402
from torchext.standby.pages import PageTracking  # noqa: E402
from torchext.standby.promote import await_promotion  # noqa: E402

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class StandbyLostWarning(UserWarning):
    """Training goes on without a standby."""


class PersistWarning(UserWarning):
    """The standby could not write a state to disk; it tries again with a later one."""


class MissedChangeWarning(UserWarning):
    """An audit has found that the standby's copy is not the state: something changed that tracking did not see."""


class Publisher:
    """Replicates the state of one training process.

    Made by `Replicator` and by the Lightning callback, which know what the state is. All methods belong to the thread
    that trains.

    Attributes:
        step: The last step that was published; None before the first.
        stalled_s: How long training has waited for the standby in all, in seconds.
        on_sealed: Called with each step that the standby holds whole and its publication, before the optimizers may
            change what that speaks of (`Ledger.entry`).
    """

    def __init__(
        self,
        modules: dict[str, torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        *,
        identity: Identity,
        options: Options,
        gate_in_optimizers: bool,
    ) -> None:
        if options.transport == "rdma" and (lacks := rdma.lacks(None)) is not None:
            raise StandbyError(f"transport='rdma' is not possible: {lacks}")
        self._options = options
        self._persist_dir = None if options.persist_dir is None else str(Path(options.persist_dir).absolute())
        self.ledger = Ledger(
            modules,
            optimizers,
            huge_pages=options.huge_pages,
            track_rows=options.tracking in ("rows", "auto"),
            pages=_track_pages() if options.tracking == "pages" else None,
        )
        self._audited: int | None = None  # the last step that was
        self._expected: dict[int, int] | None = None  # checksums of the step in flight, if it is audited
        self.step: int | None = None
        self.stalled_s = 0.0
        self.on_sealed: list[Callable[[int, Publication], None]] = []
        self._identity = identity
        self._link: Link | None = None
        self._in_flight: int | None = None  # the step that the standby may be pulling
        self._ahead: dict[torch.optim.Optimizer, int] = {}  # the last order to read ahead what each has changed
        self._bytes_before = 0  # of links that are gone
        self._committed_before: int | None = None
        self._reconnect: Reconnect | None = None
        self._closed = False
        # Of which errors users were told, since the last step that the standby got.
        self._warned_of: set[type[BaseException]] = set()
        self._gate_in_optimizers = gate_in_optimizers
        self._hooks: list[Any] = []
        self.use_optimizers(optimizers)

    # --- the user's calls ---

    def use_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """From the next commit on these are the optimizers; does nothing if they are already."""
        before = self.ledger.optimizers
        if self._hooks and len(before) == len(optimizers) and all(map(operator.is_, before, optimizers)):
            return
        for hook in self._hooks:
            hook.remove()
        self.ledger.optimizers = optimizers
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers]
        if self._gate_in_optimizers:
            self._hooks += [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def resume(self, step: int | None = None) -> persist.State | None:
        """Takes over the rank and fetches its state, from the disk where that has a later one.

        Args:
            step: None: the step that counts.

        Returns:
            None where there is no state.

        Raises:
            StandbyError: The standby cannot be reached, or refuses; or this process has committed steps already.
        """
        if self.step is not None:
            raise StandbyError(
                f"restore() after commit() of step {self.step}: call it before the first commit, or in another process"
            )
        on_disk = persist.steps(self._persist_dir, self._identity.job) if self._persist_dir is not None else []
        try:
            link = self._linked(take_over=True)
            if link is None:
                raise StandbyLostError("it was lost, and has not been found again yet")
            return resume_from(link, step, on_disk, self._load_from_disk, self.ledger.mesh)
        except NoStateError:
            if step is None:
                return None
            raise
        except (OSError, StandbyLostError) as error:
            if on_disk and step in (None, *on_disk) and self._options.on_standby_loss == "degrade":
                self._lose(error)
                return self._load_from_disk(step)
            raise StandbyLostError(f"the standby at {self._options.standby} cannot be reached: {error}") from error

    def _load_from_disk(self, step: int | None) -> persist.State:
        i = self._identity
        assert self._persist_dir is not None
        return persist.load(
            self._persist_dir, i.job, rank=i.rank, world_size=i.world_size, step=step, find_mesh=self.ledger.mesh
        )

    def connect(self) -> None:
        """Claims the rank, if that was not done yet; call it before the first step.

        Raises:
            FencedError: Another process trains this rank.
            StateMismatchError: The job has another number of ranks.
            StandbyLostError: With ``on_standby_loss="raise"``.
        """
        try:
            self._linked(take_over=False)
        except (FencedError, StateMismatchError):
            raise
        except (OSError, StandbyError) as error:
            self._lose(error)

    def publish(self, step: int, collect: Callable[[], Any]) -> None:
        """Commits the state of a step: lets the standby pull it, and in mode rpo0 waits until it counts.

        Args:
            step: The step; more than the one before.
            collect: Gives the tree of the state; called if there is a standby.

        Raises:
            FencedError: Another process has taken over.
            StandbyLostError: With ``on_standby_loss="raise"``.
        """
        if self._closed:
            raise StandbyError("commit() after close()")
        if self.step is not None and step <= self.step:
            raise ValueError(f"steps have to grow: {step} after {self.step}")
        self.gate()  # of the commit before, where no optimizer has stepped since
        try:
            link = self._linked(take_over=False)
            if link is None:
                self.step = step
                return
            self._check(link)
            audit = self._is_audit_due(step)
            link.publish(step, self.ledger.publish(collect, at_once=audit), audit=audit)
            self._in_flight = step
            self._expected = self.ledger.checksums() if audit else None  # while it pulls
            self.step = step
            self._ahead.clear()  # what was read ahead is part of the step that is in flight
        except (FencedError, StateMismatchError):
            self._unlink()
            raise
        except (OSError, StandbyError) as error:
            self.step = step
            self._lose(error)
        if self._options.mode == "rpo0":
            self.gate()

    def gate(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Returns once the optimizers may change what they own: the standby has pulled it, and in rpo0 it counts.

        Args:
            optimizer: If only this one may.

        Returns:
            Whether a step was sealed by this call; False where there was nothing to wait for, or it was dropped.

        Raises:
            FencedError: Another process has taken over.
            StandbyLostError: With ``on_standby_loss="raise"``: the standby is gone, or did not end within the timeout.
        """
        link, step = self._link, self._in_flight
        if link is None:
            return False
        orders = list(self._ahead.values()) if optimizer is None else [self._ahead.get(optimizer, 0)]
        sealed: Publication | None = None
        try:
            if max(orders, default=0) > link.read_ahead:
                self._timed(lambda: link.wait_ahead(max(orders)))
            if step is None:
                return False
            self._check(link)
            checksums = self._timed(lambda: link.wait_pulled(step))
            disturbed = self.ledger.disturbed()
            self._in_flight = None
            if disturbed:
                # It may have been written while it was pulled: what the standby has may be of no step at all.
                link.drop(step)
                assert link.publication is not None  # it was sent: the standby has pulled it
                self.ledger.take_back(link.publication)
                logger.warning(
                    "step %d is not committed: %s was changed between commit() and the optimizer's step; commit after "
                    "such changes",
                    step,
                    ", ".join(disturbed[:3]),
                )
            elif not self._is_as_expected(step, checksums):
                link.drop(step)
                assert link.publication is not None
                self.ledger.take_back(link.publication)
            else:
                link.seal(step)
                self._warned_of.clear()
                sealed = link.publication
                if self._options.mode == "rpo0":
                    self._timed(lambda: link.wait_committed(step))
        except FencedError:
            self._unlink()
            raise
        except (OSError, StandbyError) as error:
            self._lose(error)
        if sealed is None or step is None:
            return False
        for tell in self.on_sealed:
            tell(step, sealed)
        return True

    def settle(self) -> None:
        """Returns once the last commit counts, or cannot."""
        link, step = self._link, self._in_flight
        try:
            if self.gate() and link is not None and step is not None:
                link.wait_committed(step)
        except (StandbyError, OSError) as error:
            logger.warning("the last commit may be lost: %s", error)

    def close(self, *, finished: bool) -> None:
        """Lets the standby finish the last commit, then ends the connection. The tensors stay where they are.

        Idempotent; raises nothing that has to do with the standby: there is no more to save.

        Args:
            finished: Whether the training is over. A standby that was started for it ends with it.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        try:
            self.settle()
            if self._link is not None:
                if finished:
                    self._link.finish()
                self._link.flush()
        except (StandbyError, OSError) as error:
            logger.warning("the standby may not know how the training has ended: %s", error)
        finally:
            self._unlink()
            if self._reconnect is not None:
                self._reconnect.cancel()
            self.ledger.close()

    @property
    def bytes_pulled(self) -> int:
        """What standbys have read in all."""
        return self._bytes_before + (0 if self._link is None else self._link.bytes_pulled)

    @property
    def committed(self) -> int | None:
        """The step that counts, as far as this process has heard."""
        return self._committed_before if self._link is None else self._link.committed

    @property
    def released(self) -> int:
        """The last output that this rank had let out when it connected; -1: none, or nobody knows."""
        return -1 if self._link is None else self._link.released

    def note_released(self, number: int) -> None:
        """Lets the standby, if there is one, remember the last output that was let out; returns once that is sent.

        Raises:
            StandbyLostError: With ``on_standby_loss="raise"``.
        """
        if self._link is not None:
            try:
                self._link.note_released(number)
            except (OSError, StandbyError) as error:
                self._lose(error)

    @property
    def is_connected(self) -> bool:
        """Whether there is a standby."""
        return self._link is not None

    # --- within ---

    def _check(self, link: Link) -> None:
        """Raises or warns of what has gone wrong in the background since the last step."""
        link.check()
        while link.notices:
            notice = link.notices.pop(0)
            if self._options.on_standby_loss == "raise":
                raise StandbyError(notice)
            warnings.warn(f"{notice}; training goes on, a later state is tried", PersistWarning, stacklevel=4)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.gate(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        changed = self.ledger.mark_step(optimizer)
        if self._options.mode == "rpo0" and self._link is not None and changed:
            self._ahead[optimizer] = self._link.pull_ahead(changed)

    def _is_audit_due(self, step: int) -> bool:
        every = self._options.audit_every_n_steps
        if not every or (self._audited is not None and step - self._audited < every):
            return False
        self._audited = step
        return True

    def _is_as_expected(self, step: int, checksums: dict[int, int]) -> bool:
        """Whether an audited step arrived as it is; says what did not."""
        if self._expected is None:
            return True
        expected, self._expected = self._expected, None
        missed = [number for number, checksum in expected.items() if checksums.get(number) != checksum]
        if not missed:
            return True
        names = self.ledger.missed(missed)
        warnings.warn(
            f"step {step} is not committed: an audit found that {', '.join(names[:3])}"
            f"{f' and {len(names) - 3} more' * (len(names) > 3)} changed unseen, some time since the audit before; "
            "the next commit brings them whole. Find out who changes them in place (.data, numpy, a library's own "
            "kernels), or use tracking='pages'",
            MissedChangeWarning,
            stacklevel=4,
        )
        return False

    def _timed(self, wait: Callable[[], _Result]) -> _Result:
        start = time.perf_counter()
        try:
            return wait()
        finally:
            self.stalled_s += time.perf_counter() - start

    def _linked(self, *, take_over: bool) -> Link | None:
        """The link, claimed; None while there is none and training goes on without."""
        if self._link is not None:
            return self._link
        if self._reconnect is None:
            link = self._open()
        else:
            found = self._reconnect.result()
            if found is None:
                return None
            link = found
            logger.info("the standby at %s is back; the next commit brings it the whole state", self._options.standby)
        try:
            if take_over:
                await_promotion(link, self._options.standby)
            wanted = {"directory": self._persist_dir, "every_n_commits": self._options.persist_every_n_commits}
            link.claim(
                take_over=take_over,
                num_streams=self._options.num_streams,
                find=self.ledger.entry,
                persist=None if self._persist_dir is None else wanted,
            )
        except BaseException:
            link.close()
            raise
        self._reconnect = None
        self._link = link
        self.ledger.renew()
        return link

    def _open(self) -> Link:
        return open_link(
            self._options.standby,
            self._identity,
            transport=self._options.transport,
            timeout_s=self._options.timeout_s,
        )

    def _lose(self, error: Exception) -> None:
        """No standby any more: raises, or goes on and looks for it in the background."""
        self._unlink()
        message = (
            f"rank {self._identity.rank} of job {self._identity.job!r} has lost its standby at "
            f"{self._options.standby} at step {self.step}: {error or type(error).__name__}"
        )
        if self._options.on_standby_loss == "raise":
            raise StandbyLostError(message) from error
        reason = type(error.__cause__ or error)
        if reason not in self._warned_of:
            self._warned_of.add(reason)
            warnings.warn(
                f"{message}; training goes on without, and catches up when it is back", StandbyLostWarning, stacklevel=4
            )
        if not self._closed:
            self._reconnect = Reconnect(self._open)

    def _unlink(self) -> None:
        if self._link is not None:
            self._bytes_before += self._link.bytes_pulled
            self._committed_before = self._link.committed
            self._link.close()
        self._link = None
        self._in_flight = None
        self._ahead.clear()


def resume_from(
    link: Link,
    step: int | None,
    on_disk: list[int],
    load: Callable[[int | None], persist.State],
    find_mesh: trees.FindMesh | None = None,
) -> persist.State:
    """The state of a step, by default the last one, of a standby whose rank was claimed, or from the disk.

    Args:
        link: Claimed.
        step: None: the last.
        on_disk: The steps that are there.
        load: Reads one of them.
        find_mesh: For a state of the standby, see `tree.load`.

    Raises:
        NoStateError: There is none.
    """
    held = link.committed
    if step is not None or not on_disk or (held is not None and held >= on_disk[-1]):
        try:
            return link.fetch(step, find_mesh)
        except NoStateError:
            if step not in on_disk:
                raise
    state = load(step)
    link.start_over(state.step)
    return state


def _track_pages() -> PageTracking | None:
    try:
        return PageTracking()
    except OSError as error:
        logger.warning("tracking='pages' is not possible here, using tracking='owner': %s", error)
        return None
