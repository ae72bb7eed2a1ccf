"""Time FreDFLoss against MSE, the two-transform formula and neuralforecast's FreDF: forward + backward.

    python tests/benchmarks/loss.py [--rounds 15] [--device cpu|cuda] [--shape B T D] [--json out.json]

Contenders take turns within a round, on one thread; the table gives medians over rounds, and the median of the
per-round ratios to the two-transform formula. Extra memory is the peak resident size above what the inputs take
(Linux, large shapes only), in multiples of the forecast's size. The last lines put the loss beside a whole
training step of iTransformer. neuralforecast is compared where it is installed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torchext.losses import FreDFLoss

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from forecasting_models import ITransformer

SHAPES = ((32, 96, 7), (32, 720, 321), (32, 336, 862))
Loss = Callable[[Tensor, Tensor], Tensor]


def two_transforms(input: Tensor, target: Tensor, alpha: float = 0.8) -> Tensor:
    """FreDF as its paper writes it."""
    frequency = (torch.fft.rfft(input, dim=1) - torch.fft.rfft(target, dim=1)).abs().mean()
    return alpha * frequency + (1 - alpha) * (input - target).square().mean()


def contenders() -> dict[str, Loss]:
    ours = FreDFLoss(alpha=0.8)
    losses: dict[str, Loss] = {
        "MSE": torch.nn.functional.mse_loss,
        "two transforms": two_transforms,
        "torchext": ours,
        "torchext, masked": lambda a, b: ours(a, b, mask=torch.ones_like(b, dtype=torch.bool)),
    }
    try:
        from neuralforecast.losses.pytorch import FreDF as TheirFreDF
    except ImportError as error:
        print(f"neuralforecast's FreDF is not compared: {error}")
    else:
        theirs = TheirFreDF(alpha=0.8)
        losses["neuralforecast"] = lambda a, b: theirs(b, a)
    return losses


def versions() -> dict[str, str]:
    """Return what the figures were taken with: versions, and the commit of the checkout."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if importlib.util.find_spec("neuralforecast") is not None:
        found["neuralforecast"] = importlib.metadata.version("neuralforecast")
    return found | {"commit": head.stdout.strip() or "unknown", "machine": platform.processor() or platform.machine()}


def step(loss: Loss, input: Tensor, target: Tensor) -> None:
    input.grad = None
    loss(input, target).backward()


def seconds(run: Callable[[], None], repeats: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def extra_tensors(loss: Loss, input: Tensor, target: Tensor) -> float | None:
    """Return the peak memory of a step above the standing one, in multiples of the input's size."""
    size = input.numel() * input.element_size()
    if input.device.type == "cuda":
        input.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss, input, target)
        return (torch.cuda.max_memory_allocated() - before) / size
    if platform.system() != "Linux" or size < 1 << 24:
        return None
    step(loss, input, target)
    input.grad = None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _status_bytes("VmRSS")
    step(loss, input, target)
    return (_status_bytes("VmHWM") - before) / size


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def compare(losses: dict[str, Loss], shape: tuple[int, int, int], rounds: int, device: str) -> list[dict[str, object]]:
    input = torch.randn(shape, device=device, requires_grad=True)
    target = torch.randn(shape, device=device)
    repeats = max(1, 2_000_000 // input.numel())
    runs = {name: lambda loss=loss: step(loss, input, target) for name, loss in losses.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(rounds + 1):
        for name, run in runs.items():
            elapsed = seconds(run, repeats, device)
            if round_index > 0:  # the first warms up
                times[name].append(elapsed)
    rows = []
    for name, samples in times.items():
        ratios = [theirs / ours for theirs, ours in zip(times["two transforms"], samples, strict=True)]
        rows.append(
            {
                "shape": shape,
                "loss": name,
                "median_ms": statistics.median(samples) * 1e3,
                "p10_ms": statistics.quantiles(samples, n=10)[0] * 1e3,
                "speedup": statistics.median(ratios),
                "extra_tensors": extra_tensors(losses[name], input, target),
            }
        )
    return rows


def share_of_training_step(rounds: int) -> dict[str, float]:
    """Return the milliseconds of an iTransformer step at (32, 96, 7) with MSE, and what FreDF adds to it."""
    model = ITransformer(96, 96)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, marks, y = torch.randn(32, 96, 7), torch.randn(32, 96, 4), torch.randn(32, 96, 7)

    def train(loss: Loss) -> None:
        optimizer.zero_grad()
        loss(model(x, marks), y).backward()
        optimizer.step()

    fredf = FreDFLoss()
    forecast = model(x, marks).detach().requires_grad_()
    training, alone = [], []
    for round_index in range(rounds + 1):
        samples = (
            seconds(lambda: train(torch.nn.functional.mse_loss), 5, "cpu"),
            seconds(lambda: step(fredf, forecast, y), 50, "cpu")
            - seconds(lambda: step(torch.nn.functional.mse_loss, forecast, y), 50, "cpu"),
        )
        if round_index > 0:
            training.append(samples[0])
            alone.append(samples[1])
    return {
        "training_step_ms": statistics.median(training) * 1e3,
        "fredf_over_mse_ms": statistics.median(alone) * 1e3,
        "share": statistics.median(a / t for a, t in zip(alone, training, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="at least 2 (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("B", "T", "D"), help="this one alone")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds: got {args.rounds}, expected at least 2, to have a spread")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    about = versions()
    print(", ".join(f"{name} {version}" for name, version in about.items()))
    losses = contenders()
    rows = []
    for shape in [tuple(args.shape)] if args.shape else SHAPES:
        print(f"\n{shape}\n{'':<18}{'median ms':>10}{'p10 ms':>10}{'speedup':>10}{'extra tensors':>15}")
        for row in compare(losses, shape, args.rounds, args.device):
            rows.append(row)
            extra = "" if row["extra_tensors"] is None else f"{row['extra_tensors']:.2f}"
            print(f"{row['loss']:<18}{row['median_ms']:>10.3f}{row['p10_ms']:>10.3f}{row['speedup']:>10.2f}{extra:>15}")
    result: dict[str, object] = {"command": sys.argv, "versions": about, "rows": rows}
    if args.device == "cpu":
        result["training_step"] = share_of_training_step(args.rounds)
        print("\niTransformer step with MSE {training_step_ms:.2f} ms; FreDF over MSE {fredf_over_mse_ms:.3f} ms, "
              "{share:.1%} of the step".format(**result["training_step"]))  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
