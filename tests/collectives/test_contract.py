"""Every collective gives what plain tensor arithmetic gives, bit by bit, on each engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchext  # noqa: F401  registers the backend
from tests.ranks import Rank, run_ranks

Tensor = torch.Tensor
Op = dist.ReduceOp

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3, 5), (1027,)]
LARGE = (131, 1009)  # of float32, 516 KiB: through staging memory, with a ragged last chunk
REDUCE_OPS = [Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT, Op.BAND, Op.BOR, Op.BXOR]


@dataclass(frozen=True)
class Engine:
    """What an engine promises; the ordered one can do no more than the backend that it puts in order."""

    name: str
    reduced: list[torch.dtype]
    moved: list[torch.dtype]
    averages_integers: bool = True
    exact: bool = True  # floats are added up in the order of ranks
    keeps_inputs_of_reduce: bool = True  # on ranks that are not the root
    uneven_lists: bool = True


ENGINES = [
    Engine("preemptive", DTYPES, DTYPES),
    Engine(  # over gloo
        "ordered",
        reduced=[torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8],
        moved=[dtype for dtype in DTYPES if dtype not in (torch.int16, torch.complex64)],
        averages_integers=False,
        exact=False,
        keeps_inputs_of_reduce=False,
        uneven_lists=False,
    ),
]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Any rank's input, computable by all."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in INTEGERS:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(
        dtype
    )


def reduced(inputs: list[Tensor], op: Any) -> Tensor:
    """The reduction by plain arithmetic: in the order of ranks, halves in float32 and rounded once."""
    dtype = inputs[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(reduced([torch.view_as_real(x) for x in inputs], op))
    if dtype == torch.bool:
        either, both = Tensor.__or__, Tensor.__and__
        combine = {Op.SUM: either, Op.MAX: either, Op.BOR: either, Op.BXOR: Tensor.__xor__}.get(op, both)
    else:
        combine = {
            Op.SUM: Tensor.__add__,
            Op.AVG: Tensor.__add__,
            Op.PRODUCT: Tensor.__mul__,
            Op.MIN: torch.minimum,
            Op.MAX: torch.maximum,
            Op.BAND: Tensor.__and__,
            Op.BOR: Tensor.__or__,
            Op.BXOR: Tensor.__xor__,
        }[op]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = inputs[0].to(wide)
    for x in inputs[1:]:
        total = combine(total, x.to(wide))
    if op == Op.AVG:
        total = total / len(inputs) if wide.is_floating_point else total.div(len(inputs), rounding_mode="trunc")
    return total.to(dtype)


def defined(op: Any, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op in (Op.SUM, Op.AVG)
    if op == Op.AVG:
        return dtype != torch.bool
    return op not in (Op.BAND, Op.BOR, Op.BXOR) or not dtype.is_floating_point


def huge(rank: int, world: int, check: Checks) -> None:
    """Larger than all staging memory of a rank (64 MiB)."""
    x = torch.full((20_000_003,), rank + 1, dtype=torch.int32)
    dist.all_reduce(x)
    total = world * (world + 1) // 2
    check("all_reduce of 80 MB", torch.stack([x.min(), x.max()]), torch.tensor([total, total], dtype=torch.int32))


class Checks:
    """Collects what is not as expected, so that one run of the ranks shows all of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failures: list[str] = []
        self.count = 0

    def __call__(self, what: str, got: Any, expected: Any) -> None:
        self.count += 1
        pairs = list(zip(got, expected, strict=True)) if isinstance(got, list) else [(got, expected)]
        for i, (g, e) in enumerate(pairs):
            same = g.dtype == e.dtype and g.shape == e.shape
            close = same and (torch.equal(g, e) if self.engine.exact else torch.allclose(g, e, atol=1e-5))
            if not close:
                self.failures.append(f"{what}[{i}]: got {g.flatten()[:4]}, expected {e.flatten()[:4]}")


