from __future__ import annotations

import json

import pytest

import torchext
from torchext.doctor import Finding
from torchext.doctor.cli import has_part, main, to_json, to_table

FINDINGS = [
    Finding("versions", "python", True, "3.11", "", "all of torchext", ""),
    Finding("kernel", "huge pages", False, "none are reserved", "standby", "state in huge pages", "as root: sysctl"),
    Finding("kernel", "memfd", True, "made", "losses", "shared memory", ""),
]


def test_the_table_is_aligned_and_marks_parts_to_come() -> None:
    table = to_table(FINDINGS, width=80, has_part=lambda part: part == "losses").splitlines()
    assert table[0].startswith(f"torchext {torchext.__version__} on ")
    assert table[1:] == [
        "",
        "versions",
        "  ok      python      3.11",
        "                      for all of torchext",
        "",
        "kernel",
        "  absent  huge pages  none are reserved",
        "                      for standby*: state in huge pages",
        "                      get it: as root: sysctl",
        "  ok      memfd       made",
        "                      for losses: shared memory",
        "",
        f"* not yet in torchext {torchext.__version__}",
    ]


def test_the_footnote_is_there_only_where_needed() -> None:
    assert "*" not in to_table(FINDINGS, width=80, has_part=lambda part: True)


def test_long_words_are_wrapped_under_their_column() -> None:
    long = Finding("kernel", "x", True, "word " * 40, "", "y", "")
    lines = to_table([long], width=60).splitlines()[3:]
    assert all(len(line) <= 60 for line in lines)
    assert all(line.startswith(" " * 13 + "word") for line in lines[1:-1])


def test_json_holds_the_same() -> None:
    report = json.loads(to_json(FINDINGS))
    assert report["torchext"] == torchext.__version__
    assert [Finding(**finding) for finding in report["findings"]] == FINDINGS


@pytest.mark.parametrize("part", ["", "losses", "callbacks", "doctor"])
def test_parts_of_this_version_are_known(part: str) -> None:
    assert has_part(part)
    assert not has_part("no_such_part")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr()
    assert "PAGEMAP_SCAN" in printed.out
    assert printed.err == ""


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"python", "torchext._native", "Slurm"} <= {finding["name"] for finding in report["findings"]}
