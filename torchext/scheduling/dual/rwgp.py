"""A Gaussian process over machines and classes of jobs, whose kernel counts random walks between machines.

Each relation between machines (of one cluster, of one type, in one rack, alike in their running times) is a graph; S is
its adjacency matrix, normalised. Walks of length up to L, weighted, give G = sum_l beta_l S^l, and machines covary as
K = G G^T; classes covary as B. Over (machine, class), the kernel is the sum over relations of K (x) B.

Source: after Reid et al., "General Graph Random Features" (ICLR 2024), and Borovitskiy et al., "Matern Gaussian
Processes on Graphs" (AISTATS 2021), for kernels of this form; exact matrices here instead of sampled walks. The part
of the classes is the intrinsic model of coregionalisation, Alvarez, Rosasco and Lawrence, "Kernels for Vector-Valued
Functions" (2012), section 4.2.

Shapes: M machines, C classes, R relations, L longest walk, N rows observed. A *cell* is (machine, class), numbered
machine * C + class. All floating-point tensors are float64, values are log speeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_RANK = 2  # of the covariance of classes, beside its diagonal
# The noise of what is older than this many times the kernel's memory grows no more; by then it weighs nothing.
_OLDEST = 40.0
# Of what `fit` believes before it has seen anything. Classes are much alike: one in which all that has been seen of it
# was regular need not stay so.
_PRIOR_SDS = {"beta": 1.0, "log_noise": 2.0, "log_memory": 1.0}
_CLASSES_SD = 0.05


class RWGPError(ValueError):
    """Observations or a graph that no Gaussian process can be made of."""


class Observations(NamedTuple):
    """What has been seen.

    Args:
        machine: (N,) int64.
        job_class: (N,) int64.
        value: (N,) float64, log speeds.
        time_s: (N,) float64, when.
    """

    machine: Tensor
    job_class: Tensor
    value: Tensor
    time_s: Tensor


class Cells(NamedTuple):
    """Observations added up by cell, which loses nothing that the process asks for.

    Args:
        machine: (N,) int64.
        job_class: (N,) int64.
        value: (N,) float64, means weighted by precision.
        variance: (N,) float64, of the noise in `value`.
    """

    machine: Tensor
    job_class: Tensor
    value: Tensor
    variance: Tensor


def cliques(groups: Sequence[object]) -> Tensor:
    """Joins all machines of one group; returns the adjacency matrix, (M, M), with each machine joined to itself."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    of = torch.tensor([numbers[group] for group in groups])
    return (of[:, None] == of[None, :]).double()


def nearest(profiles: Tensor, num_neighbours: int) -> Tensor:
    """Joins each machine to those with the nearest profiles, and them to it.

    Args:
        profiles: (M, D) float64, say the mean log speed for each class.
        num_neighbours: How many each machine chooses; fewer when there are not as many others.

    Returns:
        (M, M) float64, with each machine joined to itself.
    """
    distances = torch.cdist(profiles, profiles)
    distances.fill_diagonal_(-1.0)  # before all others, also before those that are equal
    chosen = distances.argsort(dim=1, stable=True)[:, : num_neighbours + 1]
    joined = torch.zeros_like(distances).scatter_(1, chosen, 1.0)
    return torch.maximum(joined, joined.T)


def walks(adjacency: Tensor, longest: int) -> Tensor:
    """Computes S^0 to S^L for S = D^-1/2 A D^-1/2, each scaled so that S^l S^l has a mean diagonal of 1.

    The scale is part of beta_l, which so is the standard deviation that walks of this length bring.

    Args:
        adjacency: (M, M) float64, symmetric, not negative.
        longest: L.

    Returns:
        (L + 1, M, M) float64.

    Raises:
        RWGPError: The matrix is not what is asked for.
    """
    if not torch.isfinite(adjacency).all() or (adjacency < 0).any() or not torch.equal(adjacency, adjacency.T):
        raise RWGPError("an adjacency matrix must be symmetric, finite and not negative")
    degree = adjacency.sum(1)
    scale = torch.where(degree > 0, degree, 1.0).rsqrt()
    step = scale[:, None] * adjacency * scale[None, :]
    power = torch.eye(len(adjacency), dtype=torch.float64)
    powers = []
    for _ in range(longest + 1):
        size = power.square().sum(1).mean().sqrt()
        powers.append(power / size if size > 0 else power)
        power = power @ step
    return torch.stack(powers)


