from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from torchext import cli
from torchext.scheduling import (
    Cluster,
    ClusterState,
    Job,
    Machine,
    RecordedJob,
    SchedulingError,
    simulate,
    synthetic,
)
from torchext.scheduling.dual.losses import Learned, losses_of
from torchext.scheduling.dual.networks import Agents, Ordered
from torchext.scheduling.dual.rollout import Cost, Explorer, Weights, compare_costs, draw_episode, play
from torchext.scheduling.dual.train import Options, Training, Validation, estimate_advantages
from torchext.scheduling.dual.train import run as train
from torchext.scheduling.policies import QSSF, FIFOFirstFit

_SMALL = Options(seed=3, iterations=4, episodes=1, jobs=40, first_load=1.2, last_load=1.5, learning_rate=1e-3)


def _trace(num_jobs: int = 300, seed: int = 0) -> list[RecordedJob]:
    random = np.random.default_rng(seed)
    submit_s = np.cumsum(random.exponential(300.0, num_jobs))
    return [
        RecordedJob(
            Job(f"j{i}", float(submit_s[i]), int(random.choice([1, 1, 2, 4])), f"t{random.integers(3)}"),
            float(random.gamma(0.5, 4000.0)),
        )
        for i in range(num_jobs)
    ]


def _training(options: Options = _SMALL) -> Training:
    return Training([_trace()], [Cluster.uniform(2, 4)], is_synthetic=False, options=options)


def _parameters(training: Training) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in training.agents.state_dict().values()])


def test_episodes_have_the_load_asked_for() -> None:
    trace, cluster = _trace(3000), Cluster.uniform(2, 4)
    loads = []
    for seed in range(30):
        random = np.random.default_rng(seed)
        episode = draw_episode(trace, cluster, random, num_jobs=400, load=0.8, is_synthetic=False)
        span_s = episode.jobs[-1].job.submit_s - episode.jobs[0].job.submit_s
        loads.append(sum(r.duration_s * r.job.num_gpus for r in episode.jobs) / (8 * span_s))
        assert all(r.job.submit_s <= episode.jobs[0].job.submit_s for r in episode.earlier)
    assert np.mean(loads) == pytest.approx(0.8, rel=0.1)
    with pytest.raises(SchedulingError, match="has not two jobs"):
        draw_episode([], cluster, np.random.default_rng(0), num_jobs=9, load=1.0, is_synthetic=False)


def test_cost_is_the_integral_of_what_it_counts() -> None:
    trace = [replace(r, job=replace(r.job, deadline_s=r.job.submit_s + 3000.0)) for r in _trace(80)]
    cluster = synthetic.make_cluster(3)
    result = simulate(trace, cluster, QSSF())
    cost = Cost(result, Weights(100.0, 0.5))
    for until_s in (0.0, 4000.0, 20_000.0, cost.end_s, cost.end_s + 5.0):
        expected = 0.0
        for recorded, finish_s in zip(result.jobs, result.finish_s, strict=True):
            job = recorded.job
            assert job.deadline_s is not None
            expected += max(0.0, min(until_s, finish_s) - job.submit_s)
            expected += 0.5 * max(0.0, min(until_s, finish_s) - job.deadline_s)
        for run in result.runs:
            rate = sum(cluster.machines[index].price_per_gpu_hour * gpus for index, gpus in run.placement.gpus) / 3600
            expected += 100.0 * rate * max(0.0, min(until_s, run.end_s) - run.start_s)
        assert float(cost.until(np.array(until_s))) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_advantages_are_the_sums_of_surprises() -> None:
    random = np.random.default_rng(0)
    rewards, values = random.normal(size=7), random.normal(size=8)
    elapsed_s = random.exponential(100.0, 7)
    discounts = np.exp(-elapsed_s / 200.0)
    surprises = rewards + discounts * values[1:] - values[:-1]
    expected = [sum(surprises[j] * np.prod(0.9 * discounts[i:j]) for j in range(i, 7)) for i in range(7)]
    assert estimate_advantages(rewards, values, elapsed_s, 200.0, 0.9) == pytest.approx(expected)


