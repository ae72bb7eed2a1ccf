"""What torchrun's command line understands means the same here."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import io
import itertools
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from torchext.launch import arguments
from torchext.launch.durations import duration
from torchext.launch.errors import LaunchError
from torchext.launch.queue.submit import describe

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


def test_options_for_a_queue_become_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    words = ["--nnodes", "2", "--nproc-per-node", "4", "--estimate", "40m", "--deadline", "2h", "--priority", "3"]
    words += ["--grace", "60", "--retries", "2", "--class", "vision", "--min-nodes", "1", "--max-price", "2.5"]
    before_s = time.time()
    job = describe([*words, "--rdzv-conf", "a=1", "train.py", "--lr", "1"])
    assert (job.name, job.user, job.cwd) == ("train", getpass.getuser(), str(tmp_path))
    assert (job.num_nodes, job.nproc_per_node, job.min_nodes) == (2, 4, 1)
    assert (job.estimate_s, job.grace_s, job.retries, job.priority) == (2400, 60, 2, 3)
    assert (job.job_class, job.max_price_per_gpu_hour, job.rendezvous) == ("vision", 2.5, "a=1")
    assert job.deadline_s is not None
    assert before_s + 7200 <= job.deadline_s <= time.time() + 7200
    assert job.command == ("train.py", "--lr", "1")
    plain = describe(["--name", "mine", "train.py"])
    assert (plain.name, plain.num_nodes, plain.nproc_per_node, plain.grace_s) == ("mine", 1, 1, 30)
    assert (plain.estimate_s, plain.deadline_s, plain.min_nodes, plain.retries) == (None, None, None, 0)
    assert describe(["--nproc-per-node", "gpu", "train.py"]).nproc_per_node is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian.py"], "there is no training script 'trian.py'"),
        (["--nnodes", "1:2", "train.py"], "--nnodes must be one number with --queue, got '1:2'"),
        (["--nnodes", "2", "--standalone", "train.py"], "--standalone is for one node"),
        (["--nnodes", "2", "--min-nodes", "3", "train.py"], "--min-nodes must be from 1 to the 2 of --nnodes, got 3"),
    ],
)
def test_what_no_queue_could_run_is_refused_at_submission(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=message):
        describe(words)
