"""A channel as a data set: batches that senders have written side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

from torch.utils.data import IterableDataset

from torchext.channels import trees
from torchext.channels.channel import Channel
from torchext.channels.errors import ChannelClosed
from torchext.channels.weights import WeightBroadcast


class ChannelLoader(IterableDataset[Any]):
    """Iterates over the batches of a channel until it ends. Works bare, and under torch's and Lightning's loaders.

    With ``collate="stack"`` senders write into rows of one batch from the moment it is iterated over, so that equal
    messages need not be stacked: a batch is received in place. Where messages differ in shape, hold strings, or were
    sent before, they are stacked by copying. A slot of the channel holds a batch then.

    In a `torch.utils.data.DataLoader` use ``batch_size=None``; with workers, each batch goes to one of them. Close the
    channel before such a loader if you stop early: torch kills workers that wait for a message, after five seconds.

    Args:
        channel: Where the messages come from. Several processes may iterate over loaders of one channel.
        batch_size: Messages in a batch, 1 to 4096. The last may be smaller.
        collate: "stack": tensors, arrays and numbers get a new first dimension, as torch's default collation does;
            "list": a batch is a list of messages; or a function from such a list to a batch.
        max_staleness: By how many versions the weights that a message was made with may be behind the latest when it
            is received; older messages are dropped, and counted as ``stale`` in `Channel.stats`. None: no limit.
        weights: Where the latest version is taken from; messages give theirs as ``send(..., version=)``. Needed for
            ``max_staleness``; without that, staleness is only counted.
        drop_last: Whether to drop the last batch if it is smaller.
        timeout: How long to wait for a message: seconds, a timedelta or None for ever.

    Iterating raises what `Channel.receive` raises, but for `ChannelClosed`, which ends it. Messages that were received
    before and make no full batch yet are kept: iterating again goes on with them.
    """

    def __init__(
        self,
        channel: Channel,
        batch_size: int,
        collate: Literal["stack", "list"] | Callable[[list[Any]], Any] = "stack",
        max_staleness: int | None = None,
        *,
        weights: WeightBroadcast | None = None,
        drop_last: bool = False,
        timeout: float | timedelta | None = None,
    ) -> None:
        if not 1 <= batch_size <= 4096:
            raise ValueError(f"batch_size must be 1 to 4096, got {batch_size}")
        if collate not in ("stack", "list") and not callable(collate):
            raise ValueError(f'collate must be "stack", "list" or a function, got {collate!r}')
        if max_staleness is not None and weights is None:
            raise ValueError("max_staleness needs weights=, the WeightBroadcast that the latest version is taken from")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, got {max_staleness}")
        self.channel = channel
        self.batch_size = batch_size
        self.collate = collate
        self.max_staleness = max_staleness
        self.weights = weights
        self.drop_last = drop_last
        self.timeout = timeout
        self._pending: list[Any] = []  # received, and in no batch yet

    def __iter__(self) -> Iterator[Any]:
        in_rows = self.collate == "stack" and self.batch_size > 1
        self.channel._own_queue().set_batch_rows(self.batch_size if in_rows else 0)
        while True:
            while len(self._pending) >= self.batch_size:
                yield self._put_together(self._take(self.batch_size))
            try:
                batch = self._receive()
            except ChannelClosed:
                break
            if batch is not None:
                yield batch
                del batch  # or it would be held while waiting for the next
        rest = self._take(len(self._pending))
        if rest and not self.drop_last:
            yield self._put_together(rest)

    def _take(self, count: int) -> list[Any]:
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def _receive(self) -> Any:
        """A batch that can be used as it came; else None, with the messages added to those that are pending."""
        from torchext._native import channels as native

        tree, num_rows, versions, there, lease = self.channel._next(self.timeout)
        if num_rows == 0:
            if self._fresh(versions):
                self._pending.append(self._kept(tree))
            return None
        fresh = [self._fresh(version) for version in versions]
        if all(fresh) and there is None and num_rows == self.batch_size and not self._pending:
            return tree
        indices = there if there is not None else range(num_rows)
        self._pending += [self._kept(native.row(lease, i)) for i, good in zip(indices, fresh, strict=True) if good]
        return None

    def _kept(self, message: Any) -> Any:
        """A message that outlives the receipt of the next."""
        return trees.copied(message) if self.channel._ends_views else message

    def _fresh(self, version: int) -> bool:
        if self.weights is None:
            return True
        if version < 0:
            if self.max_staleness is None:
                return True
            raise ValueError("max_staleness needs messages that tell their version: send(..., version=weights.loaded)")
        staleness = max(0, self.weights.version - version)
        stale = self.max_staleness is not None and staleness > self.max_staleness
        self.channel._own_queue().note_staleness(staleness, stale)
        return not stale

    def _put_together(self, messages: list[Any]) -> Any:
        if callable(self.collate):
            return self.collate(messages)
        return trees.stack(messages) if self.collate == "stack" else messages
