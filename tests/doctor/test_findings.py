from __future__ import annotations

from collections.abc import Callable

from torchext.doctor import Absent, Probe, examine


def _probe(check: Callable[[], str]) -> Probe:
    return Probe("a group", "a name", check, "losses", "something", "buy one")


def _raise(error: Exception) -> str:
    raise error


def test_what_is_there_needs_no_remedy() -> None:
    (finding,) = examine([_probe(lambda: "version 3")])
    assert (finding.ok, finding.detail, finding.remedy) == (True, "version 3", "")
    assert (finding.group, finding.name, finding.part, finding.enables) == (
        "a group",
        "a name",
        "losses",
        "something",
    )


def test_what_is_absent_comes_with_its_reason_and_remedy() -> None:
    (finding,) = examine([_probe(lambda: _raise(Absent("sold out")))])
    assert (finding.ok, finding.detail, finding.remedy) == (False, "sold out", "buy one")


def test_a_probe_that_fails_is_explained_and_the_others_go_on() -> None:
    broken, fine = examine([_probe(lambda: _raise(OSError(5, "Input/output error"))), _probe(lambda: "fine")])
    assert not broken.ok
    assert broken.detail == "could not be tried: OSError: [Errno 5] Input/output error"
    assert fine.ok
