"""Checksums and copies against a plain reference; changes against sets of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchext._native import standby as native
from torchext.standby.changes import Changes, Rows

_MASK = (1 << 64) - 1


def _reference(data: bytes) -> int:
    total = 0
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8], "little")
        keyed = word ^ ((i // 8 + 1) * 0x9E3779B97F4A7C15 & _MASK)
        total += (keyed & 0xFFFFFFFF) * (keyed >> 32) + ((word << 32 | word >> 32) & _MASK)
    return total & _MASK


def _tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.binary(max_size=300))
def test_checksum_and_copy_agree_with_the_reference(data: bytes) -> None:
    source, target = _tensor(data), torch.zeros(len(data), dtype=torch.uint8)
    assert native.checksum(source.data_ptr(), len(data)) == _reference(data)
    assert native.copy(target.data_ptr(), source.data_ptr(), len(data)) == _reference(data)
    assert bytes(target.tolist()) == data


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_checksum_is_kept_up_to_date_when_ranges_change(data: bytes, draw: st.DataObject) -> None:
    old = draw.draw(st.binary(min_size=len(data), max_size=len(data)))
    row_bytes = draw.draw(st.integers(1, len(data)))
    count = -(-len(data) // row_bytes)
    indices = np.array(sorted(draw.draw(st.sets(st.integers(0, count - 1)))), dtype=np.int64)
    offsets, sizes = Rows(row_bytes, indices).ranges(len(data))
    expected = bytearray(old)
    for i in indices:
        expected[i * row_bytes : (i + 1) * row_bytes] = data[i * row_bytes : (i + 1) * row_bytes]
    packed_source = _tensor(b"".join(data[o : o + s] for o, s in zip(offsets, sizes, strict=True)))
    for source, packed in ((_tensor(data), False), (packed_source, True)):
        target = _tensor(old)
        arguments = (target.data_ptr(), source.data_ptr(), len(data), offsets.ctypes.data, sizes.ctypes.data)
        change = native.copy_ranges(*arguments, len(offsets), packed)
        assert bytes(target.tolist()) == bytes(expected)
        assert (_reference(old) + change) & _MASK == _reference(bytes(expected))


def test_swapped_words_and_flipped_bits_show() -> None:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=generator)
    before = native.checksum(data.data_ptr(), 4096)
    swapped = data.view(torch.int64).clone()
    swapped[[3, 200]] = swapped[[200, 3]]
    assert native.checksum(swapped.data_ptr(), 4096) != before
    for bit in range(0, 4096 * 8, 37):
        data[bit // 8] ^= 1 << bit % 8
        assert native.checksum(data.data_ptr(), 4096) != before
        data[bit // 8] ^= 1 << bit % 8


def test_ranges_outside_of_the_entry_are_refused() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    for offset, size in ((60, 5), (-1, 2), (65, 0), (0, -1)):
        at, sizes = np.array([offset]), np.array([size])
        with pytest.raises(IndexError, match="not within the entry's 64 bytes"):
            native.copy_ranges(memory.data_ptr(), memory.data_ptr(), 64, at.ctypes.data, sizes.ctypes.data, 1, False)


def test_update_says_whether_anything_changed() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    assert native.update(target.data_ptr(), source.data_ptr(), 100)
    assert not native.update(target.data_ptr(), source.data_ptr(), 100)
    assert torch.equal(source, target)


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 99), max_size=40)), max_size=6))
def test_changes_travel_and_merge_as_sets_of_rows(given_rows: list[tuple[int, set[int]]]) -> None:
    sizes = dict.fromkeys(range(4), 100 * 16)
    changes, model = Changes(), {entry: set[int]() for entry in range(4)}
    for entry, rows in given_rows:
        one = Changes()
        one.add_rows(entry, Rows(16, np.array(sorted(rows), dtype=np.int64)), sizes[entry])
        changes.merge(one, sizes)
        model[entry] |= rows
    words, data = changes.to_wire()
    received = Changes.from_wire(words, memoryview(data))
    for entry, rows in model.items():
        if len(rows) > 50:
            assert entry in received.whole
        elif rows and entry not in received.whole:
            assert set.union(*(set(each.indices.tolist()) for each in received.rows[entry])) == rows
        elif not rows:
            assert entry not in received
