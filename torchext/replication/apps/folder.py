"""A folder that is the same at every site: watched, sent in chunks that travel once, a copy where changes clash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchext.replication.apps import chunks
from torchext.replication.apps.streams import Follower, open_database, pack, unpack
from torchext.replication.errors import ReplicationError
from torchext.replication.message import Message
from torchext.replication.node import Node

APPLIED = "folder_applied"  # the ack type
STATE = ".torchext-folder"  # in the folder: chunks, and what is known of the files
_NEW = "new-"  # there: files that are not whole yet
_APP = b"folder"
_HISTORY = 64  # versions that one knows to go back to
_TABLES = """
CREATE TABLE IF NOT EXISTS files(path TEXT PRIMARY KEY, head TEXT, stamp TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS waiting(site TEXT, seq INTEGER, head TEXT, PRIMARY KEY (site, seq));
CREATE TABLE IF NOT EXISTS applied(site TEXT PRIMARY KEY, seq INTEGER);
"""


@dataclass(frozen=True)
class _File:
    """A version of a file: by a Lamport clock, then by site, of two concurrent ones the higher is taken everywhere."""

    path: str
    clock: int
    site: str
    history: list[list[object]]  # the versions that it comes from, as [clock, site], newest first
    chunks: list[str] | None  # None: it was deleted
    executable: bool = False

    @property
    def version(self) -> tuple[int, str]:
        return self.clock, self.site

    def comes_from(self, other: _File) -> bool:
        return list(other.version) in self.history


class FolderSync:
    """Keeps a folder as it is at the other sites, and them as it is here.

    Files are looked at every ``interval_s`` seconds. What changed travels in chunks that are cut by content, so what
    another file or an earlier version held is not sent again. Where two sites change a file at once, the version with
    the higher clock is taken at all sites, and the site that loses keeps its own beside it, as
    ``name (conflict paris 12).txt``, which then is a file like others. A file appears whole or not at all. The node may
    drop messages behind ``MIN($ALLSITES).folder_applied``.

    Chunks of old versions are kept, under ``.torchext-folder``. Symbolic links, empty folders, owners and times are not
    carried.

    Example::

        with Node("site.toml", me="paris") as node, FolderSync(node, "shared"):
            ...

    Args:
        node: This site. Close the folder before a site is added or removed, and open it anew.
        folder: Made if missing.
        interval_s: How often to look for changes, in seconds.

    Raises:
        ReplicationError: The node's log no longer holds what the folder lacks.
    """

    def __init__(self, node: Node, folder: str | os.PathLike[str], *, interval_s: float = 0.5) -> None:
        self._node = node
        self.folder = Path(folder)
        self._chunks = self.folder / STATE / "chunks"
        self._chunks.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / STATE).glob(f"{_NEW}*"):
            path.unlink()  # its writer was killed
        self._database = open_database(self.folder / STATE / "state.db", _TABLES)
        after = dict(self._database.execute("SELECT site, seq FROM applied"))
        self._files: dict[str, _File] = {}  # as they are in the folder, or were deleted; guarded by changed
        self._stamps: dict[str, str] = {}  # what they looked like then, likewise; "" for none
        self._sent: set[str] = set()  # chunks on their way into this site's own store
        for path, head, stamp in self._database.execute("SELECT path, head, stamp FROM files"):
            self._files[path], self._stamps[path] = _File(**json.loads(head)), stamp
        waiting = [json.loads(head)["clock"] for (head,) in self._database.execute("SELECT head FROM waiting")]
        self._clock = max([0, *waiting, *(file.clock for file in self._files.values())])
        self._interval_s = interval_s
        self._scanning = threading.Lock()
        self._closing = threading.Event()
        self._follower = Follower(node, after, self._apply, ack=APPLIED)
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{self.folder.name}", daemon=True)
        self._follower.start()
        try:
            # What this site sent before its end is known before its files are compared with what is known.
            self._follower.catch_up()
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    def scan(self) -> int:
        """Sends what has changed in the folder since it was last looked at.

        Returns:
            The number of this site's last message.

        Raises:
            ReplicationError: It failed, now or before.
            OSError: A file cannot be read.
        """
        self.check()
        with self._scanning:
            with self._follower.changed:
                known = {path for path, file in self._files.items() if file.chunks is not None}
            for path in sorted({*self._walk(), *known}):
                if self._closing.is_set():
                    break
                self._look(path)
            with self._follower.changed:
                self._bring_in()
            return self._node.last(self._node.me)

    @property
    def num_waiting(self) -> int:
        """How many versions came and are not in the folder yet: chunks are on their way, or files are being changed."""
        with self._follower.changed:
            count: int = self._database.execute("SELECT COUNT(*) FROM waiting").fetchone()[0]
            return count

    def check(self) -> None:
        """Raises what ended the synchronisation, if something did."""
        self._follower.check()

    def close(self) -> None:
        """Ends the threads; the node goes on, and changes are found when the folder is opened again."""
        self._closing.set()
        self._follower.close()
        if self._watcher.is_alive():
            self._watcher.join()
        self._database.close()

    def __enter__(self) -> FolderSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # From the folder to the sites.

    def _watch(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.scan()
            except BaseException as error:
                self._follower.fail(error)
                return

    def _walk(self) -> Iterator[str]:
        for root, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if Path(root, name) != self.folder / STATE]
            for name in names:
                yield Path(root, name).relative_to(self.folder).as_posix()

    def _look(self, path: str) -> None:
        """Sends a file if it is not as it was. What holds the lock sends nothing: to send may mean to wait for room."""
        with self._follower.changed:
            known, before = self._files.get(path), self._stamps.get(path, "")
        stamp = self._stamp(path)
        if stamp == before or (not stamp and os.path.lexists(self.folder / path)):
            return  # unchanged, or no regular file
        listing: list[str] | None = None
        if stamp:
            try:
                with open(self.folder / path, "rb") as file:
                    listing = [self._send_chunk(chunk) for chunk in chunks.split(file)]
            except (FileNotFoundError, NotADirectoryError):
                return  # gone meanwhile: seen the next time
            if self._stamp(path) != stamp:
                return  # changed while it was read: looked at again the next time
        executable = stamp.endswith("x")
        with self._follower.changed:
            if known is not None and (known.chunks, known.executable) == (listing, executable):
                self._stamps[path] = stamp
                return
            self._clock += 1
            history = [] if known is None else [list(known.version), *known.history][:_HISTORY]
            changed = _File(path, self._clock, self._node.me, history, listing, executable)
        self._node.send(pack(_APP, {"file": vars(changed)}))
        with self._follower.changed:
            if self._files.get(path) is known:  # else it comes with this site's own messages
                self._files[path], self._stamps[path] = changed, stamp

    def _stamp(self, path: str) -> str:
        """Differs when the file does; empty if there is none."""
        try:
            status = os.lstat(self.folder / path)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        if not stat.S_ISREG(status.st_mode):
            return ""
        return _stamp_of(status)

    def _send_chunk(self, chunk: bytes) -> str:
        """Sends a chunk unless some site has; returns its name. It is kept here once it comes with what was sent."""
        name = _name_of(chunk)
        if name not in self._sent and not self._path_of(name).exists():
            self._node.send(pack(_APP, {"chunk": name}, chunk))
            self._sent.add(name)
        return name

    def _path_of(self, chunk: str) -> Path:
        return self._chunks / chunk[:2] / chunk

    # From the sites to the folder.

    def _apply(self, site: str, messages: list[Message]) -> None:
        for message in messages:
            content = unpack(_APP, message)
            if content is None:
                continue
            head, payload = content
            if "chunk" in head:
                name = _name_of(payload)
                if name != head["chunk"]:
                    raise ReplicationError(f"message {message.seq} of {site} holds another chunk than it says")
                if not self._path_of(name).exists():
                    self._path_of(name).parent.mkdir(exist_ok=True)
                    self._write(self._path_of(name), [payload])
                self._sent.discard(name)
            else:
                values = (site, message.seq, json.dumps(head["file"]))
                self._database.execute("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?)", values)
        self._bring_in()
        self._database.execute("INSERT OR REPLACE INTO applied VALUES (?, ?)", (site, messages[-1].seq))

    def _bring_in(self) -> None:
        """Takes the versions that came, as far as their chunks are here: some travel in other sites' streams."""
        for site, seq, head in self._database.execute("SELECT site, seq, head FROM waiting ORDER BY seq").fetchall():
            file = _File(**json.loads(head))
            if all(self._path_of(name).exists() for name in file.chunks or ()) and self._take(file):
                self._database.execute("DELETE FROM waiting WHERE site = ? AND seq = ?", (site, seq))

    def _take(self, file: _File) -> bool:
        """Brings a version into the folder, if it is the newest; False if that has to wait."""
        self._clock = max(self._clock, file.clock)
        known, before = self._files.get(file.path), self._stamps.get(file.path, "")
        if known is not None and known.version >= file.version:
            if known.version == file.version:  # sent by this site, and now known to be on its disk
                self._remember(known, before)
            return True
        target = self.folder / file.path
        if not target.resolve().is_relative_to(self.folder.resolve()) or Path(file.path).parts[0] == STATE:
            raise ReplicationError(f"{file.site} sent a file named {file.path!r}, outside the folder")
        stamp = self._stamp(file.path)
        if stamp != before or (not before and os.path.lexists(target)):
            if not stamp or self._content(target) != file.chunks:
                return False  # what was changed here is a version of its own: `scan` sends it first
            self._remember(file, stamp)  # it is there already, as after a crash
            return True
        loses = known is not None and known.site == self._node.me and not file.comes_from(known)
        if known is not None and known.chunks not in (None, file.chunks) and loses:
            # Beside what is taken in its place; found and sent as a file like others.
            os.rename(target, target.with_name(f"{target.stem} (conflict {known.site} {known.clock}){target.suffix}"))
        stamp = ""
        if file.chunks is None:
            target.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # as far as they are empty
                for parent in Path(file.path).parents[:-1]:
                    (self.folder / parent).rmdir()
        else:
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                return False  # a file is in the way
            pieces = (self._path_of(name).read_bytes() for name in file.chunks)
            stamp = self._write(target, pieces, executable=file.executable)
        self._remember(file, stamp)
        return True

    def _content(self, path: Path) -> list[str]:
        with open(path, "rb") as file:
            return [_name_of(chunk) for chunk in chunks.split(file)]

    def _remember(self, file: _File, stamp: str) -> None:
        self._files[file.path], self._stamps[file.path] = file, stamp
        values = (file.path, json.dumps(vars(file)), stamp)
        self._database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", values)

    def _write(self, path: Path, pieces: Iterable[bytes], *, executable: bool = False) -> str:
        """Makes a file that is there whole, and on the disk, or not at all; returns its stamp."""
        fd, temporary = tempfile.mkstemp(prefix=_NEW, dir=self.folder / STATE)
        try:
            with open(fd, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                os.fchmod(file.fileno(), 0o755 if executable else 0o644)
                file.flush()
                os.fsync(file.fileno())
                stamp = _stamp_of(os.fstat(file.fileno()))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        parent = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        return stamp


def _name_of(chunk: bytes) -> str:
    return hashlib.blake2b(chunk, digest_size=32).hexdigest()


def _stamp_of(status: os.stat_result) -> str:
    executable = "x" if status.st_mode & stat.S_IXUSR else "-"
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {executable}"
