"""What the native codec leaves to Python: which tensors it reads, how objects are taken apart, and stacking by copy."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# torch dtype, bytes, the numpy dtype that has the same bytes, what to view that as where it is not the same type, and
# whether it is complex
_SAME = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
_UNSIGNED = ("uint16", "uint32", "uint64")
_VIEWED = {
    "bfloat16": "i2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
    "float8_e4m3fnuz": "u1",
    "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1",
    "float4_e2m1fn_x2": "u1",
    "complex32": "i4",
}


def set_up() -> None:
    """Tells the native codec about torch; once, before it is used."""
    from torchext._native import channels as native

    rows: list[tuple[Any, ...]] = [(torch.bool, 1, np.dtype("bool"), None, False)]
    for name in (*_SAME, *_UNSIGNED):
        dtype = getattr(torch, name)
        rows.append((dtype, dtype.itemsize, np.dtype(name), None, dtype.is_complex))
    for name, stored in _VIEWED.items():
        if (dtype := getattr(torch, name, None)) is not None:  # the latest came with torch 2.8
            rows.append((dtype, dtype.itemsize, np.dtype(stored), dtype, dtype.is_complex))
    native.set_up(
        {
            "tensor": torch.Tensor,
            "from_numpy": torch.from_numpy,
            "as_tensor": torch.as_tensor,
            "prepare_tensor": _prepare_tensor,
            "decompose": decompose,
            "dumps": _dumps,
            "loads": pickle.loads,
            "strided": torch.strided,
            "dtypes": rows,
        }
    )


def _prepare_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same values, dense, on the CPU and contiguous; None for what has no such form."""
    if tensor.device.type == "meta":
        raise ValueError(f"a tensor on the meta device has no values to send (shape {tuple(tensor.shape)})")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return tensor.as_subclass(torch.Tensor) if type(tensor) is not torch.Tensor else tensor


def _dumps(value: object) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"a message may hold tensors, arrays, numbers, strings, bytes, dicts, lists, tuples, dataclasses, "
            f"TensorDicts and what can be pickled, not a {type(value).__qualname__}: {error}"
        ) from error


def decompose(value: Any) -> tuple[bytes, Any] | None:
    """Takes an object apart so that the tensors in it travel in place.

    Returns:
        A pickled function and the tree to call it with for an equal object, in which tensors may have been stacked
        meanwhile; or None for objects that are pickled whole.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return _rebuilder(_from_scalar), np.asarray(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _rebuilder(_make_namedtuple, type(value)), tuple(value)
    if type(value) is OrderedDict:
        return _rebuilder(OrderedDict), dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _rebuilder(_make_dataclass, type(value)), parts
    tensordict = sys.modules.get("tensordict")  # whoever has one has imported it
    if tensordict is not None and isinstance(value, tensordict.TensorDict):
        # Its batch size as the shape of an empty tensor, which is stacked as the others are.
        return _rebuilder(_make_tensordict), (dict(value.items()), torch.empty((*value.batch_size, 0)))
    return None


@functools.lru_cache(maxsize=256)
def _rebuilder(function: Callable[..., Any], *args: Any) -> bytes:
    return _dumps(functools.partial(function, *args) if args else function)


def _from_scalar(array: Any) -> Any:
    return array if isinstance(array, torch.Tensor) else array[()]


def _make_namedtuple(kind: Any, values: tuple[Any, ...]) -> Any:
    return kind._make(values)


def _make_dataclass(kind: type[Any], parts: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, part in parts.items():
        object.__setattr__(made, name, part)  # frozen ones, and without running __post_init__ again
    return made


def _make_tensordict(parts: tuple[dict[str, Any], torch.Tensor]) -> Any:
    from tensordict import TensorDict

    return TensorDict(parts[0], batch_size=parts[1].shape[:-1])


def stack(trees: Sequence[Any], path: str = "message") -> Any:
    """Stacks equal trees leaf by leaf along a new first dimension, by copying.

    Tensors, arrays and numbers become tensors; strings, bytes and other objects lists.

    Raises:
        ValueError: The trees differ in structure or shape; the message says where.
    """
    first = trees[0]
    if isinstance(first, torch.Tensor):
        shapes = {tuple(tree.shape) for tree in trees}
        if len(shapes) > 1:
            raise ValueError(f'{path} has shapes {sorted(shapes)} in one batch; collate="list" takes unequal ones')
        return torch.stack(list(trees))
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        return stack([torch.as_tensor(tree) for tree in trees], path)
    if isinstance(first, (bool, int, float)) and not isinstance(first, np.generic):
        return torch.tensor(list(trees), dtype=torch.float64 if isinstance(first, float) else None)
    if type(first) is dict:
        if any(tree.keys() != first.keys() for tree in trees):
            raise ValueError(f"{path} has different keys in one batch: {[sorted(map(str, tree)) for tree in trees]}")
        return {key: stack([tree[key] for tree in trees], f"{path}[{key!r}]") for key in first}
    if type(first) in (tuple, list):
        if any(len(tree) != len(first) for tree in trees):
            raise ValueError(f"{path} has lengths {sorted({len(tree) for tree in trees})} in one batch")
        return type(first)(stack([tree[i] for tree in trees], f"{path}[{i}]") for i in range(len(first)))
    parts = [decompose(tree) for tree in trees]
    if parts[0] is None:
        return None if all(tree is None for tree in trees) else list(trees)
    rebuild = parts[0][0]
    if any(part is None or part[0] != rebuild for part in parts):
        raise ValueError(f"{path} has different types in one batch: {sorted({type(t).__qualname__ for t in trees})}")
    return pickle.loads(rebuild)(stack([part[1] for part in parts if part is not None], path))


def copied(tree: Any) -> Any:
    """The same tree with tensors and arrays in memory of their own."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if type(tree) is dict:
        return {key: copied(value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(copied(value) for value in tree)
    parts = decompose(tree)
    return tree if parts is None else pickle.loads(parts[0])(copied(parts[1]))
