"""Replication over an emulated wide-area network, against etcd and NATS JetStream.

    python -m tests.benchmarks.replication_wan latency [--sites 3 4] [--messages 40] [--rounds 3]
    python -m tests.benchmarks.replication_wan link [--rate 200] [--mib 64]
    python -m tests.benchmarks.replication_wan switch [--plot switch.png]

Needs root, and for the peers etcd and nats-server (Debian: etcd-server, nats-server); what is missing is said and left
out. The network is that of tests/wan.py: round trips of 36, 51 and 48 ms between three hosts, and 40, 45 and 30 ms from
them to a fourth; all processes share this machine and its disk.

latency: ms from the put, publish or send of 1 KiB until a majority has it, one after the other, from the leader's host
and from each other one; the peers and this project take turns within a round. "floor" is what the round trips alone
make it: to the nearest other hosts of a majority, and for a peer's client elsewhere also to the leader. etcd answers
once it is on their disks and is compared with a majority of .persisted; JetStream does not sync before it answers, and
is compared with one of .received.
link: how much of a link of --rate Mbit/s messages of 1 MiB fill, and ms until a message of 1 KiB from the receiver is
acknowledged meanwhile, for which the acknowledgement has to come along the full link, against an idle network.
switch: the paper's experiment: a predicate over all sites, one of which gets slow; a weaker predicate takes its place,
and the stronger one again once the site is as it was. Prints the median latency of each phase, and plots.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.replication.sites import ROOT, Site
from tests.wan import Wan, missing, symmetric

ROUND_TRIPS_MS = {(0, 1): 36.0, (0, 2): 51.0, (1, 2): 48.0, (0, 3): 40.0, (1, 3): 45.0, (2, 3): 30.0}
MAJORITY = "KTH_MAX(SIZEOF($ALLSITES)/2 + 1, $ALLSITES).persisted"
COMPARED = {"etcd": "persisted", "nats": "received"}
SIZE = 1024
START_S = 60.0


def floor_ms(host: int, num_hosts: int) -> float:
    """Until a majority has what a host sends, of which it is one itself."""
    table = symmetric(num_hosts, ROUND_TRIPS_MS)
    return sorted(table[host][other] for other in range(num_hosts))[num_hosts // 2]


@contextlib.contextmanager
def our_sites(wan: Wan, num_sites: int, folder: Path, **settings: Any) -> Iterator[list[Site]]:
    names = [f"s{number}" for number in range(num_sites)]
    sites = {
        name: {"address": f"{wan.addresses[number]}:7070", "store": str(folder / name)}
        for number, name in enumerate(names)
    }
    config = {
        "key": secrets.token_hex(16),
        "sites": sites,
        "dead_after_s": 30.0,
        "predicates": {
            "persisted": MAJORITY,
            "received": MAJORITY.replace("persisted", "received"),
            "all": "MIN($ALLSITES).persisted",
        },
        "segment_bytes": 16 << 20,
        **settings,
    }
    processes: list[Site] = []
    try:
        for number, name in enumerate(names):
            processes.append(Site(name, config, wan.at(number)))
        for process in processes:
            process.answer(START_S)
        for process in processes:
            process.call("waitfor", process.call("send", 1, 10), "all", START_S)
        yield processes
    finally:
        for process in processes:
            process.end()


# The peers, each started here and asked over its own protocol from a process at a host.


@contextlib.contextmanager
def servers(commands: Sequence[Sequence[str]], folder: Path, name: str) -> Iterator[None]:
    running = []
    with open(folder / f"{name}.log", "wb") as log:
        try:
            for command in commands:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
            yield
        finally:
            for process in running:
                process.send_signal(signal.SIGKILL)
                process.wait()


def etcd(wan: Wan, folder: Path) -> contextlib.AbstractContextManager[None]:
    cluster = ",".join(f"e{number}=http://{address}:2380" for number, address in enumerate(wan.addresses))
    commands = []
    for number, address in enumerate(wan.addresses):
        urls = {"client": f"http://{address}:2379", "peer": f"http://{address}:2380"}
        words = ["etcd", "--name", f"e{number}", "--data-dir", str(folder / f"etcd{number}")]
        words += ["--listen-client-urls", urls["client"], "--advertise-client-urls", urls["client"]]
        words += ["--listen-peer-urls", urls["peer"], "--initial-advertise-peer-urls", urls["peer"]]
        words += ["--initial-cluster", cluster, "--heartbeat-interval", "100", "--election-timeout", "1000"]
        commands.append([*wan.at(number), *words])
    return servers(commands, folder, "etcd")


def nats(wan: Wan, folder: Path) -> contextlib.AbstractContextManager[None]:
    routes = ",".join(f"nats://{address}:6222" for address in wan.addresses)
    commands = []
    for number, address in enumerate(wan.addresses):
        words = ["nats-server", "-n", f"n{number}", "-a", address, "-p", "4222"]
        words += ["-js", "-sd", str(folder / f"nats{number}")]
        words += ["--cluster_name", "wan", "--cluster", f"nats://{address}:6222", "--routes", routes]
        commands.append([*wan.at(number), *words])
    return servers(commands, folder, "nats")


class EtcdClient:
    """Over the JSON gateway, on one connection."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, 2379, timeout=5)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _post(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        self._connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        data: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise ConnectionError(f"etcd: {data}")
        return data

    def is_leader(self) -> bool:
        status = self._post("/v3/maintenance/status", {})
        if "leader" not in status:
            raise ConnectionError("etcd has no leader yet")
        return bool(status["leader"] == status["header"]["member_id"])

    def put(self, data: bytes) -> None:
        self._post("/v3/kv/put", {"key": "YQ==", "value": base64.b64encode(data).decode()})


