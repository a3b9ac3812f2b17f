"""The walk of ten changes in CONTRIBUTING.md leads to files that exist."""

from __future__ import annotations

import re

from support import markdown
from support.markdown import ROOT


def test_the_walk_names_at_most_four_files_a_change_and_all_exist() -> None:
    _, _, rest = markdown.read("CONTRIBUTING.md").partition("## A walk of ten changes\n")
    walk, _, _ = rest.partition("\n## ")
    changes = re.findall(r"^- \*\*(.*?)\*\*: (.*?)(?=^- |^\S|\Z)", walk, re.MULTILINE | re.DOTALL)
    assert len(changes) == 10
    for name, text in changes:
        files = {span for span in markdown.spans(text) if "/" in span}
        assert 1 <= len(files) <= 4, (name, files)
        assert [file for file in files if not (ROOT / file).is_file()] == [], name
