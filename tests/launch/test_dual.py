"""The queue with the policy that learns, and the agents that come with torchext: users, workers and crashes as ever."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.launch.test_dispatcher import _Machine

pytest.importorskip("safetensors")


class _DualMachine(_Machine):
    policy = "dual"


class _PreemptiveDualMachine(_Machine):
    policy = "dual-preemptive"


_SETTINGS = settings(
    max_examples=5, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
for _case in (_DualMachine, _PreemptiveDualMachine):
    _case.TestCase.settings = _SETTINGS
TestDual = _DualMachine.TestCase
TestPreemptiveDual = _PreemptiveDualMachine.TestCase
