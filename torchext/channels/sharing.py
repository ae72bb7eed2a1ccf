"""How the shared memory of a channel gets into other processes: as a descriptor, never by a name in /dev/shm."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing import context, reduction
from pathlib import Path
from typing import Any

from torchext._optional import require_native
from torchext.channels.errors import ChannelError, ChannelTimeout

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# What accept() may say while there are too few descriptors, too little memory, or of a caller that has gone.
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EAGAIN, errno.EPROTO}
)
_LEAST_S = 0.2  # for an answer, however short the timeout
_TAKES_CREDENTIALS = struct.Struct("3i")  # struct ucred


def require_core() -> None:
    """Makes sure that channels can work here, and prepares the native codec.

    Raises:
        ImportError: The native core is missing.
        ChannelError: This is not Linux.
    """
    if sys.platform != "linux":
        raise ChannelError(f"channels need Linux (memfds, futexes, pidfds); this is {sys.platform}")
    require_native()
    from torchext.channels import trees

    trees.set_up()


def new_nonce() -> int:
    return secrets.randbits(64)


def seconds(timeout: float | timedelta | None) -> float:
    """A public timeout as seconds; None is for ever."""
    if timeout is None:
        return float("inf")
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value >= 0:
        raise ValueError(f"timeout must be seconds >= 0, a timedelta or None (for ever), got {timeout!r}")
    return value


# --- To processes that this one starts, and through what pickles ---------------------------------------------------


def pack(descriptor: int, nonce: int) -> Any:
    """A form of the descriptor that can be pickled; `unpack` in the other process makes a descriptor of it."""
    if context.get_spawning_popen() is not None:
        return reduction.DupFd(descriptor)  # travels with the process that is being started
    return os.getpid(), descriptor, nonce


def unpack(packed: Any) -> int:
    """Gives a new descriptor, which the caller owns.

    Raises:
        ChannelError: The process that packed it is gone, or is another user's.
    """
    if not isinstance(packed, tuple):
        return int(packed.detach())
    pid, descriptor, _ = packed
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ChannelError(
            f"cannot open {path}, the shared memory of the process that this channel was pickled in: {error.strerror}; "
            "it must still run, as the same user, and have the channel open"
        ) from error


# --- To unrelated processes ----------------------------------------------------------------------------------------


def _folder() -> Path:
    """Of this user alone; holds the sockets of named channels."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "torchext"
    else:
        folder = Path(tempfile.gettempdir()) / f"torchext-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ChannelError(f"{folder} must belong to this user alone (mode 700), or others could interfere")
    return folder


def _path(name: str, kind: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name has 1 to 64 letters, digits, '.', '_' or '-', got {name!r}")
    return _folder() / f"{name}.{kind}"


class Doorman:
    """Hands a descriptor to every process of the same user that asks for it by name, from a thread of its own."""

    def __init__(self, name: str, kind: str, descriptor: int) -> None:
        self._path = _path(name, kind)
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind(name)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name=f"channel-{name}", daemon=True)
        self._thread.start()

    def _bind(self, name: str) -> None:
        # Bound under a name of its own, then renamed, so that it is never there without its mode.
        own = self._path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            self._socket.bind(str(own))
            os.chmod(own, 0o600)
            self._socket.listen()
            try:
                os.link(own, self._path)
            except FileExistsError:
                if _answers(self._path):
                    raise ChannelError(f"the name {name!r} is taken by a process that still runs") from None
                os.replace(own, self._path)  # its owner was killed
        finally:
            own.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the thread and removes the socket. Idempotent; nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the thread
        self._thread.join()
        if self._socket.fileno() >= 0:
            self._path.unlink(missing_ok=True)
            self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in _PASSING or self._closing.wait(0.05):
                    return  # closed
                continue
            with connection, contextlib.suppress(OSError):  # whoever asked may be gone
                raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _TAKES_CREDENTIALS.size)
                if _TAKES_CREDENTIALS.unpack(raw)[1] == os.getuid():
                    socket.send_fds(connection, [b"torchext"], [self._descriptor])


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            pass  # there, with many to serve before
        return True


def fetch(name: str, kind: str, timeout: float | timedelta | None) -> int:
    """A new descriptor of what is served under that name; waits until it is.

    Raises:
        ChannelTimeout: Nothing is served under it within the timeout.
    """
    path = _path(name, kind)
    limit_s = seconds(timeout)
    deadline = time.monotonic() + limit_s
    while True:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
            # Not there yet, gone, with many to serve before, or stopped.
            contextlib.suppress(ConnectionError, FileNotFoundError, BlockingIOError, TimeoutError),
        ):
            connection.settimeout(min(5.0, max(deadline - time.monotonic(), _LEAST_S)))
            connection.connect(str(path))
            message, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
            if message == b"torchext" and descriptors:
                return descriptors[0]
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ChannelTimeout(
                f"no process of this user serves the {kind} {name!r} ({path}) within {limit_s:g} s; make it there with "
                f"name={name!r} first"
            )
        time.sleep(min(0.02, left_s))  # nothing announces that a socket comes into being