class WalkKernel(nn.Module):
    """The kernel, its noise and how fast that grows; all parameters can be learned by `fit`.

    Args:
        paths: (R, L + 1, M, M) float64, of `walks`.
        num_classes: C.
        noise_sd: Standard deviation of an observation just made.
        memory_s: The noise variance of an observation grows e-fold in this time.
    """

    def __init__(
        self, paths: Tensor, num_classes: int, *, noise_sd: float = 0.15, memory_s: float = 10 * 86400.0
    ) -> None:
        super().__init__()
        num_relations, num_lengths = paths.shape[:2]
        self.register_buffer("paths", paths)
        self.paths: Tensor
        beta = torch.full((num_relations, num_lengths), 0.02, dtype=torch.float64)
        beta[:, min(1, num_lengths - 1)] = 0.2
        self.beta = nn.Parameter(beta)
        # B = W W^T + diag(d), all classes alike at first: half of the variance is shared.
        weight = torch.zeros(num_relations, num_classes, _RANK, dtype=torch.float64)
        weight[:, :, 0] = math.sqrt(0.5)
        # The second column starts with differing signs; it could not leave 0 otherwise.
        weight[:, :, 1] = 0.05 * torch.cos(torch.arange(num_classes) * 2.4)
        self.weight = nn.Parameter(weight)
        self.log_own = nn.Parameter(torch.full((num_relations, num_classes), math.log(0.5), dtype=torch.float64))
        self.log_noise = nn.Parameter(torch.tensor(2 * math.log(noise_sd), dtype=torch.float64))
        self.log_memory = nn.Parameter(torch.tensor(math.log(memory_s), dtype=torch.float64))

    def with_class(self) -> WalkKernel:
        """Copies the kernel, with one class more that is as the others are on average."""
        other = WalkKernel(self.paths, self.num_classes + 1)
        self._copy_to(other)
        if self.num_classes:
            with torch.no_grad():
                other.weight[:, -1] = self.weight.mean(1)
                other.log_own[:, -1] = self.log_own.mean(1)
        return other

    def with_paths(self, paths: Tensor) -> WalkKernel:
        """Copies the kernel, onto other graphs of the same machines."""
        other = WalkKernel(paths, self.num_classes)
        self._copy_to(other)
        return other

    @torch.no_grad()
    def _copy_to(self, other: WalkKernel) -> None:
        other.beta.copy_(self.beta)
        other.weight[:, : self.num_classes] = self.weight
        other.log_own[:, : self.num_classes] = self.log_own
        other.log_noise.copy_(self.log_noise)
        other.log_memory.copy_(self.log_memory)

    @property
    def num_machines(self) -> int:
        """M."""
        return self.paths.shape[-1]

    @property
    def num_classes(self) -> int:
        """C."""
        return self.log_own.shape[1]

    @property
    def memory_s(self) -> float:
        """In which time the noise variance grows e-fold."""
        return math.exp(self.log_memory.item())

    def machine_covariance(self) -> Tensor:
        """Returns G G^T of each relation, (R, M, M)."""
        walked = torch.einsum("rl,rlij->rij", self.beta, self.paths)
        return walked @ walked.transpose(1, 2)

    def class_covariance(self) -> Tensor:
        """Returns B of each relation, (R, C, C)."""
        return self.weight @ self.weight.transpose(1, 2) + torch.diag_embed(self.log_own.exp())

    def noise_variance(self, age_s: Tensor) -> Tensor:
        """Returns the noise variance of single observations, of the shape of their ages.

        It grows as exp(age / memory), so those of one cell add up to one observation whose variance goes on to grow by
        the same law: nothing has to be kept but the sums.
        """
        age = (age_s / self.log_memory.exp()).clamp(0.0, _OLDEST)
        return torch.exp(self.log_noise + age)

    def covariance(self, machine: Tensor, job_class: Tensor) -> Tensor:
        """Returns the kernel between cells, (N, N)."""
        among_machines = self.machine_covariance()[:, machine[:, None], machine[None, :]]
        among_classes = self.class_covariance()[:, job_class[:, None], job_class[None, :]]
        return torch.sum(among_machines * among_classes, 0)

    def full_covariance(self) -> Tensor:
        """Returns the kernel between all cells, (M C, M C)."""
        size = self.num_machines * self.num_classes
        return torch.einsum("rij,rcd->icjd", self.machine_covariance(), self.class_covariance()).reshape(size, size)


