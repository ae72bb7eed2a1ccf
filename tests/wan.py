"""A wide-area network on this machine: hosts are network namespaces, and a process in between holds packets back.

For kernels with and without netem: each host has a TUN device, whose packets `python -m tests.wan` reads, delays by the
pair of hosts, limits to a rate, drops at random, and hands to the other host's device. Where a rate makes a queue,
packets marked for low delay go first, as in Linux's pfifo_fast. TCP's segments pass as the kernel's large ones, so a
link of 1 Gbit/s costs little. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import functools
import heapq
import itertools
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_TUN = 0x0001 | 0x1000 | 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
_OFFLOADS = 1 | 2  # TUN_F_CSUM, TUN_F_TSO4
_VNET_BYTES = 10
_LOW_DELAY = 0x10  # type of service, in a packet's second byte
_NEWNET = 0x40000000  # CLONE_NEWNET


@functools.cache
def missing() -> str:
    """What this machine lacks for it; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs ip (Debian: iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    name = f"tx-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"needs network namespaces: {made.stderr.strip()}"
    router = [sys.executable, "-m", "tests.wan", name]
    try:
        for command in (["ip", "-n", name, "link", "set", "lo", "up"], router, ["ip", "netns", "exec", name, "true"]):
            tried = subprocess.run(command, input="[[0]]\n", capture_output=True, text=True, cwd=ROOT)
            if tried.returncode:
                return f"needs TUN devices in network namespaces: {tried.stderr.strip()[-200:]}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Wan:
    """Hosts, all joined to each other.

    Args:
        round_trips_ms: By host and host: how long a packet and its answer take; read for the lower with the higher.
        rate_mbit: Of each host to each other; 0 for no limit.
        loss_percent: Of packets.
    """

    def __init__(
        self, round_trips_ms: Sequence[Sequence[float]], rate_mbit: float = 0, loss_percent: float = 0
    ) -> None:
        mark = uuid.uuid4().hex[:8]
        self._names = [f"tx-{mark}-{number}" for number in range(len(round_trips_ms))]
        self.addresses = [f"10.88.0.{number + 1}" for number in range(len(self._names))]
        limits = ["--rate", str(rate_mbit), "--loss", str(loss_percent)]
        try:
            for name in self._names:
                subprocess.run(["ip", "netns", "add", name], check=True)
                subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
            self._router = subprocess.Popen(
                [sys.executable, "-m", "tests.wan", *self._names, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
            )
        except BaseException:
            self._delete()
            raise
        self.change(round_trips_ms)
        assert self._router.stdout is not None
        if not self._router.stdout.readline():
            self.close()
            raise RuntimeError("the process that carries the packets ended; its error is above")

    def change(self, round_trips_ms: Sequence[Sequence[float]]) -> None:
        """Sets the round trips anew, for packets from now on."""
        assert self._router.stdin is not None
        self._router.stdin.write(json.dumps([list(row) for row in round_trips_ms]).encode() + b"\n")
        self._router.stdin.flush()

    def at(self, host: int) -> list[str]:
        """Put before a command, to run it at a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def close(self) -> None:
        """Removes the hosts."""
        self._router.kill()
        self._router.wait()
        for pipe in (self._router.stdin, self._router.stdout):
            assert pipe is not None
            pipe.close()
        self._delete()

    def _delete(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def __enter__(self) -> Wan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def symmetric(num_hosts: int, round_trips_ms: dict[tuple[int, int], float]) -> list[list[float]]:
    """The table of round trips from those of pairs, lower with higher."""
    return [
        [round_trips_ms.get((min(one, other), max(one, other)), 0.0) for other in range(num_hosts)]
        for one in range(num_hosts)
    ]


# The process in between.


def _open_tun(namespace: str, address: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"wan0", _TUN))
        fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_BYTES))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
        if libc.setns(here, _NEWNET):
            raise OSError(ctypes.get_errno(), "cannot return")
    finally:
        os.close(here)
        os.close(there)
    for words in (f"addr add {address}/24 dev wan0", "link set wan0 up txqueuelen 10000"):
        subprocess.run(["ip", "-n", namespace, *words.split()], check=True)
    return fd


def route(fds: list[int], rate_mbit: float, loss_percent: float) -> None:
    """Carries packets until the input ends, from which tables of round trips come."""
    rng = random.Random(0)
    hosts = {fd: number for number, fd in enumerate(fds)}
    queue: list[tuple[float, int, int, bytes]] = []  # when it is due, a number, where to, the packet
    numbers = itertools.count()
    bands = [(one, other, urgent) for one in hosts.values() for other in hosts.values() for urgent in (False, True)]
    free_at, last_due = dict.fromkeys(bands, 0.0), dict.fromkeys(bands, 0.0)
    round_trips: list[list[float]] = json.loads(sys.stdin.buffer.readline())
    print("up", flush=True)
    os.set_blocking(0, False)
    poll = select.epoll()
    for fd in (*fds, 0):
        poll.register(fd, select.EPOLLIN)
    while True:
        wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else -1
        for fd, _ in poll.poll(wait_s if wait_s < 0 else int(wait_s * 1000) / 1000):
            if fd == 0:
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                round_trips = json.loads(line)
                continue
            for _ in range(64):
                try:
                    packet = os.read(fd, 70_000)
                except BlockingIOError:
                    break
                if packet[_VNET_BYTES] >> 4 != 4:
                    continue  # neighbours looked for by IPv6
                one, other = hosts[fd], packet[_VNET_BYTES + 19] - 1
                if other >= len(fds) or (loss_percent and rng.random() * 100 < loss_percent):
                    continue
                sent = now = time.monotonic()
                band = one, other, packet[_VNET_BYTES + 1] == _LOW_DELAY
                if rate_mbit:
                    takes_s = len(packet) * 8e-6 / rate_mbit
                    sent = max(now, free_at[band]) + takes_s
                    if sent - now > 0.5:
                        continue  # the queue is full
                    free_at[band] = sent
                    if band[2]:  # the others are put off by it
                        free_at[one, other, False] = max(now, free_at[one, other, False]) + takes_s
                due = sent + round_trips[min(one, other)][max(one, other)] / 2000
                last_due[band] = due = max(due, last_due[band])  # no reordering when the delay falls
                heapq.heappush(queue, (due, next(numbers), fds[other], packet))
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, _, to, packet = heapq.heappop(queue)
            with contextlib.suppress(BlockingIOError):  # then it is lost
                os.write(to, packet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("namespaces", nargs="+")
    parser.add_argument("--rate", type=float, default=0, help="Mbit/s")
    parser.add_argument("--loss", type=float, default=0, help="percent")
    options = parser.parse_args()
    fds = [_open_tun(name, f"10.88.0.{number + 1}") for number, name in enumerate(options.namespaces)]
    route(fds, options.rate, options.loss)


if __name__ == "__main__":
    main()
