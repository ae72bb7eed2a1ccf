"""README and guides keep their word: snippets run, files exist, commands have the shape that .ci/run relies on."""

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
# Each part has a guide beside its code, with what is too long for the README.
GUIDES = sorted(path for path in (ROOT / "torchext").glob("*/README.md"))
PAGES = [ROOT / "README.md", *GUIDES]
SETUP = "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[dev]' && "


def _blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _first_line(block: str) -> str:
    return next(line for line in block.splitlines() if not line.startswith(("import", "from")) and line)


SNIPPETS = [snippet for page in PAGES for snippet in _blocks("python", page.read_text())]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=_first_line)
def test_snippet_runs(snippet: str, tmp_path: Path) -> None:
    # With the installed torchext, and with warnings as errors, as nobody wants them from a first try.
    command = [sys.executable, "-W", "error", "-c", snippet]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr


def test_there_are_snippets() -> None:
    assert len(_blocks("python")) >= README.count("```python") >= 1
    assert len(SNIPPETS) == sum(page.read_text().count("```python") for page in PAGES)


def test_two_commands_set_up_and_do_everything() -> None:
    commands = [line for block in _blocks("sh") for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert commands[0].startswith(SETUP + "python examples/forecast.py")
    assert commands[1] == SETUP + "pytest"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_commands_named_exist(page: Path) -> None:
    text = page.read_text()
    for block in _blocks("sh", text):
        for words in map(shlex.split, re.split(r"&&|\n", block)):
            assert not words or words[0] in {"python3", ".", "pip", "python", "pytest", "torchext"}, words
            if words[:1] == ["python"] and words[1] != "-m":
                assert (ROOT / words[1]).is_file(), words[1]
    for target in re.findall(r"\]\((?!https?:)([^)]+)", text):
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), target
        if anchor:
            assert anchor in _anchors(there.read_text()), target


def _anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_leads_to_each_guide() -> None:
    assert {str(path.relative_to(ROOT)) for path in GUIDES} <= set(re.findall(r"\]\(([^)#]+)", README))


def test_ci_runs_the_same_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    # It takes the line out of the README by this pattern; a second copy of it could drift.
    assert SETUP not in script
    (pattern,) = re.findall(r"grep -E '(.*)' README.md", script)
    assert re.findall(pattern, README, re.MULTILINE) == [SETUP + "pytest"]
