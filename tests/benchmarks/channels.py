"""Time messages from explorers to a learner over torchext.channels and its peers, interleaved in the same run.

    python tests/benchmarks/channels.py [--sizes 1024 65536] [--explorers 1 4] [--rounds 5] [--copy]
    python tests/benchmarks/channels.py --weights | --rate | --overlap | --machines | --ends

The dummy algorithm of XingTian's paper: each explorer sends ``--messages`` messages of one tensor as fast as it can;
time runs from the first send to the last receive. CPU time is that of all processes meanwhile, in microseconds per
message: what stays comparable on a busy machine. The table gives medians over the rounds and the ratio to torchext.
With --copy the learner copies each message into a batch of its own. The first lines of each table are a bare copy of as
many messages, by one process, into memory that is there but in no cache, and how long it takes to wake a process: the
learner sleeps when the first message comes. With --weights: one publisher, four receivers, from the call of publish to
the last load, against a queue for each receiver.

With --rate: messages per second of 1 KiB, over 100,000 of them. With --overlap: the time of a learner's step that
computes while explorers make and send its next batch, against the longer of computing alone and communicating alone.
With --machines: between two brokers over the loopback interface, against ZeroMQ over TCP. With --ends: after how long
others hear of a killed process, and processes end that are told to, with full channels.

Peers, each left out with a word if it is not installed: torch.multiprocessing.Queue; DataLoader workers; ZeroMQ (PUSH
and PULL over ipc, without copies where it can); Ray (results of actor tasks, and compiled graphs, of which only the
learner's CPU time is counted). Every process is started with setsid, so that the kernel's groups of processes do not
favour one; each gets one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import platform
import resource
import statistics
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import torchext
from torchext.channels import Channel, ChannelClosed, PeerDied, WeightBroadcast

SIZES = [1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
WARM_UP = 32  # messages of each explorer, not timed: memory is touched for the first time
FORK = multiprocessing.get_context("fork")
Link = tuple[Callable[[], Any], Callable[[Any, Any], None], Callable[[Any], Iterator[torch.Tensor]]]


def torchext_link(total: int) -> Link:
    channel = Channel(slots=16)

    def send(tx: Any, message: Any) -> None:
        tx.send(message)

    return channel.sender, send, lambda _: (channel.receive()["x"] for _ in range(total))


def torch_queue_link(total: int) -> Link:
    queue = torch.multiprocessing.get_context("fork").Queue(maxsize=16)
    # A copy: it shares the tensor it is given, so that an explorer could not write the next message into it.
    return (
        lambda: queue,
        lambda q, message: q.put({"x": message["x"].clone()}),
        lambda _: (queue.get()["x"] for _ in range(total)),
    )


def zeromq_link(total: int) -> Link:
    import zmq

    address = f"ipc://@torchext-{uuid.uuid4()}"  # abstract: no file

    def connect(kind: int, bind: bool) -> Any:
        socket = zmq.Context().socket(kind)
        socket.set_hwm(16)
        (socket.bind if bind else socket.connect)(address)
        return socket

    def send(socket: Any, message: Any) -> None:
        x = message["x"]
        socket.send(pickle.dumps((x.dtype, x.shape)), zmq.SNDMORE)
        socket.send(x.numpy(), copy=False)

    def receive(_: Any) -> Iterator[torch.Tensor]:
        socket = connect(zmq.PULL, True)
        for _ in range(total):
            header, data = socket.recv_multipart(copy=False)
            dtype, shape = pickle.loads(header.buffer)
            memory = bytearray(data.buffer) if data.buffer.readonly else data.buffer  # writable, as the others' are
            yield torch.frombuffer(memory, dtype=dtype).view(shape)

    return lambda: connect(zmq.PUSH, False), send, receive


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def explore(connect: Any, send: Any, size: int, count: int, ready: Any, start: Any, end: Any, results: Any) -> None:
    os.setsid()
    link, message = connect(), {"x": torch.zeros(size, dtype=torch.uint8)}
    for _ in range(WARM_UP):
        send(link, message)
    ready.wait()
    start.wait()
    cpu, first = cpu_s(), time.monotonic()
    for _ in range(count):
        send(link, message)
    end.acquire()  # some need their sender until the last was received
    results.put((first, None, cpu_s() - cpu))
    results.close()
    results.join_thread()
    os._exit(0)


def learn(receive: Any, explorers: int, size: int, copies: bool, ready: Any, end: Any, results: Any) -> None:
    os.setsid()
    batch = torch.ones(8, size, dtype=torch.uint8)
    messages = receive(None)
    for _ in range(explorers * WARM_UP):
        batch[0] = next(messages)
    cpu = cpu_s()
    ready.set()  # it waits for messages when they come, as learners do
    for i, x in enumerate(messages):
        if copies:
            batch[i % 8] = x
        del x
    last = time.monotonic()
    spent = cpu_s() - cpu
    for _ in range(explorers):
        end.release()
    results.put((None, last, spent))
    results.close()
    results.join_thread()
    os._exit(0)


Round = tuple[float, float]  # seconds, CPU seconds


def run_link(make: Callable[[int], Link], size: int, explorers: int, options: argparse.Namespace) -> Round:
    count = options.messages
    connect, send, receive = make(explorers * (count + WARM_UP))
    ready, start, end = FORK.Event(), FORK.Barrier(explorers), FORK.Semaphore(0)
    results = FORK.Queue()
    learner = (receive, explorers, size, options.copy, ready, end, results)
    processes = [FORK.Process(target=learn, args=learner)]
    processes += [
        FORK.Process(target=explore, args=(connect, send, size, count, ready, start, end, results))
        for _ in range(explorers)
    ]
    for process in processes:
        process.start()
    rows = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    first = min(row[0] for row in rows if row[0] is not None)
    last = next(row[1] for row in rows if row[1] is not None)
    return last - first, sum(row[2] for row in rows)


class Messages(IterableDataset[Any]):
    def __init__(self, size: int, count: int, start: Any) -> None:
        self.size, self.count, self.start = size, count, start

    def __iter__(self) -> Iterator[Any]:
        message = torch.zeros(self.size, dtype=torch.uint8)
        self.start.wait()
        first = time.monotonic()
        for _ in range(self.count):
            yield {"x": message.clone(), "first": first}  # as for the queue


def run_loader(size: int, explorers: int, options: argparse.Namespace) -> Round:
    start, results = FORK.Barrier(explorers), FORK.Queue()

    def learner() -> None:
        os.setsid()
        batch, first = torch.ones(8, size, dtype=torch.uint8), float("inf")
        loader: DataLoader[Any] = DataLoader(
            Messages(size, options.messages, start),
            batch_size=None,
            num_workers=explorers,
            worker_init_fn=lambda _: os.setsid(),
            multiprocessing_context="fork",
        )
        for i, message in enumerate(loader):
            first = min(first, message["first"])
            if options.copy:
                batch[i % 8] = message["x"]
            del message
        last = time.monotonic()
        del loader
        children = resource.getrusage(resource.RUSAGE_CHILDREN)  # their start included: a little
        results.put((last - first, cpu_s() + children.ru_utime + children.ru_stime))
        results.close()
        results.join_thread()
        os._exit(0)

    process = FORK.Process(target=learner)
    process.start()
    row: Round = results.get(timeout=300)
    process.join()
    return row


def run_ray(size: int, explorers: int, options: argparse.Namespace) -> Round:
    import ray

    class Explorer:
        def __init__(self) -> None:
            self.message = {"x": torch.zeros(size, dtype=torch.uint8).numpy()}

        def make(self) -> Any:
            return self.message

        def cpu_s(self) -> float:
            return cpu_s()

    actors = [ray.remote(Explorer).options(num_cpus=0).remote() for _ in range(explorers)]
    ray.get([actor.make.remote() for actor in actors for _ in range(WARM_UP)])
    before = sum(ray.get([actor.cpu_s.remote() for actor in actors])) + cpu_s()
    batch = torch.ones(8, size, dtype=torch.uint8).numpy()
    first = time.monotonic()
    # As many under way as its store has room for, or it would write them to the disk.
    under_way = max(2, min(options.messages, (1 << 30) // (size * explorers)))
    pending = {actor.make.remote(): actor for actor in actors for _ in range(under_way)}
    left = dict.fromkeys(actors, options.messages - under_way)
    i = 0
    while pending:
        done, _ = ray.wait(list(pending))
        actor = pending.pop(done[0])
        if left[actor] > 0:
            left[actor] -= 1
            pending[actor.make.remote()] = actor
        message = ray.get(done[0])
        if options.copy:
            batch[i % 8] = message["x"]
        i += 1
        del message, done
    last = time.monotonic()
    after = sum(ray.get([actor.cpu_s.remote() for actor in actors])) + cpu_s()
    for actor in actors:
        ray.kill(actor)
    return last - first, after - before  # without what Ray's own daemons spend


def copy_s(size: int, count: int) -> float:
    """Seconds for so many copies of a message into memory that is there, and no longer in any cache."""
    message = torch.zeros(size, dtype=torch.uint8)
    cold = torch.ones(max(count, (512 << 20) // size), size, dtype=torch.uint8)
    source, to = message.data_ptr(), cold.data_ptr()
    start = time.monotonic()
    for i in range(count):
        ctypes.memmove(to + i * size, source, size)
    return time.monotonic() - start


def wake_s() -> float:
    """Seconds until a process that sleeps at a pipe runs, once another has written to it: half a round trip."""
    (request, requests), (answer, answers) = os.pipe(), os.pipe()

    def echo() -> None:
        os.setsid()
        while os.read(request, 1) == b"x":
            os.write(answers, b"x")
        os._exit(0)

    process = FORK.Process(target=echo)
    process.start()
    times = []
    for _ in range(200):
        start = time.monotonic()
        os.write(requests, b"x")
        os.read(answer, 1)
        times.append((time.monotonic() - start) / 2)
    os.write(requests, b"-")
    process.join()
    for end in (request, requests, answer, answers):
        os.close(end)
    return statistics.median(times)


def run_ray_graph(size: int, explorers: int, options: argparse.Namespace) -> Round:
    """A compiled graph: explorers in channels of their own, without a task for each message."""
    import ray
    from ray.dag import InputNode, MultiOutputNode

    class Explorer:
        def __init__(self) -> None:
            self.message = {"x": torch.zeros(size, dtype=torch.uint8).numpy()}

        def make(self, _: Any) -> Any:
            return self.message

        def cpu_s(self) -> float:
            return cpu_s()

    actors = [ray.remote(Explorer).options(num_cpus=0).remote() for _ in range(explorers)]
    with InputNode() as given:
        graph = MultiOutputNode([actor.make.bind(given) for actor in actors])
    compiled = graph.experimental_compile(_buffer_size_bytes=size + (1 << 16), _max_inflight_executions=8)
    batch = torch.ones(8, size, dtype=torch.uint8).numpy()

    def rounds(count: int) -> None:
        pending: deque[Any] = deque()
        given = got = 0
        while got < count * explorers:
            while given < count and len(pending) < 8:
                pending.append(compiled.execute(given))
                given += 1
            for message in ray.get(pending.popleft()):
                if options.copy:
                    batch[got % 8] = message["x"]
                got += 1

    rounds(WARM_UP)
    before = cpu_s()
    first = time.monotonic()
    rounds(options.messages)
    last = time.monotonic()
    spent = cpu_s() - before  # the learner's: the explorers' loops answer nothing else
    compiled.teardown()
    for actor in actors:
        ray.kill(actor)
    return last - first, spent


def measure_rate(options: argparse.Namespace) -> None:
    """Small messages, long enough that starting and stopping do not count."""
    count = 100_000
    for explorers in options.explorers:
        rates: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            links = {"torchext": torchext_link}
            if find_spec("zmq") is not None:
                links["ZeroMQ"] = zeromq_link
            for name, make in links.items():
                each = argparse.Namespace(**{**vars(options), "messages": count // explorers})
                seconds, cpu = run_link(make, 1 << 10, explorers, each)
                rates.setdefault(name, []).append(each.messages * explorers / seconds)
                rates.setdefault(f"{name}, per CPU second", []).append(each.messages * explorers / cpu)
        for name, values in rates.items():
            print(
                f"{explorers} explorers, 1024 B, {name}: median {statistics.median(values):,.0f} messages/s, "
                f"most {max(values):,.0f}",
                flush=True,
            )


def measure_overlap(options: argparse.Namespace) -> None:
    """Whether communication hides behind computation; on two free cores, one for each side."""
    size, slots, steps = 4 << 20, 4, 5
    matrix = torch.randn(384, 384)

    def compute() -> None:
        for _ in range(8):
            torch.mm(matrix, matrix)

    def explorer(channel: Channel) -> None:
        os.setsid()
        message = {"x": torch.zeros(size, dtype=torch.uint8)}
        with contextlib.suppress(ChannelClosed), channel.sender() as sender:
            while True:
                sender.send(message)
        os._exit(0)

    def step_s(channel: Channel | None, computes: bool) -> float:
        """Of one step, once what was sent while nobody received is used up."""
        for _ in range(slots if channel is not None else 0):
            channel.receive(60)
        start = time.monotonic()
        for _ in range(steps):
            batch = channel.receive(60) if channel is not None else None
            if computes:
                compute()
            del batch
        return (time.monotonic() - start) / steps

    ratios = []
    for _ in range(options.rounds):
        turns: dict[str, list[float]] = {"compute": [], "communicate": [], "both": []}
        with Channel(slots=slots) as channel:
            process = FORK.Process(target=explorer, args=(channel,))
            process.start()
            for _ in range(12):  # by turns, as the speed of a machine changes
                turns["compute"].append(step_s(None, True))
                turns["communicate"].append(step_s(channel, False))
                turns["both"].append(step_s(channel, True))
            channel.close()
            process.join()
        times = {name: statistics.median(values) for name, values in turns.items()}
        ratios.append(times["both"] / max(times["compute"], times["communicate"]))
        print(", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in times.items()), flush=True)
    print(f"a step takes {statistics.median(ratios):.3f} of the longer of the two, least {min(ratios):.3f}")


def measure_machines(options: argparse.Namespace) -> None:
    """From a process through its broker to the broker of the learner, over TCP."""
    from torchext.channels import Broker, join

    def explorer(address: str, size: int, count: int) -> None:
        os.setsid()
        message = {"x": torch.randint(0, 256, (size,), dtype=torch.uint8)}  # nothing to compress
        with join(address, token="benchmark") as broker, broker.channel("rollouts").sender() as sender:
            for _ in range(count):
                sender.send(message)
            sender.close()
            broker.close(timeout=300)
        os._exit(0)

    def pushes(address: str, size: int, count: int) -> None:
        import zmq

        os.setsid()
        message = torch.randint(0, 256, (size,), dtype=torch.uint8)
        with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
            sock.set_hwm(16)
            sock.connect(address)
            for _ in range(count):
                sock.send(message.numpy(), copy=False)
        os._exit(0)

    for size in options.sizes:
        count = max(20, min(2000, (256 << 20) // size))
        speeds: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            with (
                Channel(slots=16) as channel,
                Broker("127.0.0.1:0", {"rollouts": channel}, token="benchmark") as broker,
            ):
                process = FORK.Process(target=explorer, args=(broker.address, size, count))
                process.start()
                channel.receive(60)
                start = time.monotonic()
                for _ in range(count - 1):
                    channel.receive(60)
                speeds.setdefault("torchext", []).append((count - 1) * size / (time.monotonic() - start) / 1e6)
                process.join()
            if find_spec("zmq") is None:
                continue
            import zmq

            with zmq.Context() as context, context.socket(zmq.PULL) as sock:
                sock.set_hwm(16)
                port = sock.bind_to_random_port("tcp://127.0.0.1")
                process = FORK.Process(target=pushes, args=(f"tcp://127.0.0.1:{port}", size, count))
                process.start()
                sock.recv(copy=False)
                start = time.monotonic()
                for _ in range(count - 1):
                    bytearray(sock.recv(copy=False).buffer)  # writable, as the other's are
                speeds.setdefault("ZeroMQ", []).append((count - 1) * size / (time.monotonic() - start) / 1e6)
                process.join()
        for name, values in speeds.items():
            print(f"{size} B over TCP, {name}: median {statistics.median(values):.0f} MB/s, most {max(values):.0f}")


def publish_weights(options: argparse.Namespace) -> None:
    """6.7 MB to four receivers."""
    state = {f"layer{i}": torch.zeros(167_500) for i in range(10)}
    results: Any = FORK.Queue()
    weights = WeightBroadcast(state)
    queues = [torch.multiprocessing.get_context("fork").Queue() for _ in range(4)]

    def receiver(number: int) -> None:
        os.setsid()
        own, seen = {key: torch.zeros_like(value) for key, value in state.items()}, 0
        while seen < options.rounds:
            weights.wait(newer_than=seen)
            seen = weights.load_into(own)
            results.put(time.monotonic())
            torch._foreach_copy_(list(own.values()), list(queues[number].get().values()))
            results.put(time.monotonic())
        results.close()
        results.join_thread()
        os._exit(0)

    processes = [FORK.Process(target=receiver, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    times: dict[str, list[float]] = {"torchext": [], "torch queues": []}
    for _ in range(options.rounds):
        for name in times:
            start = time.monotonic()
            if name == "torchext":
                weights.publish()
            else:
                for queue in queues:
                    queue.put(state)
            times[name].append(1e3 * (max(results.get(timeout=60) for _ in range(4)) - start))
    for process in processes:
        process.join()
    weights.close()
    for name, values in times.items():
        print(f"6.7 MB to 4 receivers, {name}: median {statistics.median(values):.1f} ms, least {min(values):.1f} ms")


def measure_ends(options: argparse.Namespace) -> None:
    """How soon a death is heard of, and how soon all have ended."""

    def waits(channel: Channel, told: Any, sends: bool) -> None:
        os.setsid()
        sender = channel.sender("explorer")
        told.put("here")
        try:
            while True:
                sender.send(torch.zeros(1000)) if sends else time.sleep(1)
        except PeerDied:
            told.put(time.monotonic())
        except ChannelClosed:
            told.put(time.monotonic())
        told.close()
        told.join_thread()
        os._exit(0)

    def receives_one(channel: Channel, told: Any) -> None:
        os.setsid()
        channel.receive()
        told.put("received")
        time.sleep(60)

    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        # A killed process may leave a queue of multiprocessing locked: each has its own.
        told, of_learner = FORK.Queue(), FORK.Queue()
        with Channel(slots=2) as channel:  # a killed explorer, as the learner hears of it
            explorer = FORK.Process(target=waits, args=(channel, told, False))
            explorer.start()
            told.get(timeout=60)
            start = time.monotonic()
            explorer.kill()
            with contextlib.suppress(PeerDied):
                channel.receive(60)
            times.setdefault("a killed explorer is heard of", []).append(time.monotonic() - start)
            explorer.join()
        told = FORK.Queue()
        with Channel(slots=2) as channel:  # a killed learner, as its explorers hear of it
            learner = FORK.Process(target=receives_one, args=(channel, of_learner))
            learner.start()
            explorers = [FORK.Process(target=waits, args=(channel, told, True)) for _ in range(4)]
            for explorer in explorers:
                explorer.start()
            for queue in (told, told, told, told, of_learner):
                queue.get(timeout=60)
            start = time.monotonic()
            learner.kill()
            heard = max(told.get(timeout=60) for _ in range(4)) - start
            times.setdefault("a killed learner is heard of by four explorers", []).append(heard)
            for process in (learner, *explorers):
                process.join()
        with Channel(slots=2) as channel:  # explorers that wait for room end with the channel
            explorers = [FORK.Process(target=waits, args=(channel, told, True)) for _ in range(4)]
            for explorer in explorers:
                explorer.start()
            for _ in range(4):
                told.get(timeout=60)
            channel.receive(60)
            start = time.monotonic()
            channel.close()
            for explorer in explorers:
                explorer.join()
            times.setdefault("four explorers at a full channel end with it", []).append(time.monotonic() - start)
    for name, values in times.items():
        print(f"{name}: median {1e3 * statistics.median(values):.0f} ms, most {1e3 * max(values):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--explorers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--messages", type=int, default=20, help="of each explorer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copy", action="store_true")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--weights", action="store_true", help="only these")
    only.add_argument("--rate", action="store_true", help="only that of small messages")
    only.add_argument("--overlap", action="store_true", help="only that of communication and computation")
    only.add_argument("--machines", action="store_true", help="only between brokers")
    only.add_argument("--ends", action="store_true", help="only how processes end")
    options = parser.parse_args()
    with contextlib.suppress(OSError):  # a leader of its group is one already
        os.setsid()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    print(f"torch {torch.__version__}, torchext {torchext.__version__}, {platform.platform()}, {os.cpu_count()} CPUs")
    for asked, measure in (
        (options.weights, publish_weights),
        (options.rate, measure_rate),
        (options.overlap, measure_overlap),
        (options.machines, measure_machines),
        (options.ends, measure_ends),
    ):
        if asked:
            measure(options)
            return
    contenders: dict[str, Callable[[int, int, argparse.Namespace], Round]] = {
        "torchext": partial(run_link, torchext_link),
        "torch queue": partial(run_link, torch_queue_link),
        "DataLoader": run_loader,
    }
    if find_spec("zmq") is not None:
        contenders["ZeroMQ"] = partial(run_link, zeromq_link)
    else:
        print("ZeroMQ left out: pip install pyzmq")
    if find_spec("ray") is not None:
        import ray

        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, logging_level="error")
        contenders["Ray tasks"] = run_ray
        contenders["Ray graph"] = run_ray_graph
    else:
        print("Ray left out: pip install ray")
    for size in options.sizes:
        for explorers in options.explorers:
            rounds: dict[str, list[Round]] = {name: [] for name in contenders}
            for _ in range(options.rounds):
                for name, contend in contenders.items():
                    rounds[name].append(contend(size, explorers, options))
            count = explorers * options.messages
            bare_s = statistics.median(copy_s(size, min(count, (1 << 30) // size)) for _ in range(options.rounds))
            bare_s *= count / min(count, (1 << 30) // size)
            medians = {name: tuple(map(statistics.median, zip(*rows, strict=True))) for name, rows in rounds.items()}
            ours_s, ours_cpu = medians["torchext"]
            print(f"\n{size} B, {explorers} explorers, {count} messages" + (", copied" if options.copy else ""))
            share = f"{100 * bare_s / ours_s:.0f} % of it by torchext"
            rate = f"{count * size / bare_s / 1e6:10.0f} MB/s {1e6 * bare_s / count:10.1f} us"
            print(f"  {'bare copy':<12}{rate}   {share}")
            print(f"  {'bare wake-up':<26}{1e6 * wake_s():10.1f} us, of a process by another")
            for name, (seconds, cpu) in medians.items():
                rate = f"{count * size / seconds / 1e6:10.0f} MB/s {1e6 * seconds / count:10.1f} us"
                ratios = f"time {seconds / ours_s:6.1f}x, CPU {cpu / max(ours_cpu, 1e-9):6.1f}x"
                print(f"  {name:<12}{rate} {1e6 * cpu / count:10.1f} us CPU   {ratios}", flush=True)


if __name__ == "__main__":
    main()
