"""Reads a cluster from TOML."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchext.scheduling import synthetic
from torchext.scheduling.types import Cluster, Machine, SchedulingError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MACHINE_KEYS = ("type", "count", "gpus", "price_per_gpu_hour", "rack", "names", "speeds")


def read_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file.

    ::

        [[machines]]
        type = "v100"
        count = 8                 # or names = ["gpu01", "gpu02"]; without either: one machine
        gpus = 4                  # on each
        rack = "A"                # optional
        price_per_gpu_hour = 2.5  # optional, 0 if not given

        [machines.speeds]         # optional; of the block above. Speed by class of job, 1 is the machine
        default = 2.0             # that durations refer to
        resnet50 = 3.1

        [contention]              # optional; share of its speed that a class loses on a machine full of others
        default = 0.1

    Several blocks may have one type (say, in several racks), if not more than one gives its speeds.

    Raises:
        SchedulingError: The file is no TOML, or a key or a value is wrong; names the file and the place in it.
        OSError: The file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SchedulingError(f"{path}: not a TOML file: {error}") from None
    try:
        return _cluster(content)
    except SchedulingError as error:
        raise SchedulingError(f"{path}: {error}") from None


def parse_cluster(text: str) -> Cluster:
    """Makes a cluster from what a command line says: ``79x8`` (machines and GPUs of each), ``synthetic:52``, or a path.

    ``synthetic:52`` stands for the 52 machines of `synthetic.make_cluster`, a path for a cluster file.

    Raises:
        SchedulingError: It is neither, or the file is wrong.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match:
        nodes, gpus = int(match[1]), int(match[2])
        if not nodes or not gpus:
            raise SchedulingError(f"a cluster of {text} has no GPUs; give at least 1x1")
        return Cluster.uniform(nodes, gpus)
    match = re.fullmatch(r"synthetic:([1-9]\d*)", text)
    if match:
        return synthetic.make_cluster(int(match[1]))
    try:
        return read_cluster(text)
    except OSError as error:
        raise SchedulingError(
            f"{text!r} is neither NODESxGPUS, as in 79x8, nor synthetic:NODES, nor a file to read: {error}"
        ) from None


def _cluster(content: Mapping[str, Any]) -> Cluster:
    _known_keys("the file", content, ("machines", "contention"))
    blocks = content.get("machines")
    if not isinstance(blocks, list) or not blocks:
        raise SchedulingError("expected at least one [[machines]] block")
    machines: list[Machine] = []
    speeds: dict[str, dict[str, float]] = {}
    for number, block in enumerate(blocks, 1):
        where = f"[[machines]] block {number}"
        if not isinstance(block, Mapping):
            raise SchedulingError(f"{where}: expected keys and values, got {block!r}")
        _known_keys(where, block, _MACHINE_KEYS)
        if "gpus" not in block:
            raise SchedulingError(f"{where}: gpus is missing: how many each machine has")
        kind = _text(where, block, "type", "default")
        rack = _text(where, block, "rack", "")
        gpus = _count(where, block, "gpus")
        price = _number(where, "price_per_gpu_hour", block.get("price_per_gpu_hour", 0.0))
        for name in _names(where, block, kind, sum(machine.type == kind for machine in machines)):
            machines.append(Machine(name, gpus, kind, rack, price))
        if "speeds" in block:
            if kind in speeds:
                raise SchedulingError(f"{where}: an earlier block gives speeds of type {kind!r}; give them once")
            speeds[kind] = _table(f"{where}, speeds", block["speeds"])
    return Cluster(tuple(machines), speeds, _table("[contention]", content.get("contention", {})))


def _names(where: str, block: Mapping[str, Any], kind: str, num_before: int) -> list[str]:
    if "names" not in block:
        count = _count(where, block, "count") if "count" in block else 1
        return [f"{kind}-{num_before + i}" for i in range(count)]
    names = block["names"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise SchedulingError(f"{where}: names must be a list of texts, got {names!r}")
    if "count" in block and block["count"] != len(names):
        raise SchedulingError(f"{where}: count is {block['count']!r} but there are {len(names)} names; leave count out")
    return names


def _known_keys(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise SchedulingError(f"{where}: unknown key {key!r}; expected one of {', '.join(known)}")


def _text(where: str, table: Mapping[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise SchedulingError(f"{where}: {key} must be a text, got {value!r}")
    return value


def _count(where: str, table: Mapping[str, Any], key: str) -> int:
    value = table[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SchedulingError(f"{where}: {key} must be a whole number, at least 1, got {value!r}")
    return value


def _number(where: str, key: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise SchedulingError(f"{where}: {key} must be a finite number, not negative, got {value!r}")
    return float(value)


def _table(where: str, table: object) -> dict[str, float]:
    if not isinstance(table, Mapping):
        raise SchedulingError(f"{where}: expected lines such as resnet50 = 0.5, got {table!r}")
    return {job_class: _number(where, job_class, value) for job_class, value in table.items()}
