"""Addresses, whole pieces of bytes, tokens, and the greeting between the ends of a connection."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchext import transport

PURPOSE = "tests 1"
LIMIT_S = 30.0


@pytest.mark.parametrize(
    ("address", "parsed"),
    [("learner:7000", ("learner", 7000)), ("10.0.0.1:0", ("10.0.0.1", 0)), ("[::1]:65535", ("::1", 65535))],
)
def test_addresses(address: str, parsed: tuple[str, int]) -> None:
    assert transport.parse_address(address) == parsed


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:65536", "host:-1", "host:٣", "::1:80", "[::1:80"])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected an .* got '"):
        transport.parse_address(address)


def test_listening_where_somebody_else_does_names_the_address() -> None:
    with transport.listen("127.0.0.1:0") as first:
        address = "{}:{}".format(*first.getsockname())
        with pytest.raises(OSError, match=f"cannot listen at {address}"):
            transport.listen(address)


def test_a_connection_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        alone.connect(alone.getsockname())
        address = "{}:{}".format(*alone.getsockname())
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: alone)
        with pytest.raises(ConnectionRefusedError, match=f"nobody listens at {address}"):
            transport.connect(address, LIMIT_S, LIMIT_S)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with transport.listen("127.0.0.1:0") as listener:
        near = transport.connect("{}:{}".format(*listener.getsockname()), LIMIT_S, LIMIT_S)
        far, _ = listener.accept()
    with near, far:
        far.settimeout(LIMIT_S)
        yield near, far


def test_pieces_arrive_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    pieces = [bytes([i % 256]) * (i * 1000) for i in range(100)]  # more than one call takes, some empty
    thread = threading.Thread(target=transport.send_all, args=(near, pieces))
    thread.start()
    assert bytes(transport.receive_exactly(far, sum(map(len, pieces)))) == b"".join(pieces)
    thread.join()


def test_a_piece_that_is_cut_short_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    near.sendall(b"half")
    with pytest.raises(TimeoutError, match="deadline"):
        transport.receive_exactly(far, 8, time.monotonic())
    near.close()
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        transport.receive_exactly(far, 8)


Answer = Callable[[socket.socket], Any]


def both(pair: tuple[socket.socket, socket.socket], near: Answer, far: Answer) -> list[Any]:
    """What the two sides return or raise, each in a thread; who is done hangs up."""
    results: list[Any] = [None, None]

    def run(side: int, answer: Answer) -> None:
        try:
            results[side] = answer(pair[side])
        except OSError as error:
            results[side] = error
        with contextlib.suppress(OSError):
            pair[side].shutdown(socket.SHUT_RDWR)

    threads = [threading.Thread(target=run, args=row) for row in enumerate((near, far))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive()
    return results


def greeting(token: str = "t", purpose: str = PURPOSE) -> Answer:
    return lambda sock: transport.greet(sock, token, purpose, {"part": 1}, LIMIT_S)


def welcome(sock: socket.socket) -> Any:
    words = transport.accept(sock, "t", PURPOSE, LIMIT_S)
    transport.reply(sock, {"error": "this is no refusal"})
    return words


def test_both_sides_hear_each_other(pair: tuple[socket.socket, socket.socket]) -> None:
    assert both(pair, greeting(), welcome) == [{"error": "this is no refusal"}, {"part": 1}]


def test_another_token_is_found_out_by_who_comes(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = both(pair, greeting(token="u"), welcome)
    assert isinstance(near, transport.GreetingError)
    assert "another token" in str(near)
    assert isinstance(far, OSError)


def test_another_purpose_is_refused_by_name(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = both(pair, greeting(purpose="tests 2"), welcome)
    assert str(near) == "refused: this is for tests 1, not for 'tests 2'"
    assert isinstance(far, transport.GreetingError)


def packed(content: Any) -> bytes:
    data = json.dumps(content).encode()
    return struct.pack("<I", len(data)) + data


HELLO = {"purpose": PURPOSE, "nonce": "n", "words": {}}


@pytest.mark.parametrize(
    "sent",
    [
        packed(HELLO) + packed({"proof": "00"}),
        packed(HELLO) + packed({"proof": None}),
        packed(HELLO) + packed({"proof": "é"}),
        packed([1]),
        packed({**HELLO, "nonce": "é" * 20_000}),
        struct.pack("<I", 4) + b"{{{{",
        struct.pack("<I", 9000) + b"[" * 9000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
def test_strangers_get_nowhere(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    def stranger(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other side may hang up at any time
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass

    assert isinstance(both(pair, stranger, welcome)[1], OSError)


def test_no_depth_of_nesting_upsets_the_greeting() -> None:
    # Reading and writing JSON meet the limit of recursion at depths that differ a little.
    for depth in range(sys.getrecursionlimit() // 2, sys.getrecursionlimit() + 10):
        near, far = socket.socketpair()
        with near, far:
            nested = b"[" * depth + b"]" * depth
            data = b'{"purpose": "' + PURPOSE.encode() + b'", "nonce": "n", "words": ' + nested + b"}"
            near.sendall(struct.pack("<I", len(data)) + data)
            near.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError):
                transport.accept(far, "t", PURPOSE, LIMIT_S)


def test_a_proof_serves_once(pair: tuple[socket.socket, socket.socket]) -> None:
    """What an honest client has said in one connection is of no use in the next."""
    heard = []

    class Recorder:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

        def sendall(self, data: bytes) -> None:
            heard.append(data)
            self.sock.sendall(data)

    both(pair, lambda sock: greeting()(Recorder(sock)), welcome)  # type: ignore[arg-type]
    with transport.listen("127.0.0.1:0") as listener:
        near = transport.connect("{}:{}".format(*listener.getsockname()), LIMIT_S, LIMIT_S)
        far, _ = listener.accept()

    def replay(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(b"".join(heard))
            while sock.recv(1 << 16):
                pass

    with near, far:
        result = both((near, far), replay, welcome)[1]
    assert isinstance(result, transport.GreetingError)
    assert "another token" in str(result)


def test_the_token_is_made_once_and_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHEXT_TESTS_TOKEN", raising=False)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(transport.load_token("TORCHEXT_TESTS_TOKEN", "tests-token")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found[0]) >= 32
    (path,) = (tmp_path / "torchext").iterdir()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"tests-token is empty: remove the file"):
        transport.load_token("TORCHEXT_TESTS_TOKEN", "tests-token")
    monkeypatch.setenv("TORCHEXT_TESTS_TOKEN", "given")
    assert transport.load_token("TORCHEXT_TESTS_TOKEN", "tests-token") == "given"
