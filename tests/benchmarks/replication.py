"""Replication, measured: predicates, the loopback data plane, acks beside data, changes of predicates.

    python -m tests.benchmarks.replication predicates
    python -m tests.benchmarks.replication loopback [--receivers 1 3] [--gib 2] [--window 256] [--folder /dev/shm]
    python -m tests.benchmarks.replication latency [--messages 300] [--folder DIR]
    python -m tests.benchmarks.replication change

predicates: million evaluations per second of a majority over 8 and 64 sites. "acks" is what a node does: one evaluation
for each ack, incremental; "anew" works the value out of all counters. Compiled here with g++ -O3, and through Python.
In time of the processor, so that other programs on the machine matter little.
loopback: GB/s from one site to N site processes over TCP on this machine, from `send` to the last byte received,
checksummed and in every site's log (in memory with /dev/shm; give a folder on a disk for the disk). It is that of the
steady state: the sender's log is bounded to --window MiB, and its files and those of the receivers are used again.
Receivers and sender share the machine's cores: N + 1 of them are needed for a figure that means something; the table
says how many there are, and how much processor time a GB took in all of them together, which other programs on the
machine disturb less.
latency: ms from `send` of 1 KiB until a majority of three sites has it received and persisted, alone and while a stream
of 1 MiB messages fills the data plane.
change: us for change_predicate, and the frontier is right when it returns.

Each figure is the median of the rounds, with the best beside it.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.replication.sites import Cluster
from torchext.replication import Node
from torchext.replication.frontiers import Frontiers
from torchext.replication.predicates import Sites, compile_predicate

ROOT = Path(__file__).parents[2]
_COUNT = 200_000  # of evaluations from Python in a round
MAJORITY = "KTH_MIN(SIZEOF($ALLSITES)/2 + 1, $ALLSITES)"


def report(name: str, values: list[float], unit: str, better: Callable[[list[float]], float]) -> None:
    print(f"{name:<44}{statistics.median(values):10.2f}  best {better(values):10.2f} {unit}", flush=True)


def rate(function: Callable[[], None], count: int, rounds: int) -> list[float]:
    """Million per second of processor time, in each round."""
    rates = []
    for _ in range(rounds):
        begin = time.process_time()
        function()
        rates.append(count / (time.process_time() - begin) / 1e6)
    return rates


def predicates(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "core"
        source = ROOT / "tests" / "benchmarks" / "replication_core.cpp"
        include = ROOT / "torchext" / "csrc" / "replication"
        subprocess.run(["g++", "-O3", "-std=c++20", f"-I{include}", str(source), "-o", str(program)], check=True)
        for n in (8, 64):
            runs = [
                [float(word) for word in subprocess.check_output([program, str(n)], text=True).split()]
                for _ in range(options.rounds)
            ]
            report(f"core, {n} sites, acks", [run[0] for run in runs], "M/s", max)
            report(f"core, {n} sites, anew", [run[1] for run in runs], "M/s", max)
    for n in (8, 64):
        sites = Sites({f"s{i}": "z" for i in range(n)}, "s0")
        frontiers = Frontiers(sites)
        frontiers.register("p", MAJORITY)
        core = frontiers._counters
        rng = random.Random(0)
        acks = [rng.randrange(n) for _ in range(_COUNT)]
        last = [0] * n

        def ack(core: object = core, acks: list[int] = acks, last: list[int] = last) -> None:
            raise_to = core.raise_to  # type: ignore[attr-defined]
            for site in acks:
                last[site] += 1
                raise_to(site, last[site])

        def anew(core: object = core) -> None:
            evaluate = core.evaluate  # type: ignore[attr-defined]
            for _ in range(_COUNT):
                evaluate(0)

        report(f"Python, {n} sites, acks", rate(ack, _COUNT, options.rounds), "M/s", max)
        report(f"Python, {n} sites, anew", rate(anew, _COUNT, options.rounds), "M/s", max)
        times = []
        for _ in range(200):
            begin = time.process_time()
            compile_predicate("KTH_MIN(SIZEOF($ALLSITES)/2 + 1, $ALLSITES - $MYSITE).persisted", sites)
            times.append(1e6 * (time.process_time() - begin))
        report(f"compile, {n} sites", times, "us", min)


def start(folder: str, num_others: int, **settings: object) -> tuple[Cluster, Node]:
    names = ["here", *(f"there{i}" for i in range(num_others))]
    cluster = Cluster(Path(folder), names, settings={"dead_after_s": 30.0, "segment_bytes": 64 << 20, **settings})
    for name in names[1:]:
        cluster.start(name)
    for name in names[1:]:
        cluster[name].answer()
    node = Node(cluster.config("here"), me="here")
    node.register_predicate("there", "MIN($ALLSITES).received")
    node.waitfor(node.send(b"warm"), "there", 30)
    return cluster, node


def loopback(options: argparse.Namespace) -> None:
    size = 32 << 20
    count = max(1, int(options.gib * (1 << 30)) // size)
    data = random.Random(0).randbytes(size)
    for receivers in options.receivers:
        rates, costs = [], []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                window = options.window << 20
                cluster, node = start(folder, receivers, truncate="MIN($ALLSITES).received", max_log_bytes=window)
                pids = [os.getpid(), *(site.pid for site in cluster.processes.values())]
                with cluster, node:
                    for _ in range(3 * window // size):  # so that all files are there
                        seq = node.send(data)
                    node.waitfor(seq, "there", 60)
                    begin, busy = time.perf_counter(), processor_s(pids)
                    for _ in range(count):
                        seq = node.send(data)
                    node.waitfor(seq, "there", 300)
                    gigabytes = receivers * count * size / 1e9
                    rates.append(gigabytes / (time.perf_counter() - begin))
                    costs.append((processor_s(pids) - busy) / gigabytes)
        report(f"to {receivers}, together ({os.cpu_count()} cores)", rates, "GB/s", max)
        report(f"to {receivers}, processor time", costs, "s/GB", min)


def processor_s(pids: list[int]) -> float:
    """What processes have used of the processors, in seconds."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for *_, user, system in (f[:13] for f in fields)) / os.sysconf("SC_CLK_TCK")


