"""Where the output of workers goes: as torchrun has it, with one file per global rank and attempt."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

# What stands before each line with --tee; set TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE for another.
LINE_PREFIX = "[${job} node ${node} rank ${rank}]: "


class Logs(DefaultLogsSpecs):
    """``LOG_DIR/JOB_xxx/attempt_N/RANK/stdout.log`` and so on, where RANK is the rank in the whole job.

    torchrun numbers attempts by restarts that count, which nodes do not agree on, and deletes the files of an attempt
    when nodes have joined; it names files by the rank within the node.

    Attributes:
        attempt: Number of the coming attempt; set it before workers are started.
    """

    def __init__(self, plain: DefaultLogsSpecs) -> None:
        super().__init__(plain.root_log_dir, plain._redirects, plain._tee, plain._local_ranks_filter)
        self.attempt = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Makes the folders of an attempt; tells each worker its attempt and its error file."""
        for env in envs.values():
            env["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
        made = super().reify(envs)
        if self.root_log_dir == os.devnull:
            return made
        folders: dict[str, str] = {}
        for local_rank in sorted(envs, reverse=True):  # from the top: a global rank is never below the local one
            old = Path(made.error_files[local_rank]).parent
            new = old.parent / envs[local_rank]["RANK"]
            if new != old:
                old.rename(new)
            folders[str(old)] = str(new)

        def moved(files: dict[int, str]) -> dict[int, str]:
            return {rank: _moved(file, folders) for rank, file in files.items()}

        error_files = moved(made.error_files)
        for local_rank, file in error_files.items():
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = file
        return dataclasses.replace(
            made,
            stdouts=moved(made.stdouts),
            stderrs=moved(made.stderrs),
            tee_stdouts=moved(made.tee_stdouts),
            tee_stderrs=moved(made.tee_stderrs),
            error_files=error_files,
        )


def _moved(file: str, folders: dict[str, str]) -> str:
    folder, _, name = file.rpartition(os.sep)
    return f"{folders[folder]}{os.sep}{name}" if folder in folders else file
