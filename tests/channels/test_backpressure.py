"""What each policy does with a full channel, and that memory stays flat."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.channels.processes import DEADLINE_S, process
from torchext.channels import Channel, ChannelFull, ChannelTimeout


def test_a_blocked_send_times_out_with_the_reason() -> None:
    # google-deepmind/reverb#103: it blocked for ever, without a word.
    with Channel(slots=2) as channel, channel.sender() as sender:
        for i in range(2):
            sender.send(i)
        match = r"no room within 0.05 s: all 2 slots hold messages that no receiver has taken; receivers: none"
        with pytest.raises(ChannelTimeout, match=match):
            sender.send(2, timeout=0.05)
        assert channel.receive(10) == 0
        sender.send(3, timeout=10)
        with pytest.raises(TimeoutError, match=r"receivers: MainProcess-\d+ \(process \d+\)"):
            sender.send(4, timeout=0)
        assert [channel.receive(10) for _ in range(2)] == [1, 3]  # nothing of what timed out
        assert channel.stats()["send_wait_s"] >= 0.05


def test_a_blocked_send_goes_on_once_there_is_room() -> None:
    with Channel(slots=1) as channel, channel.sender() as sender:
        sender.send(0)
        thread = threading.Thread(target=lambda: sender.send(1, timeout=DEADLINE_S))
        thread.start()
        assert [channel.receive(DEADLINE_S) for _ in range(2)] == [0, 1]
        thread.join()


def test_an_empty_channel_times_out_with_the_reason() -> None:
    with Channel() as channel:
        with pytest.raises(ChannelTimeout, match=r"no message came within 0 s; senders: none"):
            channel.receive(0)
        with channel.sender("explorer-3"), pytest.raises(ChannelTimeout, match=r"senders: explorer-3 \(process \d+\)"):
            channel.receive(0.01)


def test_drop_oldest_keeps_the_latest_in_order_and_counts() -> None:
    # ray-project/ray#48702
    with Channel(slots=3, policy="drop_oldest") as channel, channel.sender() as sender:
        assert all(sender.send(i) for i in range(10))
        assert [channel.receive(10) for _ in range(3)] == [7, 8, 9]
        stats = channel.stats()
        assert (stats["dropped_oldest"], stats["sent"], stats["received"]) == (7, 10, 3)


def test_drop_newest_keeps_the_first_and_says_so() -> None:
    with Channel(slots=3, policy="drop_newest") as channel, channel.sender() as sender:
        assert [sender.send(i) for i in range(5)] == [True] * 3 + [False] * 2
        with sender.reserve(torch.empty(2)) as tree:
            tree.fill_(1)
        assert [channel.receive(10) for _ in range(3)] == [0, 1, 2]
        assert channel.stats()["dropped_newest"] == 3
        assert channel.stats()["depth"] == 0


def test_error_raises_and_counts() -> None:
    with Channel(slots=1, policy="error") as channel, channel.sender() as sender:
        sender.send(0)
        with pytest.raises(ChannelFull, match=r'all 1 slots hold messages .*policy "error"'):
            sender.send(1)
        assert channel.receive(10) == 0
        sender.send(2)
        assert channel.stats()["refused"] == 1


@given(
    st.sampled_from(["block", "drop_oldest", "drop_newest", "error"]),
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["send", "receive", "reserve", "abandon", "hold"]), st.integers(0, 2)), max_size=40
    ),
)
def test_it_is_a_bounded_queue(policy: Any, slots: int, actions: list[tuple[str, int]]) -> None:
    """Against a list: any actions of three senders and a receiver, which may keep what it got."""
    model: list[tuple[int, int]] = []
    held: list[tuple[torch.Tensor, int]] = []
    with Channel(slots=slots, policy=policy, poison=True) as channel:
        senders = [channel.sender(f"s{i}") for i in range(3)]
        for number, (action, who) in enumerate(actions):
            full = len(model) == slots
            if action == "receive" or action == "hold":
                if not model:
                    with pytest.raises(ChannelTimeout):
                        channel.receive(0)
                    continue
                got, sender = channel.receive(0)
                assert (got[0].item(), sender) == model.pop(0)
                if action == "hold":
                    held.append((got, int(got[0])))
                continue
            if action == "abandon":
                with pytest.raises(ZeroDivisionError), senders[who].reserve(torch.empty(9), timeout=0):
                    raise ZeroDivisionError
                continue
            try:
                if action == "send":
                    sent = senders[who].send((torch.full((9,), number), who), timeout=0)
                else:
                    with senders[who].reserve((torch.empty(9, dtype=torch.int64), who), timeout=0) as (tensor, _):
                        tensor.fill_(number)
                    sent = not full or policy != "drop_newest"
            except ChannelTimeout:
                assert (full, policy) == (True, "block")
            except ChannelFull:
                assert (full, policy) == (True, "error")
            else:
                assert sent == (not full or policy == "drop_oldest")
                if sent:
                    model.append((number, who))
                    del model[:-slots]
        assert all((tensor == number).all() for tensor, number in held)
        stats = channel.stats()
        assert stats["depth"] == len(model)
        assert stats["sent"] == stats["received"] + stats["depth"] + stats["dropped_oldest"]


def test_growing_messages_free_what_smaller_ones_used() -> None:
    # ray-project/ray#59640: each growth left the old arena behind.
    mebibyte = 1 << 20
    with Channel(slots=2) as channel, channel.sender() as sender:
        for size in (1, 2, 4, 8, 16, 32):
            for _ in range(4):
                sender.send(torch.zeros(size * mebibyte, dtype=torch.uint8), timeout=10)
                assert channel.receive(10).numel() == size * mebibyte
            assert channel.stats()["retained_bytes"] <= 2 * (size + 1) * mebibyte
        for _ in range(400):  # and an outlier does not keep its memory for ever
            sender.send(torch.zeros(1000), timeout=10)
            del_me = channel.receive(10)
            del del_me
        assert channel.stats()["retained_bytes"] <= 3 * mebibyte


def test_slot_bytes_bound_what_is_kept() -> None:
    with Channel(slots=2, slot_bytes=1 << 20) as channel, channel.sender() as sender:
        for num_bytes in (1 << 24, 100, 1 << 23):
            sender.send(torch.zeros(num_bytes, dtype=torch.uint8), timeout=10)
            assert channel.receive(10).numel() == num_bytes
        assert channel.stats()["retained_bytes"] <= 1 << 21


def _receive_and_stay(channel: Channel, done: Any) -> None:
    for _ in range(2):
        assert channel.receive(DEADLINE_S) is not None  # the first is freed with the second, the second not yet
    done.set()
    signal.pause()


def test_slabs_that_receivers_have_returned_are_there_for_who_needs_one() -> None:
    """They are freed when their process next receives; a sender that finds no free one does not wait for that."""
    done = multiprocessing.get_context("fork").Event()
    with (
        Channel(slots=1, on_peer_death="continue") as channel,
        channel.sender() as sender,
        process(_receive_and_stay, channel, done) as child,
    ):
        for i in range(2):
            sender.send(i, timeout=DEADLINE_S)
        assert done.wait(DEADLINE_S)
        assert channel.stats()["held"] == 0
        num_slabs = 2 * 1 + 256
        blocks = [sender.reserve(torch.empty(1), timeout=DEADLINE_S) for _ in range(num_slabs)]
        for block in blocks:  # all that there are, with that one
            block.__enter__()
        with pytest.raises(ChannelTimeout), sender.reserve(torch.empty(1), timeout=0):
            pass
        waits = threading.Thread(target=lambda: sender.reserve(torch.empty(1), timeout=DEADLINE_S).__enter__())
        waits.start()
        blocks.pop().__exit__(None, None, None)
        got = channel.receive(DEADLINE_S)
        assert waits.is_alive()
        del got  # nothing is received any more, and the thread waits for a slab
        waits.join(DEADLINE_S)
        assert not waits.is_alive()
        child.kill()
        child.join()
        for block in blocks:
            with contextlib.suppress(ZeroDivisionError):
                block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        sender.send(2, timeout=DEADLINE_S)
        assert channel.receive(DEADLINE_S) == 2
        assert channel.stats()["held"] == 0


def _shared_bytes() -> int:
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssShmem"))


def test_a_slow_consumer_costs_no_memory() -> None:
    # ray-project/ray#24329 #30139: the producer's side grew until the machine was full.
    megabyte = torch.zeros(1 << 20, dtype=torch.uint8)
    before = _shared_bytes()
    with Channel(slots=4, policy="drop_oldest") as channel, channel.sender() as sender:
        for i in range(300):
            sender.send(megabyte)
            if i % 50 == 0:
                channel.receive(10)
        assert _shared_bytes() - before < 16 << 20
        assert channel.stats()["retained_bytes"] < 16 << 20
