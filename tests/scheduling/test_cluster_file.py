from __future__ import annotations

from pathlib import Path

import pytest

from torchext.scheduling import SchedulingError
from torchext.scheduling.cluster_file import parse_cluster, read_cluster

_WHOLE = """
[[machines]]
type = "v100"
count = 2
gpus = 4
rack = "A"
price_per_gpu_hour = 2.5
[machines.speeds]
default = 2
resnet50 = 3.1

[[machines]]
type = "v100"
gpus = 8
rack = "B"

[[machines]]
type = "k80"
names = ["old1", "old2"]
gpus = 8

[contention]
default = 0.1
"""


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(_WHOLE)
    cluster = read_cluster(path)
    assert [(m.name, m.type, m.num_gpus, m.rack, m.price_per_gpu_hour) for m in cluster.machines] == [
        ("v100-0", "v100", 4, "A", 2.5),
        ("v100-1", "v100", 4, "A", 2.5),
        ("v100-2", "v100", 8, "B", 0.0),
        ("old1", "k80", 8, "", 0.0),
        ("old2", "k80", 8, "", 0.0),
    ]
    assert (cluster.speed("resnet50", "v100"), cluster.speed("bert", "v100"), cluster.speed("bert", "k80")) == (
        3.1,
        2,
        1,
    )
    assert cluster.contention_of("bert") == 0.1
    assert parse_cluster(str(path)).machines == cluster.machines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("machines = 3 3", "not a TOML file: .*line 1"),
        ("", r"expected at least one \[\[machines\]\] block"),
        ("[machines]\ngpus = 1", r"expected at least one \[\[machines\]\] block"),
        ("machines = [1]", r"\[\[machines\]\] block 1: expected keys and values, got 1"),
        ("[[machines]]\ngpus = 1\n[racks]", "the file: unknown key 'racks'; expected one of machines, contention"),
        ("[[machines]]\ncount = 1", r"\[\[machines\]\] block 1: gpus is missing"),
        ("[[machines]]\ngpus = 1\n[[machines]]\ngpus = 0", "block 2: gpus must be a whole number, at least 1, got 0"),
        ("[[machines]]\ngpus = true", "gpus must be a whole number, at least 1, got True"),
        ("[[machines]]\ngpus = 1\ncuont = 2", "block 1: unknown key 'cuont'; expected one of type, count, gpus"),
        ("[[machines]]\ngpus = 1\ntype = 3", "type must be a text, got 3"),
        ("[[machines]]\ngpus = 1\nprice_per_gpu_hour = -1", "price_per_gpu_hour must be a finite number, not negative"),
        ("[[machines]]\ngpus = 1\nnames = []", r"names must be a list of texts, got \[\]"),
        ("[[machines]]\ngpus = 1\ncount = 3\nnames = ['a']", "count is 3 but there are 1 names"),
        ("[[machines]]\ngpus = 1\nnames = ['a', 'a']", "two machines are named 'a'"),
        ("[[machines]]\ngpus = 1\nspeeds = 2", r"block 1, speeds: expected lines such as resnet50 = 0\.5, got 2"),
        ("[[machines]]\ngpus = 1\nspeeds.x = 'fast'", "x must be a finite number, not negative, got 'fast'"),
        ("[[machines]]\ngpus = 1\nspeeds.x = 0", "speed of 'x' on 'default' must be finite and > 0"),
        (
            "[[machines]]\ngpus = 1\nspeeds.x = 1\n[[machines]]\ngpus = 1\nspeeds.x = 1",
            "block 2: an earlier block gives speeds of type 'default'",
        ),
        ("[[machines]]\ngpus = 1\n[contention]\nx = 1.0", r"contention of 'x' must be in \[0, 1\)"),
    ],
)
def test_errors_name_the_file_and_the_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(SchedulingError, match=f"(?s)^{path}: .*{words}"):
        read_cluster(path)


def test_nodes_times_gpus_is_a_uniform_cluster() -> None:
    assert [machine.num_gpus for machine in parse_cluster("79x8").machines] == [8] * 79
    for text in ("0x8", "3x0"):
        with pytest.raises(SchedulingError, match="has no GPUs"):
            parse_cluster(text)
    with pytest.raises(
        SchedulingError, match="'79 x 8' is neither NODESxGPUS, as in 79x8, nor synthetic:NODES, nor a file to read"
    ):
        parse_cluster("79 x 8")
