"""The daemon as users start it, and the commands that look into it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standby.processes import ROOT, build, start_standby, step
from torchext.standby import Replicator, StandbyError, cli
from torchext.standby.daemon import Daemon
from torchext.standby.link import status

pytestmark = pytest.mark.usefixtures("one_thread")


def test_status_export_and_remove(daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = build()
    with Replicator(model, optimizer, standby=daemon.address, job="a job", mode="rpo0") as replicator:
        for i in range(3):
            step(model, optimizer)
            replicator.commit(i, state={"position": i})
        assert cli.main(["status", "--standby", daemon.address, "--json"]) == 0
        (rank,) = json.loads(capsys.readouterr().out)["jobs"]["a job"]["ranks"]
        assert (rank["step"], rank["published"], rank["lag"], rank["commits"]) == (2, 2, 0, 3)
        assert rank["connected"]
        assert rank["transport"] == "local"
        assert rank["bytes"] == replicator.stats["bytes_pulled"]
        pytest.importorskip("rich", reason="the table needs rich (pip install 'torchext[rich]')")
        assert cli.main(["status", "--standby", daemon.address]) == 0
        assert "a job" in capsys.readouterr().out
    file = tmp_path / "state.ckpt"
    for words, expected in (("latest", 2), ("1", 1)):
        assert cli.main(["export", words, str(file), "--standby", daemon.address]) == 0
        assert capsys.readouterr().out == f"step {expected} written to {file}\n"
        saved = torch.load(file, weights_only=True)
        assert saved["state"] == {"position": expected}
    assert [path.name for path in tmp_path.iterdir()] == ["state.ckpt"]
    assert cli.main(["export", "7", str(file), "--standby", daemon.address]) == 1
    assert "does not hold step 7 of rank 0, only [1, 2]" in capsys.readouterr().err
    assert cli.main(["remove", "a job", "--standby", daemon.address]) == 0
    assert cli.main(["export", "latest", str(file), "--standby", daemon.address]) == 1
    assert "say which job (--job), the standby holds none" in capsys.readouterr().err


def test_a_daemon_ends_cleanly_on_sigterm_and_says_where_it_listens() -> None:
    process, address = start_standby("--jobs", "2", "--memory", "1GiB")
    assert int(address.rpartition(":")[2]) > 0
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


class _Crash(Exception):
    pass


def test_a_local_standby_starts_by_itself_outlives_a_crash_and_ends_with_the_training(monkeypatch: Any) -> None:
    user = 1_000_000_000 + os.getpid()
    monkeypatch.setattr("os.getuid", lambda: user)  # an address of this test's own

    def environment_knows_the_address(*arguments: Any, **options: Any) -> Any:
        command = arguments[0]
        if command[1:3] == ["-m", "torchext"]:
            script = f"import os, sys; os.getuid = lambda: {user}; from torchext.cli import main; sys.exit(main())"
            return run([sys.executable, "-c", script, *command[3:]], cwd=ROOT, **options)
        return run(*arguments, **options)

    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", environment_knows_the_address)
    model, optimizer = build()
    with pytest.raises(_Crash), Replicator(model, optimizer, job="job") as replicator:  # noqa: PT012
        assert replicator.restore() is None
        replicator.commit(0, state="kept")
        raise _Crash
    with Replicator(model, optimizer, job="job") as replicator:
        found = replicator.restore()
        assert found is not None
        assert found.state == "kept"
        process = os.pidfd_open(status("local")["pid"])
    ended = select.poll()
    ended.register(process, select.POLLIN)
    assert ended.poll(60_000)
    os.close(process)


@pytest.mark.parametrize(
    ("text", "expected"), [("64GiB", 64 << 30), ("512MiB", 512 << 20), ("1.5KiB", 1536), ("100", 100), ("7B", 7)]
)
def test_sizes(text: str, expected: int) -> None:
    assert cli.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "64GB", "-1", "1.2.3MiB", "two"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 64GiB or 512MiB"):
        cli.parse_size(text)


def test_a_daemon_takes_so_many_jobs_and_no_more() -> None:
    import threading

    with Daemon("127.0.0.1:0", max_jobs=1) as daemon:
        thread = threading.Thread(target=daemon.serve)
        thread.start()
        model, optimizer = build()
        with Replicator(model, optimizer, standby=daemon.address, job="a") as replicator:
            replicator.commit(0)
        with (
            Replicator(model, optimizer, standby=daemon.address, job="b") as replicator,
            pytest.raises(StandbyError, match=r"holds 1 jobs already, its limit: \['a'\]"),
        ):
            replicator.restore()
        daemon.stop()
        thread.join()


def test_wrong_words_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--memory", "much"], ["--listen", "nowhere"], ["export", "some", "file"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2
    assert "expected a size" in capsys.readouterr().err
