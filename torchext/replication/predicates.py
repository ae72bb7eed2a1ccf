"""The language of stability predicates: parsed, checked against the sites, and turned into order statistics.

::

    value   = ("MIN" | "MAX") "(" items ")" [ack]
            | ("KTH_MIN" | "KTH_MAX") "(" number "," items ")" [ack]
    items   = (value | set) {"," (value | set)}
    set     = term {("+" | "-") term}                       union, difference
    term    = ("$ALLSITES" | "$MYSITE" | "$ZONE_" name | "$SITE_" name | name | "(" set ")") [ack]
    number  = sums, differences, products and whole quotients of digits and "SIZEOF" "(" set ")"
    ack     = "." name

A set stands for the counters of its sites, one value each; a value for itself. KTH_MIN(k, ...) is the k-th smallest of
the values, KTH_MAX(k, ...) the k-th largest, and MIN and MAX are those with k = 1. An ack type holds for all that
it follows, unless something inside names its own; without any it is ``received``. Names that are no identifiers are
put in double quotes: ``"eu-west-1"``, ``$ZONE_"eu-west"``.

Source: "Stabilizer: Geo-Replication with User-defined Consistency" (ICDCS 2022), section III. There, nodes have numbers
and a region's predicates are functions of their own; here, sites and zones have names and sets take their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torchext.replication.errors import PredicateError

ACKS = ("received", "persisted", "verified")  # those that every site knows

_DUAL = {"MIN": "MAX", "MAX": "MIN", "KTH_MIN": "KTH_MAX", "KTH_MAX": "KTH_MIN"}
_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<number>\d+)|(?P<variable>\$(?:[A-Za-z_]\w*)?(?:"[^"]*")?)|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<quoted>"[^"]*")|(?P<sign>[-+*/(),.])"""
)
_MAX_DEPTH = 50  # of brackets; each level takes some of Python's stack


@dataclass(frozen=True)
class Counter:
    """One site's counter of one ack type."""

    site: str
    ack: str


@dataclass(frozen=True)
class Order:
    """The k-th smallest of its values."""

    k: int
    values: tuple[Order | Counter, ...]


@dataclass(frozen=True)
class Sites:
    """Whom a predicate can speak of.

    Attributes:
        zones: Each site and its zone.
        origin: ``$MYSITE``: the site whose messages are judged.
        acks: The ack types that are known.
    """

    zones: Mapping[str, str]
    origin: str
    acks: Sequence[str] = ACKS


@dataclass(frozen=True)
class Predicate:
    """A predicate that fits its sites."""

    text: str
    order: Order

    def counters(self) -> tuple[Counter, ...]:
        """The counters it reads, each once, in order of appearance."""
        found: dict[Counter, None] = {}
        todo: list[Order | Counter] = [self.order]
        while todo:
            value = todo.pop()
            if isinstance(value, Order):
                todo.extend(reversed(value.values))
            else:
                found[value] = None
        return tuple(found)

    def code(self, index: Mapping[Counter, int]) -> list[int]:
        """The postfix form that the native core takes; ``index`` numbers the counters."""
        code: list[int] = []

        def emit(value: Order | Counter) -> None:
            if isinstance(value, Counter):
                code.append(index[value])
                return
            for item in value.values:
                emit(item)
            code.extend((-len(value.values), value.k))

        emit(self.order)
        return code

    def value(self, counter: Callable[[Counter], int]) -> int:
        """Its value for these counters, worked out in full; `Frontiers` follows changes faster."""

        def of(value: Order | Counter) -> int:
            if isinstance(value, Counter):
                return counter(value)
            return sorted(of(item) for item in value.values)[value.k - 1]

        return of(self.order)

    def satisfied_by(self, sites: frozenset[str] | set[str]) -> bool:
        """Whether it holds once these sites have done everything and the others nothing: whether they are a quorum."""
        return bool(self.value(lambda counter: int(counter.site in sites)))


def compile_predicate(text: str, sites: Sites) -> Predicate:
    """Checks a predicate and resolves its sets.

    Raises:
        PredicateError: It is not of the language, names what is not there, has a set without sites, or a k beyond its
            values. Points at the column.
    """
    return Predicate(text, _Parser(text, sites).predicate())