def test_the_first_to_start_is_a_draw_from_those_that_fit() -> None:
    explorer = Explorer(torch.Generator().manual_seed(0), dict.fromkeys(("a", "b", "never"), 60.0))
    state = ClusterState(Cluster.uniform(1, 2))
    jobs = [Job("a", 0.0, 1), Job("b", 0.0, 2), Job("never", 0.0, 3)]
    logits = torch.tensor([0.0, 1.0, 5.0])
    seen = (torch.zeros(3, 1), torch.zeros(1))
    said = Ordered(logits, torch.zeros(3), torch.tensor(-50.0), torch.zeros(1), torch.tensor(0.0))
    first: Counter[int] = Counter()
    for _ in range(4000):
        perturbed = explorer.order(jobs, seen, said, state).logits
        first[int(perturbed[:2].argmax())] += 1
    assert first[1] / 4000 == pytest.approx(math.e / (1 + math.e), abs=0.03)


def test_notes_are_what_the_agents_say_again() -> None:
    episode = draw_episode(
        synthetic.classify(_trace(300), 0),
        synthetic.make_cluster(3),
        np.random.default_rng(1),
        num_jobs=40,
        load=1.3,
        is_synthetic=True,
    )
    torch.manual_seed(0)
    agents = Agents()
    with torch.no_grad():
        for parameter in agents.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
        agents.ordering.log_scale.fill_(-1.0)
        agents.placement.log_scale.fill_(0.0)
    result, decisions = play(episode, agents, seed=5)
    assert len(result.jobs) == len(episode.jobs)
    assert sum(len(decision.orders) for decision in decisions) > 20
    assert sum(len(decision.places) for decision in decisions) > 20
    for decision in decisions:
        # Nothing has changed since, so all ratios are 1: each loss is the advantage, and nothing is clipped.
        said = losses_of(agents, [Learned(decision, 0.0, decision.value)], np.array([0.7]), 0.2)
        assert said["order_loss"].item() == pytest.approx(-0.7, abs=1e-4)
        assert said["place_loss"].item() == pytest.approx(-0.7 if decision.places else 0.0, abs=1e-4)
        assert said["hold_loss"].item() == pytest.approx(-0.7 if decision.holds else 0.0, abs=1e-4)
        assert said["value_loss"].item() == pytest.approx(0.0, abs=1e-8)
        assert all(allowed[chosen] for allowed, chosen, _ in decision.orders)
    assert any(decision.holds for decision in decisions)
    # Together they lose what they lose one by one, on average.
    entries = [Learned(decision, 0.0, decision.value + i % 3) for i, decision in enumerate(decisions)]
    worth = np.linspace(-1, 1, len(entries))
    single = [losses_of(agents, [entry], worth[i : i + 1], 0.2) for i, entry in enumerate(entries)]
    for name, value in losses_of(agents, entries, worth, 0.2).items():
        assert value.item() == pytest.approx(np.mean([loss[name].item() for loss in single]), abs=1e-4), name
    other = play(episode, agents, seed=5)[1]
    assert [d.value for d in other] == [d.value for d in decisions]
    assert [d.value for d in play(episode, agents, seed=6)[1]] != [d.value for d in decisions]


def test_what_went_well_becomes_likelier() -> None:
    training = _training()
    decisions = [d for seed in range(3) for d in play(_episode(), training.agents, seed)[1]]
    decision = max(decisions, key=lambda d: len(d.orders[0][0]))
    allowed, chosen, log_p = decision.orders[0]
    decision = replace(decision, orders=[(allowed, chosen, log_p)], places=[])
    optimizer = torch.optim.SGD(training.agents.parameters(), lr=0.1)
    losses = losses_of(training.agents, [Learned(decision, 1.0, 0.0)], np.ones(1), 0.2)
    losses["order_loss"].backward()
    optimizer.step()
    said = training.agents.ordering(decision.jobs, decision.cluster)
    every = torch.cat([said.logits, said.wait[None]])
    assert torch.log_softmax(every.masked_fill(~allowed, -math.inf), 0)[chosen].item() >= log_p


