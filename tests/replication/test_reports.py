"""What users of other systems have reported, each as a test of ours; the reports are named.

Two more are shown elsewhere: memory that grows with what passes (pytorch/pytorch#170163) in test_faults.py, where also
nothing is said to be persisted before it is (Lightning-AI/pytorch-lightning#17915); and those that Lightning has to do
with in tests/callbacks/test_stabilizer.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.replication.sites import Cluster
from tests.replication.test_node import Pair, pair
from torchext.replication import Node, PredicateError, fetch_checkpoint, send_checkpoint
from torchext.replication.predicates import Sites, compile_predicate

__all__ = ["pair"]


def test_state_that_is_changed_right_after_send_arrives_as_it_was(pair: Pair, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#20953, pytorch/pytorch#144657."""
    buffer, tree, file = bytearray(b"before"), {"weights": torch.ones(5000)}, tmp_path / "file"
    file.write_bytes(b"before")
    pair.paris.register_predicate("all", "MIN($ALLSITES).persisted")
    pair.paris.send(buffer)
    pair.paris.send(file)
    seq = pair.paris.send(tree)
    buffer[:] = b"after!"
    file.write_bytes(b"after!")
    tree["weights"].zero_()
    pair.paris.waitfor(seq, "all", 30)
    first, second, third = pair.tokyo.receive("paris", timeout=0)
    assert first.payload == second.payload == b"before"
    assert torch.equal(third.tree()["weights"], torch.ones(5000))


def test_pipelined_sends_survive_that_their_connection_is_made_anew(tmp_path: Path) -> None:
    """apache/pulsar#26113, apache/pulsar#23697."""
    with Cluster(tmp_path, ["paris", "tokyo"], proxied=True) as cluster:
        for site in cluster.start_all():
            site.answer()
        paris, proxy = cluster["paris"], cluster.proxies["paris", "tokyo"]
        paris.call("register", "all", "MIN($ALLSITES).persisted")
        paris.call("waitfor", paris.call("send", 1, 10), "all", 30)
        for _ in range(8):  # each time with messages under way, cut at some byte of one
            proxy.cut_after_bytes = proxy.carried_bytes + 333_333
            paris.call("send", 60, 20_000)
        paris.call("waitfor", 1 + 8 * 60, "all", 60)
        assert cluster["tokyo"].call("held", "paris") == 1 + 8 * 60


def test_no_predicate_is_true_because_nobody_is_asked(pair: Pair) -> None:
    """valkey-io/valkey#743, redis/redis#8684: with no replicas, waiting for all of them must not succeed."""
    with pytest.raises(PredicateError, match=r"\$ALLSITES - \$MYSITE has no sites here"):
        compile_predicate("MIN($ALLSITES - $MYSITE)", Sites({"paris": ""}, "paris"))
    pair.paris.register_predicate("others", "MIN($ALLSITES - $MYSITE).received")
    with pytest.raises(PredicateError, match=r"\$ALLSITES - \$MYSITE has no sites here"):
        pair.paris.remove_site("tokyo")
    pair.tokyo.close()
    seq = pair.paris.send(b"x")
    with pytest.raises(TimeoutError, match=r"tokyo.received is at 0, 1 behind"):
        pair.paris.waitfor(seq, "others", 0.1)


def test_checkpoint_whose_last_record_is_missing_does_not_count(pair: Pair, tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#3267: killed between the data and the record that makes them a checkpoint."""
    pair.paris.register_predicate("safe", "MIN($ALLSITES).persisted")
    pair.tokyo.register_predicate("safe", "MIN($ALLSITES).persisted")
    folder = tmp_path / "sharded"
    folder.mkdir()
    for name in ("0", "1"):
        (folder / name).write_bytes(b"old")
    send_checkpoint(pair.paris, folder, 1)
    (folder / "0").write_bytes(b"new")
    seq = pair.paris.send(folder / "0")  # and here it dies
    pair.paris.waitfor(seq, "safe", 30)
    pair.paris.close()
    pair.paris = Node(pair.config, me="paris")
    assert fetch_checkpoint(pair.tokyo, "stabilizer://paris/latest?predicate=safe", tmp_path / "copy", timeout=30) == 1
    assert [(tmp_path / "copy" / name).read_bytes() for name in ("0", "1")] == [b"old", b"old"]


def test_file_that_could_not_be_written_whole_leaves_the_one_before(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning-AI/pytorch-lightning#688, #19970: a torn checkpoint in the place of a whole one."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    pair.paris.send(b"new" * 1000)
    message = next(pair.paris.receive("paris", timeout=0))
    (tmp_path / "file").write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            message.save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))
    message.save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"new" * 1000
