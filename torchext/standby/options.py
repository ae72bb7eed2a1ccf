"""What the users of a standby may choose, and what is refused."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

Mode = Literal["lag1", "rpo0"]
Tracking = Literal["owner", "pages", "rows", "auto"]
Transport = Literal["auto", "local", "tcp", "rdma"]
OnStandbyLoss = Literal["degrade", "raise"]

_CHOICES = {"mode": Mode, "tracking": Tracking, "transport": Transport, "on_standby_loss": OnStandbyLoss}
_COUNTS = {  # the least, and what 0 means
    "num_streams": (1, ""),
    "audit_every_n_steps": (0, " (0: no audits)"),
    "persist_every_n_commits": (0, " (0: none)"),
}


@dataclass(frozen=True)
class Options:
    """How to replicate; `torchext.standby.Replicator` says what each of them means.

    Raises:
        ValueError: One cannot be; the message names it, what was given and what would be right.
    """

    standby: str
    mode: Mode
    tracking: Tracking
    transport: Transport
    on_standby_loss: OnStandbyLoss
    timeout: float | timedelta
    num_streams: int
    huge_pages: bool | None
    audit_every_n_steps: int
    persist_dir: str | Path | None
    persist_every_n_commits: int

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if (value := getattr(self, name)) not in (choices := get_args(kind)):
                raise ValueError(f"{name} has to be one of {', '.join(choices)}, got {value!r}")
        for name, (least, meaning) in _COUNTS.items():
            count = check_count(name, getattr(self, name), at_least=least, meaning=meaning)
            object.__setattr__(self, name, count)  # a plain int: messages to the standby take no other
        if (self.persist_every_n_commits > 0) != (self.persist_dir is not None):
            raise ValueError(
                "persist_dir and persist_every_n_commits (at least 1) go together, got "
                f"persist_dir={self.persist_dir!r} and persist_every_n_commits={self.persist_every_n_commits}"
            )
        try:
            is_time = 0 < self.timeout_s < math.inf
        except (TypeError, ValueError):
            is_time = False
        if not is_time:
            raise ValueError(f"timeout has to be a timedelta or seconds, more than 0, got {self.timeout!r}")

    @property
    def timeout_s(self) -> float:
        """The timeout in seconds."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)


def check_count(name: str, value: Any, *, at_least: int, meaning: str = "") -> int:
    """The value as an int. Refuses, with ValueError, what is no whole number, and what is less than the least."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} has to be a whole number{meaning}, got {value!r}")
    if number < at_least:
        raise ValueError(f"{name} has to be at least {at_least}{meaning}, got {value!r}")
    return number
