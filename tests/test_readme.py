"""The README keeps its word: its snippets run, and its commands have the shape that .ci/run relies on."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SETUP = "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[dev]' && "


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _first_line(block: str) -> str:
    return next(line for line in block.splitlines() if not line.startswith(("import", "from")) and line)


@pytest.mark.parametrize("snippet", _blocks("python"), ids=_first_line)
def test_snippet_runs(snippet: str, tmp_path: Path) -> None:
    # With the installed torchext, and with warnings as errors, as nobody wants them from a first try.
    command = [sys.executable, "-W", "error", "-c", snippet]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr


def test_there_are_snippets() -> None:
    assert len(_blocks("python")) >= README.count("```python") >= 1


def test_two_commands_set_up_and_do_everything() -> None:
    commands = [line for block in _blocks("sh") for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert commands[0].startswith(SETUP + "python examples/forecast.py")
    assert commands[1] == SETUP + "pytest"


def test_files_and_commands_named_exist() -> None:
    for block in _blocks("sh"):
        for words in map(shlex.split, re.split(r"&&|\n", block)):
            assert not words or words[0] in {"python3", ".", "pip", "python", "pytest", "torchext"}, words
            if words[:1] == ["python"] and words[1] != "-m":
                assert (ROOT / words[1]).is_file(), words[1]
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_ci_runs_the_same_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    # It takes the line out of the README by this pattern; a second copy of it could drift.
    assert SETUP not in script
    (pattern,) = re.findall(r"grep -E '(.*)' README.md", script)
    assert re.findall(pattern, README, re.MULTILINE) == [SETUP + "pytest"]
