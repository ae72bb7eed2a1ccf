"""The words of the doctor: a probe tries one thing, a finding says how it went."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


class Absent(Exception):
    """Raised by a check: the thing is not there, for the reason given."""


@dataclass(frozen=True)
class Probe:
    """One thing to try.

    Attributes:
        group: Heading under which it is shown.
        name: What is tried.
        check: Tries it. Returns words about what is there; raises `Absent` with the reason if it is not.
        part: The subpackage of torchext that uses it; ``""`` for torchext as a whole.
        enables: What it enables there.
        remedy: How to get it.
    """

    group: str
    name: str
    check: Callable[[], str]
    part: str
    enables: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """How a probe went.

    Attributes:
        group: As in the probe.
        name: As in the probe.
        ok: Whether the thing is there.
        detail: What is there, or why it is not.
        part: As in the probe.
        enables: As in the probe.
        remedy: How to get it; ``""`` where it is there.
    """

    group: str
    name: str
    ok: bool
    detail: str
    part: str
    enables: str
    remedy: str


def examine(probes: Iterable[Probe]) -> list[Finding]:
    """Tries each probe in turn, in this process; a few seconds in all. None of them raises."""
    return [_try(probe) for probe in probes]


def _try(probe: Probe) -> Finding:
    try:
        ok, detail = True, probe.check()
    except Absent as reason:
        ok, detail = False, str(reason)
    except Exception as error:
        # Whatever an odd machine does to one probe is that row's text: the others are still worth having.
        ok, detail = False, f"could not be tried: {type(error).__name__}: {error}"
    return Finding(probe.group, probe.name, ok, detail, probe.part, probe.enables, remedy="" if ok else probe.remedy)
