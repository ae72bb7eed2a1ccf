"""The explorers' side of channels across machines: channels and weights here that a broker elsewhere stands behind."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from multiprocessing import util
from types import TracebackType
from typing import Literal

from torchext import transport
from torchext.channels import sharing, wire
from torchext.channels.carriers import MessageCarrier, WeightCarrier
from torchext.channels.channel import Channel
from torchext.channels.errors import ChannelTimeout
from torchext.channels.link import Link
from torchext.channels.weights import WeightBroadcast

_FLUSH_S = 10.0


def join(address: str, *, token: str | None = None, timeout: float | timedelta | None = 60.0) -> RemoteBroker:
    """Joins the `torchext.channels.Broker` of another machine; waits until it is there.

    The channels and weights that it gives are used here as those of this machine are, by this process and those that it
    starts, while it runs.

        with join("learner:7000") as broker:
            channel, weights = broker.channel("rollouts"), broker.weights("policy")

    Args:
        address: Of the broker, as ``host:port``.
        token: As for `torchext.channels.Broker`.
        timeout: How long to wait for a broker: seconds, a timedelta, or None for ever.

    Raises:
        ImportError: The native core is missing.
        ValueError: That is no address; or the token is empty.
        ChannelError: The broker has another token.
        ChannelTimeout: None answers there within the timeout.
    """
    sharing.require_core()
    transport.parse_address(address)
    return RemoteBroker(address, wire.token_or_own(token), sharing.seconds(timeout))


class RemoteBroker:
    """The broker of another machine as this one sees it; made by `join`."""

    def __init__(self, address: str, token: str, timeout_s: float) -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s
        self._carriers: list[MessageCarrier | WeightCarrier] = []
        self._closer = util.Finalize(self, _close_all, args=(self._carriers, os.getpid(), 1.0), exitpriority=30)

    def channel(
        self,
        part: str,
        *,
        name: str | None = None,
        on_peer_death: Literal["raise", "continue"] = "raise",
    ) -> Channel:
        """A channel whose messages go to that of the learner, with as many slots and the same policy.

        Its slots come on top of those at the learner: as many messages may wait here, and be on their way. `PeerDied`
        is raised by senders here when the learner's process has died, or cannot be reached for 60 s.

        Args:
            part: What the broker calls it.
            name: What unrelated processes here find it by, with `torchext.channels.connect`.
            on_peer_death: As for `Channel`.

        Raises:
            ChannelError: There is no such part; or the broker has another token.
            ChannelTimeout: It does not answer.
        """
        link = Link(self.address, self._token, {"part": part, "kind": "channel"})
        reply = link.first(self._timeout_s)
        carrier = MessageCarrier(link, reply, name, on_peer_death)
        self._carriers.append(carrier)
        return carrier.channel

    def weights(self, part: str) -> WeightBroadcast:
        """The weights that the learner publishes, version by version, but for those that were overtaken on the way.

        Raises:
            ChannelError: There is no such part; or the broker has another token.
            ChannelTimeout: It does not answer.
        """
        link = Link(self.address, self._token, {"part": part, "kind": "WeightBroadcast"})
        reply = link.first(self._timeout_s)
        carrier = WeightCarrier(link, reply)
        self._carriers.append(carrier)
        return carrier.weights

    def close(self, timeout: float | timedelta | None = _FLUSH_S) -> None:
        """Takes no more messages here, waits until the learner has those that were sent, and leaves. Idempotent.

        Raises:
            ChannelTimeout: The learner did not take all in time; the message tells how many are lost.
        """
        self._closer.cancel()
        _close_all(self._carriers, os.getpid(), sharing.seconds(timeout))

    def __enter__(self) -> RemoteBroker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            with contextlib.suppress(ChannelTimeout):
                self.close(timeout=1.0)


def _close_all(carriers: list[MessageCarrier | WeightCarrier], pid: int, timeout_s: float) -> None:
    if os.getpid() != pid:  # a fork's copy
        return
    deadline = time.monotonic() + timeout_s
    lost = sum(carrier.close(max(0.0, deadline - time.monotonic())) for carrier in carriers)
    carriers.clear()
    if lost:
        raise ChannelTimeout(f"{lost} messages were not taken by the learner within {timeout_s:g} s, and are lost")
