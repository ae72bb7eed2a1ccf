"""Reads recorded jobs: Philly, ITP, or plain CSV, told apart by their header."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from torchext.scheduling.simulator import RecordedJob
from torchext.scheduling.types import Job, SchedulingError

_Number = TypeVar("_Number", int, float)

_REQUIRED = ("submit_s", "duration_s", "num_gpus")
_OPTIONAL = ("id", "tenant", "job_class", "estimate_s", "deadline_s", "gpus_per_node")


def read_trace(path: str | Path) -> list[RecordedJob]:
    """Reads a trace file; which format it has, its header line says.

    - Philly, flattened: ``timestamp,duration,num_gpus,gpu_time,cluster``. The virtual cluster is the tenant.
      Source: Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads", ATC 2019.
    - ITP: ``job_id,submission_time,duration,num_gpu``, times in seconds from a start that is not told.
      Source: Gu et al., "ElasticFlow", ASPLOS 2023.
    - Plain: ``submit_s,duration_s,num_gpus`` and any of ``id``, ``tenant``, ``job_class``, ``estimate_s``,
      ``deadline_s``, ``gpus_per_node``, named and meant as in `Job` and `RecordedJob`, in any order. Optional
      columns may be empty. ``submit_s`` and ``deadline_s`` are seconds or dates, ``2017-10-02 08:30:00``.

    Dates become seconds since 1970; without a zone they are UTC.

    Args:
        path: The file.

    Returns:
        The jobs, by submission. Jobs without an id are named after their line.

    Raises:
        SchedulingError: The header or a value is not understood; names file, line and column.
        OSError: The file cannot be read.
    """
    jobs: list[RecordedJob] = []
    seen: dict[str, int] = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            header = reader.fieldnames or ()
            parse = _parser(path, [name.strip() for name in header])
            reader.fieldnames = [name.strip() for name in header]
            for row in reader:
                recorded = _parse_row(path, reader.line_num, row, parse)
                earlier = seen.setdefault(recorded.job.id, reader.line_num)
                if earlier != reader.line_num:
                    raise SchedulingError(
                        f"{path}, line {reader.line_num}: id {recorded.job.id!r} is that of line {earlier} too"
                    )
                jobs.append(recorded)
        except (csv.Error, UnicodeDecodeError) as error:
            raise SchedulingError(f"{path}, near line {reader.line_num}: not a CSV file in UTF-8: {error}") from None
    if not jobs:
        raise SchedulingError(f"{path}: no jobs; a header line and one line per job are expected")
    jobs.sort(key=lambda recorded: recorded.job.submit_s)
    return jobs


class _Row:
    """The cells of one line, read by column; errors name the column."""

    def __init__(self, path: str | Path, line: int, cells: Mapping[str, str]) -> None:
        self.line = line
        self._path = path
        self._cells = cells

    def text(self, column: str) -> str:
        return self._cells.get(column, "").strip()

    def seconds(self, column: str) -> float:
        return self._convert(column, _seconds, "a finite number of seconds")

    def time(self, column: str) -> float:
        return self._convert(column, parse_time, "seconds or a date such as 2017-10-02 08:30:00")

    def count(self, column: str) -> int:
        return self._convert(column, _count, "a whole number, at least 1")

    def _convert(self, column: str, convert: Callable[[str], _Number], expected: str) -> _Number:
        text = self.text(column)
        try:
            return convert(text)
        except ValueError:
            where = f"{self._path}, line {self.line}, column {column}"
            raise SchedulingError(f"{where}: expected {expected}, got {text!r}") from None


_Parse = Callable[[_Row], RecordedJob]


def parse_time(text: str) -> float:
    """Turns seconds, or a date with or without time and zone, into seconds.

    Raises:
        ValueError: It is neither.
    """
    try:
        return _seconds(text)
    except ValueError:
        date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _parser(path: str | Path, header: list[str]) -> _Parse:
    columns = set(header)
    if {"timestamp", "duration", "num_gpus", "cluster"} <= columns:
        return _parse_philly
    if {"job_id", "submission_time", "duration", "num_gpu"} <= columns:
        return _parse_itp
    missing = [column for column in _REQUIRED if column not in columns]
    if missing:
        raise SchedulingError(
            f"{path}, line 1: expected the columns {', '.join(_REQUIRED)} (or those of a Philly or ITP trace), "
            f"{', '.join(missing)} missing; got {', '.join(header) or 'an empty file'}"
        )
    unknown = sorted(columns.difference(_REQUIRED, _OPTIONAL))
    if unknown:
        raise SchedulingError(
            f"{path}, line 1: unknown column {unknown[0]!r}; optional ones are {', '.join(_OPTIONAL)}"
        )
    return _parse_plain


def _parse_row(path: str | Path, line: int, cells: Mapping[str | None, str | None], parse: _Parse) -> RecordedJob:
    if None in cells or None in cells.values():
        many = "more" if None in cells else "fewer"
        raise SchedulingError(f"{path}, line {line}: {many} cells than the header has columns")
    try:
        return parse(_Row(path, line, cells))  # type: ignore[arg-type]  # no None left
    except ValueError as error:
        raise SchedulingError(f"{path}, line {line}: {error}") from None


def _parse_philly(row: _Row) -> RecordedJob:
    job = Job(f"line{row.line}", row.time("timestamp"), row.count("num_gpus"), tenant=row.text("cluster"))
    return RecordedJob(job, row.seconds("duration"))


def _parse_itp(row: _Row) -> RecordedJob:
    return RecordedJob(
        Job(row.text("job_id"), row.seconds("submission_time"), row.count("num_gpu")), row.seconds("duration")
    )


def _parse_plain(row: _Row) -> RecordedJob:
    job = Job(
        id=row.text("id") or f"line{row.line}",
        submit_s=row.time("submit_s"),
        num_gpus=row.count("num_gpus"),
        tenant=row.text("tenant"),
        job_class=row.text("job_class"),
        estimate_s=row.seconds("estimate_s") if row.text("estimate_s") else None,
        deadline_s=row.time("deadline_s") if row.text("deadline_s") else None,
        gpus_per_node=row.count("gpus_per_node") if row.text("gpus_per_node") else None,
    )
    return RecordedJob(job, row.seconds("duration_s"))
