"""The watch of conftest.py, tried in pytest runs of its own on tests that leak each kind of thing and on clean ones."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests import leaks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc and /dev/shm show what has leaked")

ROOT = Path(__file__).parent.parent

LEAKY = """
import multiprocessing.shared_memory, os, socket, subprocess, sys, threading, uuid
import pytest, torch, torch.distributed as dist

KEPT = []  # nothing is collected, so that what leaks is the thing and not a warning about it


def test_thread():
    stop = threading.Event()
    KEPT.append((stop, threading.Thread(target=stop.wait, name="left behind", daemon=True)))
    KEPT[-1][1].start()


def test_process():
    KEPT.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))  # ends with us, at the end of its input


def test_process_not_waited_for():
    KEPT.append(subprocess.Popen(["true"]))
    os.waitid(os.P_PID, KEPT[-1].pid, os.WEXITED | os.WNOWAIT)


def test_orphan():
    reading, writing = os.pipe()
    KEPT.append(writing)
    command = ["sh", "-c", f"cat /dev/fd/{reading} >/dev/null &"]
    subprocess.run(command, pass_fds=[reading], stdout=subprocess.DEVNULL, check=True)
    os.close(reading)


def test_shared_memory():
    KEPT.append(open(f"/dev/shm/left-behind-{uuid.uuid4().hex}", "w"))


def test_tcp_port():
    KEPT.append(socket.create_server(("127.0.0.1", 0)))


def test_tcp6_port():
    KEPT.append(socket.create_server(("::1", 0), family=socket.AF_INET6))


def test_unix_socket(tmp_path):
    KEPT.append(socket.socket(socket.AF_UNIX))
    KEPT[-1].bind(str(tmp_path / "s"))
    KEPT[-1].listen()


def test_environment_added():
    os.environ["LEFT_BEHIND"] = "1"


def test_environment_changed():
    os.environ["HOME"] = "/left-behind"


def test_environment_removed():
    del os.environ["PATH"]


def test_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="session", autouse=True)
def _in_the_end():
    yield
    for name in os.listdir("/dev/shm"):
        if name in {os.path.basename(f.name) for f in KEPT if hasattr(f, "name") and isinstance(f.name, str)}:
            os.unlink(f"/dev/shm/{name}")
"""

CLEAN = """
import multiprocessing, multiprocessing.shared_memory, os, socket, subprocess, threading
import pytest, torch, torch.distributed as dist


@pytest.mark.allow_leaks("environment", reason="shows that the next test does not see it")
def test_allowed():
    os.environ["ALLOWED"] = "1"


def test_environment_is_restored(monkeypatch):
    assert "ALLOWED" not in os.environ and "LEFT_BEHIND" not in os.environ
    monkeypatch.setenv("OWN", "1")
    monkeypatch.delenv("PATH")


def test_joined_thread():
    thread = threading.Thread(target=bool)
    thread.start()
    thread.join()


def test_thread_about_to_end():
    threading.Timer(0.05, bool).start()


def test_waited_process():
    subprocess.run(["true"], check=True)


def test_spawned_process_and_shared_memory():
    # Both start multiprocessing's resource tracker, which stays until the end of the process.
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=8)
    process = multiprocessing.get_context("spawn").Process(target=bool)
    process.start()
    process.join()
    process.close()
    memory.close()
    memory.unlink()


def test_closed_port():
    with socket.create_server(("127.0.0.1", 0)):
        pass


def test_native_pools():
    x = torch.randn(512, 512, requires_grad=True)
    (x @ x).tanh().sum().backward()


def test_loader_workers():
    assert len(list(torch.utils.data.DataLoader(range(4), num_workers=1))) == 4


def test_optimizer():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def test_compiled():
    compiled = torch.compile(lambda x: x.sin().sum(), fullgraph=True)
    compiled(torch.ones(8, requires_grad=True)).backward()


