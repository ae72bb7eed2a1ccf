"""As ``torchext run``, but the agent gets a signal at a moment: METHOD:before|after:N SIGNAL, then the usual words.

The moment is that before or after the N-th call of a method of the agent.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from torchext.launch.agent import Agent
from torchext.launch.cli import run_main


def main(moment: str, name: str, *words: str) -> int:
    method, when, count = moment.split(":")
    inner = getattr(Agent, method)
    calls = 0

    def outer(self: Agent, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        hit = calls == int(count)
        if hit and when == "before":
            os.kill(os.getpid(), signal.Signals[name])
        result = inner(self, *args, **more)
        if hit and when == "after":
            os.kill(os.getpid(), signal.Signals[name])
        return result

    setattr(Agent, method, outer)
    return run_main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
