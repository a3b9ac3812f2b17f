"""`loraplex chat`: one message or a conversation, and failures that leave it usable."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.app.cli import create_cli
from support.http.api_server import RunningServer, serve_app
from support.http.sse_server import KEY, Answer, FakeDataPlane


@pytest.fixture
def plane() -> FakeDataPlane:
    return FakeDataPlane()


@pytest.fixture
def server(plane: FakeDataPlane) -> Iterator[RunningServer]:
    with serve_app(plane.app()) as running:
        yield running


def chat(server: RunningServer, *args: str, stdin: str = "", key: str = KEY) -> Any:
    arguments = ["chat", "-m", "a", "--url", server.url, "--api-key", key, *args]
    return CliRunner().invoke(create_cli(), arguments, input=stdin)


def test_one_message_streams_its_answer(server: RunningServer, plane: FakeDataPlane) -> None:
    result = chat(server, "Hello there", "--system", "Be brief", "--max-tokens", "5", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout == "one two three four\n"
    assert plane.bodies == [
        {
            "model": "a",
            "max_tokens": 5,
            "temperature": 0,
            "stream": True,
            "messages": [
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": "Hello there"},
            ],
        }
    ]


def test_the_message_may_come_on_stdin(server: RunningServer, plane: FakeDataPlane) -> None:
    assert chat(server, stdin="From a pipe\n").exit_code == 0
    assert plane.bodies[0]["messages"][0]["content"] == "From a pipe\n"
    assert chat(server, stdin="  \n").exit_code == 1


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/"])
def test_the_address_may_have_the_path_of_the_routes(server: RunningServer, path: str) -> None:
    result = chat(server, "Hello", "--url", server.url + path)
    assert (result.exit_code, result.stdout) == (0, "one two three four\n")


def test_the_port_is_that_of_the_quickstarts_variable(server: RunningServer) -> None:
    def ask(*address: str, **environment: str) -> tuple[int, str]:
        arguments = ["chat", "-m", "a", "--api-key", KEY, "hi", *address]
        done = CliRunner(env={"LORAPLEX_URL": None, **environment}).invoke(create_cli(), arguments)
        return done.exit_code, done.output

    assert ask(LORAPLEX_PORT=str(server.port))[0] == 0
    assert ask(LORAPLEX_PORT="9", LORAPLEX_URL=server.url)[0] == 0
    assert ask("--url", server.url, LORAPLEX_PORT="9")[0] == 0
    assert "no server answers at http://127.0.0.1:9:" in ask(LORAPLEX_PORT="9")[1]
    # A container's link to a service of that name.
    assert "no server answers at http://127.0.0.1:8000:" in ask(LORAPLEX_PORT="tcp://10.0.0.1:80")[1]
    arguments = ["tenant", "list", "--admin-token", "x"]
    done = CliRunner(env={"LORAPLEX_ADMIN_PORT": "9"}).invoke(create_cli(), arguments)
    assert "no server answers at http://127.0.0.1:9:" in done.output


def test_json_is_the_servers_own_answer(server: RunningServer) -> None:
    result = chat(server, "Hello", "--json")
    assert json.loads(result.stdout)["choices"][0]["message"]["content"] == "one two three four"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def converse(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, lines: list[Any], *args: str
) -> tuple[int, str, str]:
    """A conversation at a terminal; an exception in `lines` is raised where a line is asked for."""
    given = iter(lines)

    def read_line(_prompt: str) -> str:
        line = next(given, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", read_line)
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    app = create_cli()
    try:
        app(["chat", "-m", "a", "--url", server.url, "--api-key", KEY, *args])
    except SystemExit as end:
        return int(end.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("the program did not exit")


def test_a_conversation_remembers_and_forgets(
    server: RunningServer, plane: FakeDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["first", "", KeyboardInterrupt(), "second", "/reset", "third", "/exit", "never"]
    code, out, _ = converse(server, monkeypatch, lines)
    assert code == 0
    assert out.count("one two three four") == 3
    said = [[m["content"] for m in b["messages"]] for b in plane.bodies]
    assert said == [["first"], ["first", "one two three four", "second"], ["third"]]


def test_a_failed_question_is_taken_back(
    server: RunningServer, plane: FakeDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([Answer(status=503), Answer(error_after=1), Answer()])
    plane.answer = lambda _body: next(answers)
    code, _, err = converse(server, monkeypatch, ["full", "breaks", "works"])
    assert code == 0
    assert "server_overloaded" in err
    assert "engine_restarting" in err
    # What was said before the break stays, for it was seen; what was refused does not.
    assert [m["content"] for m in plane.bodies[-1]["messages"]] == ["breaks", "one", "works"]


def test_model_output_cannot_command_the_terminal(server: RunningServer, plane: FakeDataPlane) -> None:
    plane.answer = Answer(pieces=("\x1b]0;title\x07", "\x1b[2J", "kept\ttext\n", "\x9b31m"))
    result = chat(server, "x")
    assert result.stdout == "]0;title[2Jkept\ttext\n31m\n"


def test_failures_are_one_line_that_says_what_to_do(server: RunningServer, plane: FakeDataPlane) -> None:
    wrong_key = chat(server, "x", key="lpx_wrong")
    assert (wrong_key.exit_code, wrong_key.stdout) == (1, "")
    assert "--api-key" in wrong_key.stderr
    plane.answer = Answer(status=404, code="model_not_found")
    assert "'loraplex adapter list', or GET /v1/models" in chat(server, "x").stderr
    plane.answer = Answer(cut_after=2)
    assert "cut off" in chat(server, "x").stderr
    nobody = CliRunner().invoke(
        create_cli(), ["chat", "-m", "a", "x", "--url", "http://127.0.0.1:9", "--api-key", "k"]
    )
    assert "loraplex serve" in nobody.stderr
    for result in (wrong_key, nobody):
        assert len(result.stderr.splitlines()) == 1
    strange = CliRunner().invoke(
        create_cli(), ["chat", "-m", "a", "x", "--url", "localhost", "--api-key", "k"]
    )
    assert strange.exit_code == 1
    assert "is no URL" in strange.stderr
    assert "such as http://localhost." in strange.stderr
    assert CliRunner().invoke(create_cli(), ["chat", "x"]).exit_code == 2