def _episode() -> object:
    return draw_episode(
        _trace(), Cluster.uniform(2, 4), np.random.default_rng(0), num_jobs=60, load=1.5, is_synthetic=False
    )


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    straight = _training()
    for _ in range(3):
        straight.step()
    first = _training()
    first.step()
    first.save(tmp_path / "checkpoint")
    second = _training()
    second.resume(tmp_path / "checkpoint")
    reports = [second.step() for _ in range(2)]
    assert second.iteration == 3
    assert torch.equal(_parameters(straight), _parameters(second))
    assert all(math.isfinite(value) for said in reports for value in said.values())
    assert math.isfinite(float(second.agents.seen_limit))


def _with_telling_deadlines(seed: int) -> list[RecordedJob]:
    """Jobs of one tenant, of three lengths that deadlines tell and the history of ended jobs does not tell apart."""
    random = np.random.default_rng(seed)
    submit_s = np.cumsum(random.exponential(150.0, 1500))
    durations_s = random.choice([60.0, 300.0, 3000.0], 1500, p=[0.5, 0.3, 0.2])
    return [
        RecordedJob(Job(f"j{i}", float(s), 1, "t", deadline_s=float(s + 100 * d)), float(d))
        for i, (s, d) in enumerate(zip(submit_s, durations_s, strict=True))
    ]


@pytest.mark.parametrize(("forecast", "num_steps"), [(0.5, 2), (0.0, 5)])
def test_training_makes_agents_better_on_jobs_they_have_not_seen(forecast: float, num_steps: int) -> None:
    """By what is learned of running times, and by rewards alone: both find what deadlines tell."""
    cluster = Cluster.uniform(1, 4)
    options = Options(
        episodes=1, jobs=80, first_load=1.1, last_load=1.1, learning_rate=3e-3, forecast=forecast, scale_s=3600.0
    )
    training = Training([_with_telling_deadlines(0)], [cluster], is_synthetic=False, options=options)
    unseen = [
        draw_episode(
            _with_telling_deadlines(1), cluster, np.random.default_rng(i), num_jobs=80, load=1.1, is_synthetic=False
        )
        for i in range(3)
    ]
    validation = Validation(unseen, options)
    assert validation.gain(training.agents) == 0.0
    for _ in range(num_steps):
        training.step()
    # It is about 0.3; to know all running times would be worth no more.
    assert validation.gain(training.agents) > 0.15


class _Scripted(Validation):
    def __init__(self, *gains: float) -> None:
        self._gains = list(gains)

    def gain(self, agents: Agents) -> float:
        return self._gains.pop(0)


def test_the_agents_that_did_best_are_kept_also_over_a_resumption(tmp_path: Path) -> None:
    best = _training(replace(_SMALL, iterations=4))
    for _ in range(2):
        best.step()
    said: list[dict[str, float]] = []
    first = _training(replace(_SMALL, iterations=4))
    first.step()
    first.consider(0.1)
    first.step()
    first.consider(0.3)
    first.save(tmp_path / "checkpoint")
    second = _training(replace(_SMALL, iterations=4))
    second.resume(tmp_path / "checkpoint")
    kept = train(second, every=1, validation=_Scripted(0.2, -0.1), report=lambda _, row: said.append(row))
    assert [row["validated"] for row in said] == [0.2, -0.1]
    assert second.iteration == 4
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(kept.parameters(), best.agents.parameters(), strict=True)
    )


def test_untrained_agents_are_kept_where_training_does_no_better_but_know_what_it_was_like() -> None:
    training, untrained = _training(replace(_SMALL, iterations=1)), _training().agents
    kept = train(training, every=1, validation=_Scripted(0.0, -0.1))
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(kept.parameters(), untrained.parameters(), strict=True)
    )
    assert math.isfinite(float(kept.seen_limit))


