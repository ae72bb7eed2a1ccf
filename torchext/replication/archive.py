"""A stream kept in an object store or on any other file system of fsspec: what is there is persisted, wherever it runs.

Parts are frames as they lie in the log, in objects that are written once. Their names say where they begin and end, so
a listing tells what is there, and a site whose machine is gone starts again elsewhere with an empty folder.
"""

from __future__ import annotations

import io
import logging
import os
import re
from pathlib import Path

from torchext.replication.cursor import Cursor
from torchext.replication.errors import StoreError
from torchext.replication.log import HEADER, Place, StreamLog, sync_folder

_PART_BYTES = 64 << 20  # of one object, at most
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{8})_([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{8})\.part")

_logger = logging.getLogger(__name__)


def is_url(store: str) -> bool:
    """Whether a store is one for this module, such as ``s3://bucket/folder``, and not a folder here."""
    return "://" in store


class Archive:
    """Parts of one stream; used by one thread.

    Args:
        url: Folder for this stream alone.

    Raises:
        ImportError: fsspec, or its package for this kind of URL, is not installed.
        StoreError: There are parts of more than one history.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise ImportError(f"store {url}: needs fsspec: pip install fsspec", name="fsspec") from None
        self._url = url
        # Instances that others use too would show their cached listings.
        self._files, self._folder = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        self._is_local = url.startswith(("file://", "local://"))
        self._parts: list[tuple[Place, Place, str]] = []
        self._tried: tuple[Place, int] | None = None  # the part that could not be written: its begin and its length
        self._files.makedirs(self._folder, exist_ok=True)
        found = []
        for path in self._files.ls(self._folder, detail=False):
            match = _NAME.fullmatch(path.rsplit("/", 1)[-1])
            if match is not None:
                numbers = [int(text, 16) for text in match.groups()]
                found.append((Place(*numbers[:3]), Place(*numbers[3:]), path))
            elif self._is_local and path.endswith(".part.new"):
                self._files.rm_file(path)  # its writer was killed
        for begin, end, path in sorted(found):
            if self._parts and begin != self._parts[-1][1]:
                raise StoreError(
                    f"{path} does not go on from where {self._parts[-1][2]} ends; give each site a store of its own"
                )
            self._parts.append((begin, end, path))

    @property
    def end(self) -> Place | None:
        """Up to where it goes; None if it is empty."""
        return self._parts[-1][1] if self._parts else None

    def restore(self, log: StreamLog) -> None:
        """Brings what a log lacks into it.

        Raises:
            StoreError: They are not of one history, or a part is damaged.
            OSError: The store cannot be read.
        """
        if self._parts and log.tail == Place(0, 0, 0) and self._parts[0][0] != log.tail:
            log.begin_at(self._parts[0][0])
        for begin, end, path in self._parts:
            if end[:2] <= log.tail[:2]:
                continue
            data = self._files.cat_file(path)
            at, place = 0, begin
            while place[:2] < log.tail[:2] and at < len(data):  # frame by frame: the log here may end within the part
                length = HEADER.unpack_from(data, at)[1]
                at, place = log.follow(data, at, at + HEADER.size + length, place)
            if place != log.tail:
                raise StoreError(
                    f"{self._url}: {path} does not go on from the log here, which ends after message "
                    f"{log.tail.seq}; remove the folder that is this site's cache"
                )
            source = io.BytesIO(data[at:])
            while log.receive(source.readinto):
                pass
            if log.tail != end:
                raise StoreError(f"{self._url}: {path} is damaged after message {log.tail.seq}")
        _logger.info("%s: %d parts, up to message %d", self._url, len(self._parts), log.tail.seq)

    def put(self, log: StreamLog, end: Place) -> None:
        """Brings the log up to a place into the store, and reads it back.

        Raises:
            StoreError: What was read back differs.
            OSError: The store cannot be written; what was not is tried again with the next call.
        """
        with Cursor(log, self.end or log.first) as cursor:
            while cursor.place[:2] < end[:2]:
                region = cursor.region()
                assert region is not None
                assert cursor.map is not None
                begin, limit = cursor.place, _PART_BYTES
                if self._tried is not None and self._tried[0] == begin:
                    limit = self._tried[1]  # what failed may be there all the same: it keeps its name, and its end
                at, place = log.follow(cursor.map, region[0], min(region[1], region[0] + limit), begin)
                self._tried = begin, at - region[0]
                self._write(begin, place, cursor.map[region[0] : at])
                self._tried = None
                cursor.advance(at, place)

    def _write(self, begin: Place, end: Place, data: bytes) -> None:
        words = [f"{place.seq:016x}-{place.offset:016x}-{place.checksum:08x}" for place in (begin, end)]
        path = f"{self._folder}/{words[0]}_{words[1]}.part"
        if self._is_local:  # there, a file shows before it is whole and on the disk
            with open(f"{path}.new", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.new", path)
            sync_folder(Path(self._folder))
        else:
            self._files.pipe_file(path, data)
        if self._files.cat_file(path) != data:
            raise StoreError(f"{path}: differs from what was written")
        self._parts.append((begin, end, path))

    def truncate(self, before: int) -> None:
        """Removes parts that hold only messages before this one.

        Raises:
            OSError: The store cannot be written.
        """
        while len(self._parts) > 1 and self._parts[0][1].seq + (self._parts[0][1].offset > 0) < before:
            self._files.rm_file(self._parts[0][2])
            del self._parts[0]
