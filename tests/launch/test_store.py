"""What the queue must not forget."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchext.launch.queue.store import Store
from torchext.launch.queue.submit import describe


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "queue.sqlite")
    yield made
    made.close()


def test_the_file_is_for_its_user_alone(store: Store, tmp_path: Path) -> None:
    store.save_clock(1.0)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("queue.sqlite*")} == {0o600}


def test_the_time_is_the_latest_of_all_that_is_stored(store: Store) -> None:
    assert store.clock_s() == 0.0
    store.save_clock(1.0)
    row = store.add_job(describe([__file__]), 5.0)
    assert store.clock_s() == 5.0
    row.end_s = 7.0
    store.save_job(row)
    assert store.clock_s() == 7.0


def test_a_failed_transaction_shows_its_own_error_and_can_be_followed_by_another(store: Store) -> None:
    def fail() -> None:
        with store.transaction():
            store.save_clock(1.0)
            store._connection.execute("ROLLBACK")  # as SQLite does by itself when the disk fails
            raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        fail()
    with store.transaction():
        store.save_clock(2.0)
    assert store.clock_s() == 2.0


def test_dashes_before_the_script_do_not_hide_the_options_of_the_queue() -> None:
    made = describe(["--nproc-per-node", "2", "--", __file__, "--", "--lr"])
    assert made.options == ("--nproc-per-node", "2")
    assert made.command == (__file__, "--", "--lr")
