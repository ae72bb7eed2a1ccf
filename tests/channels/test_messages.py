"""What goes in comes out: any tree, by value, writable, and whole."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchext.channels import Channel, ChannelClosed, Sender


class Step(NamedTuple):
    observation: torch.Tensor
    reward: float


@dataclasses.dataclass(frozen=True)
class Rollout:
    steps: Step
    actions: np.ndarray
    env: str


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    if dataclasses.is_dataclass(a):
        return equal(vars(a), vars(b))
    return bool(a == b)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Sender]]:
    with Channel() as channel, channel.sender("test") as sender:
        yield channel, sender


DTYPES = [
    torch.bool,
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
RARE = ["complex32", "float8_e8m0fnu", "float4_e2m1fn_x2"]  # that few operations take


@pytest.mark.parametrize("name", RARE)
def test_rare_dtypes(ends: tuple[Channel, Sender], name: str) -> None:
    channel, sender = ends
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    sent = torch.arange(24, dtype=torch.uint8).view(dtype)
    sender.send({"x": sent})
    got = channel.receive(10)["x"]
    assert got.dtype == dtype
    assert got.shape == sent.shape
    assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))


def test_a_dtype_that_nobody_can_read_is_refused(ends: tuple[Channel, Sender]) -> None:
    channel, sender = ends
    with pytest.raises(TypeError, match=r"torch\.bits8"):
        sender.send({"x": torch.arange(3, dtype=torch.uint8).view(torch.bits8)})
    sender.send(1)  # it goes on
    assert channel.receive(10) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_tensors_of_each_dtype(ends: tuple[Channel, Sender], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    channel, sender = ends
    sent = (10 * torch.rand(shape)).to(dtype)
    sender.send(sent)
    got = channel.receive(10)
    assert got.dtype == dtype
    assert got.shape == shape
    assert torch.equal(
        got.contiguous().view(torch.uint8) if shape else got.to(torch.complex128),
        sent.contiguous().view(torch.uint8) if shape else sent.to(torch.complex128),
    )


TREES = [
    {"observation": torch.arange(6).reshape(2, 3), "reward": 1.5, "done": False, "info": None, 3: "three"},
    [1, -(2**63), 2**80, 0.1, float("inf"), "hé\N{SNOWMAN}", "\ud800", b"bytes" * 1000, (), [], {}],
    Step(torch.ones(3), 2.0),
    Rollout(Step(torch.ones(3), 2.0), np.arange(4, dtype=np.int16), "CartPole-v1"),
    OrderedDict(b=torch.zeros(2), a=1),
    (np.float32(0.5), np.int64(3), np.bool_(True), np.float64(2.5)),
    np.array(["2020-01-01"], dtype="M8[D]"),
    np.array([1.0, 2.0], dtype=">f8"),
    np.array(["text", "more"]),
    np.arange(12.0).reshape(3, 4).T[::2],
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    torch.arange(12).reshape(3, 4).t()[1:],
    torch.arange(3).expand(4, 3),
    {Custom(1).value: Custom(2)},
    {("a", 1): torch.ones(1)},
    torch.float32,
    np.ones((2, 2), dtype=np.longdouble),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_trees_come_out_as_they_went_in(ends: tuple[Channel, Sender], tree: Any) -> None:
    channel, sender = ends
    sender.send(tree)
    got = channel.receive(10)
    assert equal(got, tree), got


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
arrays = st.builds(
    lambda shape, kind: np.arange(int(np.prod(shape)), dtype=kind).reshape(shape),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["u1", "i4", "f2", "f4", "c8"]),
)
tensors = arrays.map(torch.from_numpy)
any_tree = st.recursive(
    scalars | arrays | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(st.lists(any_tree, min_size=1, max_size=4))
def test_any_trees_in_any_order(trees: list[Any]) -> None:
    with Channel(slots=4) as channel, channel.sender() as sender:
        for tree in trees:
            sender.send(tree)
        assert all(equal(channel.receive(10), tree) for tree in trees)


def test_gradients_views_and_parameters_are_sent_by_value(ends: tuple[Channel, Sender]) -> None:
    channel, sender = ends
    parameter = torch.nn.Parameter(torch.ones(3))
    conjugate = torch.tensor([1 + 2j]).conj()
    negative = torch.tensor([1 + 2j]).conj().imag
    sender.send([parameter, 2 * parameter, conjugate, negative, torch.eye(2).to_sparse()])
    got = channel.receive(10)
    assert [type(value) for value in got] == [torch.Tensor] * 5
    assert not any(value.requires_grad for value in got)
    assert torch.equal(got[1], torch.full((3,), 2.0))
    assert got[2].item() == 1 - 2j
    assert got[3].item() == -2
    assert torch.equal(got[4].to_dense(), torch.eye(2))


def test_a_tensordict_stays_one(ends: tuple[Channel, Sender]) -> None:
    tensordict = pytest.importorskip("tensordict", reason="needs tensordict")
    channel, sender = ends
    sent = tensordict.TensorDict({"a": torch.ones(2, 3), "b": {"c": torch.zeros(2, 1)}}, batch_size=[2])
    sender.send({"data": sent})
    got = channel.receive(10)["data"]
    assert type(got) is type(sent)
    assert got.batch_size == sent.batch_size
    assert torch.equal(got["b", "c"], sent["b", "c"])


def test_received_tensors_are_writable_and_nobody_elses(ends: tuple[Channel, Sender]) -> None:
    # ray-project/ray#5592: received arrays were read-only.
    channel, sender = ends
    sent = torch.zeros(5)
    sender.send((sent, sent.numpy()))
    first, array = channel.receive(10)
    first.add_(1)
    array += 2
    assert first.tolist() == [1] * 5
    assert array.tolist() == [2] * 5
    assert sent.tolist() == [0] * 5


def test_what_cannot_be_sent_is_named_and_the_channel_goes_on(ends: tuple[Channel, Sender]) -> None:
    channel, sender = ends
    with pytest.raises(TypeError, match=r"what can be pickled, not a function"):
        sender.send({"f": lambda: None})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="does it contain itself"):
        sender.send(endless)
    with pytest.raises(ValueError, match="meta device has no values"):
        sender.send(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="is larger than the"), sender.reserve(torch.empty(2**33, 4, device="meta")):
        pass
    sender.send("still here")
    assert channel.receive(10) == "still here"
    assert channel.stats()["sent"] == 1


def test_a_message_written_in_place(ends: tuple[Channel, Sender]) -> None:
    channel, sender = ends
    spec = {"x": torch.empty(2, 3, device="meta"), "y": np.empty(4, dtype=np.int32), "name": "rollout"}
    with sender.reserve(spec) as tree:
        assert tree["name"] == "rollout"
        tree["x"].copy_(torch.arange(6.0).reshape(2, 3))
        tree["y"][:] = 7
    got = channel.receive(10)
    assert torch.equal(got["x"], torch.arange(6.0).reshape(2, 3))
    assert got["y"].tolist() == [7] * 4


def test_a_message_whose_writing_fails_is_not_sent(ends: tuple[Channel, Sender]) -> None:
    channel, sender = ends
    with pytest.raises(KeyError), sender.reserve({"x": torch.empty(2)}) as tree:
        tree["y"].fill_(1)
    sender.send(1)
    assert channel.receive(10) == 1
    assert channel.stats()["sent"] == 1


def test_more_messages_are_written_in_place_at_a_time_than_there_are_slots() -> None:
    with Channel(slots=1) as channel:
        senders = [channel.sender(f"s{i}") for i in range(10)]
        blocks = [sender.reserve(torch.empty(1), timeout=10) for sender in senders]
        for i, block in enumerate(blocks):
            block.__enter__().fill_(i)
        for i, block in enumerate(blocks):
            block.__exit__(None, None, None)
            assert channel.receive(10).item() == i


def test_held_views_stay_valid_while_the_channel_goes_on() -> None:
    with Channel(slots=2, poison=True) as channel, channel.sender() as sender:
        held = []
        for i in range(50):
            sender.send(torch.full((100,), i), timeout=10)
            held.append(channel.receive(10))
        stats = channel.stats()
        assert [tensor[0].item() for tensor in held] == list(range(50))
        assert stats["held"] <= 3  # the rest was copied out, so that senders never starve
        assert stats["copied"] >= 47
        part = held[0][10:20].numpy()
        held.clear()
        assert channel.stats()["held"] <= 1
        assert part.tolist() == [0] * 10  # a view of a view holds it, as pyzmq#1582 asks to be told


def test_views_outlive_their_channel() -> None:
    channel = Channel()
    sender = channel.sender()
    sender.send(torch.arange(4))
    got = channel.receive(10)
    sender.close()
    channel.close()
    del channel, sender
    assert got.tolist() == [0, 1, 2, 3]


def test_views_of_an_iteration_end_with_it_and_poison_shows_it() -> None:
    with Channel(slots=2, views="iteration", poison=True) as channel, channel.sender() as sender:
        for i in range(3):
            sender.send(torch.full((10,), float(i))) if i < 2 else None
        first = channel.receive(10)
        assert first.tolist() == [0] * 10
        second = channel.receive(10)
        assert first.isnan().all()
        assert second.tolist() == [1] * 10
        assert channel.stats()["held"] == 1


def test_threads_share_a_channel() -> None:
    num_threads, per_thread = 4, 200
    got: list[int] = []
    lock = threading.Lock()
    with Channel(slots=4, num_senders=num_threads) as channel:

        def send(thread: int) -> None:
            with channel.sender(f"thread-{thread}") as sender:
                for i in range(per_thread):
                    sender.send({"i": torch.tensor(thread * per_thread + i)}, timeout=30)

        def receive() -> None:
            for message in channel:
                with lock:
                    got.append(message["i"].item())

        threads = [threading.Thread(target=send, args=(i,)) for i in range(num_threads)]
        threads += [threading.Thread(target=receive) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(got) == list(range(num_threads * per_thread))


def test_closing_ends_both_sides_and_is_idempotent() -> None:
    channel = Channel()
    sender = channel.sender()
    sender.send(1)
    channel.close()
    channel.close()
    with pytest.raises(ChannelClosed, match="closed by the process that made it"):
        sender.send(2)
    sender.close()
    sender.close()
    with pytest.raises(ChannelClosed, match="was closed"):
        sender.send(3)
    assert list(channel) == [1]  # what was sent is still delivered
    channel.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"slot_bytes": "large"}, 'slot_bytes must be "auto" or at least 1'),
        ({"policy": "drop"}, "policy must be one of"),
        ({"num_senders": 0}, "num_senders must be at least 1"),
        ({"views": "always"}, 'views must be "held" or "iteration"'),
        ({"on_peer_death": "ignore"}, 'on_peer_death must be "raise" or "continue"'),
        ({"name": "a/b"}, "a name has 1 to 64 letters"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Channel(**arguments)


def test_negative_timeouts_are_refused(ends: tuple[Channel, Sender]) -> None:
    channel, sender = ends
    for call in (lambda: sender.send(1, timeout=-1), lambda: channel.receive(-1)):
        with pytest.raises(ValueError, match="timeout must be seconds >= 0"):
            call()
