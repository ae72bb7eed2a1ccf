"""State on a GPU. The first test needs none: the same path takes CPU tensors that cannot be adopted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.standby.processes import Net
from torchext.standby import Replicator
from torchext.standby.cuda import SideStreams
from torchext.standby.link import fetch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", ["lag1", "rpo0"])
def test_parameters_that_cannot_be_adopted_are_copied_beside_training_and_watched(
    running: str, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    looked_at = model.weight.view(-1)  # so it stays where it is
    address = model.weight.data_ptr()
    with Replicator(model, optimizer, standby=running, job=f"beside, {mode}", mode=mode) as replicator:

        def step(i: int) -> None:
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            replicator.commit(i)

        for i in range(3):
            step(i)
        expected = model.weight.detach().clone()
        replicator._publisher.settle()
        assert torch.equal(fetch(running, f"beside, {mode}").tree["models"]["model"]["weight"], expected)
        step(3)
        with torch.no_grad(), caplog.at_level(logging.WARNING):
            looked_at.zero_()  # while it may be copied
            replicator.gate()
        assert ("step 3 is not committed" in caplog.text) == (mode == "lag1")
        step(4)
        expected = model.weight.detach().clone()
    assert model.weight.data_ptr() == address
    assert torch.equal(fetch(running, f"beside, {mode}").tree["models"]["model"]["weight"], expected)


@pytest.mark.gpu
def test_training_on_a_gpu_goes_on_with_equal_losses(running: str) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net(width=256).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        x = torch.randn(16, 32, device="cuda")
        loss = (model(x) - x.flip(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    model, optimizer = build()
    losses = [step(model, optimizer) for _ in range(6)]
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    for first, last in ((0, 3), (3, 6)):
        model, optimizer = build()
        with Replicator(model, optimizer, standby=running, job="gpu") as replicator:
            found = replicator.restore()
            assert (0 if found is None else found.step + 1) == first
            for i in range(first, last):
                assert step(model, optimizer) == losses[i]
                replicator.commit(i)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), weights[name])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4, 1000, (16 << 20) // 4, (50 << 20) // 4])
def test_side_streams_copy_what_the_main_stream_left(size: int) -> None:
    side = SideStreams()
    host = torch.zeros(size)
    tensor = torch.zeros(size, device="cuda")
    assert not side.update(host.data_ptr(), tensor)
    torch.cuda._sleep(100_000_000)  # the main stream is behind
    tensor += 1
    side.follow([tensor.device])
    with side.used():
        assert side.update(host.data_ptr(), tensor)
    assert bool((host == 1).all())
