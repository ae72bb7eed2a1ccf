"""``torchext site``: runs a site, and asks one that runs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from torchext.replication.config import Config, load_config
from torchext.replication.errors import ReplicationError
from torchext.replication.handshake import connect
from torchext.replication.node import Node
from torchext.replication.predicates import ACKS, Order, Sites, compile_predicate, dual

_WATCH_S = 0.5


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status: 0, or 1 when something is wrong, which it says."""
    options = _arguments().parse_args(argv)
    try:
        config = load_config(options.config)
        if options.me not in config.sites:
            raise ReplicationError(f"--me: there is no site {options.me!r}; there are: {', '.join(config.sites)}")
        if options.action == "run":
            _run(config, options.me)
        elif options.action == "check":
            _check(config, options)
        else:
            _ask(config, options)
    except (ReplicationError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"torchext site: {error}", file=sys.stderr)
        return 1
    return 0


def _run(config: Config, me: str) -> None:
    stop = threading.Event()
    former = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Node(config, me=me) as node:
            print(f"site {me} listens at {config.sites[me].listen or config.sites[me].address}", flush=True)
            while not stop.wait(1.0):
                node.check()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _check(config: Config, options: argparse.Namespace) -> None:
    if options.expression is None:
        raise ReplicationError("check needs a predicate, as in: torchext site check 'MIN($ALLSITES)' ...")
    zones = {name: site.zone for name, site in config.sites.items()}
    predicate = compile_predicate(options.expression, Sites(zones, options.me, (*ACKS, *config.acks)))
    alone = [site for site in zones if not predicate.satisfied_by(set(zones) - {site})]
    report = {
        "predicate": predicate.text,
        "means": _words(predicate.order),
        "dual": dual(predicate.text),
        "reads": [f"{counter.site}.{counter.ack}" for counter in predicate.counters()],
        "cannot_do_without": alone,
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['means']}\nreaders must hear: {report['dual']}")
    print(f"cannot do without: {', '.join(alone) or 'nobody: it holds with any one site down'}")


def _words(value: Order) -> str:
    parts = [_words(v) if isinstance(v, Order) else f"{v.site}.{v.ack}" for v in value.values]
    if len(parts) == 1:
        return parts[0]
    name = {1: "least", len(parts): "greatest"}.get(value.k, f"{value.k}. smallest")
    return f"{name} of ({', '.join(parts)})"


def _ask(config: Config, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(_select(_status(config, options.me), options.action), indent=2))
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise ImportError("tables need rich: pip install 'torchext[rich]', or ask for --json", name="rich") from None
    console = Console()
    if not options.watch:
        console.print(_table(_status(config, options.me), options.action))
        return
    pause = threading.Event()
    with Live(console=console, auto_refresh=False) as live:
        while not pause.wait(_WATCH_S):
            live.update(_table(_status(config, options.me), options.action), refresh=True)


def _status(config: Config, me: str) -> dict[str, Any]:
    try:
        sock, status = connect(config, me, me, {"purpose": "status"})
    except OSError as error:
        raise ReplicationError(f"site {me} does not answer at {config.sites[me].address}: {error}") from None
    sock.close()
    return status


def _select(status: dict[str, Any], action: str) -> Any:
    if action == "status":
        return status
    key = "frontier" if action == "frontier" else "predicate"
    return {name: predicate[key] for name, predicate in status["predicates"].items()}


def _table(status: dict[str, Any], action: str) -> Any:
    from rich.console import Group
    from rich.table import Table

    me = status["me"]
    predicates = Table(title=f"predicates over the messages of {me}")
    for head in ("name", "stable up to", "predicate"):
        predicates.add_column(head)
    for name, predicate in status["predicates"].items():
        predicates.add_row(name, str(predicate["frontier"]), predicate["predicate"])
    if action != "status":
        return predicates
    counters = Table(title=f"messages as {me} knows it")
    acks = list(next(iter(status["counters"][me].values())))
    for head in ("of", "at", *acks, "connection"):
        counters.add_column(head)
    for origin, sites in status["counters"].items():
        for site, values in sites.items():
            link = status["connections"].get(site)
            words = "itself" if link is None else "up" if link["heard"] else link["data"]
            counters.add_row(origin, site, *(str(values[ack]) for ack in acks), words if origin == me else "")
    troubles = [f"[bold red]{what}: {words}" for what, words in status["trouble"].items()]
    return Group(counters, predicates, *troubles)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchext site",
        description="Runs a site of a replicated system, or asks one that runs.",
        epilog="run (the default): until SIGTERM or Ctrl-C. status: counters, predicates and connections. frontier, "
        "predicates: those of the site's own messages. check EXPR: compiles a predicate as that site would.",
    )
    parser.add_argument(
        "action", nargs="?", default="run", choices=["run", "status", "frontier", "predicates", "check"]
    )
    parser.add_argument("expression", nargs="?", metavar="EXPR", help="for check: a predicate")
    parser.add_argument("--config", required=True, metavar="FILE", help="the sites, as TOML")
    parser.add_argument("--me", required=True, metavar="SITE", help="which of them to run or to ask")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--watch", action="store_true", help="keep showing the table as it changes")
    return parser
