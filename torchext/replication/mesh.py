"""The connections of a site to all others, in and out, and the threads that serve them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torchext import transport
from torchext.replication import handshake, links
from torchext.replication.core import RECEIVED, Core
from torchext.replication.errors import ReplicationError
from torchext.replication.predicates import Counter

_MAX_STRANGERS = 32  # connections that have not yet proved who they are

_logger = logging.getLogger(__name__)


class Mesh:
    """Listens from the start; `open` begins to serve and to connect.

    Args:
        core: The node's state.
        status: What whoever asks for the node's status is answered.

    Attributes:
        links: To the other sites, two each; replaced, not changed, when a site comes or goes.

    Raises:
        OSError: It cannot listen at the site's address.
    """

    def __init__(self, core: Core, status: Callable[[], dict[str, Any]]) -> None:
        self._core = core
        self._status = status
        self._me = core.me
        self._incoming = links.Incoming()
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._served: set[threading.Thread] = set()  # those that come and go by themselves; guarded by _lock
        self._giving_back: dict[str, links.Link] = {}  # by site, to which there is one at most; guarded by _lock
        self._lock = threading.Lock()
        self.links: list[links.Link] = []
        self._threads: list[threading.Thread] = []
        site = core.config.sites[self._me]
        self._listener = transport.listen(site.listen or site.address)

    def open(self) -> None:
        """Begins to serve who connects, and to connect to all others."""
        self.start("accept", self._accept)
        self.start("watch", self._watch)
        for other in self._core.outboxes:
            self.link(other)

    def link(self, site: str) -> None:
        """Connects to a site, again and again, until it is unlinked."""
        data = {"purpose": "data", "stream": self._me}
        pair = [
            links.Link(self._core, site, data, links.send_stream(self._me)),
            links.Link(self._core, site, {"purpose": "control"}, links.send_counters),
        ]
        self.links = [*self.links, *pair]
        for link in pair:
            self.start(f"to-{site}", link.run)

    def unlink(self, site: str) -> None:
        """Hangs up on a site, in both directions."""
        with self._lock:
            giving_back = self._giving_back.get(site)
        for link in (*self._links_to(site), *([giving_back] if giving_back is not None else [])):
            link.gone = True
            link.kick()
        self.links = [link for link in self.links if link.site != site]
        self._incoming.hang_up(site)

    def close(self) -> None:
        """Hangs up, once the core has stopped; ends all threads and waits for them."""
        _shut(self._listener)
        while True:
            self._incoming.hang_up()
            with self._lock:  # also while asking: one of them may just be starting another
                running = [t for t in (*self._threads, *self._served) if t is not threading.current_thread()]
                alive = [t for t in running if t.is_alive()]
                going = [*self.links, *self._giving_back.values()]
            if not alive:
                break
            for link in going:
                link.kick()
            alive[0].join(0.1)
        self._listener.close()

    def start(self, name: str, loop: Callable[[], None]) -> None:
        """Runs a loop in a thread; what it raises stops the node."""

        def run() -> None:
            try:
                loop()
            except BaseException as error:
                _logger.error("site %s stops: %s", self._me, error)
                self._core.fail(error)

        thread = threading.Thread(target=run, name=f"replication-{self._me}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._core.closing.is_set():
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._core.closing.is_set():
                    return
                self._core.closing.wait(0.1)  # such as too many open files
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(sock, peer), name=f"replication-{self._me}-from", daemon=True
            )
            with self._lock:
                self._served.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket, peer: object) -> None:
        core = self._core
        known = False
        try:
            sock, hello = handshake.accept(self._core.config, self._me, sock)
            self._strangers.release()
            known = True
            site, purpose, stream = (str(hello.get(key)) for key in ("site", "purpose", "stream"))
            if purpose == "status":
                transport.reply(sock, self._status())
            elif purpose in ("data", "control") and site != self._me:
                with self._incoming.only((purpose, site, stream), sock):
                    if purpose == "data":
                        links.receive_stream(core, sock, site, stream)
                    else:
                        links.receive_counters(core, sock, site, self._links_to, self._give_back)
            else:
                transport.refuse(sock, f"{self._me} does not serve {purpose!r} to {site}")
        except (OSError, ReplicationError) as error:
            if not core.closing.is_set():
                _logger.debug("site %s: connection from %s: %s", self._me, peer, error)
        except BaseException as error:
            if known:  # nothing that a stranger says stops the node
                core.fail(error)
            raise
        finally:
            if not known:
                self._strangers.release()
            sock.close()
            with self._lock:
                self._served.discard(threading.current_thread())

    def _give_back(self, site: str) -> None:
        """Sends a site its own messages that it has lost, unless that is going on."""
        link = links.Link(self._core, site, {"purpose": "data", "stream": site}, links.send_back)

        def run() -> None:
            try:
                link.once()
            except (OSError, ReplicationError) as error:
                _logger.warning("could not give %s its messages back: %s", site, error)
            except BaseException as error:
                self._core.fail(error)
                raise
            finally:
                with self._lock:
                    del self._giving_back[site]
                    self._served.discard(threading.current_thread())

        with self._lock:
            if site in self._giving_back:
                return
            thread = threading.Thread(target=run, name=f"replication-{self._me}-give-back-{site}", daemon=True)
            thread.start()
            self._giving_back[site] = link
            self._served.add(thread)

    def _links_to(self, site: str) -> list[links.Link]:
        return [link for link in self.links if link.site == site]

    def _watch(self) -> None:
        """Makes data connections anew that swallow what is sent and do not deliver it."""
        dead_after_s = self._core.config.dead_after_s
        progress: dict[links.Link, tuple[tuple[int, int], float]] = {}
        while not self._core.closing.wait(dead_after_s / 4):
            now = time.monotonic()
            for link in self.links:
                if link.purpose != "data":
                    continue
                with self._core.lock:
                    held = self._core.frontiers[self._me].counter(Counter(link.site, RECEIVED))
                seen = link.sent_bytes, held
                before, since = progress.get(link, (None, now))
                if seen != before or held >= self._core.logs[self._me].tail.seq or link.state != "connected":
                    progress[link] = seen, now
                elif now - since > dead_after_s:
                    _logger.warning(
                        "site %s: %s takes data but acknowledges none; connecting anew", self._me, link.site
                    )
                    link.kick()
                    progress[link] = seen, now


def _shut(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not on every system; there, accept ends with the next connection
        listener.shutdown(socket.SHUT_RDWR)
