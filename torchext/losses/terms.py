"""The two terms of FreDF from ordinary differentiable operations, with weights and reductions.

Shape legend: `S` the input's shape, `...` its axes that are not transformed, `K` coefficients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchext.losses.spectral import Coefficients, Transform, magnitude, phase, wrapped

TimeLoss = str | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Terms:
    """Everything but the two signals. `axes` are the transformed axes of `S`, non-negative.

    `weights` broadcasts to `S` and is 0 where a position is not scored; None weighs all alike. `mask` broadcasts
    to `S` too; where it is False so is the weight, and the signals may be anything.
    """

    alpha: float
    transform: Transform
    axes: tuple[int, ...]
    component: str
    p: float
    bin_weight: Tensor | None
    time_loss: TimeLoss
    mask: Tensor | None
    weights: Tensor | None
    reduction: str


def fredf_from_terms(input: Tensor, target: Tensor, terms: Terms) -> Tensor:
    """Return alpha * frequency term + (1 - alpha) * time term.

    Per element (reduction "none") with w the weights and S_i the mean distance of a series' coefficients:
    alpha * S_i * w / mean_i(w) + (1 - alpha) * w * l. "sum" adds these up, "mean" divides the sum by sum(w).
    """
    weights = None if terms.weights is None else terms.weights.expand(input.shape)
    if terms.mask is not None:
        input, target = torch.where(terms.mask, input, 0.0), torch.where(terms.mask, target, 0.0)
    per_element = torch.zeros_like(input)
    if terms.alpha < 1:
        time = elementwise_time_loss(input, target, terms.time_loss)
        if terms.mask is not None:
            time = torch.where(terms.mask, time, 0.0)  # a callable may make anything of 0 and 0
        per_element = (1 - terms.alpha) * (time if weights is None else time * weights)
    if terms.alpha > 0:
        series = _series_distance(input, target, weights, terms)
        if weights is not None:
            series = series * _share_of_mean(weights, terms.axes)
        per_element = per_element + terms.alpha * series
    if terms.reduction == "none":
        return per_element
    if terms.reduction == "sum":
        return per_element.sum()
    if weights is None:
        return per_element.mean()
    return per_element.sum() / total_weight(weights)


def total_weight(weights: Tensor) -> Tensor:
    """Return what the weighted sum is divided by for the mean: 1 if nothing at all is scored."""
    total = weights.sum()
    return torch.where(total == 0, 1.0, total)


def root(weights: Tensor, p: float) -> Tensor:
    """w^(1/p), with gradient 0 where w is 0."""
    if p == 1:
        return weights
    zero = weights == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, weights) ** (1 / p))


def elementwise_time_loss(input: Tensor, target: Tensor, time_loss: TimeLoss) -> Tensor:
    """Return the time-domain loss per element, shape `S`."""
    if time_loss == "mse":
        return (input - target).square()
    if time_loss == "mae":
        return (input - target).abs()
    if time_loss == "smape":
        size = input.detach().abs() + target.detach().abs()
        return 200 * (input - target).abs() / torch.where(size > 0, size, 1.0)
    assert callable(time_loss)
    losses = time_loss(input, target)
    if not isinstance(losses, Tensor) or losses.shape != input.shape:
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"time_loss: the callable must return per-element losses of shape {tuple(input.shape)} "
            f'(reduction="none"), got {got}'
        )
    return losses


def _series_distance(input: Tensor, target: Tensor, weights: Tensor | None, terms: Terms) -> Tensor:
    """Mean distance of the coefficients, shape `S` with the transformed axes of length 1."""
    last = tuple(range(input.ndim - len(terms.axes), input.ndim))
    input, target = input.movedim(terms.axes, last), target.movedim(terms.axes, last)
    if weights is not None:
        weights = weights.movedim(terms.axes, last)
    if terms.component == "complex":
        difference = input - target if weights is None else (input - target) * root(weights, terms.p)
        distances = [magnitude(terms.transform.analyse(difference))]
    else:
        distances = _component_distances(input, target, weights, terms)
    distance = sum(d if terms.p == 1 else d**terms.p for d in distances) / len(distances)
    assert isinstance(distance, Tensor)
    if terms.bin_weight is not None:
        # How many coefficients a callable basis has is known only now.
        if terms.bin_weight.shape != distance.shape[-len(last) :]:
            expected, got = tuple(distance.shape[-len(last) :]), tuple(terms.bin_weight.shape)
            raise ValueError(f"freq_weight must have shape {expected} for this input, got {got}")
        distance = distance * terms.bin_weight
    return distance.mean(dim=last, keepdim=True).movedim(last, terms.axes)


def _component_distances(input: Tensor, target: Tensor, weights: Tensor | None, terms: Terms) -> list[Tensor]:
    """Distances that need both spectra, or the angle of the difference.

    An angle does not see the size of its signal: the mean weight of a series is applied to the distance, only
    its profile over the series to the signal.
    """
    num_axes = terms.transform.num_axes
    level: Tensor | float = 1.0
    if weights is not None:
        level = root(weights.mean(dim=tuple(range(-num_axes, 0)), keepdim=True), terms.p)
        profile = root(weights, terms.p) / torch.where(level == 0, 1.0, level)
        input, target = input * profile, target * profile

    def analyse(x: Tensor) -> Coefficients:
        coefficients = terms.transform.analyse(x)
        if coefficients[1] is None:
            raise ValueError(f"component={terms.component!r} needs complex coefficients, the basis returned real ones")
        return coefficients

    def angle(coefficients: Coefficients) -> Tensor:
        return phase(coefficients, num_axes)

    if terms.component.startswith("complex"):
        difference = analyse(input - target)
        distances = [angle(difference).abs()]
        if terms.component == "complex-mag-phase":
            distances.append(magnitude(difference))
    else:
        a, b = analyse(input), analyse(target)
        distances = []
        if "mag" in terms.component:
            distances.append((magnitude(a) - magnitude(b)).abs())
        if "phase" in terms.component:
            distances.append(wrapped(angle(a) - angle(b)).abs())
    return [distance * level for distance in distances]


def _share_of_mean(weights: Tensor, axes: tuple[int, ...]) -> Tensor:
    """w over its mean along the transformed axes; 0 where a whole series has no weight."""
    mean = weights.mean(dim=axes, keepdim=True)
    return weights / torch.where(mean == 0, 1.0, mean)
