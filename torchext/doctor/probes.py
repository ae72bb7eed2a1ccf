"""The table of what the doctor tries, and the checks that are not about the kernel."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from torchext.doctor import kernel
from torchext.doctor.findings import Absent, Probe

_INFINIBAND = Path("/sys/class/infiniband")
_NEWER_KERNEL = "Linux 6.7 or newer with CONFIG_USERFAULTFD, CONFIG_PROC_PAGE_MONITOR"


def default_probes() -> list[Probe]:
    """All that torchext can use, in the order in which the doctor shows it."""
    return [*_versions(), *_core(), *_kernel(), *_devices(), *_cluster()]


def _versions() -> list[Probe]:
    def row(package: str, part: str, enables: str, remedy: str) -> Probe:
        return Probe("versions", package, _version_of(package), part, enables, remedy)

    return [
        Probe("versions", "python", platform.python_version, "", "all of torchext", ""),
        row("torch", "", "all of torchext", "pip install torch"),
        row("numpy", "", "all of torchext", "pip install numpy"),
        row("einops", "", "all of torchext", "pip install einops"),
        row(
            "lightning",
            "callbacks",
            "callbacks for Lightning's Trainer",
            "pip install lightning (extra: lightning)",
        ),
        row(
            "gymnasium",
            "channels",
            "reinforcement learning environments",
            "pip install gymnasium ale-py (extra: rl)",
        ),
        row("ale-py", "channels", "Atari environments", "pip install gymnasium ale-py (extra: rl)"),
    ]


def _core() -> list[Probe]:
    remedy = "install g++ >= 10 and the headers of this Python (Debian: g++ python3-dev), then torchext from source"
    return [Probe("native core", "torchext._native", _native, "collectives", "channels and collectives on CPU", remedy)]


def _kernel() -> list[Probe]:
    part = "standby"
    return [
        Probe(
            "kernel",
            "PAGEMAP_SCAN",
            kernel.pagemap_scan,
            part,
            "finding the pages that a step changed",
            _NEWER_KERNEL,
        ),
        Probe(
            "kernel",
            "userfaultfd",
            kernel.userfaultfd,
            part,
            "write protection from user space",
            "CONFIG_USERFAULTFD; in a container, a seccomp profile that allows it, or access to /dev/userfaultfd",
        ),
        Probe(
            "kernel",
            "write tracking",
            kernel.write_tracking,
            part,
            "tracking of changes that no optimizer owns, and an audit of the rest",
            f"{_NEWER_KERNEL}, and userfaultfd",
        ),
        Probe(
            "kernel",
            "huge pages",
            kernel.huge_pages,
            part,
            "state in huge pages, which are copied and tracked at the least cost; else pages of 4 KiB are used",
            "as root: sysctl vm.nr_hugepages=N",
        ),
        Probe(
            "kernel",
            "transparent huge pages",
            kernel.transparent_huge_pages,
            part,
            "fewer page faults in large buffers",
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Probe(
            "kernel",
            "memfd",
            kernel.memfd,
            "transport",
            "shared memory that nobody has to clean up",
            "Linux 3.17 or newer",
        ),
        Probe(
            "kernel",
            "pidfd",
            kernel.pidfd,
            "transport",
            "notice at once when a peer process dies",
            "Linux 5.3 or newer; in a container, a seccomp profile that allows pidfd_open",
        ),
    ]


def _devices() -> list[Probe]:
    return [
        Probe(
            "devices",
            "RDMA devices",
            _rdma_devices,
            "transport",
            "state and messages between hosts without their CPUs",
            "an InfiniBand or RoCE card; to try without: rdma link add rxe0 type rxe netdev eth0 (module rdma_rxe)",
        ),
        Probe(
            "devices",
            "pyverbs",
            _pyverbs,
            "transport",
            "use of the RDMA devices",
            "Debian: python3-pyverbs; or pip install pyverbs (extra: rdma) beside the libibverbs of its version",
        ),
        Probe(
            "devices",
            "GPUs",
            _gpus,
            "",
            "training on them; every part also works on CPU",
            "a GPU, its driver, and the build of torch for it",
        ),
    ]


def _cluster() -> list[Probe]:
    remedy = "Slurm's client commands (Debian: slurm-client), set up for a cluster"
    return [Probe("cluster", "Slurm", _slurm, "launch", "queueing through Slurm instead of the own queue", remedy)]


def _version_of(package: str) -> Callable[[], str]:
    def check() -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise Absent("not installed") from None

    return check


def _native() -> str:
    try:
        native = importlib.import_module("torchext._native")
    except ImportError as error:
        raise Absent(str(error)) from error
    return ", ".join(f"{name} {words}" for name, words in sorted(native.build_info().items()))


def _rdma_devices() -> str:
    if not _INFINIBAND.is_dir():
        raise Absent(f"{_INFINIBAND} does not exist")
    devices = sorted(_INFINIBAND.iterdir())
    if not devices:
        raise Absent(f"{_INFINIBAND} is empty")
    return "; ".join(f"{device.name}: {', '.join(_ports(device)) or 'no ports'}" for device in devices)


def _ports(device: Path) -> list[str]:
    # As in "4: ACTIVE".
    states = [(port.name, port / "state") for port in sorted((device / "ports").glob("*"))]
    return [f"port {name} {state.read_text().strip().partition(': ')[2].lower()}" for name, state in states]


def _pyverbs() -> str:
    try:
        importlib.import_module("pyverbs.device")
    except ImportError as error:
        raise Absent(str(error)) from error
    try:
        return importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        return "imported"  # a distribution's package need not carry Python's metadata


def _gpus() -> str:
    import torch  # takes a second or two: only once something needs it

    if torch.backends.mps.is_available():
        return "Apple MPS"
    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip
        reason = "no device, or no driver for it" if built_for else "this build of torch is for CPU only"
        raise Absent(f"torch.cuda.is_available() is false: {reason}")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"{', '.join(names)} ({runtime})"


def _slurm() -> str:
    missing = [name for name in ("sinfo", "sbatch") if shutil.which(name) is None]
    if missing:
        raise Absent(f"not on PATH: {', '.join(missing)}")
    # Answers without asking the cluster; the limit is for a PATH on a network disk that hangs.
    result = subprocess.run(
        ["sinfo", "--version"], capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL
    )
    if result.returncode != 0:  # installed, but told of no cluster
        said = (result.stderr.strip() or f"it ended with status {result.returncode}").splitlines()[-1]
        raise Absent(f"sinfo does not work: {said.removeprefix('sinfo: ')}")
    return f"{result.stdout.strip()} ({os.path.dirname(shutil.which('sinfo') or '')})"
