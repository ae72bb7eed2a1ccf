"""Channels between explorers and learners: rollouts one way, weights the other, in shared memory.

Source: "XingTian" (Middleware 2022), whose explorers push what they make as they make it, so that learners find it.
Differences: no broker and no copies within a machine, only between machines (`Broker`, `join`); a dead process is
noticed by all others; see `Channel`.
"""

from __future__ import annotations

from torchext.channels.broker import Broker
from torchext.channels.channel import Channel, Sender, connect
from torchext.channels.errors import ChannelClosed, ChannelError, ChannelFull, ChannelTimeout, PeerDied
from torchext.channels.loader import ChannelLoader
from torchext.channels.remote import RemoteBroker, join
from torchext.channels.weights import WeightBroadcast, connect_weights

__all__ = [
    "Broker",
    "Channel",
    "ChannelClosed",
    "ChannelError",
    "ChannelFull",
    "ChannelLoader",
    "ChannelTimeout",
    "PeerDied",
    "RemoteBroker",
    "Sender",
    "WeightBroadcast",
    "connect",
    "connect_weights",
    "join",
]