class NatsClient:
    """Over the text protocol; a publish is acknowledged by JetStream."""

    def __init__(self, address: str) -> None:
        self._sock = socket.create_connection((address, 4222), timeout=5)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._sock.makefile("rb")
        self._name = json.loads(self._file.readline().split(b" ", 1)[1])["server_name"]
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._sock.sendall(f'CONNECT {{"verbose":false}}\r\nSUB {self._inbox} 1\r\nPING\r\n'.encode())
        while not self._file.readline().startswith(b"PONG"):
            pass

    def _ask(self, subject: str, data: bytes) -> dict[str, Any]:
        self._sock.sendall(f"PUB {subject} {self._inbox} {len(data)}\r\n".encode() + data + b"\r\n")
        while True:
            line = self._file.readline()
            if line.startswith(b"PING"):
                self._sock.sendall(b"PONG\r\n")
            elif line.startswith(b"MSG"):
                size = int(line.split()[-1])
                answer: dict[str, Any] = json.loads(self._file.read(size + 2))
                if "error" in answer:
                    raise ConnectionError(f"nats: {answer['error']}")
                return answer
            elif not line or line.startswith(b"-ERR"):
                raise ConnectionError(f"nats: {line!r}")

    def prepare(self, num_replicas: int) -> None:
        stream = {"name": "bench", "subjects": ["bench"], "num_replicas": num_replicas, "storage": "file"}
        with contextlib.suppress(ConnectionError):
            self._ask("$JS.API.STREAM.INFO.bench", b"")
            return
        self._ask("$JS.API.STREAM.CREATE.bench", json.dumps(stream).encode())

    def is_leader(self) -> bool:
        answer = self._ask("$JS.API.STREAM.INFO.bench", b"")
        if not answer.get("cluster", {}).get("leader"):
            raise ConnectionError("nats has no leader yet")
        return bool(answer["cluster"]["leader"] == self._name)

    def put(self, data: bytes) -> None:
        self._ask("bench", data)


