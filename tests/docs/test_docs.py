"""What the documents say of this repository is so: settings, links, files, tests and commands that they name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.app.settings import Settings
from support import markdown
from support.markdown import ROOT

# In halves, so that this file does not hold what it looks for.
FORBIDDEN = [
    "".join(halves)
    for halves in (
        ("/wo", "rk/"),
        ("/ro", "ot"),
        ("/ho", "me/"),
        ("pypi", ".org"),
        ("python", "hosted.org"),
        ("huggingface", ".co"),
        ("npm", "js.org"),
        ("debian", ".org"),
        ("pytorch", ".org"),
        ("interface", ".md"),  # no file of this repository
    )
]
SOURCES = ("", "server/loraplex/", "adapters/loraplex/", "kernels/loraplex/", "admin/loraplex/")
"""Where a path in a document may begin: at the top, or at a package's folder (`engine/core/engine_core.py`)."""
FILE = re.compile(
    r"(?:server|adapters|kernels|admin|migrations|tests|docs|examples|tools|charts|deploy|api|app|control|engine|serving)"
    r"/[\w./-]*\w\.(?:py|lua|md|toml|txt|json|jsonl|ya?ml|tpl|svg|png|service)"
)


def tracked() -> list[Path]:
    """The repository's files; where there is no git, every file that is not made by a tool."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        paths = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for p in ROOT.rglob("*") if not any(part.startswith(".") for part in p.parts)]
    return [path for path in paths if path.is_file()]


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LORAPLEX_"):
            monkeypatch.delenv(name)


def test_every_setting_is_documented_with_its_default() -> None:
    listed = {
        cells[0].strip("`"): cells[1:]
        for cells in markdown.rows(markdown.read("docs/configuration.md"), "option", "environment", "default")
    }
    fields = {f"--{name.replace('_', '-')}": name for name in Settings.model_fields}
    assert listed.keys() == fields.keys()
    for option, (variable, default, meaning) in listed.items():
        name = fields[option]
        assert variable == f"`LORAPLEX_{name.upper()}`", option
        assert meaning, option
        field = Settings.model_fields[name]
        actual = field.default
        if default == "(none)":
            assert actual in ("", []) or field.validate_default is False, option
        else:
            assert getattr(Settings(**{name: default.strip("`")}), name) == actual, option


def test_relative_links_lead_somewhere() -> None:
    broken = []
    for path in documents():
        for link in markdown.links(path.read_text("utf-8")):
            target, _, anchor = link.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            page = path if not target else path.parent / target
            if not page.exists() or (
                anchor and page.suffix == ".md" and anchor not in markdown.anchors(page.read_text("utf-8"))
            ):
                broken.append(f"{os.path.relpath(path, ROOT)}: {link}")
    assert broken == []


def test_files_and_tests_that_documents_name_are_there() -> None:
    missing = []
    for path in documents():
        for span in markdown.spans(path.read_text("utf-8")):
            name, _, test = span.partition("::")
            if not FILE.fullmatch(name):
                continue
            file = next((ROOT / at / name for at in SOURCES if (ROOT / at / name).is_file()), None)
            if file is None:
                missing.append(f"{os.path.relpath(path, ROOT)}: {span}")
            elif test:
                tree = ast.parse(file.read_text("utf-8"))
                known = {
                    n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                if test not in known:
                    missing.append(f"{os.path.relpath(path, ROOT)}: {span}")
    assert missing == []


def test_code_that_documents_name_by_the_end_of_its_path_is_there() -> None:
    """`routes/versions.py`, or `numba_team.py` in a paragraph about its folder."""
    ours = {f"/{path.relative_to(ROOT).as_posix()}" for path in tracked()}
    missing = [
        f"{os.path.relpath(path, ROOT)}: {span}"
        for path in documents()
        for span in markdown.spans(path.read_text("utf-8"))
        if re.fullmatch(r"[\w/-]*\w\.py", span) and not any(name.endswith(f"/{span}") for name in ours)
    ]
    assert missing == []


def test_nothing_names_a_machine_or_a_registry() -> None:
    patterns = {}
    for word in FORBIDDEN:
        # A path not as a part of a longer path or name, such as tests/home/x or /roots.
        before = r"(?<![\w.}\])-])" if word.startswith("/") else ""
        patterns[word] = re.compile(before + re.escape(word) + ("" if word.endswith("/") else r"\b"))
    found = []
    for path in tracked():
        content = path.read_bytes().decode("latin-1")
        for word, pattern in patterns.items():
            if word in content and pattern.search(content):
                found.append(f"{os.path.relpath(path, ROOT)}: {word}")
    assert found == []


def test_every_decision_is_in_the_index_and_numbered_in_turn() -> None:
    text = markdown.read("docs/adr/README.md")
    listed = re.findall(r"^\| \[(\d{4})\]\((\d{4}-[a-z0-9-]+\.md)\) \|", text, re.MULTILINE)
    files = sorted(path.name for path in (ROOT / "docs/adr").glob("[0-9]*.md"))
    assert [name for _, name in listed] == files
    folded = re.findall(r"^\| (\d{4}) \| [^|]+ \| \[(\d{4})\]", text, re.MULTILINE)
    numbers = {number for number, _ in listed}
    assert {into for _, into in folded} <= numbers
    every = sorted([*numbers, *(number for number, _ in folded)])
    assert every == [f"{turn:04}" for turn in range(1, len(every) + 1)]
    for number, name in listed:
        assert number == name[:4]
        page = markdown.read(f"docs/adr/{name}")
        assert page.startswith(f"# {number}: "), name
        for part in ("**Decision.**", "**Why.**", "**Cost.**"):
            assert part in page, (name, part)


def test_every_decision_has_a_status_that_the_index_repeats() -> None:
    text = markdown.read("docs/adr/README.md")
    listed = dict(re.findall(r"^\| \[(\d{4})\].* \| ([^|]+) \|$", text, re.MULTILINE))
    actual = {}
    for path in (ROOT / "docs/adr").glob("[0-9]*.md"):
        status = re.match(
            r"#[^\n]*\n\n\*\*Status\.\*\* (Accepted|Superseded by \[(\d{4})\])", path.read_text("utf-8")
        )
        assert status, (
            f"{path.name}: the line below the title says **Status.** Accepted, or Superseded by [NNNN]"
        )
        actual[path.name[:4]] = f"superseded by {status[2]}" if status[2] else "accepted"
    assert listed == actual


def test_every_page_is_in_the_index() -> None:
    listed = {(ROOT / "docs" / link).resolve() for link in markdown.links(markdown.read("docs/README.md"))}
    pages = {path for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"}
    assert pages - listed == set()


def named_targets(text: str) -> set[str]:
    """Targets of make in spans and blocks: `make check test-all` names two."""
    said = "\n".join([*markdown.spans(text), re.sub(r"(?m)(?:^|\s)#.*$", "", markdown.blocks(text))])
    found = re.findall(r"(?:^|[\s`&;])make((?: +[a-z][a-z-]*)+)(?=$|[\s`;&)])", said, re.MULTILINE)
    return {target for targets in found for target in targets.split()}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", markdown.read("Makefile"), re.MULTILINE))


def test_the_readme_says_how_to_begin() -> None:
    readme = markdown.read("README.md")
    for target in ("quickstart", "test"):
        assert f"make {target}" in readme
        assert target in make_targets()


def test_make_targets_that_documents_name_exist() -> None:
    for path in documents():
        assert named_targets(path.read_text("utf-8")) <= make_targets(), path


def options(command: Any) -> set[str]:
    return {"--help", "--version"}.union(*([*of.opts, *of.secondary_opts] for of in command.params))


def test_commands_and_options_that_documents_name_exist() -> None:
    from typer.main import get_command

    from loraplex.app.cli import create_cli

    program = get_command(create_cli())
    for path in documents():
        text = path.read_text("utf-8")
        said = "\n".join([*markdown.spans(text), markdown.blocks(text)]).replace("\\\n", " ")
        for name, rest in re.findall(r"(?<![\w./])(?:\S*bin/)?loraplex +([a-z]+)([^\n|;&>#)]*)", said):
            assert name in program.commands, f"{path.name}: loraplex {name}"
            command = program.commands[name]
            sub = re.match(r" +([a-z]+)", rest)
            if hasattr(command, "commands"):
                if sub is None:
                    continue
                assert sub[1] in command.commands, f"{path.name}: loraplex {name} {sub[1]}"
                command = command.commands[sub[1]]
            unknown = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", rest)) - options(command)
            assert unknown == set(), f"{path.name}: loraplex {name}{rest}"


FAULTS = [
    (test_relative_links_lead_somewhere, "[a page](gone.md)"),
    (test_relative_links_lead_somewhere, "[`code`](gone.py)"),
    (test_relative_links_lead_somewhere, "![a picture](gone.svg)"),
    (test_relative_links_lead_somewhere, "[a heading](#gone)"),
    (test_files_and_tests_that_documents_name_are_there, "`tests/docs/test_gone.py`"),
    (test_files_and_tests_that_documents_name_are_there, "`tools/gone.py`"),
    (test_files_and_tests_that_documents_name_are_there, "`charts/loraplex/gone.yaml`"),
    (test_files_and_tests_that_documents_name_are_there, "`tests/docs/test_docs.py::test_gone`"),
    (test_code_that_documents_name_by_the_end_of_its_path_is_there, "`gone_file.py`"),
    (test_nothing_names_a_machine_or_a_registry, f"https://{FORBIDDEN[3]}/"),
    (test_make_targets_that_documents_name_exist, "`make gone`"),
    (test_make_targets_that_documents_name_exist, "```bash\nmake check test-gone\n```"),
    (test_commands_and_options_that_documents_name_exist, "`loraplex gone`"),
    (test_commands_and_options_that_documents_name_exist, "```bash\n.venv/bin/loraplex key gone\n```"),
    (
        test_commands_and_options_that_documents_name_exist,
        "```bash\nloraplex key create \\\n  --tenant a --gone\n```",
    ),
]


@pytest.mark.parametrize(("guard", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_fails_its_guard(
    guard: Callable[[], None], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{fault}\n")
    monkeypatch.setitem(globals(), "documents", lambda: [page])
    if guard is test_nothing_names_a_machine_or_a_registry:
        monkeypatch.setitem(globals(), "tracked", lambda: [page])
    with pytest.raises(AssertionError):
        guard()
