"""The error of this feature."""

from __future__ import annotations


class LaunchError(Exception):
    """A job that cannot be started or go on; the message says why, and what to change where that helps."""