def client(options: argparse.Namespace) -> None:
    """Runs at a host: prints whether its server leads, then latencies, as JSON."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            if options.peer == "etcd":
                peer: EtcdClient | NatsClient = EtcdClient(options.address)
            else:
                peer = NatsClient(options.address)
                peer.prepare(options.replicas)
            leads = peer.is_leader()
            peer.put(bytes(SIZE))
            break
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{options.peer} did not come up at {options.address}: {error}") from error
            time.sleep(0.2)
    times = []
    for _ in range(options.messages):
        data = os.urandom(SIZE)
        begin = time.perf_counter()
        peer.put(data)
        times.append(1e3 * (time.perf_counter() - begin))
    print(json.dumps([leads, times]))


def ask(wan: Wan, host: int, peer: str, num_hosts: int, messages: int) -> tuple[bool, list[float]]:
    words = ["client", "--peer", peer, "--address", wan.addresses[host], "--messages", str(messages)]
    words += ["--replicas", str(num_hosts)]
    command = [*wan.at(host), sys.executable, "-m", "tests.benchmarks.replication_wan", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S + 60, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the client of {peer} at host {host} failed: {done.stderr[-500:]}")
    leads, times = json.loads(done.stdout)
    return leads, times


# What is measured.


def latency(options: argparse.Namespace) -> None:
    peers: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {}
    for name, program, start in (("etcd", "etcd", etcd), ("nats", "nats-server", nats)):
        if shutil.which(program) is None:
            print(f"{name} is left out: there is no {program} (Debian: {name}-server)")
        else:
            peers[name] = start
    for num_hosts in options.sites:
        times: dict[tuple[str, int], list[float]] = {}
        leaders: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
            wan = stack.enter_context(Wan(symmetric(num_hosts, ROUND_TRIPS_MS)))
            sites = stack.enter_context(our_sites(wan, num_hosts, folder))
            for start in peers.values():
                stack.enter_context(start(wan, folder))
            for _ in range(options.rounds):
                for host in range(num_hosts):
                    for ack in ("persisted", "received"):
                        ours = sites[host].call("latencies", options.messages, SIZE, ack, timeout_s=300)
                        times.setdefault((ack, host), []).extend(ours)
                    for name in peers:
                        leads, theirs = ask(wan, host, name, num_hosts, options.messages)
                        times.setdefault((name, host), []).extend(theirs)
                        if leads:
                            leaders[name] = host
        _report(times, leaders, num_hosts)


def _report(times: dict[tuple[str, int], list[float]], leaders: dict[str, int], num_hosts: int) -> None:
    table = symmetric(num_hosts, ROUND_TRIPS_MS)

    def row(name: str, hosts: Sequence[int], percentile: int) -> float:
        """The mean over hosts of a percentile of the times."""
        return statistics.mean(statistics.quantiles(times[name, host], n=10)[percentile // 10 - 1] for host in hosts)

    print(f"{num_hosts} sites, ms until a majority has 1 KiB")
    print(f"{'':<32}{'median':>9}{'p10':>9}{'floor':>9}{'ours is lower by (p10)':>32}")
    names = list(dict.fromkeys(name for name, _ in times))
    for hosts in (*((host,) for host in range(num_hosts)), range(num_hosts)):
        for name in names:
            leader = leaders.get(name)
            floors = [
                floor_ms(leader, num_hosts) + table[host][leader] if leader is not None else floor_ms(host, num_hosts)
                for host in hosts
            ]
            words = f"{name} from " + (f"host {hosts[0]}" if len(hosts) == 1 else "all hosts, mean")
            if len(hosts) == 1 and leader == hosts[0]:
                words += " (leader)"
            medians, p10s = row(name, hosts, 50), row(name, hosts, 10)
            lower = ""
            if name in COMPARED:
                ours = [row(COMPARED[name], hosts, percentile) for percentile in (50, 10)]
                lower = f"{100 * (1 - ours[0] / medians):18.1f} % ({100 * (1 - ours[1] / p10s):.1f} %)"
            print(f"{words:<32}{medians:9.1f}{p10s:9.1f}{statistics.mean(floors):9.1f}{lower}", flush=True)


def link(options: argparse.Namespace) -> None:
    count = options.mib
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        wan = stack.enter_context(Wan(symmetric(2, ROUND_TRIPS_MS), rate_mbit=options.rate))
        sites = stack.enter_context(our_sites(wan, 2, folder))
        idle = sites[1].call("latencies", options.messages, SIZE, "all")
        sites[0].call("throughput", 16, 1 << 20, "all", timeout_s=300)  # TCP's window grows to what the link takes
        sites[0].post("throughput", count, 1 << 20, "all")
        busy = sites[1].call("latencies", options.messages, SIZE, "all")
        rate = sites[0].answer(600)
    mbit = rate * 8e-6
    print(
        f"link of {options.rate:g} Mbit/s, {ROUND_TRIPS_MS[0, 1]:g} ms: {mbit:.1f} Mbit/s ({mbit / options.rate:.1%})"
    )
    for name, values in (("idle", idle), ("while it is full one way", busy)):
        p10 = statistics.quantiles(values, n=10)[0]
        print(f"acknowledged, {name}: median {statistics.median(values):.1f} ms, p10 {p10:.1f} ms")


def switch(options: argparse.Namespace) -> None:
    normal = symmetric(3, ROUND_TRIPS_MS)
    slow = symmetric(3, {**ROUND_TRIPS_MS, (0, 2): 400.0, (1, 2): 400.0})
    seen: list[tuple[float, float]] = []
    events: list[tuple[float, str]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        wan = stack.enter_context(Wan(normal))
        (site, *_) = stack.enter_context(our_sites(wan, 3, folder))
        site.call("register", "safe", "MIN($ALLSITES).persisted")
        begun = time.monotonic()
        for words, table, text in (
            ("all sites", normal, None),
            ("one gets slow", slow, None),
            ("change to a majority", slow, MAJORITY),
            ("it is fast again", normal, None),
            ("change to all sites", normal, "MIN($ALLSITES).persisted"),
        ):
            wan.change(table)
            if text is not None:
                site.call("change", "safe", text)
            events.append((time.monotonic() - begun, words))
            phase = []
            for _ in range(options.messages):
                (ms,) = site.call("latencies", 1, SIZE, "safe")
                phase.append(ms)
                seen.append((time.monotonic() - begun, ms))
            print(f"{words:<24}median {statistics.median(phase):7.1f} ms", flush=True)
        last = site.call("last", "s0")
        assert site.call("waitfor", last, "all", 60) == last  # nothing was lost on the way
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="seconds", ylabel="ms until stable", yscale="log")
        axes.plot(*zip(*seen, strict=True), ".")
        for at, words in events:
            axes.axvline(at, color="grey", linestyle=":")
            axes.text(at, axes.get_ylim()[1], f" {words}", rotation=90, verticalalignment="top", fontsize=8)
        figure.savefig(options.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["latency", "link", "switch", "client"])
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 4], choices=[3, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=40)
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s of the link")
    parser.add_argument("--mib", type=int, default=64, help="over the link")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--folder", help="for logs and stores; default: that of temporary files")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--replicas", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "client":
        client(options)
        return
    lacks = missing()
    if lacks:
        print(f"skipped: {lacks}")
        return
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    {"latency": latency, "link": link, "switch": switch}[options.what](options)


if __name__ == "__main__":
    main()
