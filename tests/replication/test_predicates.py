"""The predicate language, against an evaluator that sorts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchext.replication import PredicateError, dual
from torchext.replication.frontiers import Frontiers
from torchext.replication.predicates import Counter, Order, Sites, compile_predicate

ZONES = {"paris": "eu", "berlin": "eu", "tokyo": "asia", "oregon": "us", "eu-west-1": "cloud"}
SITES = Sites(ZONES, "paris", ("received", "persisted", "verified", "indexed"))


def brute(value: Order | Counter, counters: Mapping[Counter, int]) -> int:
    if isinstance(value, Counter):
        return counters.get(value, 0)
    return sorted(brute(item, counters) for item in value.values)[value.k - 1]


def order(k: int, *values: str | Order | Counter, ack: str = "received") -> Order:
    return Order(k, tuple(Counter(v, ack) if isinstance(v, str) else v for v in values))


ALL = tuple(ZONES)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("MIN($ALLSITES)", order(1, *ALL)),
        ("MAX($ALLSITES)", order(5, *ALL)),
        ("KTH_MIN(2, $ALLSITES - $MYSITE).persisted", order(2, *ALL[1:], ack="persisted")),
        ("KTH_MAX(2, $ALLSITES)", order(4, *ALL)),
        ("KTH_MIN(SIZEOF($ALLSITES)/2 + 1, $ALLSITES)", order(3, *ALL)),
        ("KTH_MIN((SIZEOF($ZONE_eu) + 4) * 2 / 3 - 1, $ALLSITES)", order(3, *ALL)),
        ("MIN($ZONE_eu + tokyo)", order(1, "paris", "berlin", "tokyo")),
        ("MIN($ZONE_eu + paris)", order(1, "paris", "berlin")),
        ("MIN($ZONE_eu, paris)", order(1, "paris", "berlin", "paris")),
        ("MIN($SITE_tokyo)", order(1, "tokyo")),
        ('MIN("eu-west-1", $ZONE_"cloud", $SITE_"eu-west-1")', order(1, *["eu-west-1"] * 3)),
        ("MIN($ALLSITES - ($ZONE_eu + $ZONE_us))", order(1, "tokyo", "eu-west-1")),
        ("MAX(MIN($ZONE_eu), tokyo)", order(2, order(1, "paris", "berlin"), "tokyo")),
        # The innermost ack type counts.
        (
            "MIN(MAX(tokyo.verified, oregon), paris.received).persisted",
            order(
                1,
                Order(2, (Counter("tokyo", "verified"), Counter("oregon", "persisted"))),
                Counter("paris", "received"),
            ),
        ),
        ("MIN((tokyo + oregon).indexed)", order(1, "tokyo", "oregon", ack="indexed")),
        ("  MIN (\n$MYSITE )\t. persisted ", order(1, "paris", ack="persisted")),
    ],
)
def test_text_means(text: str, meaning: Order) -> None:
    assert compile_predicate(text, SITES).order == meaning


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("", 1, "empty predicate"),
        ("tokyo", 1, "expected MIN, MAX, KTH_MIN or KTH_MAX, found 'tokyo'"),
        ("MEDIAN($ALLSITES)", 1, "found 'MEDIAN'"),
        ("MIN $ALLSITES", 1, "found 'MIN'"),
        ("MIN()", 5, "expected a set of sites, such as $ALLSITES or paris, found ')'"),
        ("MIN(tokyo", 10, "expected ',', '+', '-' or ')' to go on with MIN(, found the end"),
        ("MIN(tokyo paris)", 11, "found 'paris'"),
        ("MIN(tokyo) paris", 12, "expected the end of the predicate, found 'paris'"),
        ("MIN(kyoto)", 5, "there is no site 'kyoto'; there are: paris, berlin, tokyo"),
        ("MIN($SITE_kyoto)", 5, "there is no site 'kyoto'"),
        ("MIN($ZONE_africa)", 5, "there is no zone 'africa'; there are: asia, cloud, eu, us"),
        ("MIN($ALL)", 5, "there is no set $ALL; expected $ALLSITES"),
        ("MIN($)", 5, "there is no set $"),
        ("MIN(tokyo).durable", 12, "expected an ack type (received, persisted, verified, indexed), found 'durable'"),
        ("MIN(tokyo).", 12, "found the end"),
        ("MIN($MYSITE - paris)", 5, "$MYSITE - paris has no sites here"),
        ("MIN(tokyo, $ZONE_eu - $ALLSITES)", 12, "$ZONE_eu - $ALLSITES has no sites here"),
        ("KTH_MIN(0, $ALLSITES)", 9, "k is 0, but KTH_MIN has 5 values here: expected 1 to 5"),
        ("KTH_MIN(6, $ALLSITES)", 9, "k is 6"),
        ("KTH_MAX(1 - 2, $ALLSITES)", 9, "k is -1"),
        ("KTH_MIN(1/0, $ALLSITES)", 11, "division by 0"),
        ("KTH_MIN(9999999999, $ALLSITES)", 9, "beyond all bounds"),
        ("KTH_MIN($ALLSITES)", 9, "expected a number, SIZEOF(...) or '(', found '$ALLSITES'"),
        ("KTH_MIN(2 $ALLSITES)", 11, "expected ',' between the k of KTH_MIN and its values, found '$ALLSITES'"),
        ("MIN(tokyo + MIN(paris))", 13, "MIN(...) is a value, not a set"),
        ("MIN(tokyo.received + tokyo.persisted)", 20, "tokyo is on both sides with two ack types"),
        ('MIN("tokyo)', 5, "without its closing quote"),
        ("MIN(tokyo; paris)", 10, "';' is no part of a predicate"),
        ("MIN(" + 60 * "(" + "tokyo" + 60 * ")" + ")", 55, "more than 50 brackets"),
    ],
)
def test_refusal_points_at_the_column(text: str, column: int, reason: str) -> None:
    with pytest.raises(PredicateError) as caught:
        compile_predicate(text, SITES)
    assert caught.value.column == column
    assert reason in caught.value.reason
    assert str(caught.value).splitlines()[-1] == "  " + " " * (column - 1) + "^"


def test_error_shows_text_and_place() -> None:
    with pytest.raises(PredicateError) as caught:
        compile_predicate("MIN($ALLSITES, kyoto).persisted", SITES)
    assert str(caught.value) == (
        "column 16: there is no site 'kyoto'; there are: paris, berlin, tokyo, oregon, eu-west-1\n"
        "  MIN($ALLSITES, kyoto).persisted\n"
        "                 ^"
    )


@given(st.text(alphabet='MINAX KTH_0123()+-*/,.$"ALSITEparis\n', max_size=40))
def test_any_text_is_taken_or_refused(text: str) -> None:
    column = 1
    try:
        compile_predicate(text, SITES)
    except PredicateError as error:
        column = error.column
    assert 1 <= column <= len(text) + 1


# Predicates at random, up to 64 sites: a text and, made apart from it, what it means.


@st.composite
def predicates(draw: st.DrawFn, num_sites: int, depth: int = 2) -> str:
    names = [f"s{i}" for i in range(num_sites)]
    items = draw(
        st.lists(
            st.one_of(
                st.sampled_from([*names, "$ALLSITES", "$MYSITE", "$ZONE_even"]),
                st.lists(st.sampled_from(names), min_size=1, max_size=num_sites, unique=True).map(" + ".join),
                *([predicates(num_sites, depth - 1)] if depth else []),
            ),
            min_size=1,
            max_size=4,
        )
    )
    sizes = {"$ALLSITES": num_sites, "$ZONE_even": (num_sites + 1) // 2}
    n = sum(1 if "(" in item else sizes.get(item, item.count("+") + 1) for item in items)
    function = draw(st.sampled_from(["MIN", "MAX", "KTH_MIN", "KTH_MAX"]))
    if function.startswith("KTH"):
        items = [str(draw(st.integers(1, n))), *items]
    ack = draw(st.sampled_from(["", ".received", ".persisted"]))
    return f"{function}({', '.join(items)}){ack}"


def sites_of(num_sites: int) -> Sites:
    return Sites({f"s{i}": "odd" if i % 2 else "even" for i in range(num_sites)}, "s0")


@given(st.data())
def test_incremental_equals_sorting(data: st.DataObject) -> None:
    num_sites = data.draw(st.sampled_from([1, 2, 3, 8, 13, 64]))
    sites = sites_of(num_sites)
    text = data.draw(predicates(num_sites))
    frontiers = Frontiers(sites)
    frontiers.register("p", text)
    meaning = compile_predicate(text, sites).order
    counters: dict[Counter, int] = {}
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    for _ in range(60):
        counter = Counter(f"s{rng.randrange(num_sites)}", rng.choice(["received", "persisted"]))
        value = max(0, max(counters.values(), default=0) + rng.randrange(-8, 4))
        before = frontiers.frontier("p")
        moved = frontiers.raise_to(counter, value)
        counters[counter] = max(counters.get(counter, 0), value)
        assert frontiers.frontier("p") == brute(meaning, counters)
        assert moved == (["p"] if frontiers.frontier("p") > before else [])


@given(st.data())
def test_write_quorum_and_dual_quorum_share_a_site(data: st.DataObject) -> None:
    num_sites = data.draw(st.integers(1, 6))
    sites = sites_of(num_sites)
    text = data.draw(predicates(num_sites))
    write, read = compile_predicate(text, sites), compile_predicate(dual(text), sites)
    assert dual(dual(text)) == text
    subsets = [set(c) for n in range(num_sites + 1) for c in itertools.combinations(sites.zones, n)]
    for one in filter(write.satisfied_by, subsets):
        for other in filter(read.satisfied_by, subsets):
            assert one & other
    # And the dual asks for no more than that: whoever meets every write quorum may read.
    for other in subsets:
        if all(one & other for one in subsets if write.satisfied_by(one)):
            assert read.satisfied_by(other)


def test_dual_is_the_text_with_its_functions_exchanged() -> None:
    assert dual("KTH_MIN(2, $ALLSITES - $MYSITE).persisted") == "KTH_MAX(2, $ALLSITES - $MYSITE).persisted"
    assert dual("MAX(MIN($ZONE_eu), MIN)") == "MIN(MAX($ZONE_eu), MIN)"  # a site may be called MIN


@settings(max_examples=40)
@given(st.data())
def test_frontiers_never_go_back_and_waits_keep_their_predicate(data: st.DataObject) -> None:
    num_sites = data.draw(st.integers(2, 8))
    sites = sites_of(num_sites)
    frontiers = Frontiers(sites)
    text = data.draw(predicates(num_sites))
    frontiers.register("p", text)
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    counters: dict[Counter, int] = {}
    waits = []
    said = 0
    for _ in range(80):
        action = rng.random()
        if action < 0.1:
            text = data.draw(predicates(num_sites, depth=1))
            frontiers.change("p", text)
        elif action < 0.3:
            seq = rng.randrange(1, 30)
            waits.append((seq, compile_predicate(text, sites).order, frontiers.wait(seq, "p"), seq <= said))
        elif action < 0.35:
            frontiers.set_sites(sites)
        else:
            counter = Counter(f"s{rng.randrange(num_sites)}", rng.choice(["received", "persisted"]))
            counters[counter] = max(counters.get(counter, 0), rng.randrange(1, 30))
            frontiers.raise_to(counter, counters[counter])
        assert frontiers.frontier("p") >= max(said, brute(compile_predicate(text, sites).order, counters))
        said = frontiers.frontier("p")
        for seq, meaning, future, answered in waits:
            if not answered:  # under the predicate that was there when it began
                assert future.done() == (brute(meaning, counters) >= seq)
            else:
                assert future.result(0) >= seq
    for _, _, future, _ in waits:
        frontiers.abandon(future)


def test_a_site_that_lost_its_log_does_not_take_back_what_was_said() -> None:
    frontiers = Frontiers(sites_of(3))
    frontiers.register("all", "MIN($ALLSITES)")
    for site in ("s0", "s1", "s2"):
        frontiers.raise_to(Counter(site, "received"), 10)
    frontiers.lower_to(Counter("s1", "received"), 4)
    assert frontiers.frontier("all") == 10
    frontiers.raise_to(Counter("s0", "received"), 20)
    frontiers.raise_to(Counter("s2", "received"), 20)
    assert frontiers.frontier("all") == 10
    assert frontiers.behind(15, "all") == {Counter("s1", "received"): 4}
    assert frontiers.raise_to(Counter("s1", "received"), 15) == ["all"]
    assert frontiers.frontier("all") == 15


def test_sites_that_a_predicate_names_cannot_go() -> None:
    frontiers = Frontiers(sites_of(3))
    frontiers.register("named", "MIN(s2)")
    frontiers.register("all", "MIN($ALLSITES)")
    with pytest.raises(PredicateError, match="no site 's2'"):
        frontiers.set_sites(sites_of(2))
    frontiers.raise_to(Counter("s0", "received"), 7)
    frontiers.raise_to(Counter("s2", "received"), 7)
    assert frontiers.frontier("all") == 0  # nothing changed
    frontiers.change("named", "MIN(s1)")
    frontiers.set_sites(sites_of(2))
    frontiers.raise_to(Counter("s1", "received"), 5)
    assert frontiers.frontier("all") == 5
