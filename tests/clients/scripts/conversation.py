"""What the scripts of the Python clients share: the protocol with the test that runs them.

A script gets the URL of a server and a key of one tenant as JSON in its first argument. It prints one JSON line for
each check, `{"check": NAME, "value": …}`, and `{"ask": NAME}` where the test is to do or look at something on the
server's side; the answer is a JSON line on its standard input.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
URL: str = SETTINGS["url"]
KEY: str = SETTINGS["key"]
BASE: str = SETTINGS["base"]
MODEL: str = SETTINGS["model"]


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def ask(name: str) -> Any:
    say({"ask": name})
    return json.loads(sys.stdin.readline())


def check(name: str, function: Callable[[], Any]) -> None:
    """A check that raises says so in its value, and the others go on."""
    try:
        value = function()
    except Exception:
        value = {"raised": traceback.format_exc(limit=-6)}
    say({"check": name, "value": value})


def refused(function: Callable[[], Any]) -> dict[str, Any]:
    """How the client told an error: its class, status, and the code and field that the server named."""
    try:
        answer = function()
    except Exception as error:
        body = getattr(error, "body", None)
        body = body if isinstance(body, dict) else {}
        return {
            "class": type(error).__name__,
            "status": getattr(error, "status_code", None),
            "code": getattr(error, "code", None) or body.get("code"),
            "param": getattr(error, "param", None) or body.get("param"),
        }
    return {"not refused": repr(answer)}


def as_told(entries: list[Any]) -> list[Any]:
    """Log probabilities of a chat's tokens, whatever the client made of them, as dicts of ours."""

    def one(entry: Any) -> dict[str, Any]:
        entry = entry if isinstance(entry, dict) else entry.model_dump()
        return {name: entry[name] for name in ("token", "logprob", "bytes")}

    tops = [entry["top_logprobs"] if isinstance(entry, dict) else entry.top_logprobs for entry in entries]
    return [{**one(entry), "top": [*map(one, top)]} for entry, top in zip(entries, tops, strict=True)]


def timed(function: Callable[[], Any]) -> dict[str, Any]:
    """The answer, and whether the second was waited that the server asked for: clients would wait half of one by
    themselves, and their timers may be early by a little."""
    begin = time.monotonic()
    answer = function()
    return {"answer": answer, "waited": time.monotonic() - begin >= 0.9}
