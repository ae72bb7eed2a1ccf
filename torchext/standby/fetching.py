"""A state out of a standby: sent over a connection, or copied out of its memory by a process of the same host."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from typing import Any

import torch

from torchext._native import standby as native
from torchext.standby import tree as trees
from torchext.standby.errors import CorruptStateError, StandbyError
from torchext.standby.images import record_of
from torchext.standby.persist import State
from torchext.standby.source import in_parallel, open_segment
from torchext.transport import receive_into

_HUGE_PAGE = 1 << 21
_MAX_THREADS = 4


def receive_state(
    sock: socket.socket, words: dict[str, Any], tree: memoryview, find_mesh: trees.FindMesh | None = None
) -> State:
    """Takes the entries off the connection, one after the other.

    Args:
        sock: The connection.
        words: The standby's answer: ``step``, ``world_size``, ``entries`` as (number, size, checksum), ``record``.
        tree: The pickle that refers to them.
        find_mesh: See `tree.load`.

    Raises:
        CorruptStateError: What came is not what was committed.
        OSError: The connection has ended.
    """
    entries = {number: _room(size) for number, size, _ in words["entries"]}
    checksums: dict[int, int] = {}
    for number, entry in entries.items():  # all of them, whatever is wrong: the connection goes on behind the last
        receive_into(sock, entry.numpy().data)
        checksums[number] = native.checksum(entry.data_ptr(), entry.numel())
    return _rebuild(words, tree, entries, checksums, find_mesh)


def copy_state(pid: int, words: dict[str, Any], tree: memoryview, find_mesh: trees.FindMesh | None = None) -> State:
    """Copies the entries out of the standby's memory, in several threads: quicker than a connection by far.

    Args:
        pid: The standby's process. It leaves the memory as it is until it is told that this is done.
        words: As for `receive_state`, and ``places``, the descriptor of a segment, offset in it, and its nonce, of
            each of the entries.
        tree: See `receive_state`, as for the following.
        find_mesh: See there.

    Raises:
        CorruptStateError: What is there is not what was committed.
        OSError: This process may not read that one's memory.
        StandbyError: The entries do not lie there.
    """
    checksums: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        files: dict[str, int] = {}  # by nonce
        places = {}
        for (number, *_), (descriptor, offset, nonce) in zip(words["entries"], words["places"], strict=True):
            if nonce not in files:
                files[nonce] = open_segment(pid, descriptor, bytes.fromhex(nonce))
                stack.callback(os.close, files[nonce])
            places[number] = files[nonce], offset
        entries = {number: _room(size) for number, size, _ in words["entries"]}

        def copy(numbers: list[int]) -> None:
            for number in numbers:
                _read_into(entries[number].numpy().data, *places[number])
                checksums[number] = native.checksum(entries[number].data_ptr(), entries[number].numel())

        in_parallel([(copy, (share,)) for share in _shares(words["entries"])])
    return _rebuild(words, tree, entries, checksums, find_mesh)


def _read_into(memory: memoryview, file: int, offset: int) -> None:
    """Fills memory from a segment. Not by mapping that: page tables for what is read once take longer than reading."""
    at = 0
    while at < len(memory):
        count = os.preadv(file, [memory[at:]], offset + at)
        if count == 0:
            raise StandbyError(f"a segment ends before byte {offset + len(memory)}")
        at += count


def _shares(entries: list[tuple[int, int, int]]) -> list[list[int]]:
    """The numbers of the entries, split into about as many bytes for each thread."""
    shares: list[list[int]] = [[] for _ in range(min(_MAX_THREADS, len(os.sched_getaffinity(0))))]
    loads = [0] * len(shares)
    for number, size, _ in sorted(entries, key=lambda entry: -entry[1]):
        lightest = loads.index(min(loads))
        shares[lightest].append(number)
        loads[lightest] += size
    return shares


def _room(size_bytes: int) -> torch.Tensor:
    """Memory for an entry: (size_bytes,) uint8; in huge pages where they help, as it is touched for the first time."""
    if size_bytes < 2 * _HUGE_PAGE:
        return torch.empty(size_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _rebuild(
    words: dict[str, Any],
    tree: memoryview,
    entries: dict[int, torch.Tensor],
    checksums: dict[int, int],
    find_mesh: trees.FindMesh | None,
) -> State:
    for number, _, checksum in words["entries"]:
        if checksums[number] != checksum:
            raise CorruptStateError(
                f"entry {number} of step {words['step']} has another checksum than when it was sealed"
            )
    data = bytes(tree)
    if record_of(words["step"], data, words["entries"]) != words["record"]:
        raise CorruptStateError(f"the commit record of step {words['step']} does not fit its state")
    return State(words["step"], words["world_size"], trees.load(data, entries.__getitem__, find_mesh))
