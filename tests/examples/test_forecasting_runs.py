"""Runs side by side, and the journal that survives a crash. Imports no torch, and so starts its processes fast."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from forecasting_runs import Journal, Progress, Run, run_all

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_with_seed(seed: int) -> Run:
    return Run("folder/ETTh1.csv", "dlinear", lookback=96, horizon=96, loss="mse", lr=1e-3, seed=seed)


def _train_unless_seed_2(run: Run, progress: Progress) -> str:
    if run.seed == 2:
        raise ArithmeticError("seed 2 is unlucky")
    progress(str(run), 1)
    return f"result {run.seed}"


def test_a_failed_run_does_not_stop_the_others_and_is_named_at_the_end() -> None:
    reports: list[str] = []
    results: list[str] = []
    runs = [run_with_seed(seed) for seed in (1, 2, 3)]

    def collect() -> None:
        for _, result in run_all(runs, _train_unless_seed_2, 2, lambda text, _: reports.append(text)):
            results.append(result)

    with pytest.raises(RuntimeError, match=r"1 of 3 runs failed: .* seed 2: ArithmeticError"):
        collect()
    assert sorted(results) == ["result 1", "result 3"]
    assert len(reports) == 2


WAITING_JOB = """
import os, threading
from forecasting_runs import Run, run_all

def report_pid_and_wait(run, progress):
    progress(str(os.getpid()), 0)
    threading.Event().wait()

if __name__ == "__main__":
    runs = [Run("a.csv", "dlinear", 96, 96, "mse", 1e-3, seed) for seed in (1, 2)]
    for _ in run_all(runs, report_pid_and_wait, 2, lambda text, _: print(text, flush=True)):
        pass
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux: os.pidfd_open tells when a process is gone")
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(WAITING_JOB)
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        workers = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(2)]
        parent.kill()
    for worker in workers:
        gone, _, _ = select.select([worker], [], [], 30)
        os.close(worker)
        assert gone


def test_journal_keeps_what_comes_after_a_torn_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "folder" / "runs.jsonl")
    assert journal.load() == {}
    first, second = ({"config": {"seed": seed}, "test_mse": seed / 10} for seed in (1, 2))
    journal.append(first)
    with journal.path.open("a") as file:
        file.write('{"config": {"seed": 3}, "test_m')
    journal.append(second)
    assert list(journal.load().values()) == [first, second]
    journal.append(first | {"test_mse": 0.5})
    assert journal.load()[Journal.key({"seed": 1})]["test_mse"] == 0.5
