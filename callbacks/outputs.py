"""Output commit for Lightning: what leaves the job waits until the state that it came from is committed."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

logger = logging.getLogger(__name__)

# Of loggers: what of the training they are told. Hyperparameters and graphs are no step's.
_OF_LOGGERS = ("log_metrics", "log_text", "log_image", "log_audio", "log_video", "log_table", "save")
# Of TensorBoard's writer, which programs use through ``logger.experiment``.
_OF_WRITERS = (
    *("add_scalar", "add_scalars", "add_histogram", "add_histogram_raw", "add_image", "add_images", "add_figure"),
    *("add_video", "add_audio", "add_text", "add_embedding", "add_pr_curve", "add_mesh", "add_tensor"),
)


@dataclass
class _Output:
    """Something that leaves the job.

    Attributes:
        number: How many came before, in the whole training.
        kind: A method of `Outputs` that lets it out.
        arguments: For it.
        step: Whose commit it waits for; None: the next one.
        is_plain: Whether a state can hold it: numbers, text, tensors and containers of them.
    """

    number: int
    kind: str
    arguments: tuple[Any, ...]
    step: int | None = None
    is_plain: bool = True


class Outputs:
    """Holds outputs back, in order, and lets them out once they are committed.

    Held are, of all loggers, metrics, texts, images and the like (also through TensorBoard's ``experiment.add_...``),
    and files of ``trainer.save_checkpoint`` and `ModelCheckpoint`, their removal, and links: a file is written under a
    hidden name in its folder, and renamed. What is held is part of the committed state, so a restart lets out what
    the process before could not; the standby remembers how far that one got. An output during which the process is
    killed is let out once more. Nothing is held on other ranks than 0, which have no outputs.

    Not held: other uses of ``logger.experiment``, and files that a strategy writes by itself (sharded checkpoints).
    Held, but lost if the process ends between the commit and their turn: what is no plain data, such as figures.

    Args:
        trainer: Whose. Methods of its loggers and checkpoint callbacks are wrapped on the objects, until `close`.
        job: For the names of files that are held.
    """

    def __init__(self, trainer: Trainer, job: str) -> None:
        self._trainer = trainer
        self._suffix = f".torchext-held-{hashlib.sha256(job.encode()).hexdigest()[:8]}-"
        self._held: deque[_Output] = deque()
        self._next = 0
        self._is_open = True  # whether everything goes straight out: before `start`, during a release, after `close`
        self._loggers_to_save: set[int] = set()
        self._wrapped: list[tuple[Any, str]] = []

    # --- when ---

    def start(self) -> None:
        """Begins to hold."""
        if not self._trainer.is_global_zero:
            return
        self._is_open = False
        for i, each in enumerate(self._trainer.loggers):
            for name in _OF_LOGGERS:
                if callable(getattr(each, name, None)):
                    self._wrap(each, name, ("_log", i, None, name))
            self._wrap_saved(each, i)
            writer = getattr(each, "experiment", None)
            if any(base.__name__ == "SummaryWriter" for base in type(writer).__mro__):
                for name in _OF_WRITERS:
                    if callable(getattr(writer, name, None)):
                        self._wrap(writer, name, ("_log", i, "experiment", name))
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._wrap_checkpoint(callback)

    def tag(self, step: int) -> None:
        """What is held and belongs to no step yet came before the commit of this one."""
        for output in self._held:
            if output.step is None:
                output.step = step

    def state(self) -> dict[str, Any]:
        """For the state that is committed: what may not have been let out by then."""
        kept = [(output.number, output.kind, output.arguments) for output in self._held if output.is_plain]
        file = io.BytesIO()
        torch.save(kept, file)
        return {"next": self._next, "held": torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}

    def resume_from(self, state: dict[str, Any], step: int) -> None:
        """Takes over what the process before held at the step."""
        # It may be anybody's checkpoint: no code of it is run.
        kept = torch.load(io.BytesIO(state["held"].numpy().tobytes()), weights_only=True)
        self._held.extend(_Output(number, kind, tuple(arguments), step) for number, kind, arguments in kept)
        self._next = state["next"]

    def forget_released(self, number: int) -> int:
        """Leaves out what the process before let out, up to this number; returns the last one of them."""
        while self._held and self._held[0].number <= number:
            self._held.popleft()
        first = self._held[0].number if self._held else self._next
        self._clear_files({output.arguments[0] for output in self._held if output.kind == "_move"})
        return min(number, first - 1)

    def release(self, committed: int | None) -> int | None:
        """Lets out what belongs to steps up to ``committed``; returns the number of the last such output."""
        last = None
        while self._held and committed is not None:
            step = self._held[0].step
            if step is None or step > committed:
                break
            last = self._let_out(self._held.popleft())
        self._save_loggers()
        return last

    def release_all(self) -> int | None:
        """Lets out everything: there is nobody to commit to, or the training is over."""
        last = None
        while self._held:
            last = self._let_out(self._held.popleft())
        self._save_loggers()
        return last

    def close(self) -> None:
        """Drops what is still held, and takes the wrappers off. Idempotent.

        The restart does it again, or lets it out if its step was committed after all: files of such a step stay.
        """
        self._is_open = True
        for holder, name in self._wrapped:
            vars(holder).pop(name, None)
        self._wrapped.clear()
        for output in self._held:
            if output.kind == "_move" and output.step is None:
                _remove(output.arguments[0])
        self._held.clear()

    # --- files ---

    def save_checkpoint(self, inner: CheckpointIO, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        """Writes the file under another name."""
        if self._is_open:
            inner.save_checkpoint(checkpoint, path, storage_options)
            return
        if isinstance(inner, AsyncCheckpointIO):
            raise ValueError(
                "commit_outputs=True needs a CheckpointIO that has written when it returns, got AsyncCheckpointIO"
            )
        target = os.fspath(path)
        folder, name = os.path.split(target)
        pending = os.path.join(folder, f".{name}{self._suffix}{self._next}")
        inner.save_checkpoint(checkpoint, pending, storage_options)
        self._hold("_move", (pending, target))

    def remove_checkpoint(self, inner: CheckpointIO, path: Any) -> None:
        """Removes the file when its turn comes."""
        if self._is_open:
            inner.remove_checkpoint(path)
        else:
            self._hold("_remove", (os.fspath(path),))

    def _exists(self, path: Any) -> bool:
        """Whether there is or will be such a file."""
        exists = bool(get_filesystem(path).exists(path))
        for output in self._held:
            if output.kind == "_move" and output.arguments[1] == os.fspath(path):
                exists = True
            elif output.kind == "_remove" and output.arguments[0] == os.fspath(path):
                exists = False
        return exists

    def _clear_files(self, kept: set[str]) -> None:
        """Removes the files of steps that were never committed."""
        for callback in self._trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            if folder is None or "://" in str(folder) or not Path(folder).is_dir():
                continue
            for path in Path(folder).glob(f".*{self._suffix}*"):
                if str(path) not in kept:
                    _remove(str(path))

    # --- within ---

    def _hold(self, kind: str, arguments: tuple[Any, ...], *, is_plain: bool = True) -> None:
        self._held.append(_Output(self._next, kind, arguments, is_plain=is_plain))
        self._next += 1

    def _wrap(self, holder: Any, name: str, words: tuple[Any, ...]) -> None:
        original = getattr(holder, name)
        kind, *target = words

        def held(*arguments: Any, **options: Any) -> Any:
            if self._is_open:
                return original(*arguments, **options)
            copied, is_plain = _copied((arguments, options))
            self._hold(kind, (*target, *copied), is_plain=is_plain)
            return None

        self._set(holder, name, held)

    def _wrap_saved(self, each: Any, i: int) -> None:
        original = each.after_save_checkpoint

        def held(callback: ModelCheckpoint) -> None:
            if self._is_open:
                original(callback)
            else:
                position = next(n for n, c in enumerate(self._trainer.checkpoint_callbacks) if c == callback)
                self._hold("_saved", (i, position))

        self._set(each, "after_save_checkpoint", held)

    def _wrap_checkpoint(self, callback: ModelCheckpoint) -> None:
        link = callback._link_checkpoint

        def linked(trainer: Trainer, path: str, to: str) -> None:
            if self._is_open:
                link(trainer, path, to)
            else:
                self._hold("_link", (path, to))

        self._set(callback, "_link_checkpoint", linked)

        def exists(path: Any, trainer: Trainer) -> bool:
            return bool(trainer.strategy.broadcast(self._exists(path)))

        self._set(callback, "file_exists", exists)

    def _set(self, holder: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(holder, name, function)
        self._wrapped.append((holder, name))

    def _let_out(self, output: _Output) -> int:
        before, self._is_open = self._is_open, True
        try:
            getattr(self, output.kind)(*output.arguments)
        finally:
            self._is_open = before
        return output.number

    def _save_loggers(self) -> None:
        """What a logger has been told is not to wait in its buffers."""
        before, self._is_open = self._is_open, True
        try:
            for i in sorted(self._loggers_to_save):
                self._trainer.loggers[i].save()
        finally:
            self._is_open = before
        self._loggers_to_save.clear()

    # Kinds of outputs.

    def _log(self, i: int, attribute: str | None, name: str, arguments: Any, options: Any) -> None:
        if i < len(self._trainer.loggers):  # a restart may have fewer
            each: Any = self._trainer.loggers[i]
            holder = each if attribute is None else getattr(each, attribute)
            getattr(holder, name)(*arguments, **options)
            self._loggers_to_save.add(i)

    def _saved(self, i: int, position: int) -> None:
        callbacks = self._trainer.checkpoint_callbacks
        if i < len(self._trainer.loggers) and position < len(callbacks):
            callback = callbacks[position]
            assert isinstance(callback, ModelCheckpoint)
            self._trainer.loggers[i].after_save_checkpoint(callback)

    def _move(self, pending: str, path: str) -> None:
        if "://" not in path:
            try:
                os.replace(pending, path)
            except FileNotFoundError:
                logger.debug("%s was renamed before", pending)
        elif get_filesystem(path).exists(pending):
            get_filesystem(path).mv(pending, path, recursive=True)

    def _remove(self, path: str) -> None:
        _remove(path)

    def _link(self, path: str, to: str) -> None:
        ModelCheckpoint._link_checkpoint(self._trainer, path, to)


def _remove(path: str) -> None:
    files = get_filesystem(path)
    if files.exists(path):
        files.rm(path, recursive=True)


def _copied(arguments: Any) -> tuple[Any, bool]:
    """As they are now, and whether that was possible."""
    file = io.BytesIO()
    try:
        torch.save(arguments, file)
        file.seek(0)
        return torch.load(file, weights_only=True), True
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, RuntimeError):
        return arguments, False  # figures and the like
