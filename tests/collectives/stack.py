"""Programs of torch's own distributed stack; each gives tensors that must not depend on the backend.

They run on four ranks whose default group is of the backend under test, and make all their groups by way of it, as a
user's program does.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Tensor = torch.Tensor

WORLD_SIZE = 4


class Net(torch.nn.Module):
    """A little net with a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 64)
        self.second = torch.nn.Linear(64, 64)
        self.sometimes = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 8)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        if more:
            x = torch.relu(self.sometimes(x))
        return self.last(x)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: torch.nn.Module, optimizer: Any, rank: int, *, steps: int = 3, more: bool = True) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, rank), more).square().mean().backward()
        optimizer.step()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def whole(model: torch.nn.Module) -> list[Tensor]:
    """All parameters, put together from their shards."""
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def ddp_static_graph(rank: int) -> list[Tensor]:
    model = DistributedDataParallel(Net(), static_graph=True, bucket_cap_mb=0.01)
    train(model, sgd(model), rank)
    return whole(model)


def ddp_find_unused(rank: int) -> list[Tensor]:
    """Which layers are used differs from step to step, and from rank to rank."""
    model = DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=0.01)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, rank), (rank + step) % 2 == 0).square().mean().backward()
        optimizer.step()
    return whole(model)


def ddp_no_sync_and_buffers(rank: int) -> list[Tensor]:
    """Gradients are accumulated over two batches; the buffers are those of rank 0."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8)))
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch(step, rank)).square().mean().backward()
        model(batch(step + 10, rank)).square().mean().backward()
        optimizer.step()
    return [*whole(model), *(b.clone() for b in model.buffers() if b.is_floating_point())]


def ddp_join(rank: int) -> list[Tensor]:
    """Ranks have different numbers of batches."""
    model = DistributedDataParallel(Net(), find_unused_parameters=False, bucket_cap_mb=0.01)
    optimizer = sgd(model)
    with Join([model]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(batch(step, rank), True).square().mean().backward()
            optimizer.step()
    return whole(model)


def zero_redundancy_optimizer(rank: int) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns, which in the tests is an error

    model = DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    moments = []
    if rank == 0:
        moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    return [*whole(model), *moments]


def fsdp1(rank: int) -> list[Tensor]:
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, sgd(model), rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return whole(model)


def fsdp2(rank: int) -> list[Tensor]:
    model = Net()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in (model.first, model.second, model.sometimes, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, sgd(model), rank)
    return whole(model)


def hsdp(rank: int) -> list[Tensor]:
    """Sharded in pairs, replicated over the pairs."""
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.second, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, sgd(model), rank)
    return whole(model)


def tensor_and_data_parallel(rank: int) -> list[Tensor]:
    """Tensor-parallel in pairs, FSDP2 over the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    train(model, sgd(model), rank // 2, more=False)
    return whole(model)


def dtensor_on_a_mesh(rank: int) -> list[Tensor]:
    """Placements of all kinds on two dimensions, with products and changes of placement between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(12, 8, generator=generator), torch.randn(8, 20, generator=generator)
    results = []
    for first, second in (
        ([Shard(0), Shard(1)], [Replicate(), Shard(0)]),
        ([Shard(0), Replicate()], [Replicate(), Shard(1)]),
        ([Shard(1), Shard(1)], [Shard(0), Shard(0)]),
    ):
        product = distribute_tensor(a, mesh, first) @ distribute_tensor(b, mesh, second)
        results += [product.full_tensor(), product.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor()]
    partial = DTensor.from_local(torch.full((4, 4), float(rank)), mesh, [Partial("max"), Partial("max")])
    results.append(partial.redistribute(mesh, [Shard(0), Replicate()]).full_tensor())
    uneven = distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(0), Shard(1)])
    return [*results, uneven.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor()]


def compiled_functional_collectives(rank: int) -> list[Tensor]:
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def program(x: Tensor) -> list[Tensor]:
        total = functional.all_reduce(x, "sum", group)
        gathered = functional.all_gather_tensor(x, 0, group)
        scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
        swapped = functional.all_to_all_single(gathered, None, None, group)
        return [total, gathered, scattered * 2, swapped, functional.broadcast(x, 1, group)]

    x = torch.arange(6.0).reshape(2, 3) + 10 * rank
    return [y.clone() for y in (*program(x), *program(x + 1))]


def compiled_ddp(rank: int) -> list[Tensor]:
    model = DistributedDataParallel(Net(), bucket_cap_mb=1)
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, sgd(model), rank)
    return whole(model)


def checkpoint(rank: int) -> list[Tensor]:
    """Saves, in the background too while the main thread uses other groups, and loads with another sharding."""
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    train(model, sgd(model), rank)
    path = Path(folders[0])
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path / "1")
    background = dist.new_group()  # as DCP asks: a group of its own for the thread that saves
    saving = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=path / "2", process_group=background)
    dist.barrier()
    saving.result()
    other = Net()
    for p in other.parameters():
        torch.nn.init.zeros_(p)
    fully_shard(other, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    results = []
    for name in ("1", "2"):
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=path / name)
        other.load_state_dict(state["model"])
        results += whole(other)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
    return results


PROGRAMS: dict[str, Callable[[int], list[Tensor]]] = {
    program.__name__: program
    for program in (
        ddp_static_graph,
        ddp_find_unused,
        ddp_no_sync_and_buffers,
        ddp_join,
        zero_redundancy_optimizer,
        fsdp1,
        fsdp2,
        hsdp,
        tensor_and_data_parallel,
        dtensor_on_a_mesh,
        compiled_functional_collectives,
        compiled_ddp,
        checkpoint,
    )
}
