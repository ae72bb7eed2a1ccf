"""What torchrun's command line understands means the same here."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools

import pytest
from torch.distributed.run import get_args_parser

from torchext.launch import arguments
from torchext.launch.durations import duration
from torchext.launch.errors import LaunchError

_OWN = {"grace", "queue", "name", "estimate", "deadline", "priority", "retries", "job_class", "max_price", "min_nodes"}


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, object] | str:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            found = vars(parser.parse_args(words))
    except SystemExit:
        return errors.getvalue().rpartition("error: ")[2]
    return {name: value for name, value in found.items() if name not in _OWN}


def _samples(action: argparse.Action) -> list[list[str]]:
    if action.nargs == 0:
        return [[]]
    if action.choices:
        return [[str(choice)] for choice in action.choices]
    return [["3"], ["a:b,c=d"]]


def test_every_spelling_and_abbreviation_parses_as_in_torchrun() -> None:
    count = 0
    ours, theirs = arguments.parser(), get_args_parser()
    for action in theirs._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        for option in action.option_strings:
            # All abbreviations, also those that torchrun refuses because they could mean several things.
            shortest = 3 if option.startswith("--") else len(option)
            for length, sample in itertools.product(range(shortest, len(option) + 1), _samples(action)):
                spelt = option[:length]
                forms = [[spelt, *sample]]
                if sample:
                    forms.append([f"{spelt}={sample[0]}" if spelt.startswith("--") else f"{spelt}{sample[0]}"])
                for form in forms:
                    words = [*form, "train.py", "--lr", "1", "--grace", "x"]
                    assert _parse(ours, words) == _parse(theirs, words), words
                    count += 1
    assert count > 386


def test_options_after_the_script_are_the_scripts() -> None:
    args = arguments.parser().parse_args(["--grace", "5m", "train.py", "--grace", "7", "--nnodes", "3"])
    assert args.grace == 300.0
    assert args.nnodes == "1:1"
    assert args.training_script_args == ["--grace", "7", "--nnodes", "3"]


def test_environment_sets_defaults_as_in_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert arguments.parser().parse_args(["train.py"]).nproc_per_node == "3"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5h", 5400), ("40m", 2400), ("2d", 172800), ("7s", 7)])
def test_times(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "5x", "nan", "1e400", "m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a time such as"):
        duration(text)


def test_grace_falls_back_to_what_torchrun_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(*words: str) -> float:
        return arguments.grace_s(arguments.parser().parse_args([*words, "train.py"]))

    assert seconds() == 30
    assert seconds("--shutdown-timeout", "7") == 7
    assert seconds("--shutdown-timeout", "7", "--grace", "2") == 2
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "9")
    assert seconds() == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian.py"], r"there is no training script 'trian.py' in '.*'; did you mean 'train.py'\?"),
        (["nowhere/train.py"], "there is no training script 'nowhere/train.py'"),
        (["--no-python", "no-such-program"], "there is no program 'no-such-program'"),
        (["--no-python", "-m", "train.py"], "--no-python and --module exclude each other"),
        (["--nnodes", "two", "train.py"], "--nnodes must be a number or MIN:MAX, got 'two'"),
        (["--nnodes", "3:2", "train.py"], "--nnodes must be at least 1, and MIN no more than MAX, got '3:2'"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node must be at least 1, got 0"),
        (["--nproc-per-node", "99999999999", "train.py"], "--nproc-per-node 99999999999 is more than the"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts must not be negative, got -1"),
    ],
)
def test_what_could_not_work_is_refused_before_anything_starts(
    words: list[str], message: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text("")
    monkeypatch.chdir(folder)
    with pytest.raises(LaunchError, match=message):
        arguments.check(arguments.parser().parse_args(words))


def test_what_can_work_is_let_through(tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("job") / "train.py"
    script.write_text("")
    for words in (
        [str(script)],
        ["-m", "package.module"],
        ["--no-python", "true"],
        ["--nproc-per-node=auto", str(script)],
    ):
        arguments.check(arguments.parser().parse_args(words))
