"""From the calls of a process group to its engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchext.collectives.compiling import run_as_written
from torchext.collectives.deferral import Deferred, deferrals
from torchext.collectives.errors import CollectiveAbortedError, CollectiveError
from torchext.collectives.naming import NamedGroup
from torchext.collectives.requests import (
    COMPLEX_REDUCE_OPS,
    NO_REDUCE,
    NUM_REDUCE_OPS,
    PREMUL_SUM,
    CopyBack,
    Premultiplied,
    contiguous,
    dtype_code,
    span,
    split_span,
    write_back,
)
from torchext.collectives.sites import call_site
from torchext.collectives.tags import tag_of
from torchext.collectives.work import CallWork, DoneWork, JoinedWork, call_error
from torchext.collectives.world import World

if TYPE_CHECKING:
    from torchext._native import collectives as native

Tensor = torch.Tensor

DONE = DoneWork()


class EngineGroup(NamedGroup):
    """What the collectives of `ProcessGroup` have in common: each becomes one call of the world's engine."""

    def __init__(self, world: World, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks), timeout)
        self._world = world
        self._engine = world.engine
        self._rank = rank
        self._ranks = tuple(ranks)
        self._native: native.Group | None = None
        self._uid = 0
        self._closed = ""
        self._coalesced: list[CallWork] | None = None

    def _call(self, kind: int, opts: Any, like: Tensor | None, *args: Any, **kwargs: Any) -> dist.Work:
        """Issues, and waits if the caller would do nothing else."""
        if opts is None or getattr(opts, "asyncOp", True) or self._coalesced is not None:
            return self._issue(kind, opts, like, *args, **kwargs)
        self._run(kind, opts, like, *args, **kwargs)
        return DONE

    def _issue(self, kind: int, opts: Any, like: Tensor | None, *args: Any, **kwargs: Any) -> CallWork:
        result = kwargs.pop("result", None)
        request, copies, outputs, keep = self._request(kind, opts, like, *args, **kwargs)
        call = self._engine.issue(*(*request, keep))
        copy_back = (lambda: write_back(copies)) if copies else None
        work = CallWork(self._world, call, result or outputs, self._where(), request[-1], copy_back, keep)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _run(self, kind: int, opts: Any, like: Tensor | None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("result", None)
        request, copies, outputs, keep = self._request(kind, opts, like, *args, **kwargs)
        stopped = self._engine.run(*request)
        if stopped is not None:
            self._stop(stopped, outputs, keep, copies, request[-1])
        else:
            write_back(copies)

    def _stop(
        self,
        call: native.Call,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        copies: CopyBack,
        timeout_s: float,
    ) -> None:
        """Ends a blocking call that is not over in the good way: it has failed, or it is deferred."""
        where, site = self._where(), call_site()

        def finish() -> None:
            if call.code:
                raise call_error(call, self._world.global_ranks(call.culprits), where, timeout_s, site)
            write_back(copies)

        if call.code:
            finish()
        else:
            deferrals.add(Deferred(call, self._world, outputs, inputs, finish))

    def _request(
        self,
        kind: int,
        opts: Any,
        like: Tensor | None,
        inputs: list[Tensor],
        outputs: list[Tensor],
        *,
        reduce_op: int | Premultiplied = NO_REDUCE,
        root: int = -1,
        peer: int = -1,
        identity: tuple[int, ...] | None = None,
        splits: tuple[list[int], list[int]] | None = None,
        uneven: bool = False,
        timeout: timedelta | None = None,
        message_tag: int | None = None,
    ) -> tuple[Any, CopyBack, list[Tensor], tuple[Tensor, ...]]:
        """Turns tensors into what the engine takes; returns also what to copy back, the outputs and what to keep."""
        tag = tag_of(like)
        if isinstance(reduce_op, Premultiplied):
            if not all(t.is_floating_point() for t in inputs):
                raise ValueError("premul_sum is defined for floating-point tensors only")
            inputs, reduce_op = [(t.detach() * reduce_op.factor).to(t.dtype) for t in inputs], 0
        if like is not None and like.is_complex():
            if reduce_op != NO_REDUCE and reduce_op not in COMPLEX_REDUCE_OPS:
                raise ValueError("complex tensors can be summed and averaged only")
            row = 2 * (like.shape[1:].numel() if like.dim() else 1)
            like = torch.view_as_real(like)
        else:
            row = like.shape[1:].numel() if like is not None and like.dim() else 1
        if peer == self._rank == root:
            raise ValueError("a rank cannot send to itself, or receive from itself")
        dtype, item_bytes = 0, 1
        shape: tuple[int, ...] = ()
        if like is not None:
            dtype, item_bytes, shape = dtype_code(like), like.element_size(), tuple(like.shape)
            for tensor in (*inputs, *outputs):
                self._require_cpu(tensor)
                real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
                if real != like.dtype:
                    raise TypeError(f"all tensors of one call must have one dtype, got {like.dtype} and {tensor.dtype}")
        if deferrals.active:
            deferrals.before(outputs, inputs)
            deferrals.sweep()
        copies: CopyBack = []
        keep: list[Tensor] = []
        in_spans = [span(contiguous(t), keep) for t in inputs]
        out_spans = []
        for tensor in outputs:
            buffer = contiguous(tensor)
            if buffer is not tensor and not (tensor.is_complex() and buffer.data_ptr() == tensor.data_ptr()):
                if any(tensor is t for t in inputs):  # in place: both through one buffer
                    buffer = keep[[t is tensor for t in inputs].index(True)]
                copies.append((tensor, buffer))
            out_spans.append(span(buffer, keep))
        if splits is not None:
            in_spans = split_span(in_spans[0], splits[0], row * item_bytes, self.size(), "input")
            out_spans = split_span(out_spans[0], splits[1], row * item_bytes, self.size(), "output")
        timeout_s = self._timeout_s
        given = timeout if timeout is not None else getattr(opts, "timeout", None)
        if given is not None and given > timedelta(0):
            timeout_s = given.total_seconds()
        if message_tag:
            tag = f"{tag}#{message_tag}"
        request: Any = (
            self._group(),
            kind,
            reduce_op,
            dtype,
            item_bytes,
            root,
            peer,
            shape,
            identity,
            tag,
            in_spans,
            out_spans,
            uneven,
            timeout_s,
        )
        return request, copies, outputs, tuple(keep)

    def _join(self, works: list[CallWork], outputs: list[Tensor], opts: Any) -> dist.Work:
        joined = JoinedWork(works, outputs)
        if not getattr(opts, "asyncOp", True) and self._coalesced is None:
            joined.wait()
        return joined

    def _group(self) -> native.Group:
        if self._closed:
            raise CollectiveAbortedError(f"{self._closed}; make a new one to go on")
        if self._native is None:
            self._native, self._uid = self._world.group(self._ranks, self._desc)
            self._world.where[self._uid] = self._where()
        return self._native

    def _where(self) -> str:
        desc = f" ({self._desc})" if self._desc not in ("", "undefined") else ""
        return f"group {self._name!r}{desc} of ranks {list(self._ranks)} at rank {self._ranks[self._rank]}"

    def _reduce_op(self, op: Any) -> int | Premultiplied:
        code = 0 if op is None else hash(op)
        if code == PREMUL_SUM:
            return Premultiplied(op.__getstate__()[1])  # the only way to its factor
        if not 0 <= code < NUM_REDUCE_OPS:
            raise ValueError(f'"dfccl" groups do not reduce by {getattr(op, "op", op)}')
        return code

    def _require_cpu(self, tensor: Tensor) -> None:
        if not tensor.is_cpu:
            raise CollectiveError(
                f'"dfccl" groups move CPU tensors, got one on {tensor.device}; use another backend for that device, '
                "or move the tensor"
            )

    def _require_ratio(self, large: Tensor, small: Tensor, what: str) -> None:
        if large.numel() != self.size() * small.numel():
            raise ValueError(
                f"the {what} must be {self.size()} times (the group's size) as large as the other tensor, "
                f"got {large.numel()} and {small.numel()} elements"
            )


run_as_written(EngineGroup)
