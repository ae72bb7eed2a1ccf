"""``torchext doctor``: shows the findings as a table for people or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import platform
import shutil
import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby

import torchext
from torchext.doctor import Finding, default_probes, examine

_LABELS = {True: "ok", False: "absent"}


def main(argv: Sequence[str]) -> int:
    """Examines this machine and prints what it found; always 0, as nothing that lacks is an error by itself."""
    parser = argparse.ArgumentParser(
        prog="torchext doctor",
        description="Say what this machine and environment offer to torchext, what for, and how to get the rest.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(argv)
    findings = examine(default_probes())
    print(to_json(findings) if options.json else to_table(findings, width=shutil.get_terminal_size((110, 24)).columns))
    return 0


def has_part(part: str) -> bool:
    """Whether this version of torchext has that subpackage; ``""`` stands for the whole."""
    return importlib.util.find_spec(f"torchext.{part}" if part else "torchext") is not None


def to_json(findings: Sequence[Finding]) -> str:
    """One object: ``torchext``, ``platform``, and ``findings`` with the fields of `Finding`."""
    report = {
        "torchext": torchext.__version__,
        "platform": platform.platform(),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=2)


def to_table(findings: Sequence[Finding], *, width: int, has_part: Callable[[str], bool] = has_part) -> str:
    """Plain text, aligned, no wider than ``width`` as far as words allow (at least 60)."""
    lines = [f"torchext {torchext.__version__} on {platform.platform()}"]
    name_width = max((len(finding.name) for finding in findings), default=0)
    indent = " " * (2 + 6 + 2 + name_width + 2)
    planned = False
    for group, rows in groupby(findings, key=lambda finding: finding.group):
        lines += ["", group]
        for row in rows:
            lines += _wrapped(f"  {_LABELS[row.ok]:<6}  {row.name:<{name_width}}  ", row.detail, width)
            part = row.part
            if part and not has_part(part):
                planned = True
                part += "*"
            lines += _wrapped(indent, f"for {f'{part}: ' if part else ''}{row.enables}", width)
            if row.remedy:
                lines += _wrapped(indent, f"get it: {row.remedy}", width)
    if planned:
        lines += ["", f"* not yet in torchext {torchext.__version__}"]
    return "\n".join(lines)


def _wrapped(head: str, words: str, width: int) -> list[str]:
    return textwrap.wrap(
        words,
        max(width, 60),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
