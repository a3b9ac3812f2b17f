"""`loraplex chat`: talk to a model, one message or many."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.app.commands.shared.client import decoded, http_client, refused, unreachable
from loraplex.app.commands.shared.errors import CommandFailed, json_failures
from loraplex.app.commands.shared.options import DEFAULT_URL, ApiKeyOption, JsonOption, UrlOption
from loraplex.app.output import Output, printable
from loraplex.app.sse import EventTooLarge, SseParser

if TYPE_CHECKING:
    import httpx

_HELP = "An empty line does nothing; /reset forgets the conversation; /exit or Ctrl-D ends it; Ctrl-C stops an answer."


def chat(
    model: Annotated[str, typer.Option("--model", "-m", help="Base model or adapter", show_default=False)],
    api_key: ApiKeyOption,
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="[MESSAGE]",
            help="Ask this and end (default: from stdin, or a conversation at a terminal).",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy")] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Ask a model; at a terminal without MESSAGE it is a conversation."""
    asked: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    with json_failures(Output(as_json)), http_client(url, api_key) as client:
        talk = Conversation(
            client, url, {key: value for key, value in asked.items() if value is not None}, system
        )
        if message is None and sys.stdin.isatty():
            if as_json:
                raise CommandFailed("--json needs a message: give it as an argument or on stdin.")
            talk.hold()
            return
        text = sys.stdin.read() if message is None else message
        if not text.strip():
            raise CommandFailed("there is nothing to ask: give a message as an argument or on stdin.")
        if as_json:
            Output(True).json(talk.ask_whole(text))
        else:
            talk.say(text)


class Conversation:
    """The conversation so far. A question whose answer failed is taken back, so that the next one can be asked."""

    def __init__(self, client: httpx.Client, url: str, options: dict[str, Any], system: str | None) -> None:
        self._client = client
        self._url = url
        self._options = options
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def hold(self) -> None:
        """Read questions from the terminal until its end."""
        sys.stdout.write(f"{self._options['model']}. {_HELP}\n")
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                sys.stdout.write("\n")
                return
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                continue
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self._opening)
            elif text:
                try:
                    self.say(text)
                except KeyboardInterrupt:
                    sys.stdout.write("\n")
                except CommandFailed as error:
                    sys.stderr.write(f"loraplex: {printable(error.message)}\n")

    def say(self, text: str) -> None:
        """Ask, and write the answer as it comes. What came before an interruption stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                sys.stdout.write(printable(piece))
                sys.stdout.flush()
        finally:
            if pieces:
                sys.stdout.write("\n")
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def ask_whole(self, text: str) -> Any:
        """Ask, and return the whole answer as the server gave it."""
        import httpx

        body = self._body(stream=False, messages=[*self.messages, {"role": "user", "content": text}])
        try:
            response = self._client.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise unreachable(self._url, error, "--url") from error
        answer = decoded(response.url.host, response, "data plane")
        if response.status_code != 200:
            raise _refused(response.status_code, answer)
        return answer

    def _body(self, *, stream: bool, messages: list[dict[str, str]]) -> dict[str, Any]:
        return self._options | {"messages": messages, "stream": stream}

    def _stream(self) -> Iterator[str]:
        import httpx

        body = self._body(stream=True, messages=self.messages)
        parser = SseParser()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refused(response.status_code, decoded(response.url.host, response, "data plane"))
                for chunk in response.iter_raw():
                    for data in parser.feed(chunk):
                        if data == "[DONE]":
                            return
                        yield from _texts(data)
        except httpx.HTTPError as error:
            raise unreachable(self._url, error, "--url") from error
        except EventTooLarge as error:
            raise CommandFailed(f"{error}; is {self._url} Loraplex's data plane?") from error
        raise CommandFailed("the answer was cut off; look at the server's log.")


def _texts(data: str) -> Iterator[str]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise CommandFailed("the server sent a piece of answer that is not JSON.") from error
    if event.get("error"):
        raise refused(200, event)
    for choice in event.get("choices", ()):
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _refused(status: int, body: Any) -> CommandFailed:
    failed = refused(status, body, key_option="--api-key")
    if "[model_not_found]" in failed.message:
        failed.message += " See what this key may use: 'loraplex adapter list', or GET /v1/models."
    return failed
