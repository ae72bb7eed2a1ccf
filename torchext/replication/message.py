"""What one site sends and another receives."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchext.replication.errors import ReplicationError

BYTES, FILE, TREE = 0, 1, 2  # kinds


@dataclass(frozen=True)
class Message:
    """A whole message, as it lies in this site's log; it stays valid when the log is truncated.

    Attributes:
        origin: The site that sent it.
        seq: Its number in that site's stream, from 1.
        kind: 0 for bytes, 1 for a file, 2 for a tree of tensors.
        parts: Its bytes, in pieces, without a copy.
    """

    origin: str
    seq: int
    kind: int
    parts: Sequence[memoryview] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return sum(len(part) for part in self.parts)

    @property
    def payload(self) -> bytes:
        """Its bytes, copied into one piece."""
        return b"".join(self.parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file, which appears whole and on the disk, or not at all."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with open(temporary, "wb") as file:
                for part in self.parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def tree(self) -> Any:
        """The tree that was sent: tensors and the containers and plain values that hold them.

        Raises:
            ReplicationError: It is no tree.
        """
        if self.kind != TREE:
            raise ReplicationError(f"message {self.seq} of {self.origin} is no tree; use payload")
        import torch

        return torch.load(io.BytesIO(self.payload), weights_only=True)


def encode(data: object) -> tuple[int, bytes | memoryview]:
    """The kind and the bytes of what a user sends, if it is no file."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return BYTES, memoryview(data).cast("B") if memoryview(data).nbytes else b""
    try:
        view = memoryview(data)  # type: ignore[arg-type]
    except TypeError:
        pass
    else:
        return BYTES, view.cast("B") if view.nbytes else b""
    import torch

    file = io.BytesIO()
    torch.save(data, file)
    return TREE, file.getbuffer()
