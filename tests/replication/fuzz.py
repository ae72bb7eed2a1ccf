"""Random fault schedules over real site processes, checked against a model.

    python -m tests.replication.fuzz --schedules 1000 [--first 0]

A schedule is made from its number alone: sites are killed, stopped and started again, links cut, swallowed and healed,
messages sent and predicates changed. After each step, each frontier is compared with what it was and with what the
sites hold that it speaks of: those that are dead or stopped are asked once they are back. At the end all is healed,
everybody must have everything, and each message is read and compared with what was sent. A failure prints the
schedule's number and its steps.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.replication.sites import Cluster

NAMES = ["a", "b", "c"]
PREDICATES: dict[
    str, Callable[[float, list[float]], float]
] = {  # each with its value, of our own and the others' counters
    "MAX($ALLSITES - $MYSITE).persisted": lambda own, others: max(others),
    "MIN($ALLSITES).persisted": lambda own, others: min(own, *others),
    "KTH_MIN(2, $ALLSITES).persisted": lambda own, others: sorted([own, *others])[1],
    "MIN($ALLSITES).verified": lambda own, others: min(own, *others),
    "KTH_MAX(2, $ALLSITES).verified": lambda own, others: sorted([own, *others])[-2],
}
NUM_STEPS = 14


@dataclass
class Claim:
    """A frontier that a site told: what it says has to be true of those who hold the messages."""

    origin: str
    text: str
    frontier: int
    held: dict[str, int] = field(default_factory=dict)  # who is not in here is yet to be asked

    def check(self) -> None:
        own, *others = (
            float(self.held.get(name, "inf")) for name in (self.origin, *(n for n in NAMES if n != self.origin))
        )
        assert PREDICATES[self.text](own, others) >= self.frontier, f"{self}: they hold less"


def run_schedule(folder: Path, seed: int) -> list[str]:
    """Runs one schedule; returns its steps.

    Raises:
        AssertionError: A gap, a repetition, a torn message, a frontier that went back or that claims too much.
    """
    rng = random.Random(seed)
    steps: list[str] = []
    try:
        with Cluster(folder, NAMES, proxied=True, settings={"dead_after_s": 1.0}) as cluster:
            _run(cluster, rng, steps)
    except BaseException:
        print(f"schedule {seed}: {'; '.join(steps)}", file=sys.stderr)
        raise
    return steps


def _run(cluster: Cluster, rng: random.Random, steps: list[str]) -> None:
    up = set(NAMES)
    stopped: set[str] = set()
    text = {}
    said = dict.fromkeys(NAMES, 0)
    sent = dict.fromkeys(NAMES, 0)
    unsure: dict[str, list[int]] = {name: [] for name in NAMES}  # of messages that their sender was killed in
    claims: list[Claim] = []

    def ask(name: str) -> None:
        """Asks a site that is back what it holds of what was claimed."""
        held = {origin: cluster[name].call("last", origin) for origin in NAMES}
        for claim in claims:
            claim.held[name] = min(held[claim.origin], claim.held.get(name, held[claim.origin]))
            claim.check()

    def begin(name: str) -> None:
        cluster[name].answer()
        ask(name)
        text[name] = rng.choice(list(PREDICATES))
        cluster[name].call("register", "p", text[name])
        said[name] = 0
        last = cluster[name].call("last", name)
        assert last >= sent[name], f"{name} lost its own messages: {last} of {sent[name]}"
        unsure[name] += range(sent[name] + 1, last + 2)  # the last one may be given up with the next that is sent
        sent[name] = last

    def send(name: str, count: int, size: int) -> None:
        sent[name] = cluster[name].call("send", count, size)
        unsure[name] = [seq for seq in unsure[name] if seq <= sent[name] - count]

    cluster.start_all()
    for name in NAMES:
        begin(name)
    for _ in range(NUM_STEPS):
        action = rng.choice(
            ["send", "send", "send", "kill", "start", "cut", "heal", "swallow", "stop", "change", "file"]
        )
        name = rng.choice(NAMES)
        link = cluster.proxies[name, rng.choice([n for n in NAMES if n != name])]
        awake = name in up and name not in stopped
        steps.append(f"{action} {name}")
        if action in ("send", "file") and awake:
            count, size = (1, 3 << 20)
            if action == "send":
                count, size = rng.randrange(1, 20), rng.choice([0, 10, 5000, 100_000])
            send(name, count, size)
        elif action == "kill" and name in up:
            if awake and rng.random() < 0.5:
                cluster[name].post("send", 30, 100_000)  # dies in the middle
            cluster[name].kill()
            up.discard(name)
            stopped.discard(name)
        elif action == "start" and name not in up:
            cluster.start(name)
            begin(name)
            up.add(name)
        elif action == "cut":
            link.cut() if rng.random() < 0.5 else link.hang_up()
        elif action == "swallow":
            link.swallows = True
        elif action == "heal":
            link.heal()
        elif action == "stop" and awake:
            cluster[name].signal(signal.SIGSTOP)
            stopped.add(name)
        elif action == "change" and awake:
            text[name] = rng.choice(list(PREDICATES))
            cluster[name].call("change", "p", text[name])
            frontier = cluster[name].call("frontier", "p")
            assert frontier >= said[name], f"the frontier of {name} went from {said[name]} to {frontier}"
            said[name] = frontier  # which was also said under the former predicate
        awakes = sorted(up - stopped)
        for other in awakes:
            frontier = cluster[other].call("frontier", "p")
            assert frontier >= said[other], f"the frontier of {other} went from {said[other]} to {frontier}"
            if frontier > said[other]:
                held = {witness: cluster[witness].call("last", other) for witness in awakes}
                claims.append(Claim(other, text[other], frontier, held))
                claims[-1].check()
            said[other] = frontier
    for name in stopped:
        cluster[name].signal(signal.SIGCONT)
        ask(name)
    for proxy in cluster.proxies.values():
        proxy.heal()
    for name in NAMES:
        if name not in up:
            cluster.start(name)
            begin(name)
    for name in NAMES:
        send(name, 1, 50)
    for name in NAMES:
        cluster[name].call("register", "everywhere", "MIN($ALLSITES).verified")
        cluster[name].call("waitfor", sent[name], "everywhere", 60)
    for name in NAMES:
        for origin in NAMES:
            held = cluster[name].call("held", origin, unsure[origin])
            assert held == sent[origin], f"{name} holds {held} of {sent[origin]} messages of {origin}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    begun = time.monotonic()
    for seed in range(options.first, options.first + options.schedules):
        with tempfile.TemporaryDirectory() as folder:
            run_schedule(Path(folder), seed)
        if (seed + 1) % 10 == 0:
            print(f"{seed + 1 - options.first} schedules without a fault, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
