"""Sites in network namespaces, with the delay, the rate and the losses of a wide-area network between them."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests import wan
from tests.replication.sites import Site

LACKS = wan.missing()
pytestmark = pytest.mark.skipif(LACKS != "", reason=LACKS)


@pytest.mark.parametrize("num_sites", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_sites_agree_over_slow_and_lossy_links(tmp_path: Path, num_sites: int) -> None:
    round_trips_ms = {(one, other): 20.0 + 10 * (other - one) for other in range(num_sites) for one in range(other)}
    names = [f"s{number}" for number in range(num_sites)]
    with wan.Wan(wan.symmetric(num_sites, round_trips_ms), rate_mbit=100, loss_percent=1) as net:
        sites = {
            name: {"address": f"{net.addresses[number]}:7070", "store": str(tmp_path / name)}
            for number, name in enumerate(names)
        }
        config = {"key": secrets.token_hex(16), "sites": sites, "segment_bytes": 2 << 20, "dead_after_s": 10.0}
        processes = [Site(name, config, net.at(number)) for number, name in enumerate(names)]
        try:
            for process in processes:
                process.answer()
            for process in processes:
                process.call("register", "all", "MIN($ALLSITES).verified")
                process.call("register", "majority", "KTH_MAX(SIZEOF($ALLSITES)/2 + 1, $ALLSITES).persisted")
                process.post("send", 20, 30_000)
            for process in processes:
                assert process.answer() == 20
                assert process.call("waitfor", 20, "all", 60) == 20
            for process in processes:
                assert [process.call("held", name) for name in names] == num_sites * [20]
            # Nobody knows sooner than a message and its acknowledgement can travel: to the nearest of a majority.
            for number, process in enumerate(processes):
                nearest = sorted(wan.symmetric(num_sites, round_trips_ms)[number])[num_sites // 2]
                assert min(process.call("latencies", 3, 100, "majority")) >= nearest
            processes[1].kill()  # the others go on without it
            seq = processes[0].call("send", 5, 30_000)
            assert processes[0].call("waitfor", seq, "majority", 60) >= seq
            processes[1] = Site(names[1], config, net.at(1))
            processes[1].answer()
            assert processes[0].call("waitfor", seq, "all", 60) >= seq
        finally:
            for process in processes:
                process.end()
