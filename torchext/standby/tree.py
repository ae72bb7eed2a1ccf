"""State as one pickle whose large tensors are replaced by references to entries, which travel apart from it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

# Larger tensors become entries of their own, which are compared and sent only when they changed.
INLINE_BYTES = 1024

# What pickle keeps of a tensor whose bytes lie in an entry.
Reference = tuple[Any, tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]]
# Gives the number of the entry that holds a tensor's bytes.
Place = Callable[[torch.Tensor], int]
# Gives the bytes of an entry back: (size,) uint8.
Resolve = Callable[[int], torch.Tensor]


def dump(tree: Any, find: Callable[[torch.Tensor], Reference | None], place: Place) -> bytes:
    """Pickles a tree of state.

    Args:
        tree: Anything that pickle takes.
        find: The reference to the entry that a tensor lives in already, if it does.
        place: Puts a tensor that lives nowhere yet, and is too large to be pickled, into an entry.

    Returns:
        The pickle, for `load`.
    """
    out = io.BytesIO()
    _Pickler(out, find, place).dump(tree)
    return out.getvalue()


def reference(entry: int, tensor: torch.Tensor) -> Reference:
    """Refers to an entry that holds the bytes of such a tensor."""
    return _entry, (entry, tensor.dtype, tuple(tensor.shape), tensor.stride())


def load(data: bytes, resolve: Resolve) -> Any:
    """Rebuilds a tree; tensors share memory with what ``resolve`` gives. For trusted data: a pickle can run code."""
    return _Unpickler(io.BytesIO(data), resolve).load()


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, find: Callable[[torch.Tensor], Reference | None], place: Place) -> None:
        super().__init__(out, protocol=5)
        self._find = find
        self._place = place

    # Called for what the pickler does not handle itself: not for dicts, numbers, text.
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in _PLAIN or obj.layout != torch.strided:
            return NotImplemented
        found = self._find(obj)  # first: of a large state nearly all are
        if found is not None:
            return found
        tensor = obj.detach()
        if tensor.ndim == 0 and tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.int64):
            return _scalar, (tensor.item(), tensor.dtype)
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        tensor = tensor.contiguous()
        if tensor.nbytes <= INLINE_BYTES:
            data = tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            return _inline, (data, tensor.dtype, tuple(tensor.shape))
        return reference(self._place(tensor), tensor)


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, resolve: Resolve) -> None:
        super().__init__(source)
        self._resolve = resolve

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, "_entry"):
            return self._rebuild
        return super().find_class(module, name)

    def _rebuild(self, entry: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        return view(self._resolve(entry), dtype, shape, stride)


def view(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """The bytes ``data``, (size,) uint8, as a tensor."""
    return torch.as_strided(data.view(dtype), shape, stride)


def _scalar(value: float | int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def _inline(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _entry(*_: Any) -> torch.Tensor:
    raise pickle.UnpicklingError("this pickle refers to entries kept apart from it; read it with torchext.standby")
