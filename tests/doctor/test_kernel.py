from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchext.doctor import Absent, kernel

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

CHECKS = [
    kernel.pagemap_scan,
    kernel.userfaultfd,
    kernel.write_tracking,
    kernel.huge_pages,
    kernel.transparent_huge_pages,
    kernel.memfd,
    kernel.pidfd,
]


@pytest.fixture(autouse=True)
def _no_descriptors_left() -> object:
    before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
    yield
    # Others may have been closed: by the garbage collector, of what an earlier test has left.
    assert (set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()) <= before


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_elsewhere_than_on_linux_it_is_absent(check: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Absent, match="a feature of Linux"):
        check()


@linux_only
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_is_there_or_absent_for_a_reason(check: Callable[[], str]) -> None:
    try:
        words = check()
    except Absent as reason:
        words = str(reason)
    assert words


@linux_only
def test_a_scan_names_the_pages_touched() -> None:
    """Also of regions with several pages, and of several regions."""
    _skip_if_absent(kernel.pagemap_scan)
    with kernel._pages(8) as (memory, address):
        for page in (1, 2, 3, 6):
            memory[page * mmap.PAGESIZE] = 1
        assert kernel._scan(address, 8, mask=kernel._PAGE_IS_PRESENT) == [1, 2, 3, 6]


@linux_only
def test_write_tracking_needs_what_userfaultfd_says_it_has() -> None:
    words = _skip_if_absent(kernel.userfaultfd)
    if "asynchronous" in words:
        assert "found the one page written" in kernel.write_tracking()
    else:
        with pytest.raises(Absent, match="lacks WP_ASYNC"):
            kernel.write_tracking()


@linux_only
def test_an_older_kernel_is_told_by_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, request: int, arg: object) -> int:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    monkeypatch.setattr(kernel, "_ioctl", refuse)
    with pytest.raises(Absent, match="unknown to Linux"):
        kernel.pagemap_scan()


@linux_only
def test_a_userfaultfd_that_is_refused_says_by_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel.platform, "machine", lambda: "pdp11")
    monkeypatch.setattr(kernel.os, "open", refuse)
    with pytest.raises(Absent, match=r"pdp11.*unprivileged_userfaultfd = .*/dev/userfaultfd: Operation not permitted"):
        kernel.userfaultfd()


def test_huge_pages_without_hugetlb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(kernel, "_text", lambda path: "MemTotal: 1 kB\nHugePages_Total: 0\n")
    with pytest.raises(Absent, match="no hugetlb"):
        kernel.huge_pages()


@pytest.mark.parametrize(
    ("enabled", "there"), [("[always] madvise never", True), ("always [madvise] never", True), ("[never]", False)]
)
def test_transparent_huge_pages_by_the_choice_in_brackets(
    enabled: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(kernel, "_text", lambda path: enabled if Path(path).name == "enabled" else "")
    if there:
        assert kernel.transparent_huge_pages().endswith("shared memory: no")
    else:
        with pytest.raises(Absent, match="never"):
            kernel.transparent_huge_pages()


def _skip_if_absent(check: Callable[[], str]) -> str:
    try:
        return check()
    except Absent as reason:
        pytest.skip(f"{check.__name__} is absent here: {reason}")
