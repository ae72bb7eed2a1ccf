"""``torchext queue``: start a queue, look into it, stop jobs."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torchext.launch.durations import duration
from torchext.launch.errors import LaunchError
from torchext.launch.queue.client import Client, default_folder
from torchext.launch.queue.words import job_lines, span

_READY = "queue ready at "
_READY_WITHIN_S = 120.0


def parser() -> argparse.ArgumentParser:
    """Makes the parser; ``function`` of what it reads runs the command."""
    made = argparse.ArgumentParser(
        prog="torchext queue", description="A queue of training jobs. Submit with: torchext run --queue URL train.py"
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, function: Any, words: str, *, job: bool = False) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=words, description=words)
        one.set_defaults(function=function)
        if name != "start":
            one.add_argument(
                "--queue", metavar="URL", help="tcp://HOST:PORT, or a folder; default: TORCHEXT_QUEUE, or yours here"
            )
        if job:
            one.add_argument("job", type=int, help="number of the job")
        return one

    start = command("start", _start, "start the daemon; jobs outlive it")
    start.add_argument("--folder", type=Path, help=f"where it keeps everything; default {default_folder()}")
    start.add_argument(
        "--cluster", metavar="FILE|NxS", help="machines of a cluster file, or N with S slots; default: this"
    )
    start.add_argument("--policy", default="qssf", help="who runs next and where, default qssf; see torchext simulate")
    start.add_argument(
        "--engine",
        choices=["local", "nodes", "slurm"],
        default="local",
        help="what runs jobs: this machine, for all of the cluster; node agents (torchext node join); or Slurm, whose "
        "nodes are the cluster if no other is given",
    )
    start.add_argument(
        "--lease",
        type=duration,
        default=300.0,
        metavar="TIME",
        help="how long jobs go on when their machine is silent, before they are requeued; default 5m",
    )
    start.add_argument(
        "--listen", metavar="HOST:PORT", help="take requests there, too; they need the token in the folder"
    )
    start.add_argument("--detach", action="store_true", help="return once it is ready, and go on in the background")
    command("stop", lambda args: _call(args, "stop"), "stop the daemon; jobs go on")
    ls = command("ls", _ls, "list jobs")
    ls.add_argument("--all", action="store_true", help="those that have ended, too")
    command("show", _show, "say all about a job: its runs, and why each was started", job=True)
    logs = command("logs", _logs, "print what a job has printed", job=True)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until it ends")
    logs.add_argument("--run", type=int, help="which run, default the latest")
    logs.add_argument("--node", type=int, default=0, help="which of its nodes, default 0")
    command("cancel", lambda args: _call(args, "cancel", job=args.job), "end a job for good", job=True)
    command(
        "requeue", lambda args: _call(args, "requeue", job=args.job), "stop a job and put it back in line", job=True
    )
    top = command("top", _top, "watch jobs and machines")
    top.add_argument("--once", action="store_true", help="print them once")
    command("plan", _plan, "say what would start now, and why; and why others wait")
    for name, words in (("drain", "let a machine take no new jobs"), ("undrain", "let a machine take jobs again")):
        drain = command(name, _drain, words)
        drain.add_argument("machine")
        if name == "drain":
            drain.add_argument("--now", action="store_true", help="put the jobs that run there back in line")
    return made


def _start(args: argparse.Namespace) -> int:
    from torchext.launch.queue.daemon import Daemon
    from torchext.scheduling import SchedulingError, make_policy, parse_cluster

    folder = (args.folder or default_folder()).absolute()
    try:
        cluster = None if args.cluster is None else parse_cluster(args.cluster)
        make_policy(args.policy)
    except SchedulingError as error:
        raise LaunchError(str(error)) from None
    if args.detach:
        return _detach(folder, args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    daemon = Daemon(folder, cluster=cluster, policy=args.policy, engine=args.engine, lease_s=args.lease)
    try:
        asyncio.run(daemon.run(listen=args.listen, ready=lambda url: print(_READY + url, flush=True)))
    finally:
        daemon.close()
    return 0


def _detach(folder: Path, args: argparse.Namespace) -> int:
    """Starts the same command without ``--detach`` in a session of its own and waits until it is ready."""
    words = ["--folder", str(folder), "--policy", args.policy, "--engine", args.engine, "--lease", f"{args.lease:g}"]
    words += ["--cluster", args.cluster] if args.cluster else []
    words += ["--listen", args.listen] if args.listen else []
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "daemon.log"
    with open(path, "ab") as log:
        begin = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "torchext", "queue", "start", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _READY_WITHIN_S
    while True:
        printed = path.read_bytes()[begin:].decode(errors="replace")
        ready = [line for line in printed.splitlines() if line.startswith(_READY)]
        if ready:
            print(f"{ready[0]} (pid {child.pid}, log {path})")
            return 0
        if child.poll() is not None:
            raise LaunchError(f"the daemon ended with status {child.returncode}:\n{printed}")
        if time.monotonic() > deadline:
            child.kill()
            child.wait()
            raise LaunchError(f"the daemon was not ready within {_READY_WITHIN_S:g} s, and was ended:\n{printed}")
        time.sleep(0.05)


def _call(args: argparse.Namespace, op: str, **fields: object) -> int:
    with Client(args.queue) as client:
        client.call(op, **fields)
    return 0


def _drain(args: argparse.Namespace) -> int:
    fields = {"now": args.now} if args.command == "drain" else {}
    return _call(args, args.command, machine=args.machine, **fields)


def _ls(args: argparse.Namespace) -> int:
    with Client(args.queue) as client:
        answer = client.call("jobs", **({} if args.all else {"ended_within_s": 0}))
    print(_table(job_lines(answer["jobs"], answer["now_s"])))
    return 0


def _table(lines: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _show(args: argparse.Namespace) -> int:
    with Client(args.queue) as client:
        job = client.call("job", job=args.job)
    asked = job["submission"]
    print(
        f"job {job['id']} ({asked['name']}) of {asked['user']}: {job['state']}"
        + (f", {job['reason']}" if job["reason"] else "")
    )
    print(f"  command   {' '.join([*asked['options'], *asked['command']])}")
    print(f"  in        {asked['cwd']}")
    print(
        f"  asks for  {asked['num_nodes']} node(s) with {asked['nproc_per_node']} process(es), "
        f"priority {asked['priority']}"
    )
    if "waits" in job:
        print(f"  waits     score {job['waits']['score']:.6g}: {job['waits']['reason']}")
    for run in job["runs"]:
        print(f"  run {run['number']}     {run['explanation']}")
        if run["start_s"] is None:
            print(
                "            waits for its slots to come free"
                if run["outcome"] is None
                else f"            {run['outcome']}"
            )
            continue
        ended = run["end_s"] if run["end_s"] is not None else job["now_s"]
        now = run["outcome"] or (f"asked to end: {run['why']}" if run["why"] else "running")
        print(
            f"            started after {span(run['start_s'] - job['submit_s'])}, {span(ended - run['start_s'])}: {now}"
        )
    return 0


def _logs(args: argparse.Namespace) -> int:
    with Client(args.queue) as client:
        for data in client.log(args.job, run=args.run, node=args.node, follow=args.follow):
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
    return 0


def _plan(args: argparse.Namespace) -> int:
    from torchext.launch.queue.words import explain
    from torchext.scheduling import PlannedStart

    with Client(args.queue) as client:
        plan = client.call("plan")
    for start in plan["starts"]:
        start["machines"] = [tuple(machine) for machine in start["machines"]]
        print(f"job {start['job_id']} starts: {explain(PlannedStart(**start))}")
    for wait in plan["waits"]:
        print(f"job {wait['job_id']} waits, score {wait['score']:.6g}: {wait['reason']}")
    if not plan["starts"] and not plan["waits"]:
        print("nothing waits")
    return 0


def _top(args: argparse.Namespace) -> int:
    from torchext.launch.queue.top import show, watch

    with Client(args.queue) as client:
        if args.once or not os.isatty(sys.stdout.fileno()):
            show(client)
        else:
            watch(client)
    return 0


def node_parser() -> argparse.ArgumentParser:
    """Makes the parser of ``torchext node``."""
    made = argparse.ArgumentParser(prog="torchext node", description="Machines of a queue started with --engine nodes.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = "run jobs of a queue on this machine, until SIGTERM"
    one = commands.add_parser("join", help=words, description=words)
    one.set_defaults(function=_join)
    one.add_argument("url", metavar="URL", help="tcp://HOST:PORT (the token in TORCHEXT_QUEUE_TOKEN), or a folder")
    one.add_argument(
        "--name", default=socket.gethostname(), help="of this machine in the cluster file; default: its own"
    )
    one.add_argument(
        "--folder", type=Path, help="for files of jobs; default NAME in machines/ beside the default queue"
    )
    one.add_argument("--address", help="where other machines reach this one; default: on the way to the queue")
    return made


def _join(args: argparse.Namespace) -> int:
    from torchext.launch.queue.agent import join
    from torchext.launch.queue.daemon import this_machine

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    folder = (args.folder or default_folder().parent / "machines" / args.name).absolute()
    join(args.url, args.name, folder, address=args.address, devices=this_machine()[1])
    return 0
