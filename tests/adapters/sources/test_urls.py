"""Which places a tenant may name: parts are compared as they are written, and what has two readings is refused."""

from __future__ import annotations

import pytest

from loraplex.adapters.sources.errors import SourceNotAllowed
from loraplex.adapters.sources.urls import AllowedSources

FOLDERS = AllowedSources(["file:///srv/checkpoints", "file:///srv/by-tenant/{tenant}/out"])


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("/srv/checkpoints/run/step-10", "file:///srv/checkpoints/run/step-10"),
        ("/srv/checkpoints/run/", "file:///srv/checkpoints/run"),
        ("/srv/checkpoints", "file:///srv/checkpoints"),
        ("file:///srv/checkpoints/a b", "file:///srv/checkpoints/a b"),
        ("/srv/by-tenant/acme/out/x", "file:///srv/by-tenant/acme/out/x"),
    ],
)
def test_below_a_prefix(given: str, url: str) -> None:
    assert FOLDERS.allow_path(given, "acme").url == url


@pytest.mark.parametrize(
    "given",
    [
        "/srv/checkpoints/../secrets",
        "/srv/checkpoints/./x",
        "/srv/checkpoints//x",
        "/srv/checkpoints-of-others/x",
        "/srv/checkpoint",
        "/srv",
        "/",
        "",
        "srv/checkpoints/x",
        "checkpoints/../../srv/checkpoints/x",
        "/proc/self/root/srv/checkpoints/x",
        "/proc/self/cwd",
        "/srv/checkpoints/x\0y",
        "/srv/checkpoints/x\ny",
        "/srv/checkpoints/" + "x" * 4000,
        "/srv/by-tenant/rival/out/x",
        "/srv/by-tenant/{tenant}/out/x",
        "file:///srv/checkpoints/..%2fsecrets",
        "file:///srv/checkpoints/%2e%2e/secrets",
        "file:///srv/checkpoints/x?y",
        "file:///srv/checkpoints/x#y",
        "file:///srv/checkpoints\\..\\secrets",
        "file://localhost/srv/checkpoints/x",
        "file://user:password@host/srv/checkpoints/x",
        "file:/srv/checkpoints/x",
        "FILE:///srv/checkpoints/x",
        "http://127.0.0.1/srv/checkpoints/x",
        "https://169.254.169.254/latest/meta-data",
        "org/adapter",
    ],
)
def test_whatever_else_is_refused(given: str) -> None:
    with pytest.raises(SourceNotAllowed) as caught:
        FOLDERS.allow_path(given, "acme")
    assert caught.value.code == "source_not_allowed"


def test_without_prefixes_nothing_is_allowed() -> None:
    with pytest.raises(SourceNotAllowed):
        AllowedSources().allow_path("/srv/checkpoints/x", "acme")


@pytest.mark.parametrize(
    "prefix",
    [
        "/srv/checkpoints",
        "file:///",
        "file:///srv/../etc",
        "file:///srv/%2e%2e",
        "file:///srv/{user}",
        "file:///srv/x{tenant}",
        "http://example.org/x",
    ],
)
def test_prefixes_that_are_none(prefix: str) -> None:
    with pytest.raises(ValueError):
        AllowedSources([prefix])
