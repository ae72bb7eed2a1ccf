"""Starts training jobs: ``torchext run``, a superset of torchrun, and ``torchext queue``, which decides when and where.

Nothing here is needed by a training script: it is started as torchrun starts it, with the same environment variables.
"""

from torchext.launch.errors import LaunchError

__all__ = ["LaunchError"]
