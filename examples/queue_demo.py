"""A queue on this machine: eight short trainings wait for two slots, one worker is killed, and all get done.

    python examples/queue_demo.py

starts a queue, submits eight trainings of examples/forecast.py whose lengths differ, shows `torchext queue top` now and
then, kills a worker, and draws who ran when. It takes about two minutes on two cores and ends with

    all 8 jobs are done; linear-8 was killed once and started anew
    they ended in the order of policy qssf: linear-7 linear-1 linear-2 linear-3 ...
    picture: outputs/queue/gantt.png
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from torchext.launch.queue import Client, JobState, describe, recorded
from torchext.scheduling import Cluster, plot, summarize

HERE = Path(__file__).resolve().parent
TORCHEXT = [sys.executable, "-m", "torchext"]


def submit(queue: Client, number: int, out: Path) -> int:
    """Submits a training that takes longer the higher its number; the queue is told so by --estimate."""
    options = ["--name", f"linear-{number}", "--estimate", f"{10 + 2 * number}s", "--retries", "1"]
    training = ["--backbone", "dlinear", "--losses", "mse", "--epochs", "1", "--limit-batches", str(20 * number)]
    return queue.submit(describe([*options, str(HERE / "forecast.py"), *training, "--jobs", "1", "--out", str(out)]))


def kill_a_worker(job: int) -> bool:
    """Kills the training process of a job, as the kernel does when memory runs out; says whether there is one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (entry / "environ").read_bytes().split(b"\0")
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if f"TORCHEXT_JOB_ID={job}".encode() in environment and str(HERE / "forecast.py").encode() in words[:3]:
                os.kill(int(entry.name), signal.SIGKILL)
                return True
    return False


def main() -> None:
    """Runs the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--jobs", type=int, default=8, help="how many (8)")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/queue"), help="folder for the picture (outputs/queue)"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="torchext-queue-") as name:
        folder = Path(name) / "queue"
        start = [*TORCHEXT, "queue", "start", "--folder", str(folder), "--cluster", "1x2", "--detach"]
        subprocess.run(start, check=True)
        with Client(str(folder)) as queue:
            try:
                demonstrate(queue, folder, args.jobs, args.out)
            finally:
                for job in queue.call("jobs")["jobs"]:
                    if not JobState(job["state"]).ended:
                        queue.call("cancel", job=job["id"])
                while any(job["end_s"] is None for job in queue.call("jobs")["jobs"]):
                    time.sleep(0.2)
                daemon = queue.call("ping")["pid"]
                queue.call("stop")
        while Path(f"/proc/{daemon}").exists():
            time.sleep(0.05)


def demonstrate(queue: Client, folder: Path, num_jobs: int, out: Path) -> None:
    """Fills the queue, shows it until all is done, and draws what has happened."""
    # The longest first, so that there is something to put in order; those two start at once, as there are two slots.
    names = {submit(queue, number, out / f"linear-{number}"): f"linear-{number}" for number in range(num_jobs, 0, -1)}
    killed = ""
    shown = 0.0
    while any(job["end_s"] is None for job in queue.call("jobs")["jobs"]):
        if time.monotonic() > shown + 15:
            subprocess.run([*TORCHEXT, "queue", "top", "--once", "--queue", str(folder)], check=True)
            shown = time.monotonic()
        for job in queue.call("jobs")["jobs"]:
            if not killed and job["state"] == "running" and kill_a_worker(job["id"]):
                killed = names[job["id"]]
        time.sleep(0.5)
    subprocess.run([*TORCHEXT, "queue", "ls", "--all", "--queue", str(folder)], check=True)
    result = recorded(queue, Cluster.uniform(1, 2))
    coloured = [replace(r, job=replace(r.job, tenant=r.job.id)) for r in result.jobs]  # one colour per job
    plot({"qssf": replace(result, jobs=tuple(coloured))}).savefig(out / "gantt.png")
    summary = summarize(result)
    print(f"all {summary['num_jobs']} jobs are done; {killed} was killed once and started anew")
    order = sorted(zip(result.finish_s, (r.job.id for r in result.jobs), strict=True))
    print("they ended in the order of policy qssf:", *(name for _, name in order))
    print(f"picture: {out / 'gantt.png'}")


if __name__ == "__main__":
    main()
