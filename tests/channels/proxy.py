"""A network between two brokers that loses connections: in the middle of messages, again and again."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator


class Proxy:
    """Forwards connections to ``target``, and cuts each after the next number of bytes carried towards it."""

    def __init__(self, target: str, cuts: Iterator[int], host: str, port: int = 0) -> None:
        self._target = target
        self._cuts = cuts
        self._listener = socket.create_server((host, port))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self.num_cuts = 0
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self._target.rpartition(":")
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
                limit = next(self._cuts, None)
                self._threads += [
                    threading.Thread(target=self._pump, args=(near, far, limit)),
                    threading.Thread(target=self._pump, args=(far, near, None)),
                ]
                for thread in self._threads[-2:]:
                    thread.start()

    def _pump(self, source: socket.socket, to: socket.socket, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16 if limit is None else min(1 << 16, limit)):
                to.sendall(piece)
                if limit is not None:
                    limit -= len(piece)
                    if limit == 0:
                        self.num_cuts += 1
                        # A reset: what is under way is lost.
                        to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        break
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cuts all connections at once."""
        with self._lock:
            for pair in self._pairs:
                for sock in pair:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for pair in self._pairs:
            for sock in pair:
                sock.close()
