"""A machine that a node agent speaks for, as the daemon sees it.

The agent asks again and again (``sync``): it says what has become of the parts that it was asked about, and hears what
to start, to end and to watch. Whatever an answer says is said again until the agent's reports show that it was heard,
so it does not matter where a connection breaks or who is killed.

A machine that is silent may have lost its network alone. Its runners therefore end their jobs by themselves once the
agent has not reached the daemon for the time of the *lease*; only after that and the grace does the daemon count them
as lost and start them elsewhere.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Set
from typing import Any

from torchext.launch.errors import LaunchError
from torchext.launch.queue.node import SPARE_S
from torchext.launch.queue.types import Part, PartKey, PartReport, PartState

_AWAY_S = 5.0  # of silence, and no new jobs go there
_LOG_KEPT_S = 30.0  # a piece of a log that nobody asks for any more
_OVER = (PartState.ENDED, PartState.LOST)


class NotYet(Exception):
    """The answer has to come from the machine first; ask again soon."""


class RemoteNode:
    """See `torchext.launch.queue.node.Node`; for the daemon's thread.

    Args:
        name: Of the machine.
        lease_s: How long its jobs go on without contact.
        agent: Who spoke for it last, in an earlier life of the daemon.
    """

    def __init__(self, name: str, lease_s: float, agent: str | None = None) -> None:
        self._name = name
        self._lease_s = lease_s
        self._agent = agent
        self._heard = False
        self._heard_at = time.monotonic()  # a daemon that has just started gives agents their time to come back
        self._reports: dict[PartKey, PartReport] = {}
        self._starts: dict[PartKey, Part] = {}
        self._ends: set[PartKey] = set()
        self._graces_s: dict[PartKey, float] = {}
        # (part, offset, size): what the agent has read there, once it has, and when it was last asked for.
        self._logs: dict[tuple[PartKey, int, int], tuple[bytes | None, float]] = {}

    @property
    def away(self) -> bool:
        """Whether it is silent, and so gets nothing new."""
        return not self._heard or self._silent

    @property
    def _silent(self) -> bool:
        return time.monotonic() - self._heard_at > _AWAY_S

    def expect(self, key: PartKey, grace_s: float) -> None:
        """Says that this part may run there, from an earlier life of the daemon."""
        self._graces_s[key] = grace_s

    def start(self, part: Part) -> None:
        """Has the agent start a part."""
        self._graces_s[part.key] = part.grace_s
        self._starts[part.key] = part

    def look(self, key: PartKey) -> PartReport:
        """Says what was last heard of a part; lost, if that was too long ago for it to be running still."""
        report = self._reports.get(key, PartReport(PartState.UNKNOWN))
        over = report.state in _OVER
        silent_s = time.monotonic() - self._heard_at
        if not over and silent_s > self._lease_s + self._graces_s.get(key, 0.0) + SPARE_S:
            return PartReport(PartState.LOST)
        self._reports.setdefault(key, report)  # from now on the agent is asked about it
        if key in self._starts and not over:
            return PartReport(PartState.RUNNING, endpoint=report.endpoint)
        return report

    def end(self, key: PartKey) -> None:
        """Has the agent end a part."""
        self._ends.add(key)

    def read_log(self, key: PartKey, offset: int, size: int) -> bytes:
        """Reads what a part has printed.

        Raises:
            NotYet: The agent has been asked for it now.
            LaunchError: The machine is silent.
        """
        if self.away:
            raise LaunchError(f"machine {self._name!r} is away, and what job {key.job} has printed there is on it")
        data, _ = self._logs.pop((key, offset, size), (None, 0.0))
        if data is None:
            self._logs[key, offset, size] = (None, time.monotonic())
            raise NotYet
        return data

    def forget(self, open_parts: Set[PartKey]) -> None:
        """Drops what is known of parts of runs that are over."""
        for known in (self._reports, self._starts, self._graces_s):
            for key in known.keys() - open_parts:
                del known[key]
        self._ends.intersection_update(open_parts)
        old = [asked for asked, (_, asked_at) in self._logs.items() if time.monotonic() - asked_at > _LOG_KEPT_S]
        for asked in old:
            del self._logs[asked]

    def sync(
        self, *, agent: str, reports: list[list[Any]], logs: list[list[Any]], have: list[str], open_parts: set[PartKey]
    ) -> dict[str, Any]:
        """Hears an agent and tells it what to do.

        Args:
            agent: Names the agent and its folder; there is one per machine. Another one is heard only once nothing
                can be left of what was started in the folder of the first.
            reports: (part, state, status, endpoint) of each part that it was asked about.
            logs: (part, offset, size, data) of what it was asked for.
            have: Parts that run there, as far as the agent knows.
            open_parts: Parts of this machine that may run.

        Raises:
            LaunchError: Another agent speaks for this machine.
        """
        if self._agent not in (None, agent):
            self._make_way(open_parts)
        self._agent, self._heard, self._heard_at = agent, True, time.monotonic()
        for word, offset, size, data in logs:
            asked = (PartKey.parse(word), offset, size)
            if asked in self._logs:
                self._logs[asked] = (base64.b64decode(data), time.monotonic())
        for word, state, status, endpoint in reports:
            key = PartKey.parse(word)
            before = self._reports.get(key)
            if key not in open_parts or (before is not None and before.state in _OVER):
                continue
            report = PartReport(PartState(state), status, endpoint)
            self._reports[key] = report
            if report.state is not PartState.ABSENT:
                self._starts.pop(key, None)
            if report.state in _OVER:
                # What was read before the end may lack the last words; it is asked for again.
                for asked in [asked for asked in self._logs if asked[0] == key]:
                    self._logs[asked] = (None, self._logs[asked][1])
        strangers = [word for word in have if PartKey.parse(word) not in open_parts]
        return {
            "start": [part.to_dict() for part in self._starts.values()],
            "watch": [str(key) for key in self._reports],
            "end": [*map(str, self._ends), *strangers],
            "logs": [[str(key), offset, size] for (key, offset, size), (data, _) in self._logs.items() if data is None],
            "lease_s": self._lease_s,
        }

    def _make_way(self, open_parts: set[PartKey]) -> None:
        """Lets another agent speak, from another folder, unless what runs in that of the present one may live on.

        Raises:
            LaunchError: It may.
        """
        may_run = [key for key in open_parts if self.look(key).state not in _OVER]
        if not self._silent or may_run:
            raise LaunchError(
                f"machine {self._name!r} has an agent already; end that one, or join by another --name"
                + (f". Jobs of an agent that is gone may go on for {self._lease_s:g} s and their grace" * bool(may_run))
            )
        self._reports = {key: self.look(key) for key in open_parts}
        self._starts.clear()
