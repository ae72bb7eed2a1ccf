"""A network between a training and its standby, as a process: ``python -m tests.standby.relay HOST PORT``.

Says at which port it listens, then takes orders, a line each, and answers each with a line: ``cut`` closes all
connections and accepts no more, ``freeze`` carries nothing any more but closes nothing, ``slow N`` carries N bytes a
second each way on each connection, ``heal`` carries all again; connections that were frozen go on.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType


class Relay:
    """The relay as the test sees it; use it in a ``with`` block."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.standby.relay", host, port],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = f"127.0.0.1:{self._answer()}"

    def order(self, words: str) -> None:
        """Returns once it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        assert self._answer() == words

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()


class _Network:
    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._changed = threading.Condition()
        self._state = "heal"  # these three guarded by _changed
        self._rate = float("inf")
        self._sockets: list[socket.socket] = []

    def order(self, words: str) -> None:
        with self._changed:
            self._state, *rate = words.split()
            self._rate = float(rate[0]) if rate else float("inf")
            if self._state == "cut":
                for sock in self._sockets:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                self._sockets.clear()
            self._changed.notify_all()

    def serve(self, listener: socket.socket) -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(self._target)
            with self._changed:
                if self._state == "cut":
                    near.close()
                    far.close()
                    continue
                self._sockets += near, far
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                with self._changed:
                    self._changed.wait_for(lambda: self._state != "freeze")
                    rate = self._rate
                time.sleep(len(data) / rate)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def main() -> None:
    network = _Network((sys.argv[1], int(sys.argv[2])))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=network.serve, args=(listener,), daemon=True).start()
        for line in sys.stdin:
            network.order(line.strip())
            print(line.strip(), flush=True)


if __name__ == "__main__":
    main()
