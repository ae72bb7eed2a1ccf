"""Trained agents in a file: safetensors, with what made them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from torchext.scheduling.dual.networks import Agents
from torchext.scheduling.types import SchedulingError

_FORMAT = "torchext dual 1"
_SHIPPED = Path(__file__).with_name("policy.safetensors")


def save_policy(path: Path, agents: Agents, made_by: Mapping[str, str]) -> None:
    """Writes agents, all or nothing.

    Args:
        path: Where.
        agents: The networks.
        made_by: What else the file should tell, such as the command.

    Raises:
        ImportError: There is no safetensors.
        OSError: The file cannot be written.
    """
    safetensors = _Safetensors()
    tensors = {name: tensor.detach().contiguous() for name, tensor in agents.state_dict().items()}
    metadata = {"format": _FORMAT, **made_by}
    write_atomically(path, lambda temporary: safetensors.save_file(tensors, temporary, metadata=metadata))


def load_policy(path: str | Path | None = None) -> Agents:
    """Reads agents; None: those that come with torchext, whose metadata tell the command that made them.

    Raises:
        SchedulingError: There is no such file, or it holds something else.
        ImportError: There is no safetensors.
    """
    safetensors = _Safetensors()
    path = path or _SHIPPED
    agents = Agents()
    try:
        tensors = safetensors.load_file(path)
        agents.load_state_dict(tensors)
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        raise SchedulingError(f"{path} cannot be used as a policy of torchext train-policy: {error}") from None
    if not all(torch.isfinite(tensor).all() for name, tensor in tensors.items() if name != "seen_limit"):
        raise SchedulingError(f"{path} holds numbers that are not finite; train the policy again")
    return agents.eval()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` write beside a file, then puts that in its place: whatever happens, the old or the new is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def require_safetensors() -> None:
    """Makes sure that policies can be written, before hours are spent on one.

    Raises:
        ImportError: There is no safetensors.
    """
    _Safetensors()


class _Safetensors:
    """The parts of the package that are used."""

    def __init__(self) -> None:
        try:
            import safetensors
            from safetensors.torch import load_file, save_file
        except ImportError as error:
            raise ImportError(
                "trained policies are safetensors files: pip install 'torchext[policy]'", name="safetensors"
            ) from error
        self.SafetensorError = safetensors.SafetensorError
        self.load_file = load_file
        self.save_file = save_file
