"""Replication to many sites, with stability in the user's own words."""

from __future__ import annotations

from torchext.replication.errors import PredicateError, ReplicationError
from torchext.replication.predicates import dual

__all__ = ["PredicateError", "ReplicationError", "dual"]
