"""What the benchmarks of the standby train."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch


def transformer(width: int, layers: int) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(2000, width),
        torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        torch.nn.Linear(width, 1000),
    )


class WithAdapter(torch.nn.Module):
    """A frozen layer with a product of two thin matrices added."""

    def __init__(self, frozen: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = torch.nn.Linear(frozen.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Dense:
    """A transformer: all of its state changes in each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = self.make(options)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, fused=True)
        self.tokens = torch.randint(0, 2000, (options.batch, 64))
        self.optimizers = [self.optimizer]
        self.changed_bytes = 3 * sum(parameter.nbytes for parameter in trained)  # with two moments each

    def make(self, options: argparse.Namespace) -> torch.nn.Module:
        return transformer(options.width, options.layers)

    def step_in_backward(self) -> None:
        """From now on each parameter is updated as soon as its gradient is there, by an optimizer of its own."""
        own = {p: torch.optim.AdamW([p], fused=True) for group in self.optimizer.param_groups for p in group["params"]}

        def update(parameter: torch.Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(update)
        self.optimizers = list(own.values())

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.tokens).square().mean().backward()
        if self.optimizers == [self.optimizer]:
            self.optimizer.step()


class Adapted(Dense):
    """Of a frozen transformer, adapters of the feed-forward layers and the last layer are trained."""

    def make(self, options: argparse.Namespace) -> torch.nn.Module:
        model = transformer(options.width, options.layers).requires_grad_(False)
        for layer in model[1].layers:
            layer.linear1, layer.linear2 = WithAdapter(layer.linear1, 16), WithAdapter(layer.linear2, 16)
        return model


class Sparse:
    """An embedding of which each step changes few rows."""

    ROWS, WIDTH, PER_STEP = 262_144, 64, 4096

    def __init__(self, options: argparse.Namespace) -> None:
        self.model: torch.nn.Module = torch.nn.Embedding(self.ROWS, self.WIDTH, sparse=True)
        self.optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(self.model.parameters())
        self.optimizers = [self.optimizer]
        self.generator = torch.Generator().manual_seed(0)
        self.changed_bytes = 0

    def train(self) -> None:
        ids = torch.randint(0, self.ROWS, (self.PER_STEP,), generator=self.generator)
        self.changed_bytes = 3 * 4 * self.WIDTH * len(ids.unique())
        self.optimizer.zero_grad()
        self.model(ids).square().sum().backward()
        self.optimizer.step()


WORKLOADS: dict[str, Callable[[argparse.Namespace], Dense | Sparse]] = {
    "transformer": Dense,
    "LoRA": Adapted,
    "sparse": Sparse,
}
