"""The walk of ten changes in CONTRIBUTING.md leads to files that exist, and names a test of each change."""

from __future__ import annotations

import re

from support import markdown
from support.markdown import ROOT


def test_each_of_ten_changes_names_at_most_four_files_and_its_test() -> None:
    _, _, rest = markdown.read("CONTRIBUTING.md").partition("## A walk of ten changes\n")
    walk, _, _ = rest.partition("\n## ")
    changes = re.findall(r"^- \*\*(.*?)\*\*: (.*?)(?=^- |^\S|\Z)", walk, re.MULTILINE | re.DOTALL)
    assert len(changes) == 10
    for name, text in changes:
        change, test, named = text.partition("Test:")
        assert test, f"{name}: no test is named"
        files = {span for span in markdown.spans(change) if "/" in span}
        tests = {span for span in markdown.spans(named) if "/" in span}
        assert 1 <= len(files) <= 4, (name, files)
        assert len(tests) == 1, (name, tests)
        assert re.fullmatch(r"tests/(\w+/)+test_\w+\.py", *tests), name
        assert [file for file in files | tests if not (ROOT / file).is_file()] == [], name
