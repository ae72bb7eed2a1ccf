"""The queue: a daemon that decides which job runs next and where, and what it needs to start and find them.

``daemon`` (sockets) -> ``dispatcher`` (decisions become effects) -> ``store`` (SQLite) and ``node`` (processes on one
machine, each with a folder and a ``runner``), or ``remote`` and ``agent`` for machines that join, or ``slurm_engine``
and ``slurm_task`` for those of Slurm. ``client`` and ``cli`` speak to the daemon.
"""

from torchext.launch.queue.client import Client
from torchext.launch.queue.history import recorded
from torchext.launch.queue.submit import describe
from torchext.launch.queue.types import JobState, Submission

__all__ = ["Client", "JobState", "Submission", "describe", "recorded"]
