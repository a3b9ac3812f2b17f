"""The walk of ten changes in CONTRIBUTING.md leads to files that exist, and names a test of each change."""

from __future__ import annotations

import re

import pytest

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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("keep_versions", id="a setting"),
        pytest.param("num_warming", id="a metric of the adapter cache"),
        pytest.param("host_bytes_max", id="a limit"),
        pytest.param("NumbaLoraPass", id="a LoRA kernel"),
    ],
)
def test_the_walk_is_true_of_known_examples(name: str) -> None:
    """Another one like it changes as many files of the source, four at most."""
    portions = ("adapters", "admin", "kernels", "migrations", "server")
    files = [path for portion in portions for path in (ROOT / portion).rglob("*.py")]
    naming = [path for path in files if re.search(rf"\b{name}\b", path.read_text("utf-8"))]
    assert 1 < len(naming) <= 4, [str(path.relative_to(ROOT)) for path in naming]
