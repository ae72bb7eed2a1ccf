"""What brokers say to each other: frames of a stream, and whether it pays to compress them."""

from __future__ import annotations

import dataclasses
import enum
import json
import socket
import struct
import time
from importlib.util import find_spec
from typing import Any

from torchext import transport

PURPOSE = "torchext channels 1"  # changes with the protocol
TOKEN_VARIABLE = "TORCHEXT_CHANNELS_TOKEN"
TOKEN_FILE = "channels-token"

BEAT_S = 0.25  # at least so often something is said in either direction, or looked at
SILENT_S = 5.0  # who says nothing for so long is taken for gone, and the connection given up
PATIENCE_S = 60.0  # for how long a connection may be away before both sides give up what was under way

_FRAME = struct.Struct("<BBxxIQQqQI")
_MAX_WORDS = 1 << 20  # bytes of JSON


class Kind(enum.IntEnum):
    """What a frame says; the first five are numbered, repeated after a cut, and done once."""

    MESSAGE = 1
    JOINED = 2  # a sender has come: {"sender": its key, "name": ..., "pid": ...}
    LEFT = 3
    DIED = 4  # {"sender": its key, "status": wait status or -1}
    BYE = 5  # nothing more will come
    BEAT = 6  # done so far; sent now and then in any case
    CLOSED = 7  # {"reason": ...}: nobody will receive any more
    WEIGHTS = 8
    PUBLISHER_DIED = 9  # {"pid": ..., "status": ...}


@dataclasses.dataclass(frozen=True)
class Frame:
    """The fixed part of a frame; what it announces follows.

    Attributes:
        kind: What it is.
        seq: Its number, or in a BEAT the last number that is done.
        version: Of the weights, as in `Sender.send`.
        header_bytes: How much of the content is the header of a message.
        raw_bytes: Length of the content.
        wire_bytes: Length of what follows: less than ``raw_bytes`` where that was compressed.
        compressed: Whether it was.
        checksum: CRC-32C of what follows.
    """

    kind: Kind
    seq: int = 0
    version: int = -1
    header_bytes: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    compressed: bool = False
    checksum: int = 0


class FrameError(ConnectionError):
    """What came is damaged, or no frame; the connection cannot be used any further."""


def token_or_own(token: str | None) -> str:
    """The token that was given, or that of this user."""
    if token == "":
        raise ValueError("token must not be empty: whoever has it can run code here")
    return token if token is not None else transport.load_token(TOKEN_VARIABLE, TOKEN_FILE)


def send(
    sock: socket.socket,
    kind: Kind,
    content: bytes | memoryview = b"",
    *,
    seq: int = 0,
    version: int = -1,
    header_bytes: int = 0,
    raw_bytes: int | None = None,
) -> None:
    """Sends a frame; content of another length than ``raw_bytes`` is compressed."""
    from torchext._native import replication as native

    length = len(content)
    raw_bytes = length if raw_bytes is None else raw_bytes
    head = _FRAME.pack(kind, raw_bytes != length, header_bytes, raw_bytes, length, version, seq, native.crc32c(content))
    transport.send_all(sock, [head, content])


def send_words(sock: socket.socket, kind: Kind, words: dict[str, Any], *, seq: int = 0) -> None:
    """Sends a frame that holds JSON."""
    send(sock, kind, json.dumps(words).encode(), seq=seq)


def receive(sock: socket.socket) -> Frame:
    """Receives the fixed part of a frame.

    Raises:
        FrameError: What came is none.
        OSError: The connection has ended, or is silent.
    """
    kind, compressed, header_bytes, raw, wire, version, seq, checksum = _FRAME.unpack(
        transport.receive_exactly(sock, _FRAME.size)
    )
    sizes_agree = wire <= raw and header_bytes <= raw and bool(compressed) == (wire < raw)
    if kind not in Kind._value2member_map_ or not sizes_agree:
        raise FrameError("what came is no frame of a broker")
    return Frame(Kind(kind), seq, version, header_bytes, raw, wire, bool(compressed), checksum)


