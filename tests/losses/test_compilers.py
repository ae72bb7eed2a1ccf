"""torch.compile, export, tracing and ONNX give the eager loss."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchext.losses import FreDFLoss, fredf_loss

CHOICES: list[dict[str, Any]] = [
    {},
    {"method": "matmul", "norm": "ortho"},
    {"basis": "fft", "p": 2, "time_loss": "mae"},
    {"basis": "rfft2", "component": "mag-phase"},
    {"basis": "legendre", "degree": 3, "time_loss": "smape"},
    {"reduction": "none", "freq_weight": torch.rand(7), "horizon_weight": torch.rand(12)},
]


def name(choice: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in choice.items() if not isinstance(v, Tensor)) or "default"


every_choice = pytest.mark.parametrize("choice", CHOICES, ids=name)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def signals() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(3, 12, 2), torch.randn(3, 12, 2), torch.rand(3, 12, 2) > 0.3


def check_against_eager(compiled: Any, eager: Any, *signals: Tensor) -> None:
    input, *rest = signals
    grads = []
    for loss in (compiled, eager):
        leaf = input.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        value = loss(leaf, *rest)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        grads.append((value.detach(), gradient))
    torch.testing.assert_close(*grads)


@every_choice
def test_compile_without_graph_breaks(choice: dict[str, Any]) -> None:
    criterion = FreDFLoss(**choice)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    input, target, mask = signals()
    check_against_eager(compiled, criterion, input, target, mask)
    # PyTorch issues 181625 and 167265: a transposed forecast.
    check_against_eager(compiled, criterion, input.transpose(0, 2).contiguous().transpose(0, 2), target)


@pytest.mark.filterwarnings("ignore:.*complex operators:UserWarning")
@pytest.mark.parametrize("basis", ["rfft", "dct"])
def test_compile_with_inductor(basis: str) -> None:
    criterion = FreDFLoss(basis=basis)
    compiled = torch.compile(criterion, fullgraph=True)
    input, target, _ = signals()
    check_against_eager(compiled, criterion, input.transpose(1, 2).contiguous().transpose(1, 2), target)


@pytest.mark.parametrize("basis", ["rfft", "dct"])
def test_compiled_loss_follows_the_horizon_and_alpha(basis: str) -> None:
    # The second size makes the compiler take sizes for variables; a matrix is for one size.
    criterion = FreDFLoss(basis=basis)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    input, target, _ = signals()
    for horizon, alpha in ((12, 0.8), (8, 0.8), (6, 0.5)):
        criterion.alpha = alpha
        check_against_eager(compiled, criterion, input[:, :horizon], target[:, :horizon])


@pytest.mark.parametrize("basis", ["rfft", "dct"])
def test_eager_and_compiled_calls_mix(basis: str) -> None:
    criterion = FreDFLoss(basis=basis)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    input, target, mask = signals()
    for rest in ((target,), (target, mask)):
        criterion(input[:, :5], target[:, :5])
        check_against_eager(compiled, criterion, input, *rest)


def test_compiled_training_step_with_autocast() -> None:
    model, criterion = torch.nn.Linear(4, 12), FreDFLoss(dim=-1)

    def step(history: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = criterion(model(history), target)
        return loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    check_against_eager(compiled, step, torch.randn(3, 2, 4), torch.randn(3, 2, 12))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("basis", ["rfft", "dct"])
def test_export(basis: str, strict: bool) -> None:
    input, target, mask = signals()
    criterion = FreDFLoss(basis=basis)
    exported = torch.export.export(criterion, (input, target, mask), strict=strict).module()
    input, target, mask = signals()
    torch.testing.assert_close(exported(input, target, mask), criterion(input, target, mask))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("basis", ["rfft", "dct"])
def test_tracing(basis: str) -> None:
    input, target, _ = signals()
    criterion = FreDFLoss(basis=basis)
    criterion(input, target)
    traced = torch.jit.trace(criterion, (input.requires_grad_(), target))
    input, target, _ = signals()
    check_against_eager(traced, criterion, input, target)


def test_functionalize_leaves_nothing_behind() -> None:
    input, target, mask = signals()
    criterion = FreDFLoss(basis="dct")
    torch.func.functionalize(criterion)(input, target)
    criterion(input.requires_grad_(), target, mask).backward()
    torch.testing.assert_close(criterion(input, target), fredf_loss(input, target, basis="dct"))


exporters = pytest.mark.parametrize(
    "dynamo",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("onnxscript") is None, reason="the ONNX exporter of dynamo needs onnxscript"
            ),
        ),
    ],
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@exporters
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"method": "matmul", "norm": "ortho"},
        {"basis": "fft"},
        {"basis": "rfft2"},
        {"basis": "dct"},
        {"component": "mag"},
    ],
    ids=name,
)
def test_onnx(choice: dict[str, Any], masked: bool, dynamo: bool, tmp_path: Path) -> None:
    # PyTorch issue 112382: ONNX has no complex numbers.
    onnxruntime = pytest.importorskip("onnxruntime", reason="running the exported loss needs onnxruntime")
    criterion = FreDFLoss(**choice)
    inputs = signals() if masked else signals()[:2]
    path = tmp_path / "loss.onnx"
    torch.onnx.export(criterion, inputs, path, dynamo=dynamo, **({"verbose": False} if dynamo else {}))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    inputs = signals() if masked else signals()[:2]
    feed = {given.name: x.numpy() for given, x in zip(session.get_inputs(), inputs, strict=True)}
    (loss,) = session.run(None, feed)
    torch.testing.assert_close(torch.tensor(loss), criterion(*inputs))
