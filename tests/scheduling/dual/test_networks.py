from __future__ import annotations

import math

import pytest
import torch

from torchext.scheduling.dual.features import CLUSTER_FEATURES, JOB_FEATURES
from torchext.scheduling.dual.networks import (
    HOLD_FEATURES,
    MACHINE_FEATURES,
    Agents,
    OrderingAgent,
    _Attention,
    log_choice,
)


def _agents(seed: int = 0) -> Agents:
    """Agents that have learned something, if nothing useful."""
    torch.manual_seed(seed)
    agents = Agents()
    with torch.no_grad():
        for parameter in agents.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return agents.eval()


def _jobs(num: int) -> torch.Tensor:
    return torch.randn(num, len(JOB_FEATURES))


_CLUSTER = torch.linspace(-1, 1, len(CLUSTER_FEATURES))


@pytest.mark.parametrize("num", [1, 2, 9, 200])
def test_the_order_in_which_jobs_are_given_does_not_matter(num: int) -> None:
    agents = _agents()
    jobs, shuffled = _jobs(num), torch.randperm(num)
    with torch.no_grad():
        said, other = agents.ordering(jobs, _CLUSTER), agents.ordering(jobs[shuffled], _CLUSTER)
    assert torch.allclose(other.logits, said.logits[shuffled], atol=1e-5)
    assert torch.allclose(other.wait, said.wait, atol=1e-5)
    assert torch.allclose(other.value, said.value, atol=1e-5)
    assert torch.allclose(other.token, said.token, atol=1e-5)


def test_jobs_know_of_each_other_and_of_the_cluster_unless_communication_is_off() -> None:
    agents = _agents()
    jobs = _jobs(5)
    other = jobs.clone()
    other[4] += 1.0
    with torch.no_grad():
        for communicate in (True, False):
            first, second = (agents.ordering(given, _CLUSTER, communicate).logits[0] for given in (jobs, other))
            assert torch.equal(first, second) == (not communicate)
            elsewhere = agents.ordering(jobs, _CLUSTER + 1, communicate).logits[0]
            assert not torch.equal(first, elsewhere)


def test_untrained_agents_order_by_forecast_service_and_place_by_value() -> None:
    torch.manual_seed(0)
    agents = Agents()
    jobs, machines = _jobs(50), torch.randn(20, len(MACHINE_FEATURES))
    with torch.no_grad():
        said = agents.ordering(jobs, _CLUSTER)
        logits = agents.placement(machines, jobs[0], said.token)
    assert said.logits.argsort(descending=True).tolist() == jobs[:, 0].argsort().tolist()
    assert said.wait < said.logits.min()
    assert logits.argsort(descending=True).tolist() == machines[:, 0].argsort(descending=True).tolist()


def test_the_order_of_machines_does_not_matter_to_the_placement_agent() -> None:
    agents = _agents()
    machines, job, token = torch.randn(30, len(MACHINE_FEATURES)), _jobs(1)[0], torch.randn(32)
    shuffled = torch.randperm(30)
    with torch.no_grad():
        one, other = agents.placement(machines, job, token), agents.placement(machines[shuffled], job, token)
    assert torch.allclose(other, one[shuffled], atol=1e-5)


def test_every_part_learns_once_the_last_layers_have_moved() -> None:
    agents = _agents().train()
    said = agents.ordering(_jobs(6), _CLUSTER)
    placed = agents.placement(torch.randn(4, len(MACHINE_FEATURES)), _jobs(1)[0], said.token)
    declined = agents.placement.decline(torch.randn(len(HOLD_FEATURES)), _jobs(1)[0], said.token)
    heard = said.logits.square().sum() + said.forecast.square().sum() + said.wait + said.value
    (heard + placed.square().sum() + declined).backward()
    for name, parameter in agents.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(("num_asking", "num_told"), [(3, 40), (40, 3), (5, 5)])
def test_attention_is_that_of_the_definition_whichever_side_is_longer(num_asking: int, num_told: int) -> None:
    torch.manual_seed(0)
    attention = _Attention(16)
    asking, told = torch.randn(2, num_asking, 16), torch.randn(2, num_told, 16)
    present = torch.rand(2, num_told) < 0.7
    present[:, 0] = True
    weights = attention.ask(asking) @ attention.key(told).mT / 4.0
    expected = weights.masked_fill(~present[:, None], -math.inf).softmax(-1) @ attention.say(told)
    assert torch.allclose(attention(asking, told, present), expected, atol=1e-6)


def test_cost_grows_with_jobs_not_with_their_square() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    agent = OrderingAgent()
    flops = []
    for num in (1000, 2000, 4000):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            agent(_jobs(num), _CLUSTER)
        flops.append(counter.get_total_flops())
    assert flops[2] - flops[1] == 2 * (flops[1] - flops[0])


def test_clusters_unlike_those_of_training_are_far() -> None:
    agents = Agents()
    seen = torch.randn(5000, len(CLUSTER_FEATURES))
    seen[:, 0] = 1.0
    agents.remember(seen)
    beyond = (agents.distance(seen) > agents.seen_limit).double().mean()
    assert beyond == pytest.approx(0.001, abs=0.0005)
    assert agents.distance(torch.full((len(CLUSTER_FEATURES),), 6.0)) > 2 * agents.seen_limit
    assert agents.distance(seen.mean(0)) < 0.01


def test_choices_are_among_those_allowed() -> None:
    logits, allowed = torch.tensor([1.0, 5.0, 1.0]), torch.tensor([True, False, True])
    assert log_choice(logits, allowed, 0).item() == pytest.approx(math.log(0.5))
    assert log_choice(logits, allowed, 1).item() == -math.inf
