#!/usr/bin/env bash
# Believed: the clients of openai and anthropic treat a cut stream as an error and a long Retry-After alike.
# So is: openai's stream ends without an error where the connection closes before any finish_reason and before [DONE]: half an answer looks
# like a whole one. Of a 429 with Retry-After: 121 openai raises at once, without a second try, because it waits two minutes at most
# (with 1 it tries three times in all); anthropic sleeps as long as it is told, up to 49 days.
# Seen: openai 3.57.0, anthropic 2.14.0, 2026-11-28, a server on loopback:
#   openai, Retry-After 1: 3 requests; 121: 1 request, raised within a second; anthropic, 121: 1 request, still asleep after 5 s
#   openai, a stream cut after "The sum is 4": one chunk, finish_reason None, no error
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check openai==3.57.0 anthropic==2.14.0 2>/dev/null
cat >"$place/ask.py" <<'PY'
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import openai

told = {"retry_after": "1", "requests": 0, "cut": False}
CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"role":"assistant","content":"The sum is 4"},"finish_reason":null}]}\n\n'
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        told["requests"] += 1
        if told["cut"]:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(CHUNK)
            self.close_connection = True
            return
        body = b'{"error":{"message":"too many requests","type":"rate_limit_error"}}'
        self.send_response(429)
        for name, value in (("retry-after", told["retry_after"]), ("content-type", "application/json"), ("content-length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
asked = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}
of_openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
of_anthropic = anthropic.Anthropic(base_url=url, api_key="none")


def ask_openai(retry_after):
    told.update(retry_after=retry_after, requests=0)
    began = time.monotonic()
    try:
        of_openai.chat.completions.create(**asked)
    except openai.RateLimitError:
        print(f"openai, Retry-After {retry_after}: {told['requests']} requests, {time.monotonic() - began:.1f} s")
    return told["requests"], time.monotonic() - began


def ask_anthropic():
    try:
        of_anthropic.messages.create(max_tokens=4, **asked)
    except anthropic.RateLimitError:
        pass


short, long = ask_openai("1"), ask_openai("121")
told["requests"] = 0
waiting = threading.Thread(target=ask_anthropic, daemon=True)
waiting.start()
waiting.join(5)
asleep = waiting.is_alive() and told["requests"] == 1
print("anthropic, Retry-After 121: asleep after 5 s:", asleep)
told["cut"] = True
chunks = list(of_openai.chat.completions.create(stream=True, **asked))
ends = [(chunk.choices[0].delta.content, chunk.choices[0].finish_reason) for chunk in chunks]
print("openai, a cut stream:", ends)
same = short[0] == 3 and long[0] == 1 and long[1] < 1 and asleep and ends == [("The sum is 4", None)]
print("" if same else "changed", flush=True)
os._exit(0 if same else 1)  # the sleeping thread is left behind
PY
"$place/venv/bin/python" "$place/ask.py"
