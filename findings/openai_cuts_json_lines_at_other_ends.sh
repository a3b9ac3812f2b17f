#!/usr/bin/env bash
# Believed: `iter_lines()` of openai's `files.content(…)` gives the lines of a batch's output file, one JSON object each.
# So is: it is httpx's, which cuts where `str.splitlines` does: also at U+0085, U+2028 and U+2029, which JSON allows inside of a text as
# they are, and which serialisers that write UTF-8 (orjson, msgspec, json.dumps with ensure_ascii=False) do not escape. One answer with
# such a character becomes two pieces that are no JSON; `content.text.splitlines()` does the same. A reader should split at "\n" alone, as
# `content.text.split("\n")`, and a server that writes JSON lines should escape the three.
# Seen: openai 3.52.0, httpx 0.28.1, 2026-11-29:
#   U+0085 2 of 1 lines, first is no JSON; U+2028 2 of 1 lines, first is no JSON; U+2029 2 of 1 lines, first is no JSON
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" --quiet --disable-pip-version-check install openai==3.52.0 httpx==0.28.1 2>/dev/null
cat >"$place/lines.py" <<'PY'
import json
import sys

import httpx
import openai

seen = []
for end in "\x85\u2028\u2029":
    line = json.dumps({"custom_id": "a", "text": f"one{end}two"}, ensure_ascii=False) + "\n"
    assert json.loads(line)["text"] == f"one{end}two"
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=line.encode()))
    client = openai.OpenAI(api_key="none", http_client=httpx.Client(transport=transport))
    content = client.files.content("file-a")
    lines = list(content.iter_lines())
    assert lines == content.text.splitlines()
    try:
        first = json.loads(lines[0])
    except ValueError:
        first = "no JSON"
    seen.append(f"U+{ord(end):04X} {len(lines)} of 1 lines, first is {first}")
print("; ".join(seen))
sys.exit(0 if all("2 of 1 lines, first is no JSON" in each for each in seen) else "changed")
PY
"$place/venv/bin/python" "$place/lines.py"
