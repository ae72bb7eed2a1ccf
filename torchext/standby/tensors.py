"""Where tensors lie, which of them may be moved, and what optimizers do to them."""

from __future__ import annotations

from typing import Any

import torch

from torchext.standby import tree as trees


def address_of(tensor: torch.Tensor) -> int:
    """Where the part of a tensor that this rank has lies; 0 for one that is no plain memory."""
    if type(tensor) in trees.PLAIN and tensor.layout is torch.strided:  # quick: at each commit, for all that there is
        return tensor.data_ptr()
    local = trees.local(tensor)
    return local.data_ptr() if local.layout is torch.strided else 0


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory without gaps and overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def can_be_adopted(tensor: torch.Tensor) -> bool:
    """Whether it may move: nothing else may look at its memory, as a view of it would be left behind."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return False
    if tensor.layout != torch.strided or tensor.is_inference() or tensor.is_quantized or tensor.is_conj():
        return False
    if tensor.nbytes <= trees.INLINE_BYTES or tensor.storage_offset() != 0 or not is_dense(tensor):
        return False
    storage = tensor.untyped_storage()
    # Two users: the tensor and the Python object `storage`.
    return storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) == 2


def keeps_to_rows(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether an optimizer touches only the rows that a sparse gradient names."""
    kind = type(optimizer)
    if kind is torch.optim.SparseAdam:
        return True
    if kind is torch.optim.SGD:
        return not group["momentum"] and not group["weight_decay"]
    return kind is torch.optim.Adagrad and not group["weight_decay"]
