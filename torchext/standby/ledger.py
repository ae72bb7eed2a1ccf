"""Which tensors make up the state, where they live, and which of them changed since the last commit."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchext._native import standby as native
from torchext.standby import tree as trees
from torchext.standby.arena import Arena, Slot
from torchext.standby.changes import Changes, Rows
from torchext.standby.cuda import SideStreams
from torchext.standby.errors import StateMismatchError
from torchext.standby.pages import PAGE_BYTES, PageTracking
from torchext.standby.tensors import address_of, can_be_adopted, is_dense, keeps_to_rows


@dataclass(eq=False)
class Entry:
    """Bytes of the state that travel as one.

    Attributes:
        number: Its name on the wire; never used twice.
        slot: Where its bytes lie.
        name: For messages.
        tensor: The tensor that was adopted, or whose local part was; or which is to be copied. None for other copies.
        version: Autograd's count of changes to the tensor when its bytes were last accounted for.
        reference: What the pickle of the state has for the tensor that was adopted.
    """

    number: int
    slot: Slot
    name: str
    tensor: torch.Tensor | None = None
    version: int = 0
    reference: trees.Reference | None = None


@dataclass(frozen=True)
class Publication:
    """One commit, as the standby gets it.

    Attributes:
        tree: The pickle of the state, which refers to entries.
        added: Entries that the standby does not know yet.
        removed: Numbers of those that are no more.
        changes: What differs from the publication before that was sealed.
        ahead: Of the entries that changed as a whole, those that have not since they were named by `Ledger.mark_step`.
    """

    tree: bytes
    added: list[Entry]
    removed: list[int]
    changes: Changes
    ahead: set[int]


class Ledger:
    """The entries of one training process. Not thread-safe.

    Parameters and moments of the optimizers are *adopted*: moved into shared memory, where they are changed in place
    and read by the standby. So are the other parameters of the modules as long as nobody changes them. All other
    tensors of the state are compared with a copy at each commit: those of the optimizers by the thread that sends it,
    as they stay as they are until the optimizers step.

    Args:
        modules: Whose parameters to adopt.
        optimizers: Whose parameters and moments to adopt.
        huge_pages: See `Arena`.
        track_rows: Whether rows of sparse gradients are told apart.
        pages: Says what changed of that which was adopted, in place of the optimizers.
    """

    def __init__(
        self,
        modules: dict[str, torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        *,
        huge_pages: bool | None,
        track_rows: bool,
        pages: PageTracking | None = None,
    ) -> None:
        self.modules = modules
        self.optimizers = optimizers
        self._track_rows = track_rows
        self._pages = pages
        self._arena = Arena(huge_pages=huge_pages, **({} if pages is None else {"alignment": PAGE_BYTES}))
        # Numbers start anywhere, so that they differ from those of the process before, whose images may be in use.
        self._next_number = secrets.randbits(40) << 20
        self._known: dict[int, Entry] = {}  # what the standby knows, by number
        # By (id of the parameter, -1, ""), and its moments by (id, position of the optimizer, name).
        self._owned: dict[tuple[int, int, str], Entry] = {}
        self._frozen: dict[int, Entry] = {}  # id of a parameter that no optimizer owns
        self._restless: set[int] = set()  # ids of such parameters that somebody changes all the same
        self._parameters: dict[int, torch.Tensor] = {}  # keeps the ids valid
        self._by_address: dict[int, Entry] = {}
        # By ids of the optimizer and of the parameter: what a step of the one changes for the other.
        self._by_optimizer: dict[int, dict[int, list[Entry]]] = {}
        self._ids: set[int] = set()  # of the tensors that are owned
        self._has_left = False  # whether something large could not be adopted
        self._places: list[int] | None = None  # of all that is adopted, at the last commit (see _places_now)
        self._copies: list[Entry] = []  # in the order in which they are met
        self._num_copies = 0  # met so far in this commit
        self._settled: set[int] = set()  # addresses of parameters of optimizers that are not adopted
        self._left: list[Entry] = []  # copies of them that the commit is still to make, or has made
        # Moments that are not adopted, which are pickled later, with autograd's count of their changes at the commit.
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._side = SideStreams()
        self._devices: set[torch.device] = set()  # CUDA devices of the optimizers' parameters
        self._pending = Changes()  # since the last commit that was sealed
        self._ahead: set[int] = set()  # entries as a step that was marked has left them, which the standby knows
        self._added: dict[int, Entry] = {}
        self._removed: list[int] = []

    # --- what the optimizers do ---

    def mark_step(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Notes what an optimizer has just changed; call it before the gradients are cleared.

        Returns:
            The entries that changed as a whole and that the standby knows: it may read them ahead of the commit. None
            where pages are tracked, which do not tell whether an entry was written once more after this.
        """
        if self._pages is not None:
            return []
        whole: list[int] = []
        known = self._by_optimizer.get(id(optimizer), {})
        for group in optimizer.param_groups:
            rows_only = self._track_rows and keeps_to_rows(optimizer, group)
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                entries = known.get(id(parameter), ())
                if rows_only and grad.layout == torch.sparse_coo and grad.sparse_dim() == 1:
                    indices = np.unique(grad._indices()[0].numpy())
                    rows = Rows(parameter.nbytes // len(parameter), indices)  # of the moments too
                    for entry in entries:
                        self._mark_rows(entry, parameter, rows)
                else:
                    self._pending.add_whole(entry.number for entry in entries)
                    whole += [entry.number for entry in entries if entry.number in self._known]
                for entry in entries:
                    assert entry.tensor is not None
                    entry.version = entry.tensor._version
        self._ahead.update(whole)
        return whole

    def _mark_rows(self, entry: Entry, parameter: torch.Tensor, rows: Rows) -> None:
        assert entry.tensor is not None
        self._ahead.discard(entry.number)
        if entry.tensor.shape == parameter.shape and entry.tensor.is_contiguous():
            if entry.slot.size_bytes != parameter.nbytes:  # of another type
                rows = Rows(entry.slot.size_bytes // len(parameter), rows.indices)
            self._pending.add_rows(entry.number, rows, entry.slot.size_bytes)
        else:
            self._pending.add_whole([entry.number])

    def disturbed(self) -> list[str]:
        """Names of what somebody has changed in place since the last `publish`, while it may have been read."""
        names = [entry.name for entry in self.written_since()]
        if any(tensor._version != version for tensor, version in self._watched):
            names.append("the state of an optimizer")
        return names

    def written_since(self) -> list[Entry]:
        """Adopted entries that somebody has changed in place since they were last accounted for."""
        if self._pages is not None:
            numbers = self._pages.written(self._adopted())
            return [e for entries in (self._owned, self._frozen) for e in entries.values() if e.number in numbers]
        written = [
            entry
            for entries in (self._owned, self._frozen)
            for entry in entries.values()
            if entry.tensor is not None and entry.tensor._version != entry.version
        ]
        written += [each for each in self._left if each.tensor is not None and each.tensor._version != each.version]
        self._pending.add_whole(entry.number for entry in written)
        for entry in written:
            assert entry.tensor is not None
            self._ahead.discard(entry.number)
            entry.version = entry.tensor._version
        return written

    # --- commits ---

    def publish(self, collect: Callable[[], Any], *, at_once: bool = False) -> Callable[[], Publication]:
        """Adopts what is new, copies what is not adopted, and says what changed.

        Args:
            collect: Gives the tree of the state. Called after the adoption: the tree's tensors are further users of
                the memory, which would keep it from being moved.
            at_once: Whether all is done when this returns, as for `checksums`. So it is where pages are tracked: what
                is written to them from then on is no part of the state.

        Returns:
            Ends it: pickles what the tree has left for `tree.Later`. Call it once, in whatever thread, before anything
            else of the ledger.
        """
        for entry in self._left:
            entry.tensor = None
        self._left = []
        self._adopt_all()
        self._num_copies = 0
        pickle_rest = trees.dump(collect(), self._find, self._copy)
        self._side.follow(self._devices)
        self._watched = [] if self._pages is not None else [(each, each._version) for each in self._moments_left()]

        def complete() -> Publication:
            with self._side.used():
                data = pickle_rest()
                for entry in self._left:
                    assert entry.tensor is not None
                    self._update(entry, entry.tensor)
            for entry in self._copies[self._num_copies :]:
                self._remove(entry)
            del self._copies[self._num_copies :]
            if self._pages is not None:  # after all copies, which may share pages with what was adopted
                self._pages.take(self._arena.segments, self._adopted(), self._pending)
            added, removed = list(self._added.values()), self._removed
            self._added, self._removed = {}, []
            self._known.update((entry.number, entry) for entry in added)
            changes, self._pending = self._pending, Changes()
            ahead, self._ahead = self._ahead & changes.whole, set()
            return Publication(data, added, removed, changes, ahead)

        if not at_once and self._pages is None:
            return complete
        publication = complete()
        return lambda: publication

    def later(self, state_dict: dict[str, Any]) -> Any:
        """A module's state dict, for `tree.Later` where all in it was adopted."""
        for each in state_dict.values():
            if not isinstance(each, torch.Tensor) or address_of(each) not in self._by_address:
                return state_dict
        return trees.Later(state_dict)

    def take_back(self, publication: Publication) -> None:
        """A publication was not sealed: what it would have brought belongs to the next one.

        As whole entries: the standby may have torn the image that held the last publication.
        """
        changes = publication.changes
        self._pending.add_whole(number for number in [*changes.whole, *changes.rows] if number in self._known)

    def renew(self) -> None:
        """The standby knows nothing: the next publication brings everything."""
        everything = [*self._owned.values(), *self._frozen.values(), *self._copies]
        self._ahead = set()
        self._pending = Changes()
        self._pending.add_whole(entry.number for entry in everything)
        self._added = {entry.number: entry for entry in everything}
        self._removed = []
        self._known.clear()

    def checksums(self) -> dict[int, int]:
        """Of every entry as it is now, by number."""
        return {
            number: native.checksum(entry.slot.address, entry.slot.size_bytes) for number, entry in self._known.items()
        }

    def sizes(self) -> dict[int, int]:
        """Bytes of every entry that the standby knows, by number."""
        return {number: entry.slot.size_bytes for number, entry in self._known.items()}

    def missed(self, numbers: Iterable[int]) -> list[str]:
        """These entries are other ones at the standby: the next publication brings them whole. Returns their names."""
        self._pending.add_whole(numbers)
        return [self._known[number].name for number in numbers]

    def entry(self, number: int) -> torch.Tensor:
        """The bytes of an entry: (size,) uint8. From any thread, between a publication and the next."""
        return self._known[number].slot.base

    def mesh(self, wanted: trees.Mesh) -> Any:
        """The mesh of the modules' or optimizers' DTensors that is so.

        Raises:
            StateMismatchError: There is none; the message names those that there are.
        """
        found = {}
        for tensor in self._all_parameters():
            described = trees.mesh_of(tensor)
            if described is not None:
                found[repr(described)] = tensor.device_mesh  # type: ignore[attr-defined]
        if repr(wanted) not in found:
            raise StateMismatchError(
                f"the standby's state is spread over a mesh of ranks {wanted[0]} with dimensions {wanted[1]}, this "
                f"program's DTensors over {', '.join(found) or 'none: it has no DTensors'}"
            )
        return found[repr(wanted)]

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        for module in self.modules.values():
            yield from module.parameters()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    @property
    def arena_bytes(self) -> int:
        """Shared memory in use."""
        return self._arena.size_bytes

    def close(self) -> None:
        """Gives up the files of the shared memory; the tensors stay where they are."""
        if self._pages is not None:
            self._pages.close()
        self._arena.close()

    def _adopted(self) -> list[tuple[int, Slot]]:
        return [(e.number, e.slot) for entries in (self._owned, self._frozen) for e in entries.values()]

    def _moments_left(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            for moments in optimizer.state.values():
                if isinstance(moments, dict):
                    for each in moments.values():
                        if id(each) not in self._ids and isinstance(each, torch.Tensor) and not each.is_inference():
                            yield trees.local(each)

    def _find(self, tensor: torch.Tensor) -> trees.Reference | None:
        entry = self._by_address.get(tensor.data_ptr())
        if entry is None:
            return None
        assert entry.reference is not None
        _, (number, dtype, shape, stride) = entry.reference
        if tensor.dtype is dtype and tensor.shape == shape and tensor.stride() == stride:
            return entry.reference
        if entry.slot.size_bytes != tensor.nbytes or not is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        return trees.reference(number, tensor)

    def _copy(self, tensor: torch.Tensor) -> int:
        """Brings a contiguous tensor into the next copy; returns its number."""
        position = self._num_copies
        self._num_copies += 1
        if position < len(self._copies) and self._copies[position].slot.size_bytes != tensor.nbytes:
            self._remove(self._copies[position])
            self._copies[position] = self._new_entry(tensor.nbytes, f"tensor {position} of the state")
        elif position == len(self._copies):
            self._copies.append(self._new_entry(tensor.nbytes, f"tensor {position} of the state"))
        entry = self._copies[position]
        if tensor.data_ptr() in self._settled:
            entry.tensor, entry.version = tensor, tensor._version
            self._left.append(entry)
        else:
            self._update(entry, tensor)
        return entry.number

    def _update(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Makes a copy equal to a contiguous tensor."""
        if tensor.is_cuda:
            has_changed = self._side.update(entry.slot.address, tensor)
        else:
            host = tensor.cpu()
            has_changed = native.update(entry.slot.address, host.data_ptr(), entry.slot.size_bytes)
        if has_changed:
            self._pending.add_whole([entry.number])

    def _new_entry(self, size_bytes: int, name: str) -> Entry:
        entry = Entry(self._next_number, self._arena.allocate(size_bytes), name)
        self._next_number += 1
        self._added[entry.number] = entry
        self._pending.add_whole([entry.number])
        return entry

    def _remove(self, entry: Entry) -> None:
        self._arena.free(entry.slot)
        self._pending.forget([entry.number])
        if self._added.pop(entry.number, None) is None:
            self._removed.append(entry.number)
            self._known.pop(entry.number, None)

    # --- adoption ---

    def _adopt_all(self) -> None:
        if self._places is None or self._places != self._places_now():
            self._places = self._places_now() if self._look_at_all() else None
        for entry in self.written_since():
            # A parameter of no optimizer that changes all the same is copied from now on.
            for identity, frozen_entry in list(self._frozen.items()):
                if frozen_entry is entry and entry.tensor is not None and entry.number in self._known:
                    self._restless.add(identity)
                    self._parameters[identity] = entry.tensor
                    self._forget_all_but(self._frozen, self._frozen.keys() - {identity})

    def _places_now(self) -> list[int]:
        """Identity and address of each tensor that could be adopted: whether all is as before is quick to see."""
        tensors: list[torch.Tensor] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                tensors += group["params"]
            for moments in optimizer.state.values():
                if isinstance(moments, dict):
                    tensors += [each for each in moments.values() if isinstance(each, torch.Tensor) and each.ndim]
        left: list[torch.nn.Module | None] = [*self.modules.values()]
        while left:
            module = left.pop()
            if module is not None:
                left += module._modules.values()
                tensors += [each for each in module._parameters.values() if each is not None]
        return [*map(id, tensors), *map(address_of, tensors)]

    def _look_at_all(self) -> bool:
        """Adopts what can be; false where something large could not, as it may be possible another time."""
        self._has_left = False
        self._settled = set()
        self._devices = set()
        owned: set[tuple[int, int, str]] = set()
        owners: set[int] = set()
        fresh: list[tuple[dict[Any, Entry], Any, str, torch.Tensor, dict[str, Any] | None]] = []
        for i, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    key = (id(parameter), -1, "")
                    owners.add(key[0])
                    self._look_at(self._owned, key, f"parameter of optimizer {i}", parameter, None, owned, fresh)
                    moments = optimizer.state.get(parameter)
                    if moments:
                        for name, value in moments.items():
                            if isinstance(value, torch.Tensor) and value.ndim:
                                moment = (key[0], i, name)
                                self._look_at(
                                    self._owned, moment, f"{name} of optimizer {i}", value, moments, owned, fresh
                                )
        frozen: set[int] = set()
        for name, module in self.modules.items():
            for path, parameter in module.named_parameters():
                if id(parameter) not in owners and id(parameter) not in self._restless:
                    self._look_at(self._frozen, id(parameter), f"{name}.{path}", parameter, None, frozen, fresh)
        self._forget_all_but(self._owned, owned)
        self._forget_all_but(self._frozen, frozen)
        if fresh:
            self._arena.reserve(sum(trees.local(tensor).nbytes for *_, tensor, _ in fresh), len(fresh))
            paths = {id(p): f"{name}.{path}" for name, m in self.modules.items() for path, p in m.named_parameters()}
            for entries, key, name, tensor, moments in fresh:
                found = paths.get(key[0] if isinstance(key, tuple) else key)
                if found is not None:
                    name = found if moments is None else f"{key[2]} of {found}"
                self._adopt(entries, key, name, tensor, moments)
        self._by_optimizer = {id(optimizer): {} for optimizer in self.optimizers}
        for (parameter, position, _), entry in self._owned.items():
            # The parameter itself belongs to each optimizer that has it.
            for i, optimizer in enumerate(self.optimizers):
                if position in (i, -1):
                    self._by_optimizer[id(optimizer)].setdefault(parameter, []).append(entry)
        self._ids = {id(entry.tensor) for entry in self._owned.values()}
        return not self._has_left

    def _look_at(
        self,
        entries: dict[Any, Entry],
        key: Any,
        name: str,
        tensor: torch.Tensor,
        moments: dict[str, Any] | None,
        seen: set[Any],
        fresh: list[Any],
    ) -> None:
        """Sees whether a tensor is where it was; else notes it in ``fresh`` if it can be adopted."""
        entry = entries.get(key)
        if entry is not None and entry.tensor is tensor and entry.slot.address == address_of(tensor):
            seen.add(key)
        elif can_be_adopted(trees.local(tensor)):
            seen.add(key)
            fresh.append((entries, key, name, tensor, moments))
        elif trees.local(tensor).nbytes > trees.INLINE_BYTES:
            self._has_left = True
            if entries is self._owned and moments is None:
                self._settled.add(address_of(tensor))
                if tensor.is_cuda:
                    self._devices.add(tensor.device)

    def _adopt(
        self, entries: dict[Any, Entry], key: Any, name: str, tensor: torch.Tensor, moments: dict[str, Any] | None
    ) -> None:
        entry = entries.get(key)
        if entry is not None:
            entry.tensor = None  # it may be the last user of the slot
        local = trees.local(tensor)
        if entry is None or entry.slot.size_bytes != local.nbytes or entry.slot.is_shared():
            if entry is not None:
                self._forget_all_but(entries, entries.keys() - {key})
            entry = entries[key] = self._new_entry(local.nbytes, name)
        self._by_address[entry.slot.address] = entry
        place = trees.view(entry.slot.base, local.dtype, tuple(local.shape), local.stride())
        place.copy_(local.detach())
        if local is not tensor:
            tensor._local_tensor = place  # type: ignore[attr-defined]
            entry.tensor = tensor
        elif moments is None:
            tensor.data = place
            entry.tensor = tensor
        else:
            entry.tensor = moments[key[2]] = place
        entry.version = entry.tensor._version
        entry.reference = trees.reference(entry.number, place)
        self._ahead.discard(entry.number)
        self._pending.add_whole([entry.number])

    def _forget_all_but(self, entries: dict[Any, Entry], kept: Iterable[Any]) -> None:
        if len(entries) == len(kept := set(kept)):
            return
        for key in [key for key in entries if key not in kept]:
            entry = entries.pop(key)
            entry.tensor = None
            del self._by_address[entry.slot.address]
            self._remove(entry)
