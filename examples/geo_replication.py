"""Trains in Paris with checkpoints in Tokyo and Oregon, over links with the delay of a wide-area network.

    python examples/geo_replication.py [--plot geo_replication.png]

Three sites run on this machine: Paris in this process, the others as `torchext site`. A proxy in between holds each
byte back for half of the pair's round trip (Paris-Tokyo 220 ms, Paris-Oregon 140 ms, Tokyo-Oregon 100 ms). In the
middle of the training Tokyo is killed: "safe", which asks for all sites, stands still; changed to a majority, it goes
on; Tokyo comes back, catches up, and "safe" asks for all again. At the end the newest stable checkpoint is read at
Paris. It takes about half a minute; the last line is

    restored from what all sites hold: step 200

The plot (with matplotlib) shows checkpoints sent and stable over time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchext.callbacks import StabilizerReplication
from torchext.replication import Node, fetch_checkpoint

SITES = ("paris", "tokyo", "oregon")
ROUND_TRIP_S = {("oregon", "paris"): 0.140, ("paris", "tokyo"): 0.220, ("oregon", "tokyo"): 0.100}
ALL = "MIN($ALLSITES).persisted"
MAJORITY = "KTH_MAX(SIZEOF($ALLSITES)/2 + 1, $ALLSITES).persisted"
STEPS, EVERY = 200, 10
KILL, WEAKEN, REVIVE, STRENGTHEN = 50, 90, 120, 160  # at these steps


class DelayedLinks:
    """Carries connections between sites and holds each piece back for a time, in a thread with an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="delayed-links")
        self.thread.start()

    def open(self, to: tuple[str, int], delay_s: float) -> str:
        """The address of a new link to another address."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                other_reader, other_writer = await asyncio.open_connection(*to)
            except OSError:
                writer.close()
                return
            with contextlib.suppress(asyncio.CancelledError):  # by close, below
                await asyncio.gather(
                    self._carry(reader, other_writer, delay_s), self._carry(other_reader, writer, delay_s)
                )

        async def start() -> str:
            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

        return asyncio.run_coroutine_threadsafe(start(), self.loop).result()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=10_000)

        async def read() -> None:
            data = b"start"
            while data:
                try:
                    data = await reader.read(1 << 16)
                except ConnectionError:
                    data = b""
                await pieces.put((self.loop.time() + delay_s, data))

        reading = self.loop.create_task(read())
        try:
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(due - self.loop.time())
                if not data:
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            reading.cancel()
            writer.close()

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def write_configs(folder: Path, links: DelayedLinks, ports: dict[str, socket.socket]) -> None:
    """A file for each site, in which the others' addresses are those of its links to them."""
    key = secrets.token_hex(16)
    own = {name: sock.getsockname() for name, sock in ports.items()}
    for me in SITES:
        lines = [f'key = "{key}"', "segment_bytes = 8388608", f'predicates = {{ safe = "{ALL}" }}']
        for site in SITES:
            address = listen = "{}:{}".format(*own[site])
            if site != me:
                delay_s = ROUND_TRIP_S[min(me, site), max(me, site)] / 2
                address = links.open(own[site], delay_s)
            lines += [f"[sites.{site}]", f'address = "{address}"', f'listen = "{listen}"', f'store = "{site}"']
        (folder / f"{me}.toml").write_text("\n".join(lines))


def start_site(folder: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torchext", "site", "--config", str(folder / f"{name}.toml"), "--me", name]
    site = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert site.stdout is not None
    site.stdout.readline()  # it listens
    return site


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.net(x), x.flip(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Story(pl.Callback):
    """What happens on the way, and what is seen of it."""

    def __init__(self, folder: Path, node: Node, replication: StabilizerReplication, sites: dict[str, Any]) -> None:
        self.folder, self.node, self.replication, self.sites = folder, node, replication, sites
        self.begun = time.monotonic()
        self.seen: list[tuple[float, int, int]] = []  # seconds, step, step of the newest stable checkpoint
        self.events: list[tuple[float, str]] = []
        self.reviving = threading.Thread()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        time.sleep(0.05)  # in place of a larger model
        if step == KILL:
            self.sites["tokyo"].send_signal(signal.SIGKILL)
            self.sites["tokyo"].wait()
            self._say("tokyo is killed")
        elif step == WEAKEN:
            self.node.change_predicate("safe", MAJORITY)
            self._say("safe: a majority")
        elif step == REVIVE:
            # In a thread: the training does not wait for the site to start.
            self.reviving = threading.Thread(target=self._revive)
            self.reviving.start()
        elif step == STRENGTHEN:
            self.reviving.join()  # so that the story is told in this order on a slow machine, too
            self.node.change_predicate("safe", ALL)
            self._say("safe: all sites")
        stable = max(self.replication.stable_step, 0)
        self.seen.append((time.monotonic() - self.begun, step, stable))
        persisted = {site: acks["persisted"] for site, acks in self.node.status()["counters"]["paris"].items()}
        words = "  ".join(f"{site} {count:3}" for site, count in persisted.items())
        print(f"\rstep {step:3}  stable: step {stable:3}  messages persisted: {words}   ", end="", flush=True)

    def _revive(self) -> None:
        self.sites["tokyo"] = start_site(self.folder, "tokyo")
        self._say("tokyo is back")

    def _say(self, words: str) -> None:
        self.events.append((time.monotonic() - self.begun, words))
        print(f"\n{words}")


def plot(story: Story, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds", ylabel="step")
    seconds, steps, stable = zip(*story.seen, strict=True)
    axes.plot(seconds, steps, label="training")
    axes.step(seconds, stable, where="post", label='newest checkpoint that is "safe"')
    for at, words in story.events:
        axes.axvline(at, color="grey", linestyle=":")
        axes.text(at, 2, f" {words}", rotation=90, verticalalignment="bottom", fontsize=8)
    axes.legend(loc="upper left")
    figure.savefig(path)


def run(folder: Path, plot_path: str | None) -> int:
    ports = {name: socket.socket() for name in SITES}
    for sock in ports.values():  # kept, so that nobody else is given the port
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
    links = DelayedLinks()
    sites: dict[str, Any] = {}
    try:
        write_configs(folder, links, ports)
        for name in SITES[1:]:
            sites[name] = start_site(folder, name)
        with Node(folder / "paris.toml", me="paris") as node:
            replication = StabilizerReplication(
                node, predicate="safe", every_n_steps=EVERY, on_unstable="wait", max_lag=STEPS, timeout=60
            )
            story = Story(folder, node, replication, sites)
            trainer = pl.Trainer(
                max_steps=STEPS,
                accelerator="cpu",
                logger=False,
                callbacks=[replication, story],
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            data = TensorDataset(torch.randn(10_000, 64, generator=torch.Generator().manual_seed(0)))
            trainer.fit(Model(), DataLoader(data, batch_size=32))
            print()
            print(json.dumps(node.status()["predicates"]))
            step = fetch_checkpoint(node, "stabilizer://paris/latest?predicate=safe", folder / "restored.ckpt")
            if plot_path:
                plot(story, plot_path)
            print(f"restored from what all sites hold: step {step}")
            return step
    finally:
        for site in sites.values():
            site.kill()
            site.wait()
            site.stdout.close()
        links.close()
        for sock in ports.values():
            sock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="draw what happened (png, pdf, svg)")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options.plot)


if __name__ == "__main__":
    main()
