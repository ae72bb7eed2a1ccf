"""Channels between real processes: how they travel, and that nothing stays when processes end or are killed."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.channels.processes import DEADLINE_S, die, ends, process
from torchext.channels import Channel, ChannelClosed, ChannelError, ChannelTimeout, PeerDied, Sender, connect

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIZE = 1 << 14  # too small for torch to use OpenMP, which hangs in processes that were forked after its use


def send_range(channel: Channel, first: int, count: int) -> None:
    with channel.sender(f"sender-{first}") as sender:
        for i in range(first, first + count):
            sender.send({"i": i, "x": torch.full((SIZE,), i)}, timeout=DEADLINE_S)


def echo(requests: Channel, replies: Channel) -> None:
    with replies.sender("echo") as sender:
        for message in requests:
            sender.send(message, timeout=DEADLINE_S)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_started_processes_get_the_channel_as_an_argument(method: str) -> None:
    with Channel() as requests, Channel() as replies, process(echo, requests, replies, method=method) as child:
        with requests.sender() as sender:
            for i in range(20):
                sender.send({"i": i, "x": torch.arange(i)}, timeout=DEADLINE_S)
                got = replies.receive(DEADLINE_S)
                assert got["i"] == i
                assert torch.equal(got["x"], torch.arange(i))
        assert ends(child) == 0
    if method == "forkserver":
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def test_messages_of_a_producer_that_has_ended_arrive() -> None:
    # pytorch/pytorch#45831 #60654: they were lost with it.
    with Channel(slots=8) as channel, process(send_range, channel, 0, 8) as child:
        assert ends(child) == 0
        got = list(channel)
        assert [message["i"] for message in got] == list(range(8))
        assert all((message["x"] == message["i"]).all() for message in got)


def test_several_producers_keep_their_own_order() -> None:
    with Channel(slots=4, num_senders=3) as channel:
        starts = [0, 1000, 2000]
        with contextlib.ExitStack() as stack:
            for start in starts:
                stack.enter_context(process(send_range, channel, start, 100))
            got = []
            for message in channel:
                assert (message["x"] == message["i"]).all()
                got.append(message["i"])
    for start in starts:
        assert [i for i in got if start <= i < start + 1000] == list(range(start, start + 100))
    assert len(got) == 300


def fork_with_threads(channel: Channel) -> None:
    """Forks, as DataLoader workers are, while other threads of this process use the channel."""
    sender = channel.sender("threads")
    stop = threading.Event()
    threads = [threading.Thread(target=lambda: [sender.send(-1, timeout=DEADLINE_S) for _ in iter(stop.is_set, True)])]
    threads.append(threading.Thread(target=lambda: [channel.stats() for _ in iter(stop.is_set, True)]))
    for thread in threads:
        thread.start()
    for i in range(10):
        pid = os.fork()
        if pid == 0:
            with sender, channel.sender(f"child-{i}") as own:
                sender.send(1000 + i, timeout=DEADLINE_S)  # the parent's, in this process
                own.send(i, timeout=DEADLINE_S)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join()
    sender.close()


def test_forking_while_threads_use_the_channel() -> None:
    # pytorch/pytorch#2245 #17199: the children hung in locks that were held at the fork.
    with Channel(slots=4) as channel, process(fork_with_threads, channel) as child:
        got = [message for message in channel if message != -1]
        assert sorted(got) == [*range(10), *range(1000, 1010)]
        assert ends(child) == 0


def send_what_is_dropped(sender: Sender) -> None:
    assert not sender.send(torch.zeros(1 << 16), timeout=DEADLINE_S)
    sender.close()


def test_a_fork_whose_messages_are_dropped_has_been_there_all_the_same() -> None:
    with Channel(slots=1, policy="drop_newest", num_senders=2) as channel:
        with channel.sender() as sender:
            sender.send(1)
            with process(send_what_is_dropped, sender) as child:
                assert ends(child) == 0
        assert channel.receive(DEADLINE_S) == 1
        with pytest.raises(ChannelClosed, match="all senders have left"):
            channel.receive(DEADLINE_S)


# --- Deaths --------------------------------------------------------------------------------------------------------


def die_while_writing(channel: Channel) -> None:
    sender = channel.sender("explorer-3")
    with sender.reserve({"x": torch.empty(SIZE)}) as tree:
        tree["x"].fill_(1)
        die()


def raise_after(channel: Channel) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sender = channel.sender("explorer-4")
    sender.send(1, timeout=DEADLINE_S)
    raise ValueError("a bug in the explorer")


def test_a_sender_killed_while_writing_is_named_within_a_second() -> None:
    # NVIDIA-NeMo/RL#3488: the others waited for ever.
    with Channel() as channel, process(die_while_writing, channel) as child:
        with pytest.raises(PeerDied, match=r"explorer-3 \(process \d+\) died with exit code -9") as caught:
            channel.receive(DEADLINE_S)
        assert caught.value.pid == child.pid
        assert caught.value.exitcode == -9
        assert pickle.loads(pickle.dumps(caught.value)).exitcode == -9
        assert channel.stats()["torn"] == 1
        with channel.sender() as sender:  # it goes on
            sender.send(2)
            assert channel.receive(10) == 2


def test_a_sender_that_ends_by_an_exception_is_named() -> None:
    with Channel() as channel, process(raise_after, channel):
        assert channel.receive(DEADLINE_S) == 1
        with pytest.raises(PeerDied, match=r"explorer-4 .* died with exit code 1"):
            channel.receive(DEADLINE_S)


def test_a_death_is_told_to_each_thread_that_learns_of_it() -> None:
    with Channel() as channel, process(die_while_writing, channel):
        with pytest.raises(PeerDied, match="explorer-3"):
            channel.receive(DEADLINE_S)
        # Another thread has waited in the same end and asks after the first.
        assert channel._join().deaths()[0][0] == "explorer-3"


class Interrupted(Exception):
    pass


def signal_and_send(channel: Channel, receiver: int, turns: int) -> None:
    with channel.sender() as sender:
        for _ in range(200):
            os.read(turns, 1)
            os.kill(receiver, signal.SIGUSR1)
            sender.send(None, timeout=DEADLINE_S)


def test_a_signal_handler_that_raises_just_as_a_message_comes() -> None:
    num_raised = 0

    def interrupt(_number: int, frame: Any) -> None:
        nonlocal num_raised
        # In the channel: neither here nor in this handler, which the next signal may interrupt.
        if frame.f_code.co_filename != __file__:
            num_raised += 1
            raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    reading, writing = os.pipe()
    try:
        with Channel(slots=256) as channel, process(signal_and_send, channel, os.getpid(), reading):
            while True:
                os.write(writing, b"x")
                try:
                    channel.receive(DEADLINE_S)
                except Interrupted:
                    pass
                except ChannelClosed:
                    break
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(reading)
        os.close(writing)
    assert num_raised > 0


def test_going_on_when_a_peer_dies() -> None:
    with Channel(on_peer_death="continue", num_senders=2) as channel:
        with process(die_while_writing, channel) as child:
            ends(child)
        with process(send_range, channel, 0, 3):
            assert [message["i"] for message in channel] == [0, 1, 2]
        presences = {peer["name"]: peer["presence"] for peer in channel.stats()["peers"]}
        assert presences["explorer-3"] == "dead"


def receive_and_die(channel: Channel) -> None:
    channel.receive(DEADLINE_S)
    die()


def test_a_sender_learns_that_the_receiver_died() -> None:
    with Channel(slots=1) as channel, channel.sender() as sender, process(receive_and_die, channel):
        with pytest.raises(PeerDied, match=r"receive_and_die.* died with exit code -9"):
            _ = [sender.send(i, timeout=DEADLINE_S) for i in range(3)]
        channel.close()
        with pytest.raises(PeerDied, match="receive_and_die"):  # each end is told once
            channel.receive(10)
        assert list(channel) == [1]  # another receiver takes over


def report_deaths(channel: Channel, number: int) -> None:
    sender = channel.sender(f"watcher-{number}")
    try:
        while True:
            sender.send(number, timeout=DEADLINE_S)
    except PeerDied as death:
        os._exit(40 if death.exitcode == -9 else 41)


def test_all_senders_learn_that_the_learner_died() -> None:
    with (
        Channel(slots=2) as channel,
        process(receive_and_die, channel) as learner,
        process(report_deaths, channel, 1) as first,
        process(report_deaths, channel, 2) as second,
    ):
        # The learner last: its exit code is unknown to others once its parent has waited for it.
        assert [ends(first), ends(second), ends(learner)] == [40, 40, -9]


def write_for_ever(channel: Channel, number: int) -> None:
    sender = channel.sender(f"writer-{number}")
    count = 0
    while True:
        count += 1
        value = torch.full((SIZE,), number * 1_000_000 + count)
        if count % 2:
            sender.send({"x": value, "n": count})
        else:
            with sender.reserve({"x": value, "n": count}) as tree:
                tree["x"].copy_(value)


@pytest.mark.parametrize("batch_rows", [0, 4])
def test_killing_writers_a_hundred_times_tears_nothing_and_stops_nobody(batch_rows: int) -> None:
    with Channel(slots=4, on_peer_death="continue") as channel:
        channel._own_queue().set_batch_rows(batch_rows)
        latest = dict.fromkeys(range(1000), 0)
        number = 0
        running = [multiprocessing.get_context("fork").Process(target=write_for_ever, args=(channel, -1))]
        running[0].start()  # this one lives on throughout
        try:
            for number in range(50):
                victim = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(channel, number))
                running.append(victim)
                victim.start()
                seen = 0
                while seen < 3 + number % 5:  # at whatever instruction it then is
                    message = channel.receive(DEADLINE_S)
                    values = message["x"]
                    assert (values == values[0]).all()
                    writer, count = divmod(int(values[0]), 1_000_000)
                    assert message["n"] == count
                    if writer == number:
                        seen += 1
                    if writer >= 0 and not batch_rows:
                        assert count == latest[writer] + 1  # in order, none lost, none twice
                        latest[writer] = count
                victim.kill()
                victim.join()
            for _ in range(20):
                channel.receive(DEADLINE_S)
        finally:
            for child in running:
                child.kill()
                child.join()
        with channel.sender() as sender:
            sent = threading.Thread(target=sender.send, args=("end", DEADLINE_S))
            sent.start()
            while channel.receive(DEADLINE_S) != "end":  # what was complete when they died is still there
                pass
            sent.join()


def hold_lock_and_die(channel: Channel) -> None:
    """Dies with the queue's lock, between two of its stores."""
    import ctypes

    queue = channel._own_queue()
    sender = channel.sender("holder")
    sender.send(1)
    with open(f"/proc/self/fd/{queue.descriptor}", "r+b") as file:
        import mmap

        head = mmap.mmap(file.fileno(), 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(head))
    libc = ctypes.CDLL(None)
    assert libc.pthread_mutex_lock(ctypes.c_void_p(address + 64)) == 0
    die()


