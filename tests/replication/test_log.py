"""The log of one stream: what was written is read, whatever was torn, cut or refused in between."""

from __future__ import annotations

import io
import mmap
import os
import random
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchext._native import replication as native
from torchext.replication.cursor import Cursor, verify
from torchext.replication.errors import StoreError, StoreFullError
from torchext.replication.log import HEADER, MIN_SEGMENT_BYTES, FrameError, Place, StreamLog


def open_log(folder: Path, *, segment_bytes: int = MIN_SEGMENT_BYTES) -> StreamLog:
    return StreamLog(folder, segment_bytes=segment_bytes, max_message_bytes=1 << 30)


def message(seq: int, size: int) -> bytes:
    return random.Random(seq).randbytes(size)


def contents(log: StreamLog, after: int = 0) -> list[tuple[int, bytes]]:
    with Cursor(log, (after, 0), lends=True) as cursor:
        return [(seq, b"".join(parts)) for seq, _, aborted, parts in iter(cursor.message, None) if not aborted]


def raw(log: StreamLog, begin: tuple[int, int] = (0, 0)) -> bytes:
    """The frames from a place on, as a link sends them."""
    out = b""
    with Cursor(log, begin) as cursor:
        while (region := cursor.region()) is not None:
            assert cursor.map is not None
            out += cursor.map[region[0] : region[1]]
            cursor.skip(region[1])
    return out


@pytest.fixture
def log(tmp_path: Path) -> Iterator[StreamLog]:
    made = open_log(tmp_path / "log")
    yield made
    made.close()


def test_checksum_is_crc32c() -> None:
    def bitwise(data: bytes) -> int:
        crc = 0xFFFFFFFF
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        return crc ^ 0xFFFFFFFF

    assert native.crc32c(b"123456789") == 0xE3069283  # RFC 3720's own check value
    rng = random.Random(1)
    for size in (0, 1, 7, 8, 9, 767, 768, 769, 1023, 1024, 1087, 1088, 1300, 3 * 8192 - 1, 3 * 8192, 30000):
        data = rng.randbytes(size)
        assert native.crc32c(data) == bitwise(data)
        assert set(native.crc32c_each_way(data)) == {bitwise(data)}
        cut = rng.randrange(size + 1)
        assert native.crc32c(data[cut:], native.crc32c(data[:cut])) == bitwise(data)
    assert native.crc32c(b"a") != zlib.crc32(b"a")


SIZES = [0, 1, 100, 5000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20, 17]