def receive_content(sock: socket.socket, frame: Frame, memory: memoryview) -> None:
    """Receives what follows a frame into ``memory``, of as many bytes as it announced.

    Raises:
        FrameError: It was damaged on its way.
        OSError: The connection has ended, or is silent.
    """
    from torchext._native import replication as native

    transport.receive_into(sock, memory)
    if native.crc32c(memory) != frame.checksum:
        raise FrameError("a frame arrived with another checksum than it was sent with")


def receive_words(sock: socket.socket, frame: Frame) -> dict[str, Any]:
    """Receives the JSON that follows a frame."""
    if frame.wire_bytes > _MAX_WORDS:
        raise FrameError(f"a {frame.kind.name} of {frame.wire_bytes} bytes")
    memory = memoryview(bytearray(frame.wire_bytes))
    receive_content(sock, frame, memory)
    try:
        words = json.loads(bytes(memory)) if len(memory) else {}
    except ValueError as error:
        raise FrameError(f"a {frame.kind.name} that is not JSON") from error
    if not isinstance(words, dict):
        raise FrameError(f"a {frame.kind.name} that is no object")
    return words


def has_lz4() -> bool:
    """Whether this end can compress: `pip install 'torchext[lz4]'`."""
    return find_spec("lz4") is not None


def decompressed(data: memoryview, raw_bytes: int) -> bytes:
    """The content of a compressed frame.

    Raises:
        FrameError: It is not what it says.
    """
    import lz4.block

    try:
        raw: bytes = lz4.block.decompress(data, uncompressed_size=raw_bytes)
    except lz4.block.LZ4BlockError as error:
        raise FrameError(f"a frame that cannot be decompressed: {error}") from error
    if len(raw) != raw_bytes:
        raise FrameError(f"a frame of {len(raw)} bytes that announced {raw_bytes}")
    return raw


class Compression:
    """Decides, from what was measured on this link, whether the next message is compressed.

    That pays where sending what it saves takes longer than compressing. So a slow network gets compressed rollouts, and
    a fast one, or noise that cannot be compressed, costs no more than a sample now and then.
    """

    LEAST_BYTES = 16 << 10
    MOST_BYTES = 1 << 30  # LZ4 takes little more at a time
    SAMPLE_BYTES = 128 << 10
    SAMPLE_EVERY = 32  # messages
    _NEW = 0.25  # weight of the latest measurement

    def __init__(self, *, available: bool) -> None:
        self._available = available
        self._countdown = 0  # messages until the next sample
        self._ratio = 1.0  # compressed to raw
        self._compress = 1e9  # bytes per second
        self._link = 0.0  # bytes per second; 0: not known yet

    def samples(self, size: int) -> bool:
        """Whether to compress a sample of this message, to see how that goes."""
        if not self._available or size < self.LEAST_BYTES:
            return False
        self._countdown -= 1
        if self._countdown < 0:
            self._countdown = self.SAMPLE_EVERY
            return True
        return False

    def pays(self, size: int) -> bool:
        """Whether to compress a message of so many bytes."""
        if not self._available or not self.LEAST_BYTES <= size <= self.MOST_BYTES or self._link == 0:
            return False
        return 1 / self._compress + self._ratio / self._link < 1 / self._link

    def note_compressed(self, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        """Tells what became of a message or sample."""
        self._ratio += self._NEW * (wire_bytes / raw_bytes - self._ratio)
        self._compress += self._NEW * (raw_bytes / max(seconds, 1e-9) - self._compress)

    def note_sent(self, wire_bytes: int, seconds: float) -> None:
        """Tells how long sending has taken, of what does not disappear in the socket's buffer."""
        if wire_bytes < self.LEAST_BYTES:
            return
        speed = wire_bytes / max(seconds, 1e-9)
        self._link = speed if self._link == 0 else self._link + self._NEW * (speed - self._link)

    def compress(self, content: memoryview) -> bytes | memoryview:
        """The content as it is to be sent: compressed if that is expected to pay and makes it smaller."""
        size = len(content)
        if self.samples(size):
            self._compressed(content[: self.SAMPLE_BYTES])
        if not self.pays(size):
            return content
        smaller = self._compressed(content)
        return smaller if len(smaller) < size else content

    def _compressed(self, content: memoryview) -> bytes:
        import lz4.block

        start = time.perf_counter()
        smaller: bytes = lz4.block.compress(content, store_size=False)
        self.note_compressed(len(content), len(smaller), time.perf_counter() - start)
        return smaller
