"""The process against a dense one written out, and on inputs that break careless ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchext.scheduling.dual.rwgp import (
    Cells,
    Observations,
    Posterior,
    RWGPError,
    WalkKernel,
    aggregate,
    cliques,
    fit,
    log_likelihood,
    nearest,
    safe_cholesky,
    walks,
)

_NOW_S = 1e6


def _kernel(num_machines: int = 6, num_classes: int = 3, longest: int = 2, seed: int = 0) -> WalkKernel:
    random = torch.Generator().manual_seed(seed)
    graphs = [cliques([i % 2 for i in range(num_machines)]), cliques([i // 2 for i in range(num_machines)])]
    kernel = WalkKernel(torch.stack([walks(graph, longest) for graph in graphs]), num_classes, memory_s=3e5)
    with torch.no_grad():
        for parameter in (kernel.beta, kernel.weight, kernel.log_own):
            parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=random)
    return kernel


def _seen(kernel: WalkKernel, num: int, seed: int = 0) -> Observations:
    random = np.random.default_rng(seed)
    return Observations(
        torch.from_numpy(random.integers(0, kernel.num_machines, num)),
        torch.from_numpy(random.integers(0, kernel.num_classes, num)),
        torch.from_numpy(random.normal(0, 0.5, num)),
        torch.from_numpy(_NOW_S - random.exponential(3e5, num)),
    )


def _dense_kernel(kernel: WalkKernel, first: list[tuple[int, int]], second: list[tuple[int, int]]) -> np.ndarray:
    """The kernel, cell by cell, from S^l written out."""
    result = np.zeros((len(first), len(second)))
    for relation in range(kernel.beta.shape[0]):
        beta, paths = kernel.beta[relation].detach().numpy(), kernel.paths[relation].numpy()
        walked = sum(weight * path for weight, path in zip(beta, paths, strict=True))
        weight, own = kernel.weight[relation].detach().numpy(), kernel.log_own[relation].detach().exp().numpy()
        for i, (machine, job_class) in enumerate(first):
            for j, (other, other_class) in enumerate(second):
                among = walked[machine] @ walked[other]
                classes = weight[job_class] @ weight[other_class] + (job_class == other_class) * own[job_class]
                result[i, j] += among * classes
    return result


def _dense(kernel: WalkKernel, seen: Observations) -> tuple[np.ndarray, np.ndarray, float]:
    """Posterior mean and variance of all cells and the log likelihood, one row per single observation."""
    where = list(zip(seen.machine.tolist(), seen.job_class.tolist(), strict=True))
    every = [(machine, c) for machine in range(kernel.num_machines) for c in range(kernel.num_classes)]
    noise = math.exp(kernel.log_noise.item()) * np.exp((_NOW_S - seen.time_s.numpy()) / kernel.memory_s)
    observed = _dense_kernel(kernel, where, where) + np.diag(noise)
    across = _dense_kernel(kernel, every, where)
    value = seen.value.numpy()
    mean = across @ np.linalg.solve(observed, value)
    variance = np.diag(_dense_kernel(kernel, every, every) - across @ np.linalg.solve(observed, across.T))
    sign, log_determinant = np.linalg.slogdet(observed)
    assert sign > 0
    likelihood = -0.5 * (
        value @ np.linalg.solve(observed, value) + log_determinant + len(value) * math.log(2 * math.pi)
    )
    return mean, variance, likelihood


def _cells(rows: list[tuple[int, int, float, float]]) -> Cells:
    machine, job_class, value, variance = zip(*rows, strict=True)
    return Cells(
        torch.tensor(machine),
        torch.tensor(job_class),
        torch.tensor(value, dtype=torch.float64),
        torch.tensor(variance, dtype=torch.float64),
    )


@pytest.mark.parametrize("longest", [0, 1, 3])
@pytest.mark.parametrize("num", [1, 7, 60])
def test_posterior_and_likelihood_are_those_of_the_dense_process(num: int, longest: int) -> None:
    kernel = _kernel(longest=longest, seed=num)
    seen = _seen(kernel, num, seed=num)
    mean, variance, likelihood = _dense(kernel, seen)
    posterior = Posterior(kernel, aggregate(kernel, seen, _NOW_S))
    assert posterior.mean.flatten().numpy() == pytest.approx(mean, abs=1e-9)
    assert posterior.variance.flatten().numpy() == pytest.approx(variance, abs=1e-9)
    assert log_likelihood(kernel, seen, _NOW_S).item() == pytest.approx(likelihood, rel=1e-10)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 1000))
def test_rows_added_piece_by_piece_are_as_good_as_all_at_once(pieces: list[int], seed: int) -> None:
    kernel = _kernel(seed=seed)
    seen = _seen(kernel, sum(pieces), seed)
    single = Cells(seen.machine, seen.job_class, seen.value, kernel.noise_variance(_NOW_S - seen.time_s).detach())
    posterior = Posterior(kernel, Cells(*(part[:0] for part in single)))
    begin = 0
    for piece in pieces:
        posterior.extend(Cells(*(part[begin : begin + piece] for part in single)))
        begin += piece
    mean, variance, _ = _dense(kernel, seen)
    assert posterior.num_rows == begin
    assert posterior.mean.flatten().numpy() == pytest.approx(mean, abs=1e-9)
    assert posterior.variance.flatten().numpy() == pytest.approx(variance, abs=1e-9)


def test_sums_made_early_age_as_their_observations_do() -> None:
    kernel = _kernel()
    seen = _seen(kernel, 40)
    early, late = (aggregate(kernel, seen, now_s) for now_s in (_NOW_S, _NOW_S + 2e5))
    assert torch.allclose(early.value, late.value, rtol=1e-12)
    assert torch.allclose(early.variance * math.exp(2e5 / kernel.memory_s), late.variance, rtol=1e-12)


def test_gradients_of_the_likelihood_are_those_of_finite_differences() -> None:
    kernel = _kernel(4, 2)
    seen = _seen(kernel, 12)
    names = [name for name, _ in kernel.named_parameters()]

    def value(*parameters: Tensor) -> Tensor:
        return torch.func.functional_call(
            _Likelihood(kernel, seen), {f"kernel.{n}": p for n, p in zip(names, parameters, strict=True)}, ()
        )

    inputs = tuple(parameter.detach().clone().requires_grad_() for parameter in kernel.parameters())
    assert torch.autograd.gradcheck(value, inputs)


class _Likelihood(torch.nn.Module):
    def __init__(self, kernel: WalkKernel, seen: Observations) -> None:
        super().__init__()
        self.kernel = kernel
        self._seen = seen

    def forward(self) -> Tensor:
        return log_likelihood(self.kernel, self._seen, _NOW_S)


def test_walks_are_powers_of_the_normalised_adjacency() -> None:
    adjacency = nearest(torch.tensor([[0.0], [0.1], [0.3], [5.0], [5.1]], dtype=torch.float64), 1)
    degree = np.diag(adjacency.sum(1).numpy() ** -0.5)
    step = degree @ adjacency.numpy() @ degree
    for length, path in enumerate(walks(adjacency, 3)):
        expected = np.linalg.matrix_power(step, length)
        scale = math.sqrt(np.trace(expected @ expected.T) / 5)
        assert path.numpy() == pytest.approx(expected / scale)


def test_on_cliques_longer_walks_are_no_new_ones() -> None:
    paths = walks(cliques(["a", "a", "b", "b", "b"]), 3)
    assert torch.allclose(paths[1], paths[2])
    assert torch.allclose(paths[1], paths[3])


def test_nearest_joins_both_ways_and_each_to_itself() -> None:
    joined = nearest(torch.tensor([[0.0], [1.0], [1.5], [9.0], [0.0]], dtype=torch.float64), 1)
    assert torch.equal(joined, joined.T)
    assert joined.diagonal().tolist() == [1.0] * 5
    assert [int(row.sum()) for row in joined] == [2, 2, 3, 2, 2]
    assert torch.equal(nearest(torch.zeros(3, 2, dtype=torch.float64), 9), torch.ones(3, 3, dtype=torch.float64))


def test_fitting_finds_the_noise_and_its_growth_and_never_ends_worse() -> None:
    kernel = _kernel(20, 3)
    with torch.no_grad():
        kernel.log_noise.fill_(math.log(0.02))
        truth = torch.distributions.MultivariateNormal(
            torch.zeros(60, dtype=torch.float64), kernel.full_covariance() + 1e-9 * torch.eye(60, dtype=torch.float64)
        )
    torch.manual_seed(1)
    level = truth.sample()
    seen = _seen(kernel, 900, 1)
    single = kernel.noise_variance(_NOW_S - seen.time_s).detach()
    value = level[seen.machine * 3 + seen.job_class] + single.sqrt() * torch.randn(900, dtype=torch.float64)
    seen = seen._replace(value=value)
    other = WalkKernel(kernel.paths, 3, noise_sd=0.6, memory_s=3e6)
    before = log_likelihood(other, seen, _NOW_S).item()
    fit(other, seen, _NOW_S, num_steps=120)
    assert log_likelihood(other, seen, _NOW_S).item() > before
    assert math.exp(other.log_noise.item()) == pytest.approx(0.02, rel=0.3)
    assert other.memory_s == pytest.approx(kernel.memory_s, rel=0.3)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 0, 1.0, 1e-12)] * 50, id="one cell seen without noise, again and again"),
        pytest.param([(0, 0, 1.0, 1e-9), (0, 0, -1.0, 1e-9)], id="what contradicts itself"),
        pytest.param([(m, c, 1e6, 1e-6) for m in range(6) for c in range(3)], id="huge values"),
        pytest.param([(m, c, 0.1, 1e30) for m in range(6) for c in range(3)], id="all but forgotten"),
        pytest.param([(1, 1, 1e-300, 1e-300)], id="nearly nothing"),
    ],
)
def test_nasty_observations_leave_finite_means_and_true_variances(rows: list[tuple[int, int, float, float]]) -> None:
    kernel = _kernel()
    prior = Posterior(kernel, _cells(rows[:1])).variance
    posterior = Posterior(kernel, _cells(rows))
    assert torch.isfinite(posterior.mean).all()
    assert (posterior.variance >= 0).all()
    assert (posterior.variance <= prior + 1e-9).all()


def test_a_thousand_years_of_age_are_no_overflow() -> None:
    kernel = _kernel()
    seen = _seen(kernel, 30)._replace(time_s=torch.full((30,), _NOW_S - 3e10, dtype=torch.float64))
    assert torch.isfinite(log_likelihood(kernel, seen, _NOW_S))
    posterior = Posterior(kernel, aggregate(kernel, seen, _NOW_S))
    assert posterior.mean.abs().max() < 1e-6


def test_a_kernel_whose_relations_say_the_same_can_be_factored() -> None:
    paths = torch.stack([walks(torch.ones(8, 8, dtype=torch.float64), 3)] * 3)
    kernel = WalkKernel(paths, 2)
    with torch.no_grad():
        kernel.beta[:, 0] = 0.0  # rank one
        kernel.log_own.fill_(-60.0)
    safe_cholesky(kernel.full_covariance().detach())
    posterior = Posterior(kernel, _cells([(m, 0, 0.5, 1e-14) for m in range(8)]))
    assert posterior.mean[:, 0].numpy() == pytest.approx([0.5] * 8, abs=1e-3)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((0, 0, math.nan, 1.0), "must be finite"),
        ((0, 0, math.inf, 1.0), "must be finite"),
        ((0, 0, 0.0, math.nan), "must be finite"),
        ((0, 0, 0.0, 0.0), "must be positive"),
    ],
)
def test_what_is_no_observation_is_refused_and_leaves_no_trace(row: tuple[int, int, float, float], words: str) -> None:
    posterior = Posterior(_kernel(), _cells([(1, 1, 0.3, 0.1)]))
    before = posterior.mean.clone()
    with pytest.raises(RWGPError, match=words):
        posterior.extend(_cells([(2, 0, 0.1, 0.1), row]))
    assert torch.equal(posterior.mean, before)
    with pytest.raises(RWGPError, match="symmetric, finite"):
        walks(torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64), 1)
    with pytest.raises(RWGPError, match="needs observations"):
        fit(_kernel(), Observations(*(torch.zeros(0, dtype=torch.float64) for _ in range(4))), 0.0)
    with pytest.raises(RWGPError, match="cannot be factored"):
        safe_cholesky(torch.tensor([[1.0, 5.0], [5.0, 1.0]], dtype=torch.float64))


def test_a_new_class_is_as_the_others_are() -> None:
    kernel = _kernel()
    grown = kernel.with_class()
    assert torch.equal(grown.class_covariance()[:, :3, :3], kernel.class_covariance())
    machine, job_class = torch.tensor([0, 0]), torch.tensor([3, 0])
    assert grown.covariance(machine, job_class)[0, 1] > 0
