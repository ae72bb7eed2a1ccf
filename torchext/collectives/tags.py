"""Names for collectives that could otherwise be taken for each other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch

current_tag: ContextVar[str] = ContextVar("torchext_collective_tag", default="")


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """Names the collectives that this thread issues in the block.

    Calls of different ranks belong together if they agree in group, operation, dtype, shape, root and tag; those that
    agree in all of it pair in the order of issue. So where ranks issue collectives of equal shape in different orders,
    give each its name. All members must use the same. Nothing is sent and nothing waits. Only "dfccl" groups look at
    it, and those in another thread, as in autograd hooks, are not named.

    Args:
        name: Any text; blocks inside others add theirs after a slash.

    Raises:
        TypeError: The name is no text, say a number.

    Example:
        >>> with torchext.tag("grad/layer3"):
        ...     work = dist.all_reduce(grad, async_op=True)
    """
    if not isinstance(name, str):
        raise TypeError(f'tag: the name must be a string, got {name!r}; use tag(f"layer{{i}}") or tag(str(i))')
    outer = current_tag.get()
    token = current_tag.set(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        current_tag.reset(token)


def name_tensors(model: torch.nn.Module, prefix: str = "") -> None:
    """Names the parameters, gradients and buffers of a model, so that their collectives are told apart by name.

    For collectives of equal shape that ranks issue in an order that depends on their data, as when experts or branches
    become ready: ``dist.all_reduce(p.grad, async_op=True)`` then pairs as if it stood in ``tag("grad/<name>")``. A
    gradient gets its name when backward has accumulated it, so hooks that come after this call see it. The name belongs
    to that tensor object, not to views or copies of it. Only "dfccl" groups look at it; all members must name alike.

    Args:
        model: Its tensors get the names that ``named_parameters()`` and ``named_buffers()`` give them.
        prefix: Put before each name, say where two models have tensors of one name.
    """
    for name, parameter in model.named_parameters():
        _name(parameter, f"{prefix}{name}")
        if parameter.requires_grad:
            hook = functools.partial(_name_grad, name=f"grad/{prefix}{name}")
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    for name, buffer in model.named_buffers():
        _name(buffer, f"{prefix}{name}")


_NAME = "_torchext_name"


def tag_of(tensor: torch.Tensor | None) -> str:
    """What tells a collective on the tensor apart: the tag of this thread, and the name of the tensor if it has one."""
    outer = current_tag.get()
    name: str = getattr(tensor, _NAME, "")
    return f"{outer}/{name}" if outer and name else outer or name


def _name(tensor: torch.Tensor, name: str) -> None:
    setattr(tensor, _NAME, name)


def _name_grad(parameter: torch.Tensor, name: str) -> None:
    if parameter.grad is not None:
        _name(parameter.grad, name)