def test_a_process_that_dies_with_the_lock_leaves_it_to_the_next() -> None:
    with Channel() as channel, process(hold_lock_and_die, channel):
        assert channel.receive(10) == 1
        with pytest.raises(PeerDied, match="holder"):
            channel.receive(10)


@pytest.mark.slow
def test_the_queue_and_the_weights_under_thread_sanitizer(tmp_path: Path) -> None:
    program = tmp_path / "stress"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", "-o", str(program)]
    if shutil.which("g++") is None or shutil.which("setarch") is None:
        pytest.skip("needs g++ and setarch(8)")
    built = subprocess.run(["g++", *flags, HERE / "stress.cpp"], check=False, capture_output=True, text=True)
    if built.returncode != 0 and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip("needs the libraries of -fsanitize=thread")
    assert built.returncode == 0, built.stderr
    command = ["setarch", "-R", str(program), "4", "2", "2000"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "messages: 8000 messages\nbatches: 8000 messages\nweights: 2000 versions\n", done.stderr
    assert done.returncode == 0, done.stderr


# --- Ends ----------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "the sender exits with a full channel": """
        channel = Channel(slots=2)
        sender = channel.sender()
        sender.send(torch.zeros(1000)), sender.send(2)
    """,
    "an exception with a full channel and blocked explorers": """
        channel = Channel(slots=2)
        children = [mp.get_context("fork").Process(target=send, args=(channel,)) for _ in range(2)]
        [child.start() for child in children]
        channel.receive()
        raise SystemExit(3)
    """,
    "an exception while explorers wait for weights": """
        model = torch.nn.Linear(2, 2)
        weights = WeightBroadcast(model)
        weights.publish()
        child = mp.get_context("fork").Process(target=wait_for_weights, args=(weights,))
        child.start()
        raise SystemExit(3)
    """,
    "Ctrl-C while all wait": """
        channel = Channel(slots=1)
        child = mp.get_context("fork").Process(target=send, args=(channel,))
        child.start()
        other = Channel()
        try:
            threading.Timer(0.3, lambda: os.killpg(0, signal.SIGINT)).start()
            other.receive()
        except KeyboardInterrupt:
            raise SystemExit(3)
    """,
}
PROLOGUE = """
import multiprocessing as mp, os, signal, sys, threading, torch
from torchext.channels import Channel, ChannelClosed, WeightBroadcast

def send(channel):
    try:
        with channel.sender() as sender:
            while True:
                sender.send(torch.zeros(10000))
    except (ChannelClosed, KeyboardInterrupt):
        pass

def wait_for_weights(weights):
    try:
        while True:
            weights.wait(newer_than=weights.load_into(torch.nn.Linear(2, 2)))
    except ChannelClosed:
        pass
"""


@pytest.mark.parametrize("end", SCRIPTS)
def test_it_ends_in_less_than_two_seconds_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    # pytorch/pytorch#48666 #33721: the process hung at its exit.
    body = "\n".join(line.removeprefix("        ") for line in SCRIPTS[end].splitlines())
    trace = "import atexit, time; start = []; print('ending', flush=True)\n"
    script = PROLOGUE + body.replace("raise SystemExit", "print('ending', flush=True); raise SystemExit")
    if "raise SystemExit" not in body:
        script += "\n" + trace
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ending\n"
        # Two seconds, times what a busy machine may take; a hang would take for ever.
        assert child.wait(30) in (0, 3)
        assert child.stdout.read() == ""  # so its children have ended as well


def test_a_process_that_ends_with_a_full_channel_ends_at_once() -> None:
    with Channel(slots=1) as channel:
        with channel.sender() as sender:
            sender.send(0)
        with process(send_until_closed, channel) as child:
            deadline = time.monotonic() + DEADLINE_S
            while not any(p["name"] == "blocked" for p in channel.stats()["peers"]) and time.monotonic() < deadline:
                os.sched_yield()
            channel.close()
            assert ends(child) == 7


def send_until_closed(channel: Channel) -> None:
    sender = channel.sender("blocked")
    try:
        while True:
            sender.send(1)
    except ChannelClosed:
        os._exit(7)


# --- Limits of the system ------------------------------------------------------------------------------------------


def send_many_leaves(channel: Channel, count: int) -> None:
    message = {f"leaf{i}": torch.full((10,), i) for i in range(100)}
    with channel.sender() as sender:
        for _ in range(count):
            sender.send(message, timeout=DEADLINE_S)


def test_ten_thousand_messages_of_a_hundred_tensors_with_few_descriptors() -> None:
    # pytorch/pytorch#973 #65198: a descriptor for each tensor.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with Channel() as channel, process(send_many_leaves, channel, 10_000):
            opened = len(os.listdir("/proc/self/fd"))
            received = sum(1 for message in channel if message["leaf99"][9].item() == 99)
            assert received == 10_000
            assert len(os.listdir("/proc/self/fd")) <= opened + 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_channels_do_not_use_dev_shm(tmp_path: Path) -> None:
    # pytorch/pytorch#5040: containers have 64 MB there; the messages of torch.multiprocessing got lost.
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace (root)")
    script = (
        "import torch\nfrom torchext.channels import Channel\nchannel = Channel(slots=4)\nsender = channel.sender()\n"
        "for i in range(4): sender.send(torch.full((1 << 23,), i))\n"  # 64 MiB each
        "print([int(channel.receive(10)[-1]) for _ in range(4)])"
    )
    command = f'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "{sys.executable}" -c "$SCRIPT"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        env={**os.environ, "SCRIPT": script},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr


# --- Unrelated processes -------------------------------------------------------------------------------------------

UNRELATED = """
import sys
from torchext.channels import connect
channel = connect(sys.argv[1], timeout=30)
with channel.sender("stranger") as sender:
    sender.send({"policy": channel.stats()["peers"][0]["role"]})
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "torchext"


def test_unrelated_processes_connect_by_name_and_wait_for_it(runtime: Path) -> None:
    command = [sys.executable, "-c", UNRELATED, "rollouts"]
    with subprocess.Popen(command, cwd=ROOT) as waits, Channel(name="rollouts") as channel:
        (path,) = runtime.iterdir()
        assert path.name == "rollouts.channel"
        assert path.stat().st_mode & 0o777 == 0o600
        assert runtime.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ChannelError, match="'rollouts' is taken"):
            Channel(name="rollouts")
        # python/cpython#104291: the end of a stranger, by its resource tracker, took the memory from all others.
        assert channel.receive(DEADLINE_S) == {"policy": "creator"}
        assert waits.wait(DEADLINE_S) == 0
        assert subprocess.run(command, cwd=ROOT, timeout=DEADLINE_S, check=True).returncode == 0
        assert channel.receive(DEADLINE_S) == {"policy": "creator"}
    assert list(runtime.iterdir()) == []
    with pytest.raises(ChannelTimeout, match="no process of this user serves the channel 'rollouts'"):
        connect("rollouts", timeout=0)


