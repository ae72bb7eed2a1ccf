from __future__ import annotations

import os
import subprocess
import sys

import pytest

import torchext
from torchext import cli


def _torchext(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchext", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=60)


def test_version_and_help_end_well() -> None:
    version, words = _torchext("--version"), _torchext("--help")
    assert (version.returncode, version.stdout) == (0, f"torchext {torchext.__version__}\n")
    assert words.returncode == 0
    assert "doctor" in words.stdout


@pytest.mark.parametrize("words", [[], ["docter"], ["--json", "doctor"]])
def test_what_is_not_understood_ends_with_status_2_and_names_the_choices(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: torchext" in printed.err
    if words == ["docter"]:
        assert "'docter'" in printed.err
        assert "doctor" in printed.err


def test_words_after_the_command_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--help"])
    assert caught.value.code == 0
    assert "usage: torchext doctor" in capsys.readouterr().out


def test_each_command_of_the_table_exists() -> None:
    import importlib

    for target, words in cli._COMMANDS.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
        assert words


def test_commands_are_imported_only_when_called() -> None:
    program = "import sys, torchext.cli; print(sorted(m for m in sys.modules if m.startswith('torchext.')))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "['torchext.cli']\n"


def test_what_a_command_returns_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def command(argv: list[str]) -> int:
        given.append(argv)
        return 7

    monkeypatch.setattr("torchext.doctor.cli.main", command)
    assert cli.main(["doctor", "a", "--b"]) == 7
    assert given == [["a", "--b"]]


def test_an_interrupt_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchext.doctor.cli.main", command)
    assert cli.main(["doctor"]) == 130


def test_a_reader_that_stops_early_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # so the first write fails
    command = [sys.executable, "-m", "torchext", "doctor"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_broken_pipe_of_the_command_itself_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: object) -> None:
    def command(argv: list[str]) -> int:
        raise BrokenPipeError("a peer has hung up")

    monkeypatch.setattr("torchext.doctor.cli.main", command)
    with pytest.raises(BrokenPipeError, match="a peer has hung up"):
        cli.main(["doctor"])
