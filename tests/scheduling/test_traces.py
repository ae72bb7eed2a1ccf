from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.scheduling.recorded import recorded
from torchext.scheduling import Job, SchedulingError, read_trace
from torchext.scheduling.traces import parse_time


def _write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_plain_columns_are_read_in_any_order_and_optional_ones_may_be_empty(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "num_gpus,duration_s,submit_s,id,tenant,job_class,estimate_s,deadline_s,gpus_per_node",
        "4,60.5,1970-01-01 00:01:40,one,me,bert,50,1970-01-01T01:00:00+00:30,2",
        "1,7,30,,,,,,",
    )
    second, first = read_trace(path)  # by submission
    assert (first.duration_s, second.duration_s) == (60.5, 7.0)
    fields = ("id", "submit_s", "num_gpus", "tenant", "job_class", "estimate_s", "deadline_s", "gpus_per_node")
    assert [getattr(first.job, f) for f in fields] == ["one", 100.0, 4, "me", "bert", 50.0, 1800.0, 2]
    assert [getattr(second.job, f) for f in fields] == ["line3", 30.0, 1, "", "", None, None, None]


def test_philly_and_itp_are_told_by_their_headers(tmp_path: Path) -> None:
    philly = _write(tmp_path, "timestamp,duration,num_gpus,gpu_time,cluster", "1970-01-02 00:00:01,66.0,2,132.0,11cb48")
    (read,) = read_trace(philly)
    assert (read.job.submit_s, read.duration_s, read.job.num_gpus, read.job.tenant) == (86401.0, 66.0, 2, "11cb48")
    itp = _write(tmp_path, "job_id,submission_time,duration,num_gpu", "965d,5010,1265,64")
    (read,) = read_trace(itp)
    assert (read.job.id, read.job.submit_s, read.duration_s, read.job.num_gpus) == ("965d", 5010.0, 1265.0, 64)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], "line 1: expected the columns submit_s, duration_s, num_gpus .* missing; got"),
        (["submit_s,num_gpus"], "line 1: .*duration_s missing; got submit_s, num_gpus"),
        (["submit_s,duration_s,num_gpus,colour"], "line 1: unknown column 'colour'; optional ones are id, tenant"),
        (["submit_s,duration_s,num_gpus"], "no jobs"),
        (["submit_s,duration_s,num_gpus", "1,2,3", "1,2"], "line 3: fewer cells than the header has columns"),
        (["submit_s,duration_s,num_gpus", "1,2,3,4"], "line 2: more cells than the header has columns"),
        (["submit_s,duration_s,num_gpus", "soon,2,3"], "line 2, column submit_s: expected seconds or a date .*'soon'"),
        (["submit_s,duration_s,num_gpus", "1,nan,3"], "line 2, column duration_s: expected a finite number .*'nan'"),
        (["submit_s,duration_s,num_gpus", "1,2,0"], "line 2, column num_gpus: expected a whole number, at least 1"),
        (["submit_s,duration_s,num_gpus", "1,-2,1"], "line 2: job line2: duration_s must be .* not negative, got -2"),
        (["submit_s,duration_s,num_gpus,gpus_per_node", "1,2,4,3"], "line 2: job line2: gpus_per_node must divide"),
        (["id,submit_s,duration_s,num_gpus", "a,1,2,3", "b,1,2,3", "a,1,2,3"], "line 4: id 'a' is that of line 2 too"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path: Path, lines: list[str], words: str) -> None:
    path = _write(tmp_path, *lines)
    with pytest.raises(SchedulingError, match=f"^{path}.*{words}"):
        read_trace(path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"submit_s,duration_s,num_gpus\n1,2,\xff\n")
    with pytest.raises(SchedulingError, match="not a CSV file in UTF-8"):
        read_trace(path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.csv")


def test_dates_without_a_zone_are_utc() -> None:
    assert parse_time("2017-10-02") == parse_time("2017-10-02T02:00:00+02:00") == 1506902400.0
    assert parse_time("12.5") == 12.5
    for text in ("", "nan", "tomorrow"):
        with pytest.raises(ValueError):
            parse_time(text)


def test_the_recorded_philly_trace_is_read() -> None:
    trace = read_trace(recorded("cluster/philly_2017-09_to_2017-11-05.csv"))
    assert len(trace) == 55_803
    assert len({r.job.tenant for r in trace}) == 13
    assert max(r.job.num_gpus for r in trace) == 32
    assert trace[0].job.submit_s == parse_time("2017-09-04 10:30:41")
    assert all(isinstance(r.job, Job) for r in trace)


@pytest.mark.parametrize(
    ("number", "jobs"), [("01", 1595), ("02", 5778), ("03", 3011), ("05", 3629), ("06", 2396), ("07", 12699)]
)
def test_the_recorded_itp_traces_are_read(number: str, jobs: int) -> None:
    trace = read_trace(recorded(f"cluster/itp/cluster{number}.csv"))
    assert len(trace) == jobs
    assert all(one.job.submit_s <= next_one.job.submit_s for one, next_one in itertools.pairwise(trace))
    assert trace[-1].job.submit_s - trace[0].job.submit_s < 70 * 86400
