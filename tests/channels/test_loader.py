"""Batches: received in place where they can be, stacked by copy where not, always with the same values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate

from tests.channels.processes import DEADLINE_S, process
from tests.channels.test_messages import equal
from torchext.channels import Channel, ChannelClosed, ChannelLoader, ChannelTimeout, WeightBroadcast
from torchext.channels.trees import stack


@dataclasses.dataclass
class Transition:
    observation: torch.Tensor
    reward: float


def message(i: int) -> dict[str, Any]:
    return {"x": torch.full((3,), i), "a": np.full((2, 2), i, dtype=np.float32), "r": float(i), "i": i, "d": i % 2 == 0}


def send_messages(channel: Channel, first: int, count: int) -> None:
    with channel.sender(f"sender-{first}") as sender:
        for i in range(first, first + count):
            sender.send(message(i), timeout=DEADLINE_S)


def test_batches_equal_those_of_torchs_collation() -> None:
    with Channel(slots=4) as channel, process(send_messages, channel, 0, 10):
        batches = list(ChannelLoader(channel, batch_size=4))
    assert [len(batch["x"]) for batch in batches] == [4, 4, 2]
    assert all(map(equal, batches, [default_collate([message(i) for i in r]) for r in (range(4), range(4, 8), (8, 9))]))


def test_messages_of_an_unfinished_batch_are_in_the_next_iteration() -> None:
    with Channel() as channel, channel.sender() as sender:
        loader = ChannelLoader(channel, batch_size=3, timeout=0)
        for i in range(2):
            sender.send(message(i))
        with pytest.raises(ChannelTimeout):
            next(iter(loader))
        sender.send(message(2))
        assert equal(next(iter(loader)), default_collate([message(i) for i in range(3)]))


def test_rows_of_a_batch_lie_side_by_side_and_are_writable() -> None:
    with Channel() as channel:
        batches = iter(ChannelLoader(channel, batch_size=3, timeout=0))
        with pytest.raises(ChannelTimeout):
            next(batches)  # from here on, senders write into rows
        with channel.sender() as sender:
            for i in range(2):
                sender.send({"x": torch.full((2, 5), float(i))})
            with sender.reserve({"x": torch.empty(2, 5)}) as tree:
                tree["x"].fill_(2)
            got = next(iter(ChannelLoader(channel, batch_size=3, timeout=10)))["x"]
        assert got.is_contiguous()
        assert got.untyped_storage().nbytes() == 4 * 30  # a view of the slab, with nothing else in it
        assert got[:, 1, 4].tolist() == [0, 1, 2]
        got.add_(1)
        assert channel.stats()["copied"] == 0


@given(
    st.integers(1, 5),
    st.lists(st.sampled_from(["plain", "reserve", "abandon", "string", "wide"]), max_size=25),
    st.integers(0, 25),
)
def test_any_mixture_gives_every_message_once_and_in_order(batch_size: int, kinds: list[str], before: int) -> None:
    def content(i: int, kind: str) -> dict[str, Any]:
        return {"x": torch.full((2 if kind == "wide" else 1,), i), "s": "text" if kind == "string" else 0}

    with Channel(slots=30, poison=True) as channel:
        loader = ChannelLoader(channel, batch_size, collate="list")
        loader.collate = lambda messages: messages if isinstance(messages, list) else [messages]
        with channel.sender() as sender:
            for i, kind in enumerate(kinds):
                if i == before:
                    channel._own_queue().set_batch_rows(batch_size)
                if kind == "abandon":
                    with pytest.raises(ZeroDivisionError), sender.reserve(content(i, "plain")):
                        raise ZeroDivisionError
                elif kind == "reserve":
                    with sender.reserve(content(i, kind)) as tree:
                        tree["x"].fill_(i)
                else:
                    sender.send(content(i, kind))
        expected = [content(i, kind) for i, kind in enumerate(kinds) if kind != "abandon"]
        got = list(channel)
        assert all(map(equal, got, expected))
        assert len(got) == len(expected)


@given(
    st.integers(2, 4),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["send", "text", "wide", "begin", "abandon", "receive"])),
        max_size=40,
    ),
)
# A batch is full before the one that was begun before it; a row that was given back lies before others of who is next.
@example(2, [(0, "begin"), (1, "send"), (1, "send"), (1, "send"), (1, "text")])
@example(2, [(0, "begin"), (1, "send"), (0, "abandon"), (1, "send")])
@example(3, [(0, "begin"), (1, "send"), (2, "begin"), (0, "abandon"), (1, "send"), (1, "send"), (2, "send")])
def test_no_message_overtakes_another_of_its_sender(batch_size: int, actions: list[tuple[int, str]]) -> None:
    """Also where one batch is full while a row of the batch before is still being written by somebody else."""
    sent: list[list[int]] = [[], [], []]
    got: list[list[int]] = [[], [], []]
    writing: list[Any] = [None, None, None]

    def finish(who: int, *failure: Any) -> None:
        context, writing[who] = writing[who], None
        context.__exit__(*(failure or (None, None, None)))
        if failure:
            sent[who].pop()

    def receive() -> bool:
        with contextlib.suppress(ChannelTimeout, ChannelClosed):
            _, who, number = channel.receive(0)
            got[who].append(number)
            return True
        return False

    with Channel(slots=100, poison=True) as channel:
        channel._own_queue().set_batch_rows(batch_size)
        senders = [channel.sender(f"s{i}") for i in range(3)]
        for number, (who, action) in enumerate(actions):
            if action == "receive":
                receive()
            elif writing[who] is not None:
                if action == "abandon":
                    with contextlib.suppress(ZeroDivisionError):
                        finish(who, ZeroDivisionError, ZeroDivisionError(), None)
                else:
                    finish(who)
            elif action != "abandon":
                content = {"text": "a", "wide": torch.zeros(2)}.get(action, torch.zeros(1))
                sent[who].append(number)
                if action == "begin":
                    writing[who] = senders[who].reserve((content, who, number), timeout=0)
                    writing[who].__enter__()
                else:
                    senders[who].send((content, who, number), timeout=0)
        for who in range(3):
            if writing[who] is not None:
                finish(who)
            senders[who].close()
        while receive():
            pass
    assert got == sent


def test_messages_of_unequal_shape_are_refused_by_stack_and_taken_by_list() -> None:
    for collate in ("stack", "list"):
        with Channel() as channel:
            with channel.sender() as sender:
                sender.send({"x": torch.ones(2)})
                sender.send({"x": torch.ones(3)})
            loader = ChannelLoader(channel, 2, collate=collate)
            if collate == "stack":
                with pytest.raises(ValueError, match=r"message\['x'\] has shapes \[\(2,\), \(3,\)\] in one batch"):
                    next(iter(loader))
            else:
                assert [len(m["x"]) for m in next(iter(loader))] == [2, 3]


def test_a_function_collates() -> None:
    with Channel() as channel:
        with channel.sender() as sender:
            for i in range(5):
                sender.send(i)
        assert list(ChannelLoader(channel, 2, collate=sum, drop_last=True)) == [1, 5]


@pytest.mark.parametrize("place", [0, 20], ids=["in place", "by copy"])
def test_dataclasses_and_tensordicts_are_stacked_as_such(place: int) -> None:
    tensordict = pytest.importorskip("tensordict", reason="needs tensordict")
    with Channel(slots=8) as channel:
        channel._own_queue().set_batch_rows(0 if place else 2)
        with channel.sender() as sender:
            for i in range(2):
                inner = tensordict.TensorDict({"a": torch.full((3,), i)}, batch_size=[3])
                sender.send((Transition(torch.full((2,), i), 0.5), inner, np.float32(i)))
        transition, inner, scalar = next(iter(ChannelLoader(channel, 2)))
        assert isinstance(transition, Transition)
        assert transition.observation.tolist() == [[0, 0], [1, 1]]
        assert torch.equal(transition.reward, torch.tensor([0.5, 0.5], dtype=torch.float64))  # type: ignore[arg-type]
        assert inner.batch_size == (2, 3)
        assert inner["a"].tolist() == [[0] * 3, [1] * 3]
        assert scalar.tolist() == [0, 1]


def test_stacking_by_copy_names_what_differs() -> None:
    with pytest.raises(ValueError, match="message has different keys"):
        stack([{"a": 1}, {"b": 1}])
    with pytest.raises(ValueError, match="message has lengths"):
        stack([(1,), (1, 2)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_works_under_torchs_loader(num_workers: int) -> None:
    with Channel(slots=4) as channel, process(send_messages, channel, 0, 60):
        method = "fork" if num_workers else None
        rows = ChannelLoader(channel, 4)
        loader: DataLoader[Any] = DataLoader(
            rows, batch_size=None, num_workers=num_workers, multiprocessing_context=method
        )
        got = [i for batch in loader for i in batch["i"].tolist()]
        assert sorted(got) == list(range(60))


@pytest.mark.filterwarnings("ignore")  # of Lightning's own, about loaders without workers and the like
def test_it_works_under_lightning() -> None:
    lightning = pytest.importorskip("lightning", reason="needs lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            assert batch["x"].shape == (4, 3)
            return self.layer(batch["x"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with Channel(slots=20) as channel:
        with channel.sender() as sender:
            for _ in range(20):
                sender.send({"x": torch.ones(3)})
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(quiet, False))
        trainer.fit(Model(), DataLoader(ChannelLoader(channel, 4), batch_size=None))
        assert trainer.global_step == 5


def test_messages_of_old_weights_are_dropped_and_counted() -> None:
    # sample-factory#128, pytorch/rl#3587: stale data was trained on without a word.
    weights = WeightBroadcast({"w": torch.zeros(1)})
    with weights, Channel(slots=20) as channel:
        loader = ChannelLoader(channel, 2, max_staleness=2, weights=weights)
        with channel.sender() as sender:
            for version in range(1, 9):
                assert weights.publish() == version
                sender.send({"version": version}, version=weights.loaded)
        assert [batch["version"].tolist() for batch in loader] == [[6, 7], [8]]
        stats = channel.stats()
        assert stats["stale"] == 5
        assert stats["staleness_max"] == 7
        assert stats["staleness_mean"] == pytest.approx(sum(range(8)) / 8)


def test_messages_without_a_version_are_not_taken_for_fresh() -> None:
    weights = WeightBroadcast({"w": torch.zeros(1)})
    with weights, Channel() as channel, channel.sender() as sender:
        sender.send(1)
        with pytest.raises(ValueError, match=r"send\(\.\.\., version=weights.loaded\)"):
            next(iter(ChannelLoader(channel, 1, max_staleness=0, weights=weights)))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda c: ChannelLoader(c, 0), "batch_size must be 1 to 4096, got 0"),
        (lambda c: ChannelLoader(c, 2, collate=cast(Any, "pad")), 'collate must be "stack", "list" or a function'),
        (lambda c: ChannelLoader(c, 2, max_staleness=1), "max_staleness needs weights="),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[Channel], Any], match: str) -> None:
    with Channel() as channel, pytest.raises(ValueError, match=match):
        make(channel)


def test_full_batches_block_and_drop_whole() -> None:
    with Channel(slots=2, policy="drop_oldest") as channel:
        channel._own_queue().set_batch_rows(3)
        with channel.sender() as sender:
            for i in range(14):
                sender.send({"i": i})
        batches = list(ChannelLoader(channel, 3))
        assert [batch["i"].tolist() for batch in batches] == [[9, 10, 11], [12, 13]]
        assert channel.stats()["dropped_oldest"] == 9
