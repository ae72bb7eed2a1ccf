from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchext import cli


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = ["submit_s,duration_s,num_gpus,tenant", "0,7200,3,me", "600,3600,4,you", "1200,1800,1,me", "86400,60,1,me"]
    path.write_text("\n".join(lines))
    return path


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = cli.main(["simulate", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_table_compares_policies(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _run(capsys, "--trace", trace, "--cluster", "1x4", "--policy", "fifo,fifo-firstfit,sjf")
    assert (status, err) == (0, "")
    head, fifo, first_fit, sjf, note = out.splitlines()
    assert head.split()[:4] == ["policy", "jobs", "JCT", "h"]
    # fifo: 2, 2.83, 3.17 and 0.02 hours; first fit: the third passes the second and takes half an hour.
    assert fifo.split()[:3] == ["fifo", "4", "2.00"]
    assert first_fit.split()[:3] == ["fifo-firstfit", "4", "1.34"]
    assert sjf.split()[0] == "sjf*"
    assert note == "* told the true durations"
    assert len({len(line) for line in (head, fifo, first_fit, sjf)}) == 1
    names = re.split(r"\s{2,}", head)
    assert len(set(names)) == len(names)


def test_short_times_are_not_rounded_to_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text("submit_s,duration_s,num_gpus\n0,9,1\n0,9,1\n")
    _, out, _ = _run(capsys, "--trace", trace, "--cluster", "1x1", "--policy", "fifo")
    head, line = (re.split(r"\s{2,}", row) for row in out.splitlines())
    assert dict(zip(head, line, strict=True))["makespan h"] == "0.005"


def test_json_has_all_metrics_by_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trace", trace, "--cluster", "1x4", "--policy", "qssf, las", "--to", "3600", "--json")
    status, out, _ = _run(capsys, *words)
    read = json.loads(out)
    assert status == 0
    assert read.keys() == {"qssf", "las"}
    assert read["qssf"]["num_jobs"] == 3
    assert read["qssf"]["jct_s"].keys() == {"mean", "median", "p99"}


def test_dates_choose_the_jobs(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--trace", trace, "--cluster", "1x4", "--policy", "fifo", "--json")
    assert json.loads(_run(capsys, *common, "--from", "1970-01-02")[1])["fifo"]["num_jobs"] == 1
    status, out, err = _run(capsys, *common, "--from", "1971-01-01")
    assert (status, out) == (1, "")
    assert err.endswith("it has jobs from 0 s to 86400 s\n")
    trace.write_text("submit_s,duration_s,num_gpus\n1507507200,60,1\n1507510800,60,1\n")
    assert "from 2017-10-09T00:00:00 to 2017-10-09T01:00:00" in _run(capsys, *common, "--from", "2018-01-01")[2]


def test_costs_failures_and_too_large_jobs_show(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--trace", trace, "--cluster", "2x2", "--policy", "fifo-firstfit")
    free = json.loads(_run(capsys, *common, "--json")[1])["fifo-firstfit"]
    failing = ("--mtbf", 2000, "--mttr", 100, "--restart", 60, "--checkpoint-every", 300, "--seed", 1)
    costly = json.loads(_run(capsys, *common, *failing, "--json")[1])["fifo-firstfit"]
    assert free["num_failed"] == 0 < costly["num_failed"]
    assert costly["jct_s"]["mean"] > free["jct_s"]["mean"]
    _, out, _ = _run(capsys, "--trace", trace, "--cluster", "1x3", "--policy", "fifo", "--placement", "spread")
    assert out.splitlines()[-1] == "1 jobs left out: they do not fit on this cluster, even when it is empty"


def test_fees_and_deadlines_get_columns_when_there_are_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, cluster = tmp_path / "trace.csv", tmp_path / "cluster.toml"
    trace.write_text("submit_s,duration_s,num_gpus,deadline_s\n0,7200,1,3600\n")
    cluster.write_text("[[machines]]\ngpus = 1\nprice_per_gpu_hour = 5\n")
    _, out, _ = _run(capsys, "--trace", trace, "--cluster", cluster, "--policy", "gavel", "--placement", "fastest")
    head, line = out.splitlines()
    assert head.split()[-5:] == ["fees", "late", "h", "late", "%"]
    assert line.split()[-3:] == ["10", "1.00", "100.0"]


def test_the_shipped_trace_and_cluster_run(capsys: pytest.CaptureFixture[str]) -> None:
    examples = Path(__file__).parents[2] / "examples"
    words = ("--trace", examples / "data" / "philly_2017-10-09.csv", "--cluster", examples / "cluster.toml")
    status, out, _ = _run(capsys, *words, "--policy", "fifo,qssf,las,sjf")
    assert status == 0
    mean_jct_h = {line.split()[0]: float(line.split()[2]) for line in out.splitlines()[1:-1]}
    assert mean_jct_h["sjf*"] < mean_jct_h["qssf"] < mean_jct_h["fifo"]
    assert mean_jct_h["las"] < mean_jct_h["fifo"]


def test_a_plot_is_written(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    status, _, _ = _run(capsys, "--trace", trace, "--cluster", "1x4", "--policy", "fifo", "--plot", picture)
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_synthetic_world_is_the_one_of_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "examples" / "data" / "philly_2017-10-09.csv"
    words = ("--trace", trace, "--cluster", "synthetic:15", "--world", "synthetic", "--to", "2017-10-09 02:00")
    _, out, err = _run(capsys, *words, "--policy", "qssf,machine-mean,rwgp", "--json")
    assert err == ""
    mean_s = {name: summary["jct_s"]["mean"] for name, summary in json.loads(out).items()}
    assert len(set(mean_s.values())) == 3
    assert json.loads(_run(capsys, *words, "--policy", "rwgp", "--json")[1])["rwgp"]["jct_s"]["mean"] == mean_s["rwgp"]
    other = json.loads(_run(capsys, *words, "--policy", "qssf", "--seed", 1, "--json")[1])
    assert other["qssf"]["jct_s"]["mean"] != mean_s["qssf"]


def test_a_placement_for_a_policy_that_learns_its_own_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--trace", trace, "--cluster", "1x4", "--policy", "rwgp", "--placement", "packed")
    status, _, err = _run(capsys, *words)
    assert status == 1
    assert "'rwgp' learns where jobs go; leave the placement out" in err


def test_inputs_that_cannot_be_used_end_with_status_1_and_a_reason(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, reason in [
        (("--trace", tmp_path / "none.csv", "--cluster", "1x4"), "--trace: cannot read "),
        (("--trace", trace, "--cluster", "1 by 4"), "neither NODESxGPUS"),
        (("--trace", trace, "--cluster", "1x4", "--plot", tmp_path / "no" / "out.png"), "out.png"),
    ]:
        status, _, err = _run(capsys, *words, "--policy", "fifo")
        assert status == 1
        assert err.startswith("torchext simulate: ")
        assert reason in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--policy", "fifo,lifo"), "there is no policy 'lifo'; choose from fifo, fifo-firstfit"),
        (("--policy", "fifo", "--from", "soon"), "expected a date such as 2017-10-02, or seconds, got 'soon'"),
        (("--policy", "fifo", "--mtbf", "0"), "expected seconds above 0, got '0'"),
        (("--policy", "fifo", "--restart", "-3"), "expected seconds, finite and not negative, got '-3'"),
        (("--policy", "fifo", "--checkpoint", "x"), "expected seconds, finite and not negative, got 'x'"),
    ],
)
def test_options_that_are_not_understood_end_with_status_2(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["simulate", "--trace", "t.csv", "--cluster", "1x1", *words])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("name", "message"), [("out.xyz", "must end in .png"), ("no/out.png", "there is no folder")])
def test_a_plot_that_cannot_be_written_is_refused_before_the_simulation(
    name: str, message: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--trace", trace, "--cluster", "1x4", "--policy", "fifo", "--plot", tmp_path / name)
    status, out, err = _run(capsys, *words)
    assert (status, out) == (1, "")
    assert message in err