def aggregate(kernel: WalkKernel, seen: Observations, now_s: float) -> Cells:
    """Adds observations up by cell, as they weigh at some time."""
    cells, row = torch.unique(seen.machine * kernel.num_classes + seen.job_class, return_inverse=True)
    precision = 1.0 / kernel.noise_variance(now_s - seen.time_s)
    zeros = torch.zeros(len(cells), dtype=torch.float64)
    total = zeros.index_add(0, row, precision)
    value = zeros.index_add(0, row, precision * seen.value) / total
    return Cells(
        torch.div(cells, kernel.num_classes, rounding_mode="floor"), cells % kernel.num_classes, value, 1.0 / total
    )


def log_likelihood(kernel: WalkKernel, seen: Observations, now_s: float) -> Tensor:
    """Computes the log marginal likelihood of single observations, by way of their sums.

    Returns:
        Scalar, of which gradients can be taken.
    """
    cells = aggregate(kernel, seen, now_s)
    covariance = kernel.covariance(cells.machine, cells.job_class) + torch.diag(cells.variance)
    factor = safe_cholesky(covariance)
    white = torch.linalg.solve_triangular(factor, cells.value[:, None], upper=False)[:, 0]
    between = -0.5 * white.square().sum() - factor.diagonal().log().sum() - 0.5 * len(white) * math.log(2 * math.pi)
    # What the sums leave out: how observations of one cell scatter about their mean.
    single = kernel.noise_variance(now_s - seen.time_s)
    within = -0.5 * ((seen.value.square() / single).sum() - (cells.value.square() / cells.variance).sum())
    within = within - 0.5 * (torch.log(2 * math.pi * single).sum() - torch.log(2 * math.pi * cells.variance).sum())
    total: Tensor = between + within
    return total


def fit(
    kernel: WalkKernel,
    seen: Observations,
    now_s: float,
    *,
    num_steps: int = 60,
    step_size: float = 0.1,
    classes_sd: float = _CLASSES_SD,
) -> float:
    """Learns the kernel's parameters by marginal likelihood, in place, with weak priors about where they are.

    The priors are normal about the present values, of the sds in `_PRIOR_SDS`: what the data do not say stays as it is.

    Args:
        kernel: Changed in place.
        seen: At least one observation.
        now_s: As of when they weigh.
        num_steps: Of Adam.
        step_size: Of Adam.
        classes_sd: Sd of the priors about the covariance of classes.

    Returns:
        The best value of log likelihood plus log prior; the parameters are those it was reached with.

    Raises:
        RWGPError: No observations, or one that is not finite.
    """
    if not len(seen.value) or not all(torch.isfinite(part).all() for part in (seen.value, seen.time_s)):
        raise RWGPError("to fit the kernel needs observations, all of them finite")
    start = {name: parameter.detach().clone() for name, parameter in kernel.named_parameters()}
    best_value, best = -math.inf, start
    sds = {"weight": classes_sd, "log_own": classes_sd, **_PRIOR_SDS}
    optimizer = torch.optim.Adam(kernel.parameters(), lr=step_size)
    for _ in range(num_steps):
        optimizer.zero_grad()
        away = sum(
            ((parameter - start[name]) / sds[name]).square().sum() for name, parameter in kernel.named_parameters()
        )
        value = log_likelihood(kernel, seen, now_s) - 0.5 * away
        if not torch.isfinite(value):
            break  # a step has gone astray; the best so far stands
        if value.item() > best_value:
            best_value = value.item()
            best = {name: parameter.detach().clone() for name, parameter in kernel.named_parameters()}
        (-value).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(kernel.parameters(), 1000.0)
        optimizer.step()
    with torch.no_grad():
        for name, parameter in kernel.named_parameters():
            parameter.copy_(best[name])
    return best_value


