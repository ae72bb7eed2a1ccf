"""The reinforcement learning examples run, write what they say and go on from it; the slow tests see them learn."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torchext.channels import Channel, ChannelLoader, WeightBroadcast

pytest.importorskip("gymnasium", reason="needs gymnasium: pip install 'torchext[rl]'")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *words: str | Path, timeout_s: float = 200) -> str:
    command = [sys.executable, str(EXAMPLES / example), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", ["ppo.py", pytest.param("impala.py", marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_it_saves_resumes_evaluates_and_plots(example: str, tmp_path: Path) -> None:
    files = ["--checkpoint", tmp_path / "a.pt", "--plot", tmp_path / "a.png"]
    common = ["--explorers", "1", "--envs", "4", "--rollout", "16", "--evaluate", "1", *files]
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


@pytest.mark.timeout(300)
def test_dqn_saves_resumes_evaluates_and_plots(tmp_path: Path) -> None:
    files = ["--checkpoint", tmp_path / "a.pt", "--plot", tmp_path / "a.png"]
    common = ["--explorers", "1", "--chunk", "32", "--warm-up", "64", "--test-every", "64", "--test-episodes", "1"]
    run("dqn.py", *common, *files, "--evaluate", "1", "--steps", "128")
    before = torch.load(tmp_path / "a.pt")
    assert before["steps"] == before["history"][-1][0] == 128
    output = run("dqn.py", *common, *files, "--evaluate", "1", "--steps", "192", "--resume")
    after = torch.load(tmp_path / "a.pt")
    assert after["history"][: len(before["history"])] == before["history"]
    assert re.search(r"after 192 steps, \d+ s \(\d+ steps/s\)\nevaluation: 1 episodes, mean return \d+", output), output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.pt"]


@pytest.mark.timeout(300)
def test_explorers_on_another_machine() -> None:
    # Keeps a port for the learner, who may listen there as long as this does not.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{held.getsockname()[1]}"
    environment = {**os.environ, "TORCHEXT_CHANNELS_TOKEN": "a token of the tests"}
    small = ["--explorers", "1", "--envs", "2", "--rollout", "16"]
    words = [*small, "--learner-address", address, "--first-number", "1"]
    with held, subprocess.Popen([sys.executable, EXAMPLES / "impala.py", *words], env=environment) as elsewhere:
        words = [*small, "--listen", address, "--remote-explorers", "1", "--steps", "256", "--evaluate", "0"]
        done = subprocess.run(
            [sys.executable, EXAMPLES / "impala.py", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "after 256 steps" in done.stdout  # in batches with a row from each
        assert elsewhere.wait(60) == 0


@pytest.mark.timeout(300)
def test_impala_plays_atari() -> None:
    pytest.importorskip("ale_py", reason="needs ale-py: pip install 'torchext[rl]'")
    words = ["--explorers", "1", "--envs", "1", "--rollout", "4", "--steps", "8", "--evaluate", "0"]
    assert "after 8 steps" in run("impala.py", "--env", "ALE/Breakout-v5", *words)


@pytest.mark.parametrize("game", ["BeamRider", "Qbert", "SpaceInvaders"])
def test_impala_plays_the_other_games_of_the_paper(game: str) -> None:
    """By the functions of the example, with the explorer as a thread: a second each instead of ten."""
    pytest.importorskip("ale_py", reason="needs ale-py: pip install 'torchext[rl]'")
    spec = importlib.util.spec_from_file_location("impala_example", EXAMPLES / "impala.py")
    assert spec is not None
    assert spec.loader is not None
    impala: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(impala)
    options = argparse.Namespace(env=f"ALE/{game}-v5", envs=2, rollout=4, seed=0, gamma=0.99, entropy=0.01)
    policy, num_threads = impala.Policy(options.env), torch.get_num_threads()
    before = [parameter.clone() for parameter in policy.parameters()]
    optimizer = torch.optim.Adam(policy.parameters())
    with Channel(slots=2) as channel, WeightBroadcast(policy) as weights:
        explorer = threading.Thread(target=impala.explore, args=(channel, weights, 0, options))
        explorer.start()
        weights.publish()
        for _, batch in zip(range(2), ChannelLoader(channel, 1, weights=weights, timeout=60), strict=False):
            assert batch["observation"].shape == (1, 5, 2, 4, 80, 80)
            assert batch["observation"].float().std() > 0  # a picture
            impala.update(policy, optimizer, batch, options)
            weights.publish()
        channel.close()
        explorer.join()
    torch.set_num_threads(num_threads)
    assert all((old != new).any() for old, new in zip(before, policy.parameters(), strict=True))


@pytest.mark.timeout(300)
def test_a_population_goes_on_from_its_best() -> None:
    output = run("pbt.py", "--members", "2", "--rounds", "3", "--steps", "20").splitlines()
    assert [line[:8] for line in output[:-1]] == [f"round {i:2}" for i in (1, 2, 3)]
    assert re.fullmatch(r"best of the population [\d.]+; of the same members without exchange [\d.]+", output[-1])
    rates = [line.rpartition("rates ")[2].split() for line in output[:-1]]
    assert rates[0] != rates[1]  # the worse one has taken over the better one's, changed a little


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.timeout(700)
def test_dqn_solves_cartpole(seed: int) -> None:
    output = run("dqn.py", "--seed", str(seed), "--evaluate", "0", timeout_s=600)
    assert int(re.findall(r"greedy return (\d+)", output)[0]) >= 475, output


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("example", ["ppo.py", "impala.py"])
@pytest.mark.timeout(700)
def test_cartpole_is_solved(example: str, seed: int) -> None:
    output = run(example, "--seed", str(seed), timeout_s=600)
    mean = int(re.findall(r"return (\d+) over the last 100 episodes", output)[0])
    assert mean >= 475, output