def dual(text: str) -> str:
    """The predicate that a reader must have answered to see all that was stable under this one.

    Whatever sites made ``text`` hold, and whatever sites satisfy its dual, have one in common: MIN becomes MAX, and
    KTH_MIN becomes KTH_MAX (of n values, the k-th smallest becomes the (n + 1 - k)-th).

    Raises:
        PredicateError: A character is not of the language.
    """
    tokens = _tokens(text)
    parts, end = [], 0
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.kind == "name" and token.text in _DUAL and following is not None and following.text == "(":
            parts += [text[end : token.at], _DUAL[token.text]]
            end = token.at + len(token.text)
    return "".join([*parts, text[end:]])


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int


def _tokens(text: str) -> list[_Token]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            if text[at] == '"':
                raise PredicateError(text, at + 1, "a quoted name without its closing quote")
            raise PredicateError(text, at + 1, f"{text[at]!r} is no part of a predicate")
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append(_Token(kind, match[0], at))
        at = match.end()
    return tokens


@dataclass(frozen=True)
class _Set:
    """Sites with the ack type that a part of the text gave them, or None; in order."""

    acks: dict[str, str | None]
    at: int
    end: int


@dataclass(frozen=True)
class _Value:
    """An order statistic whose counters may still take the ack type of what is around them."""

    k: int
    values: tuple[_Value | tuple[str, str | None], ...]