def latency(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cluster, node = start(folder, 2, truncate="MIN($ALLSITES).received")
        with cluster, node:
            for ack in ("received", "persisted"):
                node.register_predicate(ack, f"{MAJORITY}.{ack}")
                times = []
                for _ in range(options.messages):
                    begin = time.perf_counter()
                    node.waitfor(node.send(bytes(1024)), ack, 60)
                    times.append(1e3 * (time.perf_counter() - begin))
                report(f"majority {ack}, alone", times, "ms", min)
            times = []
            for _ in range(max(1, options.messages // 10)):
                for _ in range(8):
                    node.send(bytes(1 << 20))
                begin = time.perf_counter()
                node.waitfor(node.send(bytes(1024)), "received", 60)
                times.append(1e3 * (time.perf_counter() - begin))
            report("majority received, behind 8 MiB", times, "ms", min)


def change(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cluster, node = start(folder, 2)
        with cluster, node:
            node.register_predicate("safe", MAJORITY)
            seq = node.waitfor(node.send(b"x"), "there", 30)
            times = []
            for number in range(1000):
                text = "MIN($ALLSITES)" if number % 2 else MAJORITY
                begin = time.perf_counter()
                node.change_predicate("safe", text)
                assert node.get_stability_frontier("safe") == seq
                times.append(1e6 * (time.perf_counter() - begin))
            report("change_predicate, in effect", times, "us", min)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predicates", "loopback", "latency", "change"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--gib", type=float, default=2.0, help="to send in a round")
    parser.add_argument("--window", type=int, default=256, help="MiB that the sender's log may take")
    parser.add_argument("--messages", type=int, default=300)
    parser.add_argument("--folder", help="for the logs; default: that of temporary files")
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    {"predicates": predicates, "loopback": loopback, "latency": latency, "change": change}[options.what](options)


if __name__ == "__main__":
    main()
