"""What changed, whoever changed it: pages, audits, and huge pages."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import multiprocessing
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.standby.processes import Net, build, step, undisturbed
from torchext._native import standby as native
from torchext.standby import MissedChangeWarning, Replicator
from torchext.standby.arena import Arena, Segment
from torchext.standby.daemon import Daemon
from torchext.standby.link import fetch
from torchext.standby.pages import PageTracking

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def pages() -> None:
    try:
        PageTracking()
    except OSError as error:
        pytest.skip(f"this kernel does not track written pages: {error}")


def _replicator(daemon: Daemon, model: Any, optimizer: Any, **options: Any) -> Replicator:
    return Replicator(model, optimizer, standby=daemon.address, job="job", mode="rpo0", **options)


def _assert_held(daemon: Daemon, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    tree = fetch(daemon.address, "job").tree
    for (name, left), right in zip(model.state_dict().items(), tree["models"]["model"].values(), strict=True):
        assert torch.equal(left, right), name
    if optimizer is not None:
        held = tree["optimizers"][0]["state"]
        for key, moments in optimizer.state_dict()["state"].items():
            for name, value in moments.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(held[key][name])), name


@pytest.mark.usefixtures("pages")
def test_what_was_written_is_found_page_by_page() -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 64 * mmap.PAGESIZE), dtype=torch.uint8)
    tracker = native.PageTracker(memory.data_ptr(), memory.numel())
    page = mmap.PAGESIZE
    memory[3 * page + 5] = 1
    memory[7 * page - 1 : 9 * page] = 1
    assert tracker.scan(False) == [(3 * page, page), (6 * page, 3 * page)]
    assert tracker.scan(True) == [(3 * page, page), (6 * page, 3 * page)]
    assert tracker.scan(True) == []
    memory.numpy()[0] = 7
    memory.data.zero_()
    assert sum(size for _, size in tracker.scan(True)) == memory.numel()
    with Path("/dev/zero").open("rb") as file:  # the kernel writes for the program
        file.readinto(memory.numpy().data[5 * page : 6 * page])
    assert tracker.scan(True) == [(5 * page, page)]
    tracker.close()
    tracker.close()
    memory[0] = 1
    with pytest.raises(OSError, match="closed"):
        tracker.scan(True)


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_pages_bring_every_change_and_little_else(daemon: Daemon, transport: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    options: dict[str, Any] = {"tracking": "pages", "huge_pages": False, "transport": transport}
    with _replicator(daemon, model, optimizer, **options) as replicator:

        def train(i: int) -> int:
            before = replicator.stats["bytes_pulled"]
            replicator.commit(i)
            _assert_held(daemon, model, optimizer)
            return int(replicator.stats["bytes_pulled"] - before)

        rest = 5056 + 8192  # torch's generator; copies of what is small
        for i in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 512)).sum().backward()
            optimizer.step()
            pulled = train(i)
        assert pulled <= 3 * (512 * 512 + 512) * 4 + rest
        assert train(3) <= rest  # nothing was written
        model[1].weight.data[7, 3] = 5.0  # not seen by versions
        assert 4096 <= train(4) <= 4096 + rest
        model[1].weight.detach().numpy()[100:104] += 1.0
        assert 2 * 4096 <= train(5) <= 3 * 4096 + rest
        ctypes.memset(optimizer.state[model[1].weight]["exp_avg"].data_ptr() + 4096, 0, 10)
        assert 4096 <= train(6) <= 4096 + rest
        model[0].weight.data.mul_(2.0)  # of no optimizer
        train(7)
        model[0].weight.data.mul_(2.0)
        train(8)


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("mode", ["lag1", "rpo0"])
def test_a_run_with_pages_is_the_undisturbed_one_and_restores(daemon: Daemon, mode: Any) -> None:
    losses, weights = undisturbed(10)
    start = 0
    for end in (5, 10):
        model, optimizer = build()
        with Replicator(
            model, optimizer, standby=daemon.address, job="job", mode=mode, tracking="pages", audit_every_n_steps=1
        ) as replicator:
            found = replicator.restore()
            assert (found is None) == (start == 0)
            for i in range(start, end):
                assert step(model, optimizer) == losses[i]
                replicator.commit(i)
        start = end
    for left, right in zip(model.state_dict().values(), weights.values(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.usefixtures("pages")
def test_pages_see_a_change_between_commit_and_step_that_versions_do_not(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = build()
    options: dict[str, Any] = {"tracking": "pages", "huge_pages": False}  # a huge page may hold several tensors
    with Replicator(model, optimizer, standby=daemon.address, job="job", **options) as replicator:
        step(model, optimizer)
        replicator.commit(0)
        model.layers[0].weight.data.mul_(2.0)
        step(model, optimizer)
        assert "step 0 is not committed: model.layers.0.weight was changed" in caplog.text
        replicator.commit(1)
    _assert_held(daemon, model, optimizer)


@pytest.mark.parametrize("tracking", ["owner", "rows", "auto"])
def test_an_audit_names_what_tracking_missed_and_the_next_commit_mends_it(daemon: Daemon, tracking: Any) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer, tracking=tracking, audit_every_n_steps=2) as replicator:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(6):
                step(model, optimizer)
                replicator.commit(i)
        model.frozen.data.mul_(2.0)  # no optimizer's, and no version says so
        with pytest.warns(
            MissedChangeWarning, match=r"step 6 is not committed: an audit found that model\.frozen changed unseen"
        ):
            replicator.commit(6)
        assert fetch(daemon.address, "job").step == 5
        replicator.commit(7)
        _assert_held(daemon, model, optimizer)
        model.frozen.data.mul_(2.0)
        with pytest.warns(MissedChangeWarning, match="step 8"):
            replicator.commit(8)
        replicator.commit(9)
        _assert_held(daemon, model, optimizer)


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("tracking", ["auto", "pages"])
def test_an_audit_covers_what_was_read_ahead_of_the_commit(
    daemon: Daemon, tracking: Any, transport: Any, request: pytest.FixtureRequest
) -> None:
    if tracking == "pages":
        request.getfixturevalue("pages")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    options = {"tracking": tracking, "transport": transport, "audit_every_n_steps": 1}
    with _replicator(daemon, model, list(optimizers.values()), **options) as replicator:
        for i in range(8):
            before = replicator.stats["bytes_pulled"]
            model(torch.randn(8, 64)).square().mean().backward()
            replicator.gate()  # by now all is read that can be
            if i > 2:
                assert (replicator.stats["bytes_pulled"] > before) == (tracking == "auto")
            if i == 4:
                model[1].weight.data.mul_(2.0)  # since then, and no version says so
            if i == 4 and tracking == "auto":
                with pytest.warns(MissedChangeWarning, match=r"step 4 is not committed: .* model\.1\.weight changed"):
                    replicator.commit(i)
                assert fetch(daemon.address, "job").step == 3
            else:
                replicator.commit(i)  # warnings are errors
                assert fetch(daemon.address, "job").step == i
                _assert_held(daemon, model)


def test_an_audit_finds_a_copy_that_has_gone_bad(daemon: Daemon) -> None:
    model, optimizer = build()
    with _replicator(daemon, model, optimizer, audit_every_n_steps=1) as replicator:
        replicator.commit(0)
        replicator.commit(1)
        for image in daemon.jobs["job"].ranks[0].images.images:
            for held in image.entries.values():
                held.checksum += 1
        with pytest.warns(MissedChangeWarning, match="and [0-9]+ more changed unseen"):
            replicator.commit(2)
        replicator.commit(3)
        _assert_held(daemon, model, optimizer)


def _on_an_older_kernel(address: str, results: Any) -> None:
    """Replicates in a process whose kernel does not know PAGEMAP_SCAN, as those before 6.7."""
    _deny_pagemap_scan()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchext.standby.publisher").addHandler(handler)
    model, optimizer = build()
    with Replicator(model, optimizer, standby=address, job="job", mode="rpo0", tracking="pages") as replicator:
        for i in range(3):
            step(model, optimizer)
            replicator.commit(i)
    results.send((messages, [tensor.tolist() for tensor in model.state_dict().values()]))


def _deny_pagemap_scan() -> None:
    """By a filter of system calls: ioctl with the number of PAGEMAP_SCAN fails with ENOTTY."""
    instructions = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 3, 16),  # ioctl?
        (0x20, 0, 0, 24),  # load the low half of its second argument
        (0x15, 0, 1, 0xC0606610),  # PAGEMAP_SCAN?
        (0x06, 0, 0, 0x00050000 | 25),  # ENOTTY
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    program = b"".join(
        np.array([code], np.uint16).tobytes() + bytes([yes, no]) + np.array([value], np.uint32).tobytes()
        for code, yes, no, value in instructions
    )
    buffer = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    one = ctypes.c_ulong(1)
    zero = ctypes.c_ulong(0)
    assert libc.prctl(38, one, zero, zero, zero) == 0  # no new privileges
    loaded = Filter(len(instructions), ctypes.addressof(buffer))
    assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(loaded)) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter of system calls is written for x86-64")
def test_without_page_tracking_owners_say_what_changed_and_a_message_says_so(daemon: Daemon) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_on_an_older_kernel, args=(daemon.address, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(100)
        messages, weights = ours.recv()
    finally:
        process.join(30)
        ours.close()
    assert process.exitcode == 0
    assert len(messages) == 1
    assert messages[0].startswith("tracking='pages' is not possible here, using tracking='owner': ")
    held = fetch(daemon.address, "job").tree["models"]["model"]
    assert [tensor.tolist() for tensor in held.values()] == weights


def _huge_pages_free() -> int:
    try:
        return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    except OSError:
        return 0


def test_an_arena_takes_ordinary_pages_where_the_system_has_no_huge_ones() -> None:
    size = (_huge_pages_free() + 64) << 21  # more than there are
    with pytest.raises(OSError, match=r"huge pages of 2 MiB: .*; reserve them \(vm\.nr_hugepages\) or leave"):
        Arena(huge_pages=True).reserve(size)
    arena = Arena(huge_pages=None)
    arena.reserve(size)  # memory that nobody touches costs nothing
    assert [segment.huge_pages for segment in arena.segments] == [False]
    slot = arena.allocate(1000)
    slot.base.fill_(3)
    assert slot.base.sum() == 3000
    arena.close()


@pytest.mark.usefixtures("pages")
def test_huge_pages_hold_the_state_and_are_tracked(daemon: Daemon) -> None:
    if _huge_pages_free() < 16:
        pytest.skip("needs 16 free huge pages of 2 MiB (sysctl vm.nr_hugepages=32)")
    losses, _ = undisturbed(6)
    model, optimizer = build()
    with _replicator(daemon, model, optimizer, huge_pages=True, tracking="pages", audit_every_n_steps=1) as replicator:
        assert all(segment.huge_pages for segment in replicator._publisher.ledger._arena.segments)
        for i in range(6):
            assert step(model, optimizer) == losses[i]
            replicator.commit(i)
            _assert_held(daemon, model, optimizer)
        assert any(segment.huge_pages for segment in replicator._publisher.ledger._arena.segments)


def test_slots_are_aligned_reused_and_kept_apart() -> None:
    arena = Arena(huge_pages=False, alignment=4096)
    slots = [arena.allocate(size) for size in (1, 4096, 4097, 100_000)]
    for number, slot in enumerate(slots):
        assert slot.address % 4096 == 0
        slot.base.fill_(number)
    assert [int(slot.base[-1]) for slot in slots] == [0, 1, 2, 3]
    before = arena.size_bytes
    offsets = {slot.offset for slot in slots}
    for slot in slots:
        arena.free(slot)
    del slot, slots
    gc.collect()
    again = [arena.allocate(size) for size in (1, 4096, 4097, 100_000)]
    assert {slot.offset for slot in again} == offsets
    assert arena.size_bytes == before
    arena.close()


def test_a_segment_rounds_up_to_huge_pages() -> None:
    segment = Segment(1, huge_pages=False)
    assert segment.size_bytes == 1 << 21
    segment.close()
    segment.close()


__all__ = ["Net"]
