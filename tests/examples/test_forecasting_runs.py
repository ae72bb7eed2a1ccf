"""Runs side by side, and the journal that survives a crash. Imports no torch, and so starts its processes fast."""

from __future__ import annotations

from pathlib import Path

import pytest
from forecasting_runs import Journal, Progress, Run, run_all


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
