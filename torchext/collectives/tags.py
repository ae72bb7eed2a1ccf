"""Names for collectives that could otherwise be taken for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

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
