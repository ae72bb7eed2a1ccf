"""What torch.distributed asks of any process group written in Python."""

# torch's stub gives some of these as attributes, or in several forms.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from torchext.collectives.compiling import run_as_written


class NamedGroup(dist.ProcessGroup):
    """Carries the names and the timeout that torch gives to a group."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # without a store, which its stub asks for
        self._timeout_s = timeout.total_seconds()
        self._name = ""
        self._desc = ""

    def name(self) -> str:
        return "dfccl"

    def getBackendName(self) -> str:
        return "dfccl"

    def _get_backend_name(self) -> str:
        return "dfccl"

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        pass  # calls are matched by what they are, not by number

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = True) -> None:
        """Blocks until all members have called it; if that is not in time, the error names all that are missing.

        `torch.distributed.monitored_barrier` refuses all backends but gloo before it asks; call it on the group.

        Args:
            timeout: None: that of the group.
            wait_all_ranks: Ignored; here it costs nothing to name all.

        Raises:
            CollectiveTimeoutError: Some have not called it.
        """
        options = dist.BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        self.barrier(options).wait()


run_as_written(NamedGroup)
