"""Checks the prose of documents, docstrings, comments and commit subjects against a list of words to avoid.

    python tools/check_prose.py [FILE …]

Without files: every Markdown page that git tracks, all docstrings and comments, and the subjects of commits since BASE.
Code blocks, `code spans` and link targets are not prose. The exit status is 1 if a word was found.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

WORDS: tuple[tuple[str, str], ...] = (
    (r"anew", "again"),
    (r"likewise", "also, too, the same"),
    (r"so many", "that many, or a number"),
    (r"whom?ever", "the caller, tenant or reader that is meant"),
    (r"(?<!out\s)of (which|whom)", "whose, or two sentences"),
    (r"(?<!in[\s-])flights?", "in-flight steps"),
    (r"wish(es)?", "prefetch, or request"),
    (r"(lends?|lent|lending)", "schedule"),
    (r"what [\w'\s-]{1,30} comes? to", "the result, by its name"),
    (r"(has|have|had) to go", "is evicted, is preempted"),
    (r"put(s|ting)? off", "defer"),
    (r"(makes?|making) way", "is preempted, yields"),
    (r"draw(s|n|ing)? (\w+ )?tokens?|tokens? (\w+ )?(is|are|was|were|been) drawn", "sample"),
    (r"of late", "recently"),
    (r"but for", "except"),
    (r"in vain", "without effect"),
    (r"for ever", "without end, for good, or the time"),
    (r"(some|every)body", "the caller, tenant or reader that is meant"),
    (
        r"(thereby|hence|thence|whence|thereof|herein|hitherto|notwithstanding)",
        "a plain word, or a new sentence",
    ),
)
"""Words to avoid, as a regular expression over whole words (a space is any white space), and their replacement."""

SOURCE = ("adapters", "admin", "kernels", "migrations", "server")
"""Folders whose docstrings begin with a noun phrase or a verb."""
BASE = "c6a670f4"
"""Subjects of later commits are checked."""
SUBJECT = re.compile(r"(Revert \")?[a-z][a-z0-9_./, -]*: \S.*")
MAX_SUBJECT = 72

_NOT_PROSE = re.compile(
    r"^ *```.*?^ *```|``[^`]+``|`[^`]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+", re.MULTILINE | re.DOTALL
)
_WORDS = re.compile(
    "|".join(rf"(?P<w{n}>\b(?:{pattern})\b)" for n, (pattern, _) in enumerate(WORDS)).replace(" ", r"\s+"),
    re.IGNORECASE,
)
_HEADLESS = re.compile(r"(?:\A|(?<=[.:;|] )|(?<=\n\n)|(?<=\*\* )|(?<=- ))Who\s[^.?!|]*\.", re.MULTILINE)
"""A sentence without a head, such as "Who comes late waits.": a question may begin so, a statement not."""


_FRAGMENT = re.compile(r"\s*(Of|For|By|As|At|It|They|What)\b")
"""Beginnings of a docstring that leave its subject to the reader; a noun phrase or a verb names it."""


class Finding(NamedTuple):
    line: int
    """Counted from 1."""
    text: str
    instead: str


def check_text(text: str) -> Iterator[Finding]:
    """Findings in a Markdown page or docstring, by place."""
    prose = _NOT_PROSE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    found = [
        (match.start(), " ".join(match[0].split()), WORDS[int((match.lastgroup or "w0")[1:])][1])
        for match in _WORDS.finditer(prose)
    ]
    found += [
        (match.start(), " ".join(match[0].split()[:4]) + " …", "a sentence with a subject: a tenant that …")
        for match in _HEADLESS.finditer(prose)
    ]
    for start, words, instead in sorted(found):
        yield Finding(prose.count("\n", 0, start) + 1, words, instead)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands for itself: docstrings, also those below an attribute."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def fragments(source: str) -> Iterator[Finding]:
    """Docstrings that begin with a fragment."""
    for line, text in docstrings(source):
        if match := _FRAGMENT.match(text):
            yield Finding(line, f"{match[1]} …", "a docstring that begins with a noun phrase or a verb")


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each run of comments on lines of their own, and of each comment behind code."""
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("#").strip()
        alone = not token.line[: token.start[1]].strip()
        if lines and not (alone and line == last + 1):
            yield first, "\n".join(lines)
            lines = []
        first, last = (first if lines else line), line
        lines.append(text)
    if lines:
        yield first, "\n".join(lines)


def check_file(path: Path) -> Iterator[Finding]:
    source = path.read_text("utf-8")
    if path.suffix == ".py":
        for line, text in (*docstrings(source), *comments(source)):
            yield from (found._replace(line=found.line + line - 1) for found in check_text(text))
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in SOURCE:
            yield from fragments(source)
    else:
        yield from check_text(source)


def check_subject(subject: str) -> Iterator[str]:
    """Faults of a commit's first line."""
    if not SUBJECT.fullmatch(subject):
        yield "write 'area: what it does'"
    if len(subject) > MAX_SUBJECT:
        yield f"{len(subject)} characters; at most {MAX_SUBJECT}"
    yield from (f"{found.text!r}: write {found.instead}" for found in check_text(subject))


def git(*arguments: str) -> list[str] | None:
    """Lines that git prints; None where it fails, as without a repository."""
    try:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - ours
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()


def default_files() -> Iterator[Path]:
    listed = git("ls-files", "*.md", "*.py")
    pages = [ROOT / name for name in listed] if listed is not None else sorted(ROOT.glob("docs/**/*.md"))
    yield from (path for path in pages if path.is_file())


def main(arguments: Sequence[str]) -> int:
    wrong = []
    for path in [Path(name).resolve() for name in arguments] or [*default_files()]:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        wrong += [f"{name}:{found.line}: {found.text!r}: write {found.instead}" for found in check_file(path)]
    if not arguments:
        commits = git("log", "--no-merges", "--format=%h %s", f"{BASE}..HEAD")
        if commits is None:  # a shallow clone, or a copy without its history
            print(f"prose: {BASE} is not here, so no commit's subject was checked")
        for commit in commits or ():
            short, _, subject = commit.partition(" ")
            wrong += [f"commit {short}: {subject!r}: {reason}" for reason in check_subject(subject)]
    print("\n".join(wrong) or "prose: nothing found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