class _Parser:
    """Recursive descent; one method for each rule of the grammar."""

    def __init__(self, text: str, sites: Sites) -> None:
        self._text = text
        self._sites = sites
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0

    def predicate(self) -> Order:
        if not self._tokens:
            self._fail("an empty predicate; expected one such as MIN($ALLSITES)")
        if not self._at_function():
            self._fail(f"expected MIN, MAX, KTH_MIN or KTH_MAX, found {self._found()}")
        value = self._value()
        if self._token() is not None:
            self._fail(f"expected the end of the predicate, found {self._found()}")
        return _resolved(value, ACKS[0])

    def _value(self) -> _Value:
        name = self._take()
        self._open(f"after {name.text}")
        k, k_at = 1, self._column()
        if name.text.startswith("KTH"):
            k = self._number()
            self._expect(",", f"between the k of {name.text} and its values")
        values: list[_Value | tuple[str, str | None]] = []
        while True:
            if self._at_function():
                values.append(self._value())
            else:
                members = self._set()
                if not members.acks:
                    set_text = self._text[members.at : members.end].strip()
                    raise PredicateError(self._text, members.at + 1, f"{set_text} has no sites here")
                values += list(members.acks.items())
            token = self._token()
            if token is None or token.text != ",":
                break
            self._take()
        self._close(f"{name.text}(", "',', '+', '-' or ')'")
        if not 1 <= k <= len(values):
            raise PredicateError(
                self._text,
                k_at,
                f"k is {k}, but {name.text} has {len(values)} values here: expected 1 to {len(values)}",
            )
        if name.text in ("MAX", "KTH_MAX"):
            k = len(values) + 1 - k
        value = _Value(k, tuple(values))
        ack = self._ack()
        return value if ack is None else _with_ack(value, ack)

    def _set(self) -> _Set:
        at = self._column() - 1
        acks = dict(self._term())
        while (token := self._token()) is not None and token.text in ("+", "-"):
            self._take()
            other = self._term()
            if token.text == "-":
                acks = {site: ack for site, ack in acks.items() if site not in other}
                continue
            for site, ack in other.items():
                if acks.setdefault(site, ack) != ack:
                    raise PredicateError(
                        self._text,
                        token.at + 1,
                        f"{site} is on both sides with two ack types; separate them by a comma",
                    )
        return _Set(acks, at, self._end())

    def _term(self) -> dict[str, str | None]:
        token = self._token()
        if token is not None and token.text == "(":
            self._open("")
            members = self._set().acks
            self._close("(", "'+', '-' or ')'")
        elif token is not None and token.kind == "variable":
            members = dict.fromkeys(self._variable(self._take()))
        elif token is not None and token.kind in ("name", "quoted"):
            if self._at_function():
                self._fail(f"{token.text}(...) is a value, not a set: separate it by commas")
            members = {self._site(self._take(), token.text.strip('"')): None}
        else:
            self._fail(f"expected a set of sites, such as $ALLSITES or {self._sites.origin}, found {self._found()}")
        ack = self._ack()
        return members if ack is None else {site: inner or ack for site, inner in members.items()}

    def _variable(self, token: _Token) -> list[str]:
        name = token.text[1:].replace('"', "")
        if name == "ALLSITES":
            return list(self._sites.zones)
        if name == "MYSITE":
            return [self._sites.origin]
        if name.startswith("ZONE_"):
            zone = name.removeprefix("ZONE_")
            zones = sorted({z for z in self._sites.zones.values() if z})
            if zone not in zones:
                raise PredicateError(
                    self._text, token.at + 1, f"there is no zone {zone!r}; there are: {', '.join(zones) or 'none'}"
                )
            return [site for site, of in self._sites.zones.items() if of == zone]
        if name.startswith("SITE_"):
            return [self._site(token, name.removeprefix("SITE_"))]
        raise PredicateError(
            self._text,
            token.at + 1,
            f"there is no set {token.text}; expected $ALLSITES, $MYSITE, $ZONE_ with a zone or $SITE_ with a site",
        )

    def _site(self, token: _Token, name: str) -> str:
        if name not in self._sites.zones:
            raise PredicateError(
                self._text, token.at + 1, f"there is no site {name!r}; there are: {', '.join(self._sites.zones)}"
            )
        return name

    def _ack(self) -> str | None:
        token = self._token()
        if token is None or token.text != ".":
            return None
        self._take()
        name = self._token()
        if name is None or name.kind != "name" or name.text not in self._sites.acks:
            self._fail(f"expected an ack type ({', '.join(self._sites.acks)}), found {self._found()}")
        return self._take().text

    def _number(self) -> int:
        value = self._product()
        while (token := self._token()) is not None and token.text in ("+", "-"):
            self._take()
            value = value + self._product() if token.text == "+" else value - self._product()
        return value

    def _product(self) -> int:
        value = self._factor()
        while (token := self._token()) is not None and token.text in ("*", "/"):
            self._take()
            at = self._column()
            factor = self._factor()
            if token.text == "*":
                value *= factor
            elif factor == 0:
                raise PredicateError(self._text, at, "a division by 0")
            else:
                value //= factor
        if abs(value) > 1 << 63:
            raise PredicateError(self._text, self._column(), "a number beyond all bounds")
        return value

    def _factor(self) -> int:
        token = self._token()
        if token is not None and token.kind == "number":
            if len(token.text) > 9:
                self._fail("a number beyond all bounds")
            return int(self._take().text)
        if token is not None and token.text == "SIZEOF":
            self._take()
            self._open("after SIZEOF")
            members = self._set().acks
            self._close("SIZEOF(", "'+', '-' or ')'")
            return len(members)
        if token is not None and token.text == "(":
            self._open("")
            value = self._number()
            self._close("(", "'+', '-', '*', '/' or ')'")
            return value
        self._fail(f"expected a number, SIZEOF(...) or '(', found {self._found()}")

    # The tokens.

    def _token(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self) -> _Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _at_function(self) -> bool:
        following = self._tokens[self._next : self._next + 2]
        return bool(following) and following[0].text in _DUAL and (len(following) < 2 or following[1].text == "(")

    def _open(self, where: str) -> None:
        self._expect("(", where)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._fail(f"more than {_MAX_DEPTH} brackets within each other")

    def _close(self, opened: str, expected: str) -> None:
        token = self._token()
        if token is None or token.text != ")":
            self._fail(f"expected {expected} to go on with {opened}, found {self._found()}")
        self._take()
        self._depth -= 1

    def _expect(self, sign: str, where: str) -> None:
        token = self._token()
        if token is None or token.text != sign:
            self._fail(f"expected {sign!r} {where}, found {self._found()}")
        self._take()

    def _found(self) -> str:
        token = self._token()
        return "the end" if token is None else repr(token.text)

    def _column(self) -> int:
        token = self._token()
        return (len(self._text) if token is None else token.at) + 1

    def _end(self) -> int:
        last = self._tokens[self._next - 1]
        return last.at + len(last.text)

    def _fail(self, reason: str) -> NoReturn:
        raise PredicateError(self._text, self._column(), reason)


def _with_ack(value: _Value, ack: str) -> _Value:
    return _Value(
        value.k, tuple(_with_ack(v, ack) if isinstance(v, _Value) else (v[0], v[1] or ack) for v in value.values)
    )


def _resolved(value: _Value, ack: str) -> Order:
    return Order(
        value.k,
        tuple(_resolved(v, ack) if isinstance(v, _Value) else Counter(v[0], v[1] or ack) for v in value.values),
    )
