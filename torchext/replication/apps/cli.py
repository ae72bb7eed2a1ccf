"""The applications as programs: each runs a site, and takes what it is told from its standard input."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchext.replication.apps.folder import FolderSync
from torchext.replication.apps.kv import KeyValueStore
from torchext.replication.apps.pubsub import PubSub, Subscription
from torchext.replication.config import load_config
from torchext.replication.errors import ReplicationError
from torchext.replication.node import Node


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status: 0, or 1 when something is wrong, which it says."""
    options = _arguments().parse_args(argv)
    try:
        config = load_config(options.config)
        with Node(config, me=options.me) as node:
            state = Path(config.sites[options.me].store) / f"{options.app}.db"
            {"kv": _kv, "folder": _folder, "pubsub": _pubsub}[options.app](node, state, options)
    except (ReplicationError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"torchext.replication.apps: {error}", file=sys.stderr)
        return 1
    return 0


def _kv(node: Node, state: Path, options: argparse.Namespace) -> None:
    del options
    with KeyValueStore(node, state) as store:

        def answer(words: list[str]) -> None:
            match words:
                case ["put", key, value, *predicate]:
                    version = store.put(key, value.encode(), predicate=_one(predicate))
                    print(f"{key}: version {version.clock} of {version.site}")
                case ["delete", key, *predicate]:
                    store.put(key, None, predicate=_one(predicate))
                    print(f"{key}: deleted")
                case ["get", key, *predicate]:
                    found = store.get(key, predicate=_one(predicate))
                    held = None if found is None else found.value
                    print(f"{key}: nothing" if held is None else f"{key} = {held.decode(errors='replace')}")
                case ["keys"]:
                    print(" ".join(store.keys()))
                case _:
                    raise ReplicationError("expected: put KEY VALUE [PREDICATE], get KEY [PREDICATE], delete KEY, keys")

        _serve(answer)


def _one(predicate: list[str]) -> str | None:
    if len(predicate) > 1:
        raise ReplicationError(f"expected one predicate at most, got {' '.join(predicate)!r}")
    return predicate[0] if predicate else None


def _folder(node: Node, state: Path, options: argparse.Namespace) -> None:
    del state
    with FolderSync(node, options.path, interval_s=options.interval) as folder, _until_told() as stop:
        print(f"{options.path} is kept as at {', '.join(site for site in node.sites() if site != node.me)}", flush=True)
        while not stop.wait(1.0):
            folder.check()


def _pubsub(node: Node, state: Path, options: argparse.Namespace) -> None:
    def show(subscription: Subscription) -> None:
        for delivery in subscription:
            print(f"{delivery.topic} from {delivery.site}: {delivery.payload.decode(errors='replace')}", flush=True)

    with PubSub(node, state, patience_s=options.patience) as topics:
        shown = [topics.subscribe(topic, options.name) for topic in options.subscribe]
        threads = [threading.Thread(target=show, args=(subscription,), daemon=True) for subscription in shown]
        for thread in threads:
            thread.start()

        def answer(words: list[str]) -> None:
            if len(words) < 2:
                raise ReplicationError("expected: TOPIC TEXT")
            seq = topics.publish(words[0], " ".join(words[1:]).encode())
            topics.wait_delivered(words[0], seq, options.timeout)
            print(f"{words[0]}: delivered at {', '.join(topics.subscribers(words[0])) or 'nobody'}")

        _serve(answer)
        for subscription in shown:
            subscription.close()
        for thread in threads:
            thread.join()


def _serve(answer: Callable[[list[str]], None]) -> None:
    """Answers a line each, until the input ends or a signal comes."""
    with _until_told():
        for line in sys.stdin:
            try:
                answer(line.split())
            except ReplicationError as error:
                print(f"error: {error}")
            sys.stdout.flush()


@contextmanager
def _until_told() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set; they also end a wait for input."""
    stop = threading.Event()

    def told(*_: object) -> None:
        if stop.is_set():
            return
        stop.set()
        raise InterruptedError

    former = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    except InterruptedError:
        pass
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchext.replication.apps",
        description="Applications on replicated sites. Each runs the site itself, in place of torchext site.",
    )
    apps = parser.add_subparsers(dest="app", required=True)
    kv = apps.add_parser("kv", help="a key/value store; reads: put KEY VALUE [PREDICATE], get KEY [PREDICATE], ...")
    folder = apps.add_parser("folder", help="keeps a folder as it is at the other sites")
    folder.add_argument("path", metavar="FOLDER")
    folder.add_argument("--interval", type=float, default=0.5, help="how often to look for changes, in seconds")
    pubsub = apps.add_parser("pubsub", help="publishes what it reads (TOPIC TEXT), prints what it is subscribed to")
    pubsub.add_argument("--subscribe", nargs="+", default=[], metavar="TOPIC")
    pubsub.add_argument("--name", default="printer", help="of the subscriber")
    pubsub.add_argument("--patience", type=float, default=10.0, help="seconds before a lost site is not waited for")
    pubsub.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a delivery")
    for app in (kv, folder, pubsub):
        app.add_argument("--config", required=True, metavar="FILE", help="the sites, as TOML")
        app.add_argument("--me", required=True, metavar="SITE", help="which of them to run")
    return parser