def test_messages_come_back_across_segments_and_restarts(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    wanted = []
    for number, size in enumerate(SIZES * 2, 1):
        assert log.append(message(number, size), size, 7) == number
        wanted.append((number, message(number, size)))
    assert contents(log) == wanted
    assert contents(log, after=9) == wanted[9:]
    log.close()
    log = open_log(tmp_path / "log")
    assert log.tail.seq == len(wanted)
    assert contents(log) == wanted
    assert log.append(b"more", 4, 0) == len(wanted) + 1
    assert contents(log, after=len(wanted)) == [(len(wanted) + 1, b"more")]
    log.close()
    assert not list((tmp_path / "log").glob("spare-*"))


def test_file_is_sent_and_one_that_ends_early_is_given_up(tmp_path: Path, log: StreamLog) -> None:
    data = message(1, (5 << 20) + 3)
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file:
        assert log.append(file.fileno(), len(data), 1) == 1
        with pytest.raises(StoreError, match=rf"ended after {len(data)} of {len(data) + 1} bytes; message 2 was given"):
            log.append(file.fileno(), len(data) + 1, 1)
    log.append(b"next", 4, 1)
    assert contents(log) == [(1, data), (3, b"next")]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_torn_tail_leaves_a_prefix(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("torn")
    sizes = data.draw(st.lists(st.sampled_from([0, 10, 1000, 300_000]), min_size=1, max_size=8))
    log = open_log(folder)
    for number, size in enumerate(sizes, 1):
        log.append(message(number, size), size, 0)
    log.close()
    path = sorted(folder.glob("*.seg"))[-1]
    content = bytearray(path.read_bytes())
    end = len(content.rstrip(b"\0"))
    at = data.draw(st.integers(64, max(64, end)))
    tear = data.draw(st.sampled_from(["zeros", "noise", "one bit"]))
    if tear == "zeros":
        content[at:] = bytes(len(content) - at)
    elif tear == "noise":
        content[at:end] = random.Random(at).randbytes(max(0, end - at))
    else:
        content[min(at, len(content) - 1)] ^= 1
    path.write_bytes(content)
    log = open_log(folder)
    held = contents(log)
    assert held == [(n, message(n, size)) for n, size in enumerate(sizes, 1)][: len(held)]
    log.abort_partial()
    seq = log.append(b"after", 5, 0)
    assert contents(log)[-1] == (seq, b"after")
    log.close()
    log = open_log(folder)
    assert contents(log)[-1] == (seq, b"after")
    log.close()


def test_damage_before_the_last_segment_is_not_passed_over(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    for number in range(1, 4):
        log.append(message(number, 900_000), 900_000, 0)
    log.close()
    first = min((tmp_path / "log").glob("*.seg"))
    content = bytearray(first.read_bytes())
    content[500_000] ^= 1
    first.write_bytes(content)
    with pytest.raises(StoreError, match=r"0000000000000000-0000000000000000.seg: damaged after message 0"):
        open_log(tmp_path / "log")


def test_file_is_on_the_disk_before_the_next_one_goes_on_from_it(
    tmp_path: Path, log: StreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fdatasync, rename = os.fdatasync, os.rename

    def synced(fd: int) -> None:
        fdatasync(fd)
        steps.append("synced " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def renamed(source: Path, target: Path) -> None:
        steps.append("new " + target.name)
        rename(source, target)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    for number in range(1, 4):
        log.append(message(number, 900_000), 900_000, 0)
    files = sorted(path.name for path in (tmp_path / "log").glob("*.seg"))
    assert len(files) == 3
    assert steps == [
        "new " + files[0],
        "synced " + files[0],
        "new " + files[1],
        "synced " + files[1],
        "new " + files[2],
    ]
    log.sync()
    assert steps[-1] == "synced " + files[2]
    assert contents(log) == [(number, message(number, 900_000)) for number in range(1, 4)]


def test_receiver_takes_frames_in_any_pieces(tmp_path: Path, log: StreamLog) -> None:
    wanted = [(n, message(n, size)) for n, size in enumerate(SIZES, 1)]
    for _, data in wanted:
        log.append(data, len(data), 0)
    stream = raw(log)
    rng = random.Random(3)
    other = open_log(tmp_path / "other", segment_bytes=MIN_SEGMENT_BYTES + 4096)
    position = 0
    while position < len(stream):
        size = rng.choice([1, 31, 33, 5000, 1 << 20, 3 << 20])
        position += other.receive(io.BytesIO(stream[position : position + size]).readinto)
        if rng.random() < 0.1:  # the connection is cut: the next one goes on from the receiver's place
            other.begin_receiving()
            tail = other.tail
            with Cursor(log, tail) as cursor:
                assert cursor.place == tail  # the checksum too: both have the same history
            stream, position = raw(log, tail[:2]), 0
    assert contents(other) == wanted
    assert verify(other, Place(0, 0, 0), other.tail)
    other.close()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (0, 0x12345678, "no frame where one is due"),
        (0, 0, "no frame where one is due"),
        (1, 1 << 31, "a length beyond bounds"),
        (1, 3, "a checksum"),
        (2, 1, "a frame out of place"),  # a repetition
        (2, 3, "a frame out of place"),  # a gap
        (3, 1, "a frame out of place"),
        (6, 1, "a checksum"),
    ],
)
def test_frame_that_lies_is_refused_whole(tmp_path: Path, log: StreamLog, field: int, value: int, reason: str) -> None:
    for number in (1, 2):
        log.append(message(number, 100), 100, 0)
    stream = bytearray(raw(log))
    second = HEADER.size + 100
    header = list(HEADER.unpack_from(stream, second))
    header[field] = value
    if (field, value) == (0, 0):
        header[1] = 0
    HEADER.pack_into(stream, second, *header)
    other = open_log(tmp_path / "other")
    with pytest.raises(FrameError, match=reason):
        other.receive(io.BytesIO(stream).readinto)
    assert contents(other) == [(1, message(1, 100))]
    other.close()


def test_message_beyond_bounds_is_refused(tmp_path: Path) -> None:
    log = StreamLog(tmp_path / "log", segment_bytes=MIN_SEGMENT_BYTES, max_message_bytes=1000)
    with pytest.raises(StoreError, match="1001 bytes is longer than max_message_bytes = 1000"):
        log.append(bytes(1001), 1001, 0)
    log.close()


def test_truncation_drops_whole_files_and_readers_are_told(log: StreamLog) -> None:
    for number in range(1, 7):
        log.append(message(number, 600_000), 600_000, 0)
    assert log.truncate(4) >= 1
    kept = contents(log, after=log.first.seq + (log.first.offset > 0))
    assert kept[-1] == (6, message(6, 600_000))
    assert kept[0][0] <= 4
    with pytest.raises(StoreError, match="what follows message 0 is not there"):
        Cursor(log, (0, 0))


def test_dropped_files_are_used_again_but_not_under_what_still_reads_them(tmp_path: Path) -> None:
    log, size = open_log(tmp_path / "log"), 1 << 20  # just what fits into a file

    def roll(number: int) -> mmap.mmap:
        log.append(message(number, size), size, 0)
        found = log._segments[-1].map
        assert found is not None
        return found

    roll(1)
    with Cursor(log, (0, 0), lends=True) as cursor:
        lent = cursor.message()
    assert lent is not None
    second, third = roll(2), roll(3)
    with Cursor(log, (1, 0)) as user:  # as a link does that is about to send it
        region = user.region()
        assert region is not None
        assert user.map is second
        assert log.truncate(4) == 2
        maps = {roll(number) for number in range(4, 8)}
        assert not maps & {second, third}
        assert bytes(second[region[0] : region[1]])[-size:] == message(2, size)
    assert b"".join(lent[3]) == message(1, size)
    assert log.truncate(8) == 4
    assert {roll(8), roll(9)} <= maps | {third}
    assert contents(log, after=7) == [(n, message(n, size)) for n in (8, 9)]
    log.close()


def test_full_disk_takes_nothing_of_a_message(tmp_path: Path) -> None:
    # A file of more than the limit cannot be reserved: the same answer as that of a full disk.
    program = f"""
import resource, sys
from pathlib import Path
from torchext.replication.log import *
from torchext.replication.errors import StoreFullError
log = StreamLog(Path({str(tmp_path / "log")!r}), segment_bytes=MIN_SEGMENT_BYTES, max_message_bytes=1 << 30)
log.append(b"first", 5, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    log.append(bytes(3 << 20), 3 << 20, 0)
except StoreFullError as error:
    assert "no room" in str(error), error
else:
    sys.exit("not refused")
assert log.append(b"fits", 4, 0) == 2
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert log.append(bytes(3 << 20), 3 << 20, 0) == 3
"""
    run_without_torch(program)
    log = open_log(tmp_path / "log")
    assert contents(log) == [(1, b"first"), (2, b"fits"), (3, bytes(3 << 20))]
    log.close()
    assert StoreFullError.__mro__[1] is StoreError


def test_killed_writer_leaves_whole_messages(tmp_path: Path) -> None:
    program = f"""
import random
from pathlib import Path
from torchext.replication.log import *
log = StreamLog(Path({str(tmp_path / "log")!r}), segment_bytes=MIN_SEGMENT_BYTES, max_message_bytes=1 << 30)
while True:
    size = random.Random(log.tail.seq + 1).choice([10, 1000, 2_000_000])
    seq = log.append(random.Random(log.tail.seq + 1).randbytes(size), size, 0)
    if seq % 3 == 0:
        print(seq, log.sync().seq, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", NO_TORCH + program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        for _ in range(8):
            acknowledged = int(process.stdout.readline().split()[1])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    log = open_log(tmp_path / "log")
    held = contents(log)
    assert len(held) >= acknowledged
    for number, data in held:
        size = random.Random(number).choice([10, 1000, 2_000_000])
        assert data == random.Random(number).randbytes(size)
    log.close()


NO_TORCH = "import tests.replication.no_torch\n"
ROOT = Path(__file__).parents[2]


def run_without_torch(program: str) -> None:
    subprocess.run([sys.executable, "-c", NO_TORCH + program], check=True, timeout=60, cwd=ROOT)
