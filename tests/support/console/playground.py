"""The playground of a `Screen` over a scripted engine."""

from __future__ import annotations

import ast
import json
from typing import Any

from playwright.sync_api import Locator, expect

from loraplex.engine.types import EngineRequest
from support.console.browser import Screen
from support.http.whole_server import WholeServer

SHIP = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def column(screen: Screen, number: int) -> Locator:
    return screen.page.get_by_role("region", name=f"Column {number}")


def send(screen: Screen, prompt: str = "") -> None:
    """Sends a turn, and waits until all columns are done."""
    if prompt:
        screen["play-prompt"].fill(prompt)
    screen["play-send"].click()
    expect(screen["play-stop"]).to_be_disabled()


def printed(screen: Screen) -> Any:
    """The body that the page prints for curl."""
    return json.loads(screen.text("play-curl").split("-d '")[1][:-1].replace("'\\''", "'"))


def in_python(screen: Screen) -> Any:
    """The body that the program for Python sends."""
    calls = [one for one in ast.walk(ast.parse(screen.text("play-openai"))) if isinstance(one, ast.Call)]
    (create,) = (one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "create")
    return {str(one.arg): ast.literal_eval(one.value) for one in create.keywords}


def last_of(server: WholeServer, version: int | None) -> EngineRequest:
    """The last request to the base, or to a version."""
    found = [one for one in server.plane.engine.requests if (one.adapter and one.adapter.version) == version]
    return found[-1]