def make_named_and_die() -> None:
    channel = Channel(name="rollouts")
    assert channel is not None
    die()


def test_the_name_of_a_killed_process_is_free_again(runtime: Path) -> None:
    with process(make_named_and_die) as child:
        assert ends(child) == -signal.SIGKILL
    assert len(list(runtime.iterdir())) == 1
    with Channel(name="rollouts") as channel, connect("rollouts").sender() as sender:
        sender.send(1)
        assert channel.receive(10) == 1
    assert list(runtime.iterdir()) == []


def test_connecting_to_what_does_not_answer_ends_at_the_timeout(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(runtime / "silent.channel"))
        silent.listen()
        with pytest.raises(ChannelTimeout, match="'silent'"):
            connect("silent", timeout=0)
        silent.close()
        (runtime / "silent.channel").unlink()


def test_a_name_is_served_again_once_there_are_descriptors(runtime: Path) -> None:
    path = str(runtime / "rollouts.channel")
    with contextlib.ExitStack() as stack:
        stack.enter_context(Channel(name="rollouts"))
        callers = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(2)]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # whatever is closed meanwhile, none can be had
        try:
            for caller in callers:
                caller.connect(path)
            # The first may be served: accept() takes its descriptor before it begins to wait.
            callers[1].settimeout(0.2)
            with pytest.raises(TimeoutError):
                callers[1].recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for caller in callers:
            caller.settimeout(DEADLINE_S)
            message, descriptors, _, _ = socket.recv_fds(caller, 64, 1)
            os.close(*descriptors)
            assert message == b"torchext"


