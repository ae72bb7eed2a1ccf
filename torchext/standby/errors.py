"""What can go wrong with a standby."""

from __future__ import annotations


class StandbyError(RuntimeError):
    """Base of the errors of torchext.standby."""


class StandbyLostError(StandbyError):
    """The standby cannot be reached, does not answer in time or failed; training state is not replicated any more."""


class FencedError(StandbyError):
    """Another process has taken over this rank of the job: going on would mean two trainings under one name."""


class StateMismatchError(StandbyError):
    """The state at the standby does not fit the program that asks for it; names and shapes are in the message."""


class NoStateError(StandbyError):
    """The standby holds no complete state of this job."""


class CorruptStateError(StandbyError):
    """Bytes do not have the checksum that they were recorded with."""
