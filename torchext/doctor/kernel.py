"""Features of the Linux kernel, each tried on memory of our own.

Numbers and layouts are those of ``linux/fs.h`` and ``linux/userfaultfd.h``. They hold for the architectures whose ioctl
numbers follow ``asm-generic/ioctl.h``, x86-64 and arm64 among them; on others the kernel refuses and the row says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from torchext.doctor.findings import Absent

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_PM_SCAN_WP_MATCHING = 1 << 0
_PM_SCAN_CHECK_WPASYNC = 1 << 1
_PAGE_IS_WRITTEN = 1 << 1
_PAGE_IS_PRESENT = 1 << 3

_USERFAULTFD_CALL = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
_USERFAULTFD_IOC_NEW = 0xAA00  # _IO(0xAA, 0x00), on /dev/userfaultfd
_UFFD_USER_MODE_ONLY = 1
_UFFD_API = 0xAA
_UFFDIO_API = 0xC018AA3F  # _IOWR(0xAA, 0x3F, struct uffdio_api)
_UFFDIO_REGISTER = 0xC020AA00  # _IOWR(0xAA, 0x00, struct uffdio_register)
_UFFDIO_REGISTER_MODE_WP = 1 << 1
_UFFD_FEATURE_PAGEFAULT_FLAG_WP = 1 << 0
_UFFD_FEATURE_WP_HUGETLBFS_SHMEM = 1 << 12
_UFFD_FEATURE_WP_UNPOPULATED = 1 << 13
_UFFD_FEATURE_WP_ASYNC = 1 << 15

_MAP_HUGETLB = 0x40000


class _PageRegion(ctypes.Structure):
    _fields_ = [("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("categories", ctypes.c_uint64)]


class _ScanArg(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in [
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        ]
    ]


class _UffdApi(ctypes.Structure):
    _fields_ = [("api", ctypes.c_uint64), ("features", ctypes.c_uint64), ("ioctls", ctypes.c_uint64)]


class _UffdRegister(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("start", "len", "mode", "ioctls")]


def pagemap_scan() -> str:
    """Writes to one of four fresh pages and asks the kernel which of them are present."""
    _need_linux()
    with _pages(4) as (memory, address):
        memory[2 * mmap.PAGESIZE] = 1
        found = _scan(address, 4, mask=_PAGE_IS_PRESENT)
    if found != [2]:
        raise Absent(f"wrote page 2 of 4, the kernel names {found}")
    return f"found the one page present of four (Linux {platform.release()})"


def userfaultfd() -> str:
    """Opens one and asks for its features."""
    _need_linux()
    with _userfaultfd() as (fd, way):
        features = _enable(fd, 0)
    names = {
        "write-protect": _UFFD_FEATURE_PAGEFAULT_FLAG_WP,
        "on hugetlb and shared memory": _UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
        "on unpopulated pages": _UFFD_FEATURE_WP_UNPOPULATED,
        "asynchronous": _UFFD_FEATURE_WP_ASYNC,
    }
    return f"opened {way}; " + (", ".join(name for name, bit in names.items() if features & bit) or "no write-protect")


def write_tracking() -> str:
    """Tracks writes to four pages without stopping the writer, and finds the one written."""
    _need_linux()
    needed = _UFFD_FEATURE_WP_ASYNC | _UFFD_FEATURE_WP_UNPOPULATED
    with _userfaultfd() as (fd, _):
        if _enable(fd, 0) & needed != needed:
            raise Absent(f"the userfaultfd of Linux {platform.release()} lacks WP_ASYNC")
    with _userfaultfd() as (fd, _), _pages(4) as (memory, address):
        _enable(fd, needed)
        length = 4 * mmap.PAGESIZE
        _ioctl(fd, _UFFDIO_REGISTER, _UffdRegister(address, length, _UFFDIO_REGISTER_MODE_WP))
        arm = _PM_SCAN_WP_MATCHING | _PM_SCAN_CHECK_WPASYNC
        _scan(address, 4, mask=_PAGE_IS_WRITTEN, flags=arm)
        memory[3 * mmap.PAGESIZE] = 1
        found = _scan(address, 4, mask=_PAGE_IS_WRITTEN, flags=arm)
        again = _scan(address, 4, mask=_PAGE_IS_WRITTEN)
    if (found, again) != ([3], []):
        raise Absent(f"wrote page 3 of 4, the kernel names {found}, and after re-arming {again}")
    return "found the one page written of four, and none after re-arming"


def huge_pages() -> str:
    """Maps one page of hugetlb memory of the default size, without touching it."""
    _need_linux()
    info = _meminfo()
    size_kib = info.get("Hugepagesize")
    if size_kib is None:
        raise Absent("this kernel has no hugetlb pages")
    state = f"{size_kib} KiB each, {info.get('HugePages_Free', 0)} of {info.get('HugePages_Total', 0)} free"
    try:
        mmap.mmap(-1, size_kib * 1024, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB).close()
    except OSError as error:
        raise Absent(f"{state}; mapping one: {error.strerror}") from error
    return state


def transparent_huge_pages() -> str:
    """Reads whether the kernel joins ordinary pages to huge ones."""
    _need_linux()
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    settings = {name: _selected(folder / name) for name in ("enabled", "shmem_enabled")}
    state = f"private memory: {settings['enabled'] or 'no'}, shared memory: {settings['shmem_enabled'] or 'no'}"
    if settings["enabled"] not in ("always", "madvise"):
        raise Absent(state)
    return state


def memfd() -> str:
    """Makes a memfd, and maps and reads it."""
    _need_linux()
    fd = os.memfd_create("torchext-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as memory:
            memory[0] = 1
        if os.pread(fd, 1, 0) != b"\1":
            raise Absent("what was written through a mapping cannot be read back")
    finally:
        os.close(fd)
    return "made, mapped and read"


def pidfd() -> str:
    """Opens a pidfd on this process."""
    _need_linux()
    if not hasattr(os, "pidfd_open"):
        raise Absent("this Python was built for an older kernel: it has no os.pidfd_open")
    os.close(os.pidfd_open(os.getpid()))
    return "opened on this process"


def _need_linux() -> None:
    if sys.platform != "linux":
        raise Absent(f"a feature of Linux; this is {platform.system() or sys.platform}")


@contextlib.contextmanager
def _pages(num_pages: int) -> Iterator[tuple[mmap.mmap, int]]:
    """Private memory that nothing has touched yet, and its address."""
    with mmap.mmap(-1, num_pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        # Else writing to one page may make others present.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
        view = ctypes.c_char.from_buffer(memory)
        try:
            yield memory, ctypes.addressof(view)
        finally:
            del view  # the mapping cannot be closed as long as it is exported


def _scan(address: int, num_pages: int, *, mask: int, flags: int = 0) -> list[int]:
    """Which pages have all categories of ``mask``; numbers counted from ``address``."""
    regions = (_PageRegion * num_pages)()
    arg = _ScanArg(
        size=ctypes.sizeof(_ScanArg),
        flags=flags,
        start=address,
        end=address + num_pages * mmap.PAGESIZE,
        vec=ctypes.addressof(regions),
        vec_len=num_pages,
        category_mask=mask,
        return_mask=mask,
    )
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_regions = _ioctl(fd, _PAGEMAP_SCAN, arg)
    except OSError as error:
        if error.errno == errno.ENOTTY:
            raise Absent(f"unknown to Linux {platform.release()}") from error
        raise
    finally:
        os.close(fd)
    return [
        (page - address) // mmap.PAGESIZE
        for region in regions[:num_regions]
        for page in range(region.start, region.end, mmap.PAGESIZE)
    ]


@contextlib.contextmanager
def _userfaultfd() -> Iterator[tuple[int, str]]:
    """A userfaultfd and how it was opened; for faults of user code alone, which needs the least rights."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK | _UFFD_USER_MODE_ONLY
    number = _USERFAULTFD_CALL.get(platform.machine())
    reason = f"the number of its system call on {platform.machine()} is not known here"
    if number is not None:
        fd = ctypes.CDLL(None, use_errno=True).syscall(number, flags)
        if fd >= 0:
            yield from _closing(fd, "by system call, for user faults")
            return
        reason = f"system call: {os.strerror(ctypes.get_errno())}"
    reason += f", vm.unprivileged_userfaultfd = {_text(Path('/proc/sys/vm/unprivileged_userfaultfd')) or 'unknown'}"
    try:
        import fcntl

        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
        try:
            fd = fcntl.ioctl(device, _USERFAULTFD_IOC_NEW, flags)
        finally:
            os.close(device)
    except OSError as error:
        raise Absent(f"{reason}; /dev/userfaultfd: {error.strerror}") from error
    yield from _closing(fd, "through /dev/userfaultfd")


def _closing(fd: int, way: str) -> Iterator[tuple[int, str]]:
    try:
        yield fd, way
    finally:
        os.close(fd)


def _enable(fd: int, features: int) -> int:
    """Turns features on, once for each userfaultfd; gives all that the kernel has."""
    api = _UffdApi(api=_UFFD_API, features=features)
    _ioctl(fd, _UFFDIO_API, api)
    return int(api.features)


def _ioctl(fd: int, request: int, arg: ctypes.Structure) -> int:
    import fcntl  # not on Windows

    # True: the kernel writes its answer into the structure.
    return int(fcntl.ioctl(fd, request, arg, True))


def _meminfo() -> dict[str, int]:
    rows = (line.split() for line in _text(Path("/proc/meminfo")).splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in rows if len(words) > 1}


def _selected(path: Path) -> str:
    """The choice in brackets, as in ``always [madvise] never``."""
    return _text(path).partition("[")[2].partition("]")[0]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
