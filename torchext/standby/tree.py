"""State as one pickle whose large tensors are replaced by references to entries, which travel apart from it."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch

# Larger tensors become entries of their own, which are compared and sent only when they changed.
INLINE_BYTES = 1024

# What pickle keeps of a tensor whose bytes lie in an entry.
Reference = tuple[Any, tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]]
# Gives the number of the entry that holds a tensor's bytes.
Place = Callable[[torch.Tensor], int]
# Gives the bytes of an entry back: (size,) uint8.
Resolve = Callable[[int], torch.Tensor]
# The ranks of a device mesh, as nested lists, and the names of its dimensions: what tells meshes apart.
Mesh = tuple[Any, tuple[str, ...] | None]
# Gives the mesh of this program that is so.
FindMesh = Callable[[Mesh], Any]


class Later:
    """Part of a tree that stays as it is until the optimizers step: its pickling need not hold up training."""

    def __init__(self, value: Any) -> None:
        self.value = value


def later_states(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer, with what it keeps of each parameter for `Later`."""
    if not isinstance(state_dict.get("state"), dict):
        return state_dict
    kept = {key: dict(each) if type(each) is dict else each for key, each in state_dict["state"].items()}
    return {**state_dict, "state": Later(kept)}


def dump(tree: Any, find: Callable[[torch.Tensor], Reference | None], place: Place) -> Callable[[], bytes]:
    """Pickles a tree of state.

    Args:
        tree: Anything that pickle takes.
        find: The reference to the entry that a tensor lives in already, if it does.
        place: Puts a tensor that lives nowhere yet, and is too large to be pickled, into an entry.

    Returns:
        Pickles what was left for `Later`; in any thread. It returns all of the pickle, for `load`.
    """
    out = io.BytesIO()
    now = _Pickler(out, find, place)
    now.dump(tree)

    def rest() -> bytes:
        first = io.BytesIO()
        _Pickler(first, find, place).dump(now.later)
        return first.getvalue() + out.getvalue()

    return rest


PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def reference(entry: int, tensor: torch.Tensor) -> Reference:
    """Refers to an entry that holds the bytes of such a tensor."""
    return _entry, (entry, tensor.dtype, tuple(tensor.shape), tensor.stride())


def load(data: bytes, resolve: Resolve, find_mesh: FindMesh | None = None) -> Any:
    """Rebuilds a tree; tensors share memory with what ``resolve`` gives. For trusted data: a pickle can run code.

    Args:
        data: What `dump` gave.
        resolve: Gives the bytes of entries.
        find_mesh: Gives the meshes of DTensors; None: a plain tensor, the shard of the rank, takes the place of each.
    """
    source = io.BytesIO(data)
    later = _Unpickler(source, resolve, find_mesh, []).load()
    return _Unpickler(source, resolve, find_mesh, later).load()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank has; any other tensor as it is."""
    return tensor._local_tensor if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def mesh_of(tensor: torch.Tensor) -> Mesh | None:
    """Over which mesh a DTensor is spread; None for any other tensor."""
    return _describe(tensor.device_mesh) if _is_distributed(tensor) else None  # type: ignore[attr-defined]


def _is_distributed(tensor: torch.Tensor) -> bool:
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # where it was not imported, there is none
    return module is not None and isinstance(tensor, module.DTensor)


def _describe(mesh: Any) -> Mesh:
    return mesh.mesh.tolist(), mesh.mesh_dim_names


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, find: Callable[[torch.Tensor], Reference | None], place: Place) -> None:
        super().__init__(out, protocol=5)
        self._find = find
        self._place = place
        self.later: list[Any] = []

    # Called for what the pickler does not handle itself: not for dicts, numbers, text.
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in PLAIN or obj.layout != torch.strided:
            if isinstance(obj, torch.Tensor) and _is_distributed(obj):
                spec: Any = obj._spec  # type: ignore[attr-defined]
                shape, stride = tuple(spec.shape), tuple(spec.stride)
                # Placements are plain; a mesh is bound to the process groups of this program.
                return _shard, (local(obj), shape, stride, spec.placements, _describe(spec.mesh))
            if type(obj) is Later:
                self.later.append(obj.value)
                return _later, (len(self.later) - 1,)
            return NotImplemented
        if obj.ndim == 0 and obj.dtype in (torch.float32, torch.int64) and obj.device.type == "cpu":
            return _scalar, (obj.item(), obj.dtype)
        found = self._find(obj)
        if found is not None:
            return found
        tensor = obj.detach()
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return NotImplemented
        tensor = tensor.contiguous()
        if tensor.nbytes <= INLINE_BYTES:
            data = tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            return _inline, (data, tensor.dtype, tuple(tensor.shape))
        return reference(self._place(tensor), tensor)


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, resolve: Resolve, find_mesh: FindMesh | None, later: list[Any]) -> None:
        super().__init__(source)
        self._resolve = resolve
        self._find_mesh = find_mesh
        self._later = later

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, "_entry"):
            return self._rebuild
        if (module, name) == (__name__, "_shard"):
            return self._rebuild_shard
        if (module, name) == (__name__, "_later"):
            return self._later.__getitem__
        return super().find_class(module, name)

    def _rebuild_shard(self, part: torch.Tensor, shape: Any, stride: Any, placements: Any, mesh: Mesh) -> torch.Tensor:
        if self._find_mesh is None:
            return part
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self._find_mesh(mesh), placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _rebuild(self, entry: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        return view(self._resolve(entry), dtype, shape, stride)


def view(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """The bytes ``data``, (size,) uint8, as a tensor."""
    return torch.as_strided(data.view(dtype), shape, stride)


def _scalar(value: float | int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def _inline(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


# What pickles refer to; an `_Unpickler` puts its own methods in their place.
def _entry(*_: Any) -> Any:
    raise pickle.UnpicklingError("this pickle refers to what is kept apart from it; read it with torchext.standby")


def _shard(*_: Any) -> Any:
    return _entry()


def _later(*_: Any) -> Any:
    return _entry()
