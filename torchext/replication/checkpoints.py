"""Checkpoints as messages: the files of one, then a message that lists them and so makes it whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torchext.replication import deltas
from torchext.replication.deltas import Blocks
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
        first: Number of the first message that it needs: its own, or of the checkpoint that it is told by.
        seq: Number of its last one: with it, it is whole.
        num_deltas: How many checkpoints have to be put together for it, besides a whole one.
        blocks: Of its files, by name, for the next one to be told by.
    """

    step: int
    first: int
    seq: int
    num_deltas: int = 0
    blocks: Mapping[str, Blocks] = field(default_factory=dict, repr=False, compare=False)


def send_checkpoint(
    node: Node,
    path: str | os.PathLike[str],
    step: int,
    *,
    since: Sent | None = None,
    is_base: bool = False,
    timeout: float | None = None,
) -> Sent:
    """Sends a checkpoint: a file, or a folder of them, as sharded ones are.

    Args:
        node: Of this site.
        path: The file or folder, which may be removed after the call.
        step: Of the training; `fetch_checkpoint` returns it.
        since: A checkpoint that this site sent before, as a base, and still has: of each file, what is in it is not
            sent again.
        is_base: Whether a later one is to be told by it, for which all of it is hashed; one with ``since`` always can.
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
    listing: list[tuple[str, int]] = []
    changed: dict[str, str] = {}  # by name: the digest of what it comes to
    blocks = {}
    for file in files:
        name = file.relative_to(path).as_posix() if file != path else ""
        base = None if since is None else since.blocks.get(name)
        if is_base or since is not None:
            blocks[name], ordered = deltas.scan(file)
        if base is None:
            listing.append((name, send(file)))
        else:
            listing.append((name, send(deltas.encode(file, ordered, base))))
            changed[name] = blocks[name].digest
    content: dict[str, Any] = {"stabilizer_checkpoint": 1, "step": step, "files": listing}
    if since is not None:
        content |= {"since": since.seq, "changed": changed}
    seq = send(json.dumps(content).encode())
    first = listing[0][1] if listing else seq
    if since is None:
        return Sent(step, first, seq, 0, blocks)
    return Sent(step, min(first, since.first), seq, since.num_deltas + 1, blocks)


def send_delta(node: Node, delta: bytes, step: int, since: Sent, *, timeout: float | None = None) -> Sent:
    """Sends a checkpoint of one file as what changed; whoever reads it sees by the file itself whether it is right.

    Args:
        node: Of this site.
        delta: What `deltas.Pieces` makes of it.
        step: Of the training.
        since: The checkpoint of one file that it is told by, which this site sent before and still has.
        timeout: See `send_checkpoint`, as for what is raised.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    first = node.send(delta, timeout=timeout)
    content = {
        "stabilizer_checkpoint": 1,
        "step": step,
        "files": [("", first)],
        "since": since.seq,
        "changed": {"": ""},
    }
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    return Sent(step, since.first, node.send(json.dumps(content).encode(), timeout=left), since.num_deltas + 1)


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
        for name, _ in content["files"]:
            path = Path(to) / name if name else Path(to)
            if name and not path.resolve().is_relative_to(Path(to).resolve()):
                raise ReplicationError(f"{url}: a file of the checkpoint is named {name!r}, outside its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            _restore(node, address.site, content, name, path)
    return int(content["step"])


def _restore(node: Node, site: str, content: dict[str, Any], name: str, path: Path) -> None:
    """Writes a file of a checkpoint, from those that it is told by."""
    # Newest first: the message of a delta, and the digest of what it makes, or "" if the file says whether it is right.
    steps: list[tuple[int, str]] = []
    while (digest := content.get("changed", {}).get(name)) is not None:
        steps.append((dict(content["files"])[name], digest))
        content = json.loads(_message(node, site, content["since"]).payload)
    whole = _message(node, site, dict(content["files"])[name])
    if not steps:
        whole.save(path)
        return
    base, made = (path.with_name(f".{path.name}.{os.getpid()}.{part}") for part in ("base", "new"))
    try:
        whole.save(base)
        for seq, digest in reversed(steps):
            with open(base, "rb") as source, open(made, "wb") as target:
                deltas.decode(_message(node, site, seq).payload, source, target)
                target.flush()
                os.fsync(target.fileno())
            if digest and deltas.digest_of(made) != digest:
                raise ReplicationError(f"{path}: what message {seq} of {site} makes of the file is not what was sent")
            os.replace(made, base)
        os.replace(base, path)
    finally:
        base.unlink(missing_ok=True)
        made.unlink(missing_ok=True)


def _message(node: Node, site: str, seq: int) -> Message:
    return next(node.receive(site, after=seq - 1, timeout=0))


def _newest(messages: Iterator[Message], frontier: int) -> dict[str, Any] | None:
    """The listing of the last whole checkpoint up to a frontier. Keeps no message: each holds files open."""
    newest: dict[str, Any] | None = None
    seen: set[int] = set()  # and whole, as far as they are listings
    for message in messages:
        if message.seq > frontier:
            break
        is_listing = False
        if message.kind == BYTES and message.parts and bytes(message.parts[0][: len(_HEAD)]) == _HEAD:
            is_listing = True
            content = json.loads(message.payload)
            needed = {seq for _, seq in content["files"]} | ({content["since"]} if content.get("changed") else set())
            if needed <= seen:
                newest = content
                seen.add(message.seq)
        if not is_listing:
            seen.add(message.seq)
        del message  # before the next one's files are opened
    return newest