def test_savings_are_what_all_costs_differ_by() -> None:
    trace = [replace(r, job=replace(r.job, deadline_s=r.job.submit_s + 3000.0)) for r in _trace(80)]
    cluster = synthetic.make_cluster(3)
    ours, usual = simulate(trace, cluster, QSSF()), simulate(trace, cluster, FIFOFirstFit())
    weights = Weights(100.0, 0.5)
    costs = [Cost(result, weights) for result in (ours, usual)]
    times_s = np.array([trace[0].job.submit_s, 5000.0, 9000.0, max(cost.end_s for cost in costs) + 1.0])
    saved = compare_costs(times_s, ours, usual, weights)
    mine, others = (float(cost.until(times_s[-1:])[0]) for cost in costs)
    assert saved.sum() == pytest.approx(others - mine, rel=1e-9)
    # A start that is a second shorter than usual saves that second when it is made.
    hour = [RecordedJob(Job("a", 0.0, 1), 3600.0)]
    slow = simulate(hour, Cluster((Machine("m", 1, "old"),), {"old": {"default": 0.5}}), QSSF())
    fast = simulate(hour, Cluster.uniform(1, 1), QSSF())
    assert compare_costs(np.array([0.0, 1.0, 8000.0]), fast, slow).tolist() == [3600.0, 0.0]


def test_another_seed_trains_other_agents() -> None:
    one, other = _training(), _training(replace(_SMALL, seed=4))
    one.step()
    other.step()
    assert not torch.equal(_parameters(one), _parameters(other))


def test_checkpoints_of_other_options_or_of_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    _training().save(path)
    with pytest.raises(SchedulingError, match="was made with jobs=40, not 50; resume with the same options"):
        _training(replace(_SMALL, jobs=50)).resume(path)
    path.write_bytes(b"no checkpoint")
    with pytest.raises(SchedulingError, match="cannot be read as a checkpoint"):
        _training().resume(path)
    with pytest.raises(SchedulingError, match="cannot be read as a checkpoint"):
        _training().resume(tmp_path / "none")


def _words(folder: Path, *more: object) -> list[str]:
    trace = folder / "trace.csv"
    if not trace.exists():
        rows = [f"{r.job.submit_s},{r.duration_s},{r.job.num_gpus},{r.job.tenant}" for r in _trace(200)]
        trace.write_text("\n".join(["submit_s,duration_s,num_gpus,tenant", *rows]))
    words = ["--trace", trace, "--cluster", "2x4", "--out", folder / "p.safetensors", "--episodes", 1, "--jobs", 30]
    return ["train-policy", *map(str, [*words, *more])]


def test_the_command_trains_resumes_and_its_policy_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    words = _words(tmp_path, "--iterations", 2, "--log-dir", tmp_path / "curves")
    assert cli.main([*words, "--to", "40000", "--validate-from", "40000"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("iteration") == 2
    assert printed.err.count("validated") == 1
    assert "gain" in printed.err
    assert list((tmp_path / "curves").glob("events.*"))
    simulated = ("simulate", "--trace", tmp_path / "trace.csv", "--cluster", "2x4", "--policy", "qssf,dual")
    simulated_words = [*map(str, simulated), "--policy-file", str(tmp_path / "p.safetensors")]
    assert cli.main(simulated_words) == 0
    first = capsys.readouterr().out
    assert "dual" in first
    assert cli.main(simulated_words) == 0
    assert capsys.readouterr().out == first
    # All iterations are done: resuming only writes the policy again, the same.
    before = (tmp_path / "p.safetensors").read_bytes()
    assert cli.main([*words, "--to", "40000", "--resume"]) == 0
    assert len((tmp_path / "p.safetensors").read_bytes()) > 0.9 * len(before)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--out", "no/such/p.safetensors"), "there is no folder 'no/such'"),
        (("--cluster", "nowhere.toml"), "neither NODESxGPUS"),
        (("--to", "-5"), "has not two jobs"),
        (("--resume",), "cannot be read as a checkpoint"),
        (("--validate-from", "1e9"), "no trace has two jobs of that time"),
    ],
)
def test_inputs_that_cannot_be_used_end_with_status_1_and_a_reason(
    more: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    assert cli.main(_words(tmp_path, "--iterations", 1, *more)) == 1
    err = capsys.readouterr().err
    assert err.startswith("torchext train-policy: ")
    assert reason in err


def test_a_checkpoint_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "p.safetensors.checkpoint").write_text("old")
    assert cli.main(_words(tmp_path)) == 1
    assert "go on from it with --resume, or remove it" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--iterations", "0"), ("--learning-rate", "-1"), ("--from", "soon")])
def test_options_that_are_not_understood_end_with_status_2(words: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(_words(tmp_path, *words))
    assert caught.value.code == 2