def reductions(rank: int, world: int, check: Checks, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    for shape, dtype, op in itertools.product(shapes, dtypes, REDUCE_OPS):
        if not defined(op, dtype) or (op == Op.AVG and dtype in INTEGERS and not check.engine.averages_integers):
            continue
        what = f"{op} {dtype} {shape}"
        inputs = [value(r, shape, dtype) for r in range(world)]
        total = reduced(inputs, op)
        x = inputs[rank].clone()
        dist.all_reduce(x, op)
        check(f"all_reduce {what}", x, total)
        root = world - 1
        x = inputs[rank].clone()
        work = dist.reduce(x, root, op, async_op=True)
        work.wait()
        if rank == root or check.engine.keeps_inputs_of_reduce:
            check(f"reduce {what}", x, total if rank == root else inputs[rank])
        parts = [[value(r, shape, dtype, salt=c + 1) for c in range(world)] for r in range(world)]
        mine = reduced([parts[r][rank] for r in range(world)], op)
        out = torch.empty_like(mine)
        if not dtype.is_complex:  # torch itself does not take them here
            dist.reduce_scatter(out, parts[rank], op)
            check(f"reduce_scatter {what}", out, mine)
            if shape:
                out = torch.empty_like(mine)
                dist.reduce_scatter_tensor(out, torch.cat(parts[rank]), op)
                check(f"reduce_scatter_tensor {what}", out, mine)


def moves(rank: int, world: int, check: Checks, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    for shape, dtype in itertools.product(shapes, dtypes):
        what = f"{dtype} {shape}"
        inputs = [value(r, shape, dtype) for r in range(world)]
        for root in {0, world - 1}:
            x = inputs[rank].clone()
            dist.broadcast(x, root)
            check(f"broadcast {what}", x, inputs[root])
            if not dtype.is_complex:
                outs = [torch.empty_like(x) for _ in range(world)] if rank == root else None
                dist.gather(inputs[rank], outs, root)
                if rank == root:
                    check(f"gather {what}", outs, inputs)
            x = torch.empty_like(x)
            dist.scatter(x, inputs if rank == root else None, root)
            check(f"scatter {what}", x, inputs[rank])
        outs = [torch.empty_like(inputs[0]) for _ in range(world)]
        dist.all_gather(outs, inputs[rank])
        check(f"all_gather {what}", outs, inputs)
        if shape:
            out = torch.empty(world * shape[0], *shape[1:], dtype=dtype)
            dist.all_gather_into_tensor(out, inputs[rank])
            check(f"all_gather_into_tensor {what}", out, torch.cat(inputs))
            sent = [torch.cat([value(r, shape, dtype, salt=c + 1) for c in range(world)]) for r in range(world)]
            out = torch.empty_like(sent[rank])
            dist.all_to_all_single(out, sent[rank])
            expected = torch.cat([value(r, shape, dtype, salt=rank + 1) for r in range(world)])
            check(f"all_to_all_single {what}", out, expected)
        # Member r sends r + c rows to member c.
        rows = [[value(r, (r + c, *shape), dtype, salt=c) for c in range(world)] for r in range(world)]
        lists = rows if check.engine.uneven_lists else [[value(r, shape, dtype)] * world for r in range(world)]
        outs = [torch.empty_like(lists[r][rank]) for r in range(world)]
        dist.all_to_all(outs, lists[rank])
        check(f"all_to_all {what}", outs, [lists[r][rank] for r in range(world)])
        out = torch.empty(sum(r + rank for r in range(world)), *shape, dtype=dtype)
        dist.all_to_all_single(
            out, torch.cat(rows[rank]), [r + rank for r in range(world)], [rank + c for c in range(world)]
        )
        check(f"all_to_all_single uneven {what}", out, torch.cat([rows[r][rank] for r in range(world)]))
        if world > 1:
            x = torch.empty_like(inputs[0])
            works = [
                dist.isend(inputs[rank], (rank + 1) % world, tag=7),
                dist.irecv(x, (rank - 1) % world, tag=7),
            ]
            for work in works:
                work.wait()
            check(f"isend irecv {what}", x, inputs[rank - 1])


def contract(rank: Rank, engine: Engine) -> tuple[int, list[str]]:
    check = Checks(engine)
    reductions(rank.rank, rank.world_size, check, SHAPES, engine.reduced)
    moves(rank.rank, rank.world_size, check, SHAPES, engine.moved)
    large = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
    reductions(rank.rank, rank.world_size, check, [LARGE], [dtype for dtype in large if dtype in engine.reduced])
    moves(rank.rank, rank.world_size, check, [LARGE], [torch.float32])
    huge(rank.rank, rank.world_size, check)
    return check.count, check.failures


@pytest.mark.parametrize(
    ("engine", "world_size"),
    [(ENGINES[0], n) for n in (1, 2, 3, 4)] + [(ENGINES[1], n) for n in (1, 3)],
    ids=lambda value: getattr(value, "name", value),
)
def test_each_collective_gives_what_arithmetic_gives(engine: Engine, world_size: int) -> None:
    env = {"TORCHEXT_DFCCL_ENGINE": engine.name}
    for count, failures in run_ranks(contract, world_size, engine, backend="dfccl", env=env, deadline_s=200):
        assert count > 300
        assert not failures, "\n".join(failures[:20])
