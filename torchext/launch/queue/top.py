"""``torchext queue top``: jobs and machines, live; needs rich."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchext.launch.errors import LaunchError
from torchext.launch.queue.client import Client
from torchext.launch.queue.words import job_lines

if TYPE_CHECKING:
    from rich.console import Group

_COLOURS = {"running": "green", "waiting": "yellow", "failed": "red", "cancelled": "dim", "done": "dim"}
_RECENT_S = 600.0  # ended jobs stay in view for so long
_REFRESH_S = 1.0


def show(client: Client) -> None:
    """Prints one view.

    Raises:
        LaunchError: rich is missing.
    """
    _need_rich()
    from rich.console import Console

    Console().print(_view(client))


def watch(client: Client) -> None:
    """Shows the queue until Ctrl-C.

    Raises:
        LaunchError: rich is missing, or the queue has ended.
    """
    _need_rich()
    from rich.live import Live

    with Live(_view(client), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_REFRESH_S)
            live.update(_view(client), refresh=True)


def _need_rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise LaunchError("top needs rich: pip install 'torchext[rich]'; torchext queue ls does without") from error


def _view(client: Client) -> Group:
    from rich.console import Group
    from rich.table import Table

    answer = client.call("jobs", ended_within_s=_RECENT_S)
    machines = Table(box=None, title="machines", title_justify="left")
    for name in ("machine", "state", "slots", "used", "jobs"):
        machines.add_column(name)
    for name, state, slots, free, jobs in client.call("machines"):
        bar = "#" * (slots - free) + "." * free
        machines.add_row(name, state, str(slots), bar, " ".join(map(str, jobs)))
    head, *lines = job_lines(answer["jobs"], answer["now_s"])
    table = Table(box=None, title="jobs", title_justify="left")
    for name in head:
        table.add_column(name)
    for line in lines:
        table.add_row(*line, style=_COLOURS.get(line[3]))
    return Group(machines, table)
