"""Bytes between hosts: addresses, sockets that notice lost peers, a greeting by which both ends prove themselves."""

from __future__ import annotations

from torchext.transport.greeting import GreetingError, accept, greet, refuse, reply
from torchext.transport.tcp import connect, listen, parse_address, receive_exactly, receive_into, send_all, tune
from torchext.transport.tokens import load_token

__all__ = [
    "GreetingError",
    "accept",
    "connect",
    "greet",
    "listen",
    "load_token",
    "parse_address",
    "receive_exactly",
    "receive_into",
    "refuse",
    "reply",
    "send_all",
    "tune",
]
