"""``torchext standby``: runs a standby, and looks into one that runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torchext._optional import require_native
from torchext.standby import wire
from torchext.standby.errors import StandbyError

_PROMOTION_HEARTBEAT_S = 0.5
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def main(argv: Sequence[str]) -> int:
    """Runs the standby until SIGTERM or SIGINT, or one command on a running one; 1 if that fails."""
    commands = {"status": _status, "export": _export, "remove": _remove}
    words = list(argv)
    try:
        if words and words[0] in commands:
            return commands[words[0]](words[1:])
        return _serve(words)
    except (StandbyError, OSError) as error:
        print(f"torchext standby: {error}", file=sys.stderr)
        return 1


def parse_size(text: str) -> int:
    """Bytes of a size such as 64GiB or 512MiB.

    Raises:
        ValueError: It is none.
    """
    number = text.rstrip("BKMGTi")
    unit = text[len(number) :]
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit():
        raise ValueError(f"expected a size such as 64GiB or 512MiB, got {text!r}")
    return int(float(number) * _UNITS[unit])


def _serve(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchext standby",
        description="Hold the training state of jobs as of their last step.",
        epilog="look into a running one: torchext standby status | export | remove, each with --help. Both sides need "
        "the same token: from TORCHEXT_STANDBY_TOKEN, or the file ~/.config/torchext/standby-token of one user",
    )
    parser.add_argument("--listen", default=wire.LOCAL, metavar="HOST:PORT", help="port 0: a free one (default: local)")
    parser.add_argument("--jobs", type=int, default=16, metavar="N", help="jobs at a time (default 16)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="limit of all jobs, such as 64GiB; a job takes twice its state"
    )
    parser.add_argument(
        "--linger",
        type=float,
        metavar="SECONDS",
        help="end when all trainings are over, or so long after the last has left",
    )
    parser.add_argument(
        "--promote",
        metavar="COMMAND",
        help="keep this training program running up to where it loads its state; it goes on when a process is lost",
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        metavar="SECONDS",
        help="take a training process for lost after so long a silence (default: 0.5 with --promote, else never)",
    )
    parser.add_argument("--background", action="store_true", help="return once it listens, and leave it running")
    parser.add_argument("--verbose", action="store_true", help="say who comes and goes")
    options = parser.parse_args(argv)
    try:
        memory = None if options.memory is None else parse_size(options.memory)
        wire.check_address(options.listen)
        if options.heartbeat is not None and options.heartbeat <= 0:
            raise ValueError(f"--heartbeat has to be more than 0 s, got {options.heartbeat:g}")
    except ValueError as error:
        parser.error(str(error))
    require_native()
    from torchext.standby.daemon import Daemon

    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)  # before it says that it is there
    with (
        contextlib.suppress(KeyboardInterrupt),
        Daemon(
            options.listen,
            max_jobs=options.jobs,
            memory_bytes=memory,
            linger_s=options.linger,
            heartbeat_s=_PROMOTION_HEARTBEAT_S if options.promote and not options.heartbeat else options.heartbeat,
            promote=options.promote,
        ) as daemon,
    ):
        print(f"standby listens on {daemon.address}", flush=True)
        if options.background and not _goes_on_in_background():
            os._exit(0)  # the sockets are the child's
        daemon.serve()
    if options.background:
        os._exit(0)  # nobody waits for it; tearing down the interpreter would only take time
    return 0


def _goes_on_in_background() -> bool:
    """Forks; true in the child, which has a session of its own and no terminal."""
    if os.fork() != 0:
        return False
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return True


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"torchext standby {command}", description=description)
    parser.add_argument("--standby", default=wire.LOCAL, metavar="HOST:PORT", help="which one (default: local)")
    return parser


def _status(argv: list[str]) -> int:
    parser = _parser("status", "Say what a standby holds.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(argv)
    require_native()
    from torchext.standby.link import status

    found = status(options.standby)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_table(found)
    return 0


def _print_table(found: dict[str, Any]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise StandbyError("the table needs rich: pip install 'torchext[rich]'; or use --json") from error
    memory = found["memory"]
    limit = "no limit" if memory["limit_bytes"] is None else f"limit {_size(memory['limit_bytes'])}"
    title = f"standby {found['address']}, process {found['pid']}: {_size(memory['used_bytes'])} in use, {limit}"
    table = Table("job", "rank", "step", "lag", "state", "pulled", "commits", "last commit", "from", title=title)
    for name, job in found["jobs"].items():
        for rank in job["ranks"]:
            at = rank["last_commit_unix_s"]
            table.add_row(
                name,
                f"{rank['rank']} of {job['world_size']}",
                "-" if rank["step"] is None else str(rank["step"]),
                "-" if rank["lag"] is None else str(rank["lag"]),
                _size(rank["size_bytes"]),
                _size(rank["bytes"]),
                str(rank["commits"]),
                "-" if at is None else f"{max(0.0, time.time() - at):.1f} s ago",
                f"{rank['peer']} ({rank['transport']})" if rank["connected"] else "not connected",
            )
    Console().print(table)


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _job_of(standby: str, job: str | None) -> str:
    from torchext.standby.link import status

    if job is not None:
        return job
    jobs = list(status(standby)["jobs"])
    if len(jobs) != 1:
        raise StandbyError(f"say which job (--job), the standby holds {sorted(jobs) or 'none'}")
    return str(jobs[0])


def _export(argv: list[str]) -> int:
    parser = _parser("export", "Write a state that a standby holds to a file, as torch.save does.")
    parser.add_argument("step", metavar="STEP", help="a number, or latest")
    parser.add_argument("file", metavar="FILE", help="of a Lightning job, an ordinary Lightning checkpoint")
    parser.add_argument("--job", help="may be left out where there is only one")
    parser.add_argument("--rank", type=int, default=0, help="whose state (default 0)")
    parser.add_argument("--persisted", metavar="DIR", help="take it from this persist_dir (needs --job)")
    options = parser.parse_args(argv)
    if options.step != "latest" and not options.step.isdigit():
        parser.error(f"STEP has to be a number or latest, got {options.step!r}")
    if options.persisted is not None and options.job is None:
        parser.error("--persisted needs --job")
    require_native()
    from torchext.standby.link import fetch
    from torchext.standby.persist import load

    step = None if options.step == "latest" else int(options.step)
    if options.persisted is not None:
        state = load(options.persisted, options.job, rank=options.rank, step=step)
    else:
        state = fetch(options.standby, _job_of(options.standby, options.job), rank=options.rank, step=step)
    write_checkpoint(state.tree, Path(options.file))
    print(f"step {state.step} written to {options.file}")
    return 0


def write_checkpoint(tree: Any, path: Path) -> None:
    """Writes a file by torch.save that is there whole or not at all, whatever happens meanwhile."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            torch.save(tree, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(argv: list[str]) -> int:
    parser = _parser("remove", "Make a standby forget a job and free its memory.")
    parser.add_argument("job", metavar="JOB")
    options = parser.parse_args(argv)
    require_native()
    from torchext.standby.link import remove

    remove(options.standby, options.job)
    return 0
