"""From tensors to what the engine takes: numbers, addresses and sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Tensor = torch.Tensor

# The numbers of csrc/collectives/signature.hpp.
ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL, SEND, BARRIER = range(10)
NO_REDUCE = 255
DTYPES: dict[torch.dtype, int] = {
    dtype: code
    for code, dtype in enumerate(
        [
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
            # Those from here on can be moved, not reduced. Complex ones are seen as real ones.
            *(
                getattr(torch, name)
                for name in (
                    "uint16",
                    "uint32",
                    "uint64",
                    "float8_e4m3fn",
                    "float8_e5m2",
                    "float8_e4m3fnuz",
                    "float8_e5m2fnuz",
                    "float8_e8m0fnu",
                )
                if hasattr(torch, name)
            ),
        ]
    )
}
# The engine numbers the operations as torch does, and their hash is that number. Unlike ReduceOp.op it makes no object,
# which is worth half a microsecond in each call.
NUM_REDUCE_OPS = 8
PREMUL_SUM = 8
COMPLEX_REDUCE_OPS = frozenset({0, 1})


class Premultiplied(NamedTuple):
    """The sum of the inputs, each times its member's factor."""

    factor: float | Tensor


# Where a call is to be continued: writes into buffers that are not contiguous.
CopyBack = list[tuple[Tensor, Tensor]]


def as_tensors(tensors: Any) -> Sequence[Tensor]:
    return (tensors,) if isinstance(tensors, Tensor) else tensors


def as_list(tensors: Any) -> list[Tensor]:
    """One tensor for each member, out of torch's list of one list for each tensor."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        return list(tensors[0])
    return list(tensors)


def root_of(opts: Any, root: int | None) -> int:
    if isinstance(opts, int):
        return opts
    if root is not None:
        return root
    return int(getattr(opts, "rootRank", 0))


def dtype_code(tensor: Tensor) -> int:
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise TypeError(f'"dfccl" groups do not move {tensor.dtype}')
    return code


def contiguous(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def span(tensor: Tensor, keep: list[Tensor]) -> tuple[int, int]:
    keep.append(tensor)
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def split_span(
    span: tuple[int, int], sizes: list[int], row_bytes: int, world_size: int, what: str
) -> list[tuple[int, int]]:
    data, total = span
    if not sizes:
        if total % (world_size * max(row_bytes, 1)):
            raise ValueError(f"the {what} does not divide into {world_size} equal parts; give its split sizes")
        return [(data + i * (total // world_size), total // world_size) for i in range(world_size)]
    if len(sizes) != world_size or sum(sizes) * row_bytes != total:
        raise ValueError(
            f"the {what} split sizes must be {world_size} numbers that add up to its first dimension, got {sizes} for "
            f"{total // max(row_bytes, 1)} rows"
        )
    spans = []
    for size in sizes:
        spans.append((data, size * row_bytes))
        data += size * row_bytes
    return spans


def write_back(copies: CopyBack) -> None:
    for tensor, buffer in copies:
        target: Callable[[Tensor], Tensor] = tensor.detach().copy_
        target(torch.view_as_complex(buffer) if tensor.is_complex() else buffer)


# --- What calls for other backends say of themselves ------------------------------------------------------------------


def first(tensors: Any) -> Tensor:
    return tensors if isinstance(tensors, Tensor) else tensors[0]


def flat(tensors: Any) -> list[Tensor]:
    return [t for part in tensors for t in ([part] if isinstance(part, Tensor) else part)]


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def other_dtype(dtype: torch.dtype) -> int:
    """A number, the same on all ranks, for a dtype that is not in the table."""
    return len(DTYPES) + sum(str(dtype).encode()) % 200


def root_in(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    if "root" in kwargs:
        return int(kwargs["root"])
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, int):
            return arg
        if hasattr(arg, "rootRank"):
            return int(arg.rootRank)
    return 0


def reduce_op_in(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    code = 0
    for arg in (*args, *kwargs.values()):
        if hasattr(arg, "reduceOp"):
            code = hash(arg.reduceOp)
        elif isinstance(arg, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            code = hash(arg)
    return code if 0 <= code < NUM_REDUCE_OPS else NO_REDUCE  # the inner group knows what it takes


def allreduce_options(opts: Any) -> list[Any]:
    if opts is None:
        return []
    given = dist.AllreduceOptions()
    given.reduceOp = opts.reduceOp
    return [given]
