"""The console's files: fixed names, their types, headers and digests; nothing in them that makes markup of texts."""

from __future__ import annotations

import gzip
import json
import re
from hashlib import sha256

import httpx
import pytest

from loraplex.admin.app import create_admin_app, create_starting_admin_app
from loraplex.admin.console.routes import CONTENT_SECURITY_POLICY, PAGE, STATIC, console_routes, static_files
from support.http.admin_plane import AdminPlane
from support.markdown import ROOT
from tools.vendor_console import DECLARATIONS, DIGESTS, PACKAGES, VENDOR, vendored

FOLDER = next(name.partition("/")[0] for name in static_files() if name != PAGE)
"""The part of the files' paths that changes with them."""
OURS = sorted(path for path in STATIC.rglob("*.js") if path.parent != VENDOR)
FIRST_VIEW_BYTES, ALL_BYTES = 90_000, 200_000
FIRST_PAGE = "pages/now.js"


@pytest.fixture
async def http(plane: AdminPlane) -> httpx.AsyncClient:
    app = create_admin_app(plane.services, console_routes("/"))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://admin")


def check_headers(answer: httpx.Response) -> None:
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"


async def test_every_file_has_its_type_and_the_headers(http: httpx.AsyncClient) -> None:
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for name, file in static_files().items():
        answer = await http.get("/" if name == PAGE else f"/console/{name}")
        assert (answer.status_code, answer.content) == (200, file.plain), name
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind == types.get(name.rpartition(".")[2], kind), name
        check_headers(answer)
        known = {"if-none-match": answer.headers["etag"]}
        check_headers(await http.get("/" if name == PAGE else f"/console/{name}", headers=known))
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "frame-ancestors 'none'" in CONTENT_SECURITY_POLICY


async def test_a_page_names_only_files_of_its_own_version(http: httpx.AsyncClient) -> None:
    """A browser keeps files, and asks for the page each time. The page of an older version finds its folder gone."""
    page = await http.get("/")
    assert page.headers["cache-control"] == "no-cache"
    named = re.findall(r'(?:src|href)="(.+?)"', page.text)
    assert named
    for path in named:
        assert path.startswith(f"console/{FOLDER}/"), path
        file = await http.get(f"/{path}")
        assert file.headers["cache-control"] == "public, max-age=31536000, immutable"
    other = "0" * len(FOLDER)
    for path in (f"/console/{other}/app.js", "/console/app.js"):
        answer = await http.get(path)
        assert answer.status_code == 404, path
        assert "immutable" not in answer.headers.get("cache-control", "")


async def test_a_current_copy_is_not_sent_again(http: httpx.AsyncClient) -> None:
    for encoding in ("gzip", "identity"):
        headers = {"accept-encoding": encoding}
        first = await http.get(f"/console/{FOLDER}/app.js", headers=headers)
        assert first.headers.get("content-encoding") == ("gzip" if encoding == "gzip" else None)
        known = {"if-none-match": first.headers["etag"]}
        again = await http.get(f"/console/{FOLDER}/app.js", headers=headers | known)
        assert (again.status_code, again.content) == (304, b"")
        other = headers | {"if-none-match": '"other"'}
        stale = await http.get(f"/console/{FOLDER}/app.js", headers=other)
        assert (stale.status_code, stale.content) == (200, first.content)


NO_NAMES = (
    "",
    "nothing.js",
    "index.html",
    FOLDER,
    f"{FOLDER}/",
    f"{FOLDER}/index.html",
    f"{FOLDER}/../../routes.py",
    "../routes.py",
    "..%2froutes.py",
    "%2e%2e/routes.py",
    "/etc/passwd",
    "app.js%00",
    "lib",
)


@pytest.mark.parametrize("name", NO_NAMES)
async def test_no_other_name_is_served(http: httpx.AsyncClient, name: str) -> None:
    answer = await http.get(f"/console/{name}")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_the_page_is_there_while_the_server_starts() -> None:
    app = create_starting_admin_app(console_routes("/"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://admin") as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/admin/v1/caller")).json()["code"] == "engine_restarting"


def imported(name: str) -> set[str]:
    """The modules that a module of the console imports before it runs, by their paths."""
    path = STATIC / name
    pattern = r"^(?:import|export)[^;]*?from\s*[\"'](.+?)[\"'];"
    found = re.findall(pattern, path.read_text(), re.MULTILINE)
    if "vendor" in name:
        found += re.findall(r"(?:\bfrom|\bimport)\s*[\"'](.+?)[\"']", path.read_text())
    return {(path.parent / target).resolve().relative_to(STATIC).as_posix() for target in found}


def needed(name: str) -> set[str]:
    """All modules that run before this one."""
    found, new = set(), imported(name)
    while new:
        found |= new
        new = set().union(*map(imported, new)) - found
    return found


def test_the_console_is_small_and_its_first_view_smaller() -> None:
    files = {name.removeprefix(f"{FOLDER}/"): file for name, file in static_files().items()}
    sent = {
        name: len(file.compressed) for name, file in files.items() if not name.endswith((".txt", ".json"))
    }
    modules = needed("app.js") | needed(FIRST_PAGE) | {"app.js", FIRST_PAGE}
    first = [size for name, size in sent.items() if not name.endswith(".js") or name in modules]
    assert sum(first) <= FIRST_VIEW_BYTES
    assert sum(sent.values()) <= ALL_BYTES
    assert all(gzip.decompress(file.compressed) == file.plain for file in files.values())


def test_the_page_preloads_what_its_first_module_needs() -> None:
    """Without that a browser finds out about each file when it has read the one before."""
    page = (STATIC / "index.html").read_text()
    assert set(re.findall(r'rel="modulepreload" href="console/(.+?)"', page)) == needed("app.js")


def test_no_text_becomes_markup_or_code_and_nothing_is_foreign() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySet|document\.write|DOMParser|\beval\(|new Function"
        r"|localStorage|sessionStorage|document\.cookie|indexedDB|https?://|[\"'`]//\w"
    )
    assert len(OURS) >= 10
    for path in [*OURS, STATIC / "index.html", STATIC / "style.css"]:
        assert forbidden.findall(path.read_text()) == [], path.name
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", page)


def test_every_import_is_a_file_of_the_console() -> None:
    for path in sorted(STATIC.rglob("*.js")):
        for target in re.findall(r"(?:\bfrom|\bimport)\s*\(?\s*[\"'](.+?)[\"']", path.read_text()):
            assert target.startswith("."), (path.name, target)
            assert (path.parent / target).resolve().is_relative_to(STATIC), (path.name, target)
            assert (path.parent / target).is_file(), (path.name, target)


def test_the_libraries_are_those_that_the_digests_name() -> None:
    known = {DIGESTS, *DECLARATIONS}
    about = json.loads((VENDOR / DIGESTS).read_text())
    named = {name: digest for package in about for name, digest in package["files"].items()}
    assert named == {
        path.name: sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.name not in known
    }
    assert {package["license"] for package in about} == {"MIT", "Apache-2.0"}
    pinned = json.loads((ROOT / "tests/clients/package-console.json").read_text())["dependencies"]
    assert {package["package"]: package["version"] for package in about}.items() <= pinned.items()


@pytest.mark.skipif(not PACKAGES.exists(), reason="not installed: make .clients/console/.installed")
def test_the_libraries_are_those_of_the_packages() -> None:
    assert vendored(PACKAGES) == {path.name: path.read_bytes() for path in VENDOR.iterdir()}
