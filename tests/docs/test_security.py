"""SECURITY.md's threat table: each defence has a test, or says that it has none. (That the tests exist: test_docs.)"""

from __future__ import annotations

import re

import pytest

from support import markdown

HEAD = ("who", "what they try", "what stops it", "shown by")
THREATS = markdown.rows(markdown.read("SECURITY.md"), *HEAD)
ATTACKERS = (
    "tenant",
    "neighbour",
    "keyless client",
    "network",
    "stolen key",
    "operator's mistake",
    "supply chain",
    "host",
)


@pytest.mark.parametrize("cells", THREATS, ids=lambda cells: cells[1][:40])
def test_a_threat_names_its_test_or_says_that_there_is_none(cells: list[str]) -> None:
    shown = cells[3]
    tests = re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", shown)
    rest = re.sub(r"`tests/[^`]*`|[\s,]", "", shown)
    assert (tests and not rest) or shown.startswith("no test: "), shown


def test_every_attacker_is_in_the_table() -> None:
    assert {cells[0] for cells in THREATS} == set(ATTACKERS)
