"""Replication to many sites, with stability in the user's own words.

State goes to every site at the speed of the links; a predicate that the user writes says when it is safe.

Source: "Stabilizer: Geo-Replication with User-defined Consistency" (ICDCS 2022).
"""

from __future__ import annotations

from torchext.replication.checkpoints import fetch_checkpoint, send_checkpoint
from torchext.replication.config import load_config
from torchext.replication.errors import (
    ClosedError,
    ConfigError,
    DivergedError,
    PredicateError,
    ReplicationError,
    StabilityTimeoutError,
    StoreError,
    StoreFullError,
)
from torchext.replication.message import Message
from torchext.replication.node import Node
from torchext.replication.predicates import dual

__all__ = [
    "ClosedError",
    "ConfigError",
    "DivergedError",
    "Message",
    "Node",
    "PredicateError",
    "ReplicationError",
    "StabilityTimeoutError",
    "StoreError",
    "StoreFullError",
    "dual",
    "fetch_checkpoint",
    "load_config",
    "send_checkpoint",
]
