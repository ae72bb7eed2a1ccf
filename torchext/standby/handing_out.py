"""A state of a standby for who asks for it: a reader, or a training process that goes on from there."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

from torchext.standby import wire
from torchext.standby.errors import NoStateError, StateMismatchError
from torchext.standby.images import Image
from torchext.standby.jobs import Rank

if TYPE_CHECKING:
    from torchext.standby.daemon import Daemon

# A reader that is slower than a chunk in this time is given up, and any reader once training has waited so long for it:
# together less than the 30 s after which the training process gives up its standby.
_READER_TIMEOUT_S = 10.0
_CHUNK_BYTES = 1 << 20
_SLOWEST_COPY_BYTES_S = 50e6  # what copies more slowly than that out of this process's memory has stopped


def hand_out(
    daemon: Daemon,
    sock: socket.socket,
    sending: threading.Lock,
    name: str,
    number: int,
    step: int | None,
    *,
    run: str | None = None,
    from_memory: bool = False,
) -> None:
    """Sends a state, or says where it lies and waits until it was copied; no image of the rank changes meanwhile.

    A training process, ``run``, goes on from that step: what its rank has beyond does not count from then on, so that
    no late message of another rank's dead process can make the ranks go on from different steps.

    Args:
        daemon: Holds it.
        sock: Who asks; its timeout changes.
        sending: To be held while something is sent on it.
        name: Of the job.
        number: Of the rank.
        step: None: the one that counts.
        run: See above; None: of a reader.
        from_memory: Whether the other end copies the entries out of this process's memory.

    Raises:
        NoStateError: It is not there.
        StateMismatchError: The job has no such rank.
        OSError: The connection has ended, or was too slow: nothing more can be said on it.
    """
    with daemon.changed:
        job = daemon.job(name)
        if not 0 <= number < job.world_size:
            raise StateMismatchError(f"job {name!r} has ranks 0 to {job.world_size - 1}, rank {number} was asked for")
        rank = job.ranks[number]
    with rank.busy:
        with daemon.changed:
            if step is None:
                step = job.book.latest()
            if step is None:
                raise NoStateError(f"the standby holds no complete state of job {name!r}: {job.progress()}")
            image = rank.images.images[job.book.image(number, step)]
            if run is not None:
                job.book.resume(number, run, step)
                if job.persister is not None:
                    job.persister.forget_after(step)
        with sending:  # nothing else may come in between
            if not from_memory:
                sock.settimeout(_READER_TIMEOUT_S)
                _send_whole(sock, rank, image, job.world_size)
                return
            wire.send(sock, {**image.header(job.world_size), "places": image.places()}, image.tree)
        size_bytes = sum(held.slot.size_bytes for held in image.entries.values())
        sock.settimeout(_READER_TIMEOUT_S + size_bytes / _SLOWEST_COPY_BYTES_S)
        wire.receive(sock)  # says only that it has


def _send_whole(sock: socket.socket, rank: Rank, image: Image, world_size: int) -> None:
    wire.send(sock, image.header(world_size), image.tree)
    for _, held in sorted(image.entries.items()):
        memory = held.slot.base.numpy().data
        for at in range(0, len(memory), _CHUNK_BYTES):
            sock.sendall(memory[at : at + _CHUNK_BYTES])
            since = rank.wanted_since
            if since is not None and time.monotonic() - since > _READER_TIMEOUT_S:
                raise TimeoutError(f"it was reading step {image.step} while training waited to go on")