def test_lightning(tmp_path):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, index):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    lightning.seed_everything(0)
    trainer = lightning.Trainer(max_epochs=1, logger=False, default_root_dir=tmp_path, accelerator="cpu")
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 2), num_workers=0))


def test_seed_of_lightning_is_taken_away():
    assert "PL_GLOBAL_SEED" not in os.environ


def test_destroyed_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_closed_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("a", "b")
"""

# Test in LEAKY -> what the report must say. `uuid` and ports differ from run to run.
REPORTS = {
    "test_thread": "threads: thread 'left behind'",
    "test_process": ": cat",
    "test_process_not_waited_for": "not waited for",
    "test_orphan": "cat /dev/fd/",  # by the shell, until it has become cat
    "test_shared_memory": "shared memory: /dev/shm/left-behind-",
    "test_tcp_port": "listening sockets: tcp port",
    "test_tcp6_port": "listening sockets: tcp6 port",
    "test_unix_socket": "listening sockets: unix socket",
    "test_environment_added": "environment: LEFT_BEHIND=1",
    "test_environment_changed": "environment: HOME=/left-behind",
    "test_environment_removed": "(removed)",
    "test_process_group": "process groups: process group",
}


def _run(folder: Path, source: str, settle_s: float) -> dict[str, str]:
    """Runs the tests under the watch; gives for each test its complaint, or nothing where it passed."""
    (folder / "test_it.py").write_text(source)
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    options = ["--rootdir", str(folder), f"--settle-s={settle_s}", f"--junit-xml={report}", "test_it.py"]
    result = subprocess.run(
        [*command, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert report.exists(), result.stdout + result.stderr
    cases = ET.parse(report).getroot().iter("testcase")
    return {case.attrib["name"]: "\n".join(_text(child) for child in case) for case in cases}


def _text(element: ET.Element) -> str:
    return f"{element.tag}: {element.attrib.get('message', '')} {element.text}"


@pytest.fixture(scope="module")
def leaky(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _run(tmp_path_factory.mktemp("leaky"), LEAKY, settle_s=0.1)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _run(tmp_path_factory.mktemp("clean"), CLEAN, settle_s=5.0)


@pytest.mark.parametrize(("test", "words"), REPORTS.items())
def test_a_leak_is_reported(leaky: dict[str, str], test: str, words: str) -> None:
    assert "the test left behind" in leaky[test]
    assert words in leaky[test]


@pytest.mark.parametrize("test", REPORTS)
def test_only_the_leaking_test_is_blamed(leaky: dict[str, str], test: str) -> None:
    # One thing each: what the tests before it left is there still, and is not reported again.
    # (A process group over gloo also listens.)
    assert leaky[test].count("  ") <= 2 + leaky[test].count("listening sockets"), leaky[test]


def test_clean_tests_pass(clean: dict[str, str]) -> None:
    assert len(clean) == CLEAN.count("def test_")
    assert {name: words for name, words in clean.items() if words} == {}


def test_shared_memory_of_other_programs_is_no_leak() -> None:
    # It must not descend from this process, or it would be ours: it is started by a shell that is gone.
    program = """if True:
        import multiprocessing, os, sys, tempfile
        lock = multiprocessing.get_context("spawn").Lock()  # its name stays in /dev/shm as long as it does
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, open(folder + "/file", "w"):
            print("sem." + lock._semlock.name[1:], os.path.basename(folder), flush=True)
            sys.stdin.read()
    """
    reading, writing = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != leaks.MARKER}
    shell = subprocess.Popen(
        ["sh", "-c", f'"$0" -c "$1" < /dev/fd/{reading} &', sys.executable, program],
        pass_fds=[reading],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    os.close(reading)
    with shell, open(writing, "w"):
        assert shell.wait() == 0
        assert shell.stdout is not None
        made = set(shell.stdout.readline().split())
        assert len(made) == 2
        assert made <= set(leaks.shared_memory())
        assert leaks.held_by_others(made) == made
