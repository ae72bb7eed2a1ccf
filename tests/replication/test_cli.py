"""``torchext site``: a site run by the command, and the questions to it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replication.sites import ROOT, reserve_port
from torchext.replication import Node, cli, load_config

SITE = "import sys, tests.replication.no_torch\nfrom torchext.cli import main\nsys.exit(main(sys.argv[1:]))"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    ports = [reserve_port() for _ in range(2)]
    addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in ports]
    (tmp_path / "site.key").write_text("a key of the tests\n")
    path = tmp_path / "site.toml"
    path.write_text(
        f"""
key_file = "site.key"
acks = ["indexed"]
[sites.paris]
address = "{addresses[0]}"
store = "paris-store"
zone = "eu"
[sites.tokyo]
address = "{addresses[1]}"
store = "tokyo-store"
[predicates]
safe = "MIN($ALLSITES - $MYSITE).persisted"
"""
    )
    yield path
    for sock in ports:
        sock.close()


def test_runs_a_site_answers_and_ends_at_sigterm(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--config", str(config), "--me", "tokyo"]
    site = subprocess.Popen([sys.executable, "-c", SITE, "site", *where], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert site.stdout is not None
        assert site.stdout.readline().startswith("site tokyo listens at 127.0.0.1:")
        with Node(config, me="paris") as paris:
            paris.register_predicate("verified", "MIN(tokyo).verified")  # which comes after persisted
            seq = paris.send(b"hello")
            paris.waitfor(seq, "safe", 30)
            paris.waitfor(seq, "verified", 30)
            assert (config.parent / "tokyo-store" / "streams" / "paris").is_dir()  # relative to the file
            assert cli.main(["status", *where, "--json"]) == 0
            status = json.loads(capsys.readouterr().out)
            assert status["counters"]["paris"]["tokyo"] == {"received": 1, "persisted": 1, "verified": 1}
            assert status["connections"]["paris"]["heard"]
            assert cli.main(["frontier", "--config", str(config), "--me", "paris", "--json"]) == 0
            assert json.loads(capsys.readouterr().out) == {"safe": 1, "verified": 1}
            assert cli.main(["predicates", *where, "--json"]) == 0
            assert json.loads(capsys.readouterr().out) == {"safe": "MIN($ALLSITES - $MYSITE).persisted"}
            for action in ("status", "frontier", "predicates"):
                assert cli.main([action, *where]) == 0
                assert "safe" in capsys.readouterr().out
        site.send_signal(signal.SIGTERM)
        assert site.wait(30) == 0
    finally:
        site.kill()
        site.wait()
        assert site.stdout is not None
        site.stdout.close()


def test_watch_shows_the_frontier_as_it_moves(config: Path) -> None:
    pytest.importorskip("rich", reason="rich is not installed (pip install 'torchext[rich]')")
    screen, terminal = os.openpty()
    command = [sys.executable, "-c", SITE, "site", "frontier", "--watch", "--config", str(config), "--me", "paris"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100"}
    shown = b""

    def read_until(pattern: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + 60
        while not re.search(pattern, shown):
            assert select.select([screen], [], [], max(0.0, deadline - time.monotonic()))[0], shown
            shown += os.read(screen, 10_000)

    with Node(config, me="paris") as paris, Node(config, me="tokyo"):
        watch = subprocess.Popen(command, stdout=terminal, stderr=terminal, cwd=ROOT, env=environment)
        try:
            read_until(rb"safe\W+0\W")
            paris.waitfor(paris.send(b"hello"), "safe", 30)
            read_until(rb"safe\W+1\W")
            watch.send_signal(signal.SIGINT)
            assert watch.wait(30) == 130
        finally:
            watch.kill()
            watch.wait()
            for descriptor in (screen, terminal):
                os.close(descriptor)
    assert b"Traceback" not in shown


def test_check_explains_a_predicate(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--config", str(config), "--me", "paris"]
    assert cli.main(["check", "MAX($ALLSITES - $MYSITE, MIN($ZONE_eu)).indexed", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "predicate": "MAX($ALLSITES - $MYSITE, MIN($ZONE_eu)).indexed",
        "means": "greatest of (tokyo.indexed, paris.indexed)",
        "dual": "MIN($ALLSITES - $MYSITE, MAX($ZONE_eu)).indexed",
        "reads": ["tokyo.indexed", "paris.indexed"],
        "cannot_do_without": [],
    }
    assert cli.main(["check", "MIN($ALLSITES)", *where]) == 0
    assert "cannot do without: paris, tokyo" in capsys.readouterr().out
    assert cli.main(["check", "MIN($ALLSITES, kyoto)", *where]) == 1
    assert "column 16: there is no site 'kyoto'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--me", "oslo"], "--me: there is no site 'oslo'; there are: paris, tokyo"),
        (["status", "--me", "tokyo"], "site tokyo does not answer at 127.0.0.1:"),
        (["check", "--me", "tokyo"], "check needs a predicate"),
    ],
)
def test_says_what_is_wrong(config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli.main([*arguments, "--config", str(config)]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "unknown key 'x'; expected some of acks, dead_after_s, key"),
        ("key = 'short'\n[sites.a]\naddress='h:1'\nstore='s'", "the key must have at least 16 bytes"),
        ("[sites.a]\naddress='h:1'\nstore='s'", "give key_file (or key), or a [tls] table"),
        ("[sites.a]\naddress='h'\nstore='s'", "[sites.a]: address: expected an address as host:port"),
        ("[sites.a]\naddress='h:1'", "[sites.a]: store is missing"),
        ("[sites.a]\naddress='h:1'\nstore='s'\nport='1'", "[sites.a]: unknown key 'port'"),
        ("segment_bytes = 10\n[sites.a]\naddress='h:1'\nstore='s'", "segment_bytes: expected a whole number, at least"),
        ("acks = ['received']\n[sites.a]\naddress='h:1'\nstore='s'", "acks: expected names other than received"),
        ("dead_after_s = 0\n[sites.a]\naddress='h:1'\nstore='s'", "dead_after_s: expected seconds, at least 0.1"),
        ("key = ", "not a TOML file"),
        ("", "expected at least one [sites.NAME] table"),
    ],
)
def test_config_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    from torchext.replication import ConfigError

    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
