"""Population-based training over channels: members train apart, bad ones take over the weights of good ones.

    python examples/pbt.py [--members 4] [--rounds 20] [--seed 0]

Needs no more than torch. Each member is a process that trains a small network by gradient descent with a learning rate
of its own; after each round it sends its loss and its weights through a channel. The coordinator tells the worst, by a
channel to each, to go on from the weights of the best, with that one's learning rate changed a little. It prints, with
other numbers each time:

    round  1: losses nan 0.0865 0.1691 0.1906, learning rates 0.44 0.15 0.0021 0.00027
    ...
    round 20: losses 0.0053 0.0063 0.0054 0.0060, learning rates 0.06 0.076 0.048 0.06
    best of the population 0.0053; of the same members without exchange 0.0093

Source: "Population Based Training of Neural Networks" (arXiv 1711.09846); the fourth experiment of XingTian's paper.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchext.channels import Channel, ChannelClosed

# Shapes: B examples of a minibatch.


def make_data(seed: int) -> tuple[Tensor, Tensor]:
    """A function to learn: (1024, 2) in, (1024, 1) out."""
    x = torch.rand(1024, 2, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    return x, (x[:, :1] * 2).sin() * x[:, 1:].cos()


def member(number: int, results: Channel, orders: Channel, options: argparse.Namespace) -> None:
    """Trains for a round, sends what came of it, does as it is told; until the coordinator ends the channels."""
    torch.set_num_threads(1)
    torch.manual_seed(100 * options.seed + number)
    x, y = make_data(options.seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with contextlib.suppress(ChannelClosed, KeyboardInterrupt), results.sender(f"member-{number}") as sender:
        for order in orders:
            if order["weights"] is not None:
                model.load_state_dict(order["weights"])
            for group in optimizer.param_groups:
                group["lr"] = order["lr"]
            for rows in (torch.randint(len(x), (32,)) for _ in range(options.steps)):
                optimizer.zero_grad()
                F.mse_loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                loss = F.mse_loss(model(x), y).item()
            sender.send({"number": number, "loss": loss, "weights": model.state_dict()})


def train(options: argparse.Namespace, *, exchanges: bool) -> float:
    """All rounds of one population; returns the loss of its best member."""
    chance = random.Random(options.seed)
    learning_rates = [10 ** chance.uniform(-5, 0.5) for _ in range(options.members)]
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(Channel(slots=options.members, num_senders=options.members))
        orders = [stack.enter_context(Channel(slots=1)) for _ in range(options.members)]
        tells = [channel.sender("coordinator") for channel in orders]
        members = [
            context.Process(target=member, args=(number, results, orders[number], options), daemon=True)
            for number in range(options.members)
        ]
        for process in members:
            process.start()
        inherited: list[dict[str, Tensor] | None] = [None] * options.members
        for round_number in range(1, options.rounds + 1):
            for tell, weights, lr in zip(tells, inherited, learning_rates, strict=True):
                tell.send({"weights": weights, "lr": lr})
            got: dict[int, dict[str, Any]] = {}
            while len(got) < options.members:
                result = results.receive()
                got[result["number"]] = result
            loss = [float(got[number]["loss"]) for number in range(options.members)]
            order = sorted(range(options.members), key=[math.inf if math.isnan(x) else x for x in loss].__getitem__)
            if exchanges:
                losses = " ".join(f"{x:.4f}" for x in loss)
                rates = " ".join(f"{lr:.2g}" for lr in learning_rates)
                print(f"round {round_number:2}: losses {losses}, learning rates {rates}", flush=True)
            inherited = [None] * options.members
            best, quarter = order[0], max(1, options.members // 4)
            for number in order[-quarter:] if exchanges else ():
                inherited[number] = {key: value.clone() for key, value in got[best]["weights"].items()}
                learning_rates[number] = learning_rates[best] * chance.choice([0.8, 1.25])
            final = loss[best]
            del got, result
        for channel in orders:
            channel.close()
        for process in members:
            process.join()
    return final


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=4, help="processes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="of each member in a round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    best = train(options, exchanges=True)
    alone = train(options, exchanges=False)
    print(f"best of the population {best:.4f}; of the same members without exchange {alone:.4f}")


if __name__ == "__main__":
    main()
