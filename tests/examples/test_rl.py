"""The reinforcement learning examples run, write what they say and go on from it; the slow tests see them learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'torchext[rl]'")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *words: str | Path, timeout_s: float = 200) -> str:
    command = [sys.executable, str(EXAMPLES / example), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", ["ppo.py", "impala.py"])
def test_it_saves_resumes_evaluates_and_plots(example: str, tmp_path: Path) -> None:
    files = ["--checkpoint", tmp_path / "a.pt", "--plot", tmp_path / "a.png"]
    common = ["--explorers", "2", "--envs", "2", "--rollout", "16", "--evaluate", "1", *files]
    run(example, *common, "--steps", "128")
    before = torch.load(tmp_path / "a.pt")
    assert before["steps"] == before["history"][-1][0] == 128
    assert (tmp_path / "a.png").stat().st_size > 1000
    output = run(example, *common, "--steps", "256", "--resume")
    after = torch.load(tmp_path / "a.pt")
    assert after["steps"] == 256
    assert after["history"][:2] == before["history"]
    assert re.search(r"after 256 steps, \d+ s \(\d+ steps/s\)\nevaluation: 1 episodes, mean return \d+", output), output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("example", ["ppo.py", "impala.py"])
@pytest.mark.timeout(700)
def test_cartpole_is_solved(example: str, seed: int) -> None:
    output = run(example, "--seed", str(seed), timeout_s=600)
    mean = int(re.findall(r"return (\d+) over the last 100 episodes", output)[0])
    assert mean >= 475, output
