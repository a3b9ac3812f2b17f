"""The page of each port's OpenAPI document: complete, with examples that are valid, and nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from loraplex.http.document_examples import example_of, resolve
from loraplex.http.document_page import operations_of
from support.http.admin_plane import AdminPlane
from support.http.api_server import serve_app
from support.http.data_plane import running_data_plane


class _Reader(HTMLParser):
    """Ids, links, and what would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if "href" in given else []
        if (
            tag in ("script", "link", "img", "iframe", "object", "embed")
            or "src" in given
            or "onclick" in given
        ):
            self.loads.append(tag)


@pytest.fixture(scope="module", params=["data", "admin"])
def port(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, str]]:
    """The document and the page that a port answers with."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "data":
        with running_data_plane(directory) as data:
            yield _both(data.url)
        return
    plane = AdminPlane(directory)
    with serve_app(plane.app) as server:
        yield _both(server.url)
    plane.close()


def _both(url: str) -> tuple[Any, str]:
    page = httpx.get(f"{url}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    return httpx.get(f"{url}/openapi.json").json(), page.text


def section(page: str, method: str, path: str) -> str:
    heading = f"<b class=m>{method}</b><code>{escape(path)}</code>"
    (found,) = [part for part in page.split("<section") if heading in part]
    return found


def test_every_route_has_its_parameters_fields_answers_and_an_example(port: tuple[Any, str]) -> None:
    document, page = port
    schemas = document["components"]["schemas"]
    operations = list(operations_of(document))
    assert len(operations) > 15
    for method, path, operation in operations:
        part = section(page, method, path)
        assert operation["summary"] in unescape(part)
        for parameter in operation.get("parameters", ()):
            assert f"<code>{parameter['name']}</code>" in part, (path, parameter["name"])
        for content in operation.get("requestBody", {}).get("content", {}).values():
            schema = resolve(content["schema"], schemas)
            for way in (schema, *schema.get("oneOf", schema.get("anyOf", ()))):
                for field, its in resolve(way, schemas).get("properties", {}).items():
                    assert f"<code>{field}</code>" in part, (path, field)
                    if "default" in its:
                        assert f"<code>{escape(json.dumps(its['default']))}</code>" in part, (path, field)
        for status, answer in operation["responses"].items():
            assert f"<td>{status}</td>" in part
            for code in re.findall(r"\w+", answer["description"]) if status >= "400" else ():
                assert code in part
        assert f"<pre>curl {'' if method == 'GET' else f'-X {method} '}" in part, path


def test_no_column_is_empty(port: tuple[Any, str]) -> None:
    _, page = port
    assert not re.search(r"\b1 \w+s\b", page)
    for table in re.findall(r"<table>(.*?)</table>", page):
        rows = re.findall(r"<tr>(.*?)</tr>", table)
        titles = rows[0].split("<th>")[1:]
        columns = list(zip(*(re.findall(r"<td>(.*?)</td>", row) for row in rows[1:]), strict=True))
        assert len(columns) == len(titles)
        assert all(any(column) for column in columns), titles


def test_every_example_is_a_command_with_a_valid_body(port: tuple[Any, str]) -> None:
    document, page = port
    checked = 0
    for method, path, operation in operations_of(document):
        example = unescape(section(page, method, path).partition("<pre>")[2].partition("</pre>")[0])
        assert "{" not in example.partition("\n")[0], path
        arguments = shlex.split(example)
        assert arguments[0] == "curl"
        content = operation.get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            continue
        body = example_of(content["application/json"]["schema"], document["components"]["schemas"])
        assert json.loads(arguments[arguments.index("-d") + 1]) == body
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        validator = jsonschema_rs.validator_for(schema | {"components": document["components"]})
        assert validator.is_valid(body), (path, body)
        checked += 1
    assert checked > 7


def test_nothing_is_loaded_and_every_link_leads_somewhere(port: tuple[Any, str]) -> None:
    document, page = port
    reader = _Reader()
    reader.feed(page)
    assert reader.loads == []
    assert len(reader.ids) == len(set(reader.ids))
    assert {link for link in reader.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in reader.links if link.startswith("#")} <= set(reader.ids)
    assert {f"schema-{name}" for name in document["components"]["schemas"]} <= set(reader.ids)


def test_types_values_bounds_and_defaults_are_shown(port: tuple[Any, str]) -> None:
    document, page = port
    if "/v1/chat/completions" not in document["paths"]:
        limits = page.partition("id='schema-Limits'")[2].partition("</section>")[0]
        assert "&quot;month&quot;</code>" in limits
        assert "integer, at least 1, at most 9,007,199,254,740,991 or null" in limits
        return
    part = section(page, "POST", "/v1/chat/completions")
    assert "<tr><td><code>temperature</code><td>number, at least 0, at most 2 or null" in part.replace(
        "</td>", ""
    )
    assert "<code>model</code><i>*</i>" in part
    assert "<code>&quot;minimal&quot;</code>" in part
    assert "<a href='#schema-Message'>Message</a>" in part
    assert "-H &quot;Authorization: Bearer $KEY&quot;" in part
