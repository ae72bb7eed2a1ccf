"""Checkpoints as messages: the files of one, then a message that lists them and so makes it whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torchext.replication.errors import ReplicationError, StabilityTimeoutError
from torchext.replication.message import BYTES, Message
from torchext.replication.node import Node

SCHEME = "stabilizer"
_HEAD = b'{"stabilizer_checkpoint": 1'


@dataclass(frozen=True)
class Sent:
    """A checkpoint in this site's stream.

    Attributes:
        step: Of the training.
        first: Number of its first message.
        seq: Number of its last one: with it, it is whole.
    """

    step: int
    first: int
    seq: int


def send_checkpoint(node: Node, path: str | os.PathLike[str], step: int, *, timeout: float | None = None) -> Sent:
    """Sends a checkpoint: a file, or a folder of them, as sharded ones are.

    Args:
        node: Of this site.
        path: The file or folder, which may be removed after the call.
        step: Of the training; `fetch_checkpoint` returns it.
        timeout: In seconds, for all of it to find room in this site's log; see `Node.send`.

    Raises:
        StoreFullError: There is no room; what was sent of it is never taken for a checkpoint.
        ReplicationError: See `Node.send`.
    """
    path = Path(path)
    deadline = None if timeout is None else time.monotonic() + timeout

    def send(data: bytes | Path) -> int:
        return node.send(data, timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))

    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    listing = [(p.relative_to(path).as_posix() if p != path else "", send(p)) for p in files]
    content = json.dumps({"stabilizer_checkpoint": 1, "step": step, "files": listing})
    seq = send(content.encode())
    return Sent(step, listing[0][1] if listing else seq, seq)


@dataclass(frozen=True)
class Address:
    """Where a checkpoint is: ``stabilizer://SITE/latest?predicate=NAME``."""

    site: str
    predicate: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Takes an address apart.

        Raises:
            ReplicationError: It is not of this form.
        """
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        if parts.scheme != SCHEME or not parts.netloc or parts.path != "/latest" or set(query) != {"predicate"}:
            raise ReplicationError(f"expected {SCHEME}://SITE/latest?predicate=NAME, got {url!r}")
        return cls(parts.netloc, query["predicate"][0])


def fetch_checkpoint(node: Node, url: str, to: str | os.PathLike[str], *, timeout: float = 60.0) -> int:
    """Writes the newest checkpoint that was stable to a file or folder.

    It first hears enough sites to miss none that was, wherever that was said (see `Node.read_frontier`); where some
    cannot be heard, what it restores may be newer than what was stable, never older.

    Args:
        node: Of any site, the one that sent it or another.
        url: ``stabilizer://SITE/latest?predicate=NAME``.
        to: Where to write it; made as a file or folder, as it was sent.
        timeout: In seconds, for the other sites to answer and for the data to arrive here.

    Returns:
        The step that it is of.

    Raises:
        StabilityTimeoutError: Too few sites answered, or the data did not arrive in time.
        ReplicationError: There is no stable checkpoint, or no such predicate.
    """
    address = Address.parse(url)
    deadline = time.monotonic() + timeout
    predicates = node.predicates()
    if address.predicate not in predicates:
        known = ", ".join(predicates) or "none"
        raise ReplicationError(f"{url}: there is no predicate {address.predicate!r} (there are: {known})")
    frontier = node.read_frontier(address.predicate, timeout, origin=address.site)
    if not node.wait_received(address.site, frontier, max(0.0, deadline - time.monotonic())):
        raise StabilityTimeoutError(
            f"{url}: messages of {address.site} are stable up to {frontier}, but only {node.last(address.site)} had "
            f"arrived at {node.me} after {timeout:g} s",
            [node.me],
        )
    first = node.first(address.site)
    with node.keeping(address.site, first - 1):
        content = _newest(node.receive(address.site, after=first - 1, timeout=0), frontier)
        if content is None:
            raise ReplicationError(
                f"{url}: no checkpoint of {address.site} is stable under {predicates[address.predicate]} here "
                f"(stable up to message {frontier}, held from {first} to {node.last(address.site)})"
            )
        for name, seq in content["files"]:
            path = Path(to) / name if name else Path(to)
            if name and not path.resolve().is_relative_to(Path(to).resolve()):
                raise ReplicationError(f"{url}: a file of the checkpoint is named {name!r}, outside its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            next(node.receive(address.site, after=seq - 1, timeout=0)).save(path)
    return int(content["step"])


def _newest(messages: Iterator[Message], frontier: int) -> dict[str, Any] | None:
    """The listing of the last whole checkpoint up to a frontier. Keeps no message: each holds files open."""
    newest: dict[str, Any] | None = None
    seen: set[int] = set()
    for message in messages:
        if message.seq > frontier:
            break
        seen.add(message.seq)
        if message.kind == BYTES and message.parts and bytes(message.parts[0][: len(_HEAD)]) == _HEAD:
            content = json.loads(message.payload)
            if all(seq in seen for _, seq in content["files"]):
                newest = content
        del message  # before the next one's files are opened
    return newest
