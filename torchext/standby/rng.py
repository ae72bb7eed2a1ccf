"""The states of all random number generators of this process, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def collect() -> dict[str, Any]:
    """Takes the states of python, numpy, torch and, where CUDA was used, its devices."""
    numpy = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        "python": random.getstate(),
        # A tensor and numbers, which torch.load(weights_only=True) takes.
        "numpy": {
            "bit_generator": numpy["bit_generator"],
            "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "pos": numpy["state"]["pos"],
            "has_gauss": numpy["has_gauss"],
            "gauss": numpy["gauss"],
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(states: dict[str, Any]) -> None:
    """Sets them again."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    numpy = dict(states["numpy"])
    numpy["state"] = {"key": numpy.pop("key").numpy().astype(np.uint32), "pos": numpy.pop("pos")}
    np.random.set_state(numpy)
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