def test_a_folder_that_others_could_write_to_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o777)
    runtime.chmod(0o777)
    with pytest.raises(ChannelError, match="must belong to this user alone"):
        Channel(name="rollouts")


def test_another_user_cannot_reach_a_named_channel(runtime: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs to become another user (root)")

    def as_nobody() -> None:
        os.chdir(runtime)
        os.setgroups([])
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            try:
                caller.connect("rollouts.channel")
            except PermissionError:
                os._exit(3)

    with Channel(name="rollouts"):
        runtime.chmod(0o711)  # so that the folder's mode is not what keeps them out
        with process(as_nobody) as child:
            assert ends(child) == 3
        runtime.chmod(0o700)


def test_nothing_of_a_channel_stays_in_a_process_that_has_closed_it() -> None:
    def there() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("torchext-channel")

    before = there()
    for _ in range(3):
        with Channel(slots=2) as channel, process(send_range, channel, 0, 5) as child:
            got = [message["i"] for message in channel]
            assert ends(child) == 0
        assert got == list(range(5))
        del channel
        assert there() == before


def test_a_channel_travels_through_a_pipe_while_its_process_has_it() -> None:
    channel: Any = Channel()
    pickled = pickle.dumps(channel)
    copy = pickle.loads(pickled)
    with copy.sender() as sender:
        sender.send(1)
    assert channel.receive(10) == 1
    copy.close()
    channel.close()
    del copy, channel
    with pytest.raises((ChannelError, RuntimeError)):
        pickle.loads(pickled)
