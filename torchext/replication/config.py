"""The sites: who they are, where they listen, where they keep their logs; from TOML or a dictionary."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torchext.replication.archive import is_url
from torchext.replication.errors import ConfigError
from torchext.replication.log import MIN_SEGMENT_BYTES
from torchext.replication.predicates import ACKS
from torchext.transport import parse_address

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_HERE = Path()


@dataclass(frozen=True)
class Site:
    """One site.

    Attributes:
        address: Where the others reach it, ``host:port``.
        store: Folder of its logs, on its own machine; or a URL of fsspec, such as ``s3://bucket/folder``: then messages
            count as persisted once they are there.
        zone: For ``$ZONE_...``; empty if it has none.
        listen: Where it listens, if that is not its address (as behind a proxy or with ``0.0.0.0``).
        cache: With a URL as store: folder on its own machine, for the part of the logs that is in use.
    """

    address: str
    store: str
    zone: str = ""
    listen: str = ""
    cache: str = ""

    @property
    def folder(self) -> Path:
        """Where its logs are on its own machine."""
        return Path(self.cache or self.store)


@dataclass(frozen=True)
class Tls:
    """Mutual TLS: who presents a certificate of this authority that names the site is that site.

    Attributes:
        ca: File of the authority's certificate.
        cert: File of this site's certificate, whose common name or DNS name is the site's name.
        key: File of its private key.
    """

    ca: str
    cert: str
    key: str


@dataclass(frozen=True)
class Config:
    """All that a site needs to know.

    Attributes:
        sites: By name.
        key: The secret that all sites share; nobody without it is heard. Not needed with TLS.
        tls: Encrypts and authenticates by certificate instead.
        acks: Ack types besides received, persisted and verified.
        predicates: Registered from the start.
        truncate: Messages that are stable under this predicate are dropped from the logs of all sites. Empty: all are
            kept until `Node.truncate`.
        segment_bytes: Size of a log file.
        max_message_bytes: Longer messages are refused, here and from other sites.
        max_log_bytes: How much this site's own messages may take on its disk before ``send`` waits; 0: no bound.
            The last file is never dropped, so while there is no other, ``send`` does not wait.
        dead_after_s: A silent connection is given up after this time.
    """

    sites: Mapping[str, Site]
    key: bytes = field(default=b"", repr=False)
    tls: Tls | None = None
    acks: tuple[str, ...] = ()
    predicates: Mapping[str, str] = field(default_factory=dict)
    truncate: str = ""
    segment_bytes: int = 64 << 20
    max_message_bytes: int = 1 << 40
    max_log_bytes: int = 0
    dead_after_s: float = 10.0


def load_config(source: str | Path | Mapping[str, Any]) -> Config:
    """Reads and checks the description of the sites.

    ::

        key_file = "site.key"               # at least 16 bytes, the same at all sites
        acks = ["indexed"]                  # optional, as is all that follows but the sites
        truncate = "MIN($ALLSITES).persisted"

        [sites.paris]
        address = "10.1.0.1:7070"
        store = "/var/lib/torchext"
        zone = "eu"

        [predicates]
        safe = "KTH_MIN(2, $ALLSITES - $MYSITE).persisted"

    Paths are relative to the file.

    Raises:
        ConfigError: A key or value is wrong; names it and says what would be right.
        OSError: A file cannot be read.
    """
    if isinstance(source, Mapping):
        return _config(source, Path())
    try:
        with open(source, "rb") as file:
            content = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not a TOML file: {error}") from None
    try:
        return _config(content, Path(source).parent)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def make_site(name: str, table: Any, folder: Path = _HERE) -> Site:
    """Checks one ``[sites.NAME]`` table.

    Raises:
        ConfigError: The name, a key or a value is wrong.
    """
    where = f"[sites.{name}]"
    if not name or '"' in name or "/" in name or name.startswith(".") or len(name) > 100:
        raise ConfigError(f"{where}: a site's name is up to 100 characters without '\"' and '/', got {name!r}")
    texts = _texts(where, table)
    for key in texts:
        if key not in {f.name for f in fields(Site)}:
            raise ConfigError(f"{where}: unknown key {key!r}; expected address, store, zone, listen or cache")
    for key in ("address", "store"):
        if not texts.get(key):
            raise ConfigError(f"{where}: {key} is missing")
    for key in ("address", "listen"):
        if texts.get(key):
            try:
                parse_address(texts[key])
            except ValueError as error:
                raise ConfigError(f"{where}: {key}: {error}") from None
    if is_url(texts["store"]) != bool(texts.get("cache")):
        raise ConfigError(
            f"{where}: a store that is a URL, and no other, goes with cache, a folder on the site's machine; got "
            f"store = {texts['store']!r}, cache = {texts.get('cache', '')!r}"
        )
    folders = {key: str(folder / texts[key]) for key in ("store", "cache") if texts.get(key) and not is_url(texts[key])}
    return Site(**{**texts, **folders})


def _config(content: Mapping[str, Any], folder: Path) -> Config:
    known = {f.name for f in fields(Config)} | {"key_file"}
    for key in content:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}; expected some of {', '.join(sorted(known))}")
    sites_table = content.get("sites")
    if not isinstance(sites_table, Mapping) or not sites_table:
        raise ConfigError("expected at least one [sites.NAME] table")
    sites = {name: make_site(name, table, folder) for name, table in sites_table.items()}
    acks = content.get("acks", [])
    for ack in acks:
        if not isinstance(ack, str) or not re.fullmatch(r"[A-Za-z_]\w*", ack) or ack in (*ACKS, "truncated"):
            raise ConfigError(f"acks: expected names other than {', '.join(ACKS)} and truncated, got {ack!r}")
    values: dict[str, Any] = {"sites": sites, "acks": tuple(acks)}
    values["predicates"] = _texts("[predicates]", content.get("predicates", {}))
    if not isinstance(content.get("truncate", ""), str):
        raise ConfigError(f"truncate: expected a predicate, got {content['truncate']!r}")
    values["truncate"] = content.get("truncate", "")
    least = {"segment_bytes": MIN_SEGMENT_BYTES, "max_message_bytes": 1, "max_log_bytes": 0}
    for name, bound in least.items():
        value = content.get(name, getattr(Config, name))
        if not isinstance(value, int) or isinstance(value, bool) or value < bound:
            raise ConfigError(f"{name}: expected a whole number, at least {bound}, got {value!r}")
        values[name] = value
    dead_after_s = content.get("dead_after_s", Config.dead_after_s)
    if not isinstance(dead_after_s, (int, float)) or isinstance(dead_after_s, bool) or not 0.1 <= dead_after_s < 1e6:
        raise ConfigError(f"dead_after_s: expected seconds, at least 0.1, got {dead_after_s!r}")
    values["dead_after_s"] = float(dead_after_s)
    values["key"], values["tls"] = _key(content, folder), _tls(content.get("tls"), folder)
    if not values["key"] and values["tls"] is None:
        raise ConfigError("give key_file (or key), or a [tls] table: nobody without it is to be heard")
    return Config(**values)


def _texts(where: str, table: Any) -> dict[str, str]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table, got {table!r}")
    for key, value in table.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key} must be a text, got {value!r}")
    return dict(table)


def _key(content: Mapping[str, Any], folder: Path) -> bytes:
    if "key" in content and "key_file" in content:
        raise ConfigError("give key or key_file, not both")
    key = content.get("key", b"")
    if "key_file" in content:
        key = (folder / str(content["key_file"])).read_bytes().strip()
    if isinstance(key, str):
        key = key.encode()
    if not isinstance(key, bytes) or (key and len(key) < 16):
        raise ConfigError("the key must have at least 16 bytes, as from: head -c 32 /dev/urandom | base64")
    return key


def _tls(table: Any, folder: Path) -> Tls | None:
    if table is None:
        return None
    texts = _texts("[tls]", table)
    if set(texts) != {"ca", "cert", "key"}:
        raise ConfigError(f"[tls]: expected ca, cert and key, got {', '.join(sorted(texts)) or 'nothing'}")
    return Tls(**{key: str(folder / value) for key, value in texts.items()})