def safe_cholesky(matrix: Tensor) -> Tensor:
    """Factors a covariance, (N, N), adding as little to its diagonal as it takes, from 1e-12 of its mean on.

    Raises:
        RWGPError: It cannot be factored with a hundredth added; it is no covariance.
    """
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not info:
        return factor
    mean = matrix.detach().diagonal().mean()
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    for exponent in range(-12, -1, 2):
        factor, info = torch.linalg.cholesky_ex(matrix + mean * 10.0**exponent * eye)
        if not info:
            return factor
    raise RWGPError("the covariance cannot be factored; are all its parameters finite?")


class Posterior:
    """The process given observations, for all cells, extended row by row without factoring anew.

    Keeps V = L^-1 K(observed, all) and z = L^-1 y, where L is the Cholesky factor of K(observed) + noise. New rows
    extend L by a block, of which all that is needed is in V already: O(N M C) for each.

    Args:
        kernel: As it is now; later changes are not followed.
        cells: What has been seen; may be empty. A cell may come again, as in later observations of it.

    Attributes:
        mean: (M, C) float64.
        variance: (M, C) float64, of the true log speed.
    """

    def __init__(self, kernel: WalkKernel, cells: Cells) -> None:
        with torch.no_grad():
            self._prior = kernel.full_covariance()
        self._num_classes = kernel.num_classes
        size = len(self._prior)
        self._rows = torch.empty(0, size, dtype=torch.float64)
        self._num_rows = 0
        self._white = torch.empty(0, dtype=torch.float64)
        self._mean = torch.zeros(size, dtype=torch.float64)
        self._variance = self._prior.diagonal().clone()
        self.extend(cells)

    @property
    def num_rows(self) -> int:
        """N."""
        return self._num_rows

    @property
    def mean(self) -> Tensor:
        """(M, C)."""
        return self._mean.view(-1, self._num_classes)

    @property
    def variance(self) -> Tensor:
        """(M, C)."""
        return self._variance.clamp_min(0.0).view(-1, self._num_classes)

    @torch.no_grad()
    def extend(self, cells: Cells) -> None:
        """Takes in more observations, with the same result as if all had come at once.

        Raises:
            RWGPError: A value or a variance is not finite, or a variance is not positive.
        """
        if not (torch.isfinite(cells.value).all() and torch.isfinite(cells.variance).all()):
            raise RWGPError("observed values and their variances must be finite")
        if not (cells.variance > 0).all():
            raise RWGPError("variances of observations must be positive")
        count = len(cells.value)
        if not count:
            return
        where = cells.machine * self._num_classes + cells.job_class
        old, old_white = self._rows[: self._num_rows], self._white[: self._num_rows]
        beside = old[:, where]  # L^-1 K(observed, new), (N, n)
        left = self._prior[where] - beside.T @ old  # (n, M C)
        corner = safe_cholesky(left[:, where] + torch.diag(cells.variance))
        rows = torch.linalg.solve_triangular(corner, left, upper=False)
        rest = cells.value - beside.T @ old_white
        white = torch.linalg.solve_triangular(corner, rest[:, None], upper=False)[:, 0]
        self._append(rows, white)
        self._mean += rows.T @ white
        self._variance -= rows.square().sum(0)

    def _append(self, rows: Tensor, white: Tensor) -> None:
        needed = self._num_rows + len(rows)
        if needed > len(self._rows):  # in larger and larger pieces, not row by row
            room = max(needed, self._num_rows + self._num_rows // 4 + 16)
            grown = torch.empty(room, self._rows.shape[1], dtype=torch.float64)
            grown[: self._num_rows] = self._rows[: self._num_rows]
            grown_white = torch.empty(room, dtype=torch.float64)
            grown_white[: self._num_rows] = self._white[: self._num_rows]
            self._rows, self._white = grown, grown_white
        self._rows[self._num_rows : needed] = rows
        self._white[self._num_rows : needed] = white
        self._num_rows = needed
