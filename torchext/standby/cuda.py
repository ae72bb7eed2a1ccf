"""Bytes of CUDA tensors, brought to the host on a stream of their own through pinned buffers.

Not yet run on a GPU: its tests are skipped where there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from torchext._native import standby as native

_HALF_BYTES = 16 << 20  # one half is compared while the other one is filled


class SideStreams:
    """Streams that copies run on beside the kernels of the next step, and the memory that they go through.

    The pinned memory is two buffers of 16 MiB, whatever the size of the state. One thread at a time uses an object.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._halves: list[torch.Tensor] = []

    def follow(self, devices: Iterable[torch.device]) -> None:
        """What is copied on the side from now on is as the caller's streams leave it; does not wait for them."""
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Makes them the current streams of the calling thread."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def update(self, address: int, tensor: torch.Tensor) -> bool:
        """Makes the host's memory at an address equal to a tensor, on the current stream; blocks until it is.

        Args:
            address: Of as many bytes as the tensor has.
            tensor: Contiguous, on a CUDA device.

        Returns:
            Whether it was not equal before.
        """
        if not self._halves:
            self._halves = [torch.empty(_HALF_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        source = tensor.reshape(-1).view(torch.uint8)
        under_way: list[tuple[torch.cuda.Event, int, torch.Tensor]] = []
        has_changed = False

        def finish() -> bool:
            copied, at, half = under_way.pop()
            copied.synchronize()
            return native.update(address + at, half.data_ptr(), half.numel())

        for i, at in enumerate(range(0, source.numel(), _HALF_BYTES)):
            piece = source[at : at + _HALF_BYTES]
            half = self._halves[i % 2][: piece.numel()]
            half.copy_(piece, non_blocking=True)
            copied = torch.cuda.current_stream(tensor.device).record_event()
            if under_way:
                has_changed |= finish()
            under_way.append((copied, at, half))
        return (finish() if under_way else False) or has_changed
