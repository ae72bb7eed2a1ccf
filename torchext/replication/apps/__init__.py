"""Applications on `torchext.replication`: a key/value store, a synchronised folder, publish and subscribe.

Small, whole, and an example each of what acks of one's own and predicates are good for. They may share one node: each
takes its own messages only.

Source: the three applications of "Stabilizer: Geo-Replication with User-defined Consistency" (ICDCS 2022).
"""

from __future__ import annotations

from torchext.replication.apps.folder import FolderSync
from torchext.replication.apps.kv import KeyValueStore, Version
from torchext.replication.apps.pubsub import Delivery, PubSub, Subscription

__all__ = ["Delivery", "FolderSync", "KeyValueStore", "PubSub", "Subscription", "Version"]
