"""The parts of the documentation site beyond `docs/`: pages from the top of the repository, links to its files, and
menu entries for whole folders.

MkDocs calls the `on_` functions (`hooks` in mkdocs.yml). The Markdown stays as code hosts show it: links are relative
to the file, also where they lead out of `docs/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
TOP_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
"""Pages at the top of the repository that the site shows too."""
HOME_ENDS = "\n## What you get\n"
"""The site's first page is the README up to here, then the list of all pages."""
_TOKEN = re.compile(
    r"^ *```.*?^ *```"
    r"|(?P<text>\[(?:`[^`\n]*`|[^\]`])*\])\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
    r"|`[^`\n]*`",
    re.MULTILINE | re.DOTALL,
)
"""A fenced block, a link, or a code span: the first that begins is the one, so code in a link's text is part of it."""


def links_for_site(text: str, folder: str) -> str:
    """Markdown with every link as the site needs it.

    Args:
        text: a page.
        folder: where the page is, relative to the repository, such as `docs/adr`; empty for the top.

    Returns:
        The page. A link to one of TOP_PAGES leads to its page of the site. A link to another file outside `docs/` is
        replaced by its text. A link to what does not exist is left, so that the strict build fails.
    """

    def rewrite(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None:  # code
            return match[0]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            return match[0]
        if path not in TOP_PAGES and not path.startswith("docs/"):
            return match["text"][1:-1]
        at = "docs" if folder == "" else folder
        page = path if path.startswith("docs/") else f"docs/{path}"
        return f"{match['text']}({posixpath.relpath(page, at)}{match['anchor'] or ''})"

    return _TOKEN.sub(rewrite, text)


def on_config(config: Any) -> Any:
    config["nav"] = with_folders(config["nav"], Path(config["docs_dir"]))
    return config


def with_folders(nav: Any, docs: Path) -> Any:
    """The menu with each pattern of pages, such as `adr/*.md`, replaced by those pages in the order of their names."""
    if isinstance(nav, dict):
        return {title: with_folders(part, docs) for title, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    pages: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            pages += sorted(path.relative_to(docs).as_posix() for path in docs.glob(entry))
        else:
            pages.append(with_folders(entry, docs))
    return pages


def on_files(files: Any, config: Any) -> Any:
    for name in TOP_PAGES:
        content = links_for_site((ROOT / name).read_text("utf-8"), "")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in TOP_PAGES:
        return titled(markdown, page, files)
    text = links_for_site(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)).rstrip("/"))
    if page.file.src_uri == "README.md":
        top, end, _ = (ROOT / "README.md").read_text("utf-8").partition(HOME_ENDS)
        if not end:
            raise PluginError(f"README.md has no section {HOME_ENDS.strip()!r}")
        _, _, lists = text.partition("\n## ")
        text = f"{links_for_site(top, '')}\n## {lists}"
    return titled(text, page, files)


def titled(markdown: str, page: Any, files: Any) -> str:
    """Links whose text is the name of a page's file, such as `[limits.md](limits.md#rates)`, with its title instead."""

    def rewrite(match: re.Match[str]) -> str:
        path = match["target"] and posixpath.normpath(
            posixpath.join(posixpath.dirname(page.file.src_uri), match["target"])
        )
        linked = files.get_file_from_path(path) if path else None
        if linked is None or posixpath.basename(match["text"][1:-1]) != posixpath.basename(path):
            return match[0]
        title = re.search(r"^# (.+)$", linked.content_string, re.MULTILINE)
        return match[0] if title is None else f"[{title[1]}]({match['target']}{match['anchor'] or ''})"

    return _TOKEN.sub(rewrite, markdown)
