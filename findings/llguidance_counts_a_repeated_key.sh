#!/usr/bin/env bash
# Believed: text that a JSON schema's grammar accepts is valid for that schema once it is parsed.
# So is: llguidance lets a key that `additionalProperties` or `patternProperties` allows come again, and counts it again. With
# "minProperties": 2 the object {"a":1,"a":1} is accepted; parsed it has one property. (A name under `properties` comes once.) A caller who
# needs counts has to validate the parsed answer.
# Seen: llguidance 1.9.1, jsonschema 4.26.0, Python 3.11, 2026-11-28:
#   {"a":1} accepted False; {"a":1,"b":1} accepted True, valid True; {"a":1,"a":1} accepted True, valid False
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 jsonschema==4.26.0 2>/dev/null
cat >"$place/keys.py" <<'PY'
import json
import sys

from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

SCHEMA = {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}
tokenizer = LLTokenizer("byte")


def accepted(text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


seen = []
for text in ('{"a":1}', '{"a":1,"b":1}', '{"a":1,"a":1}'):
    seen.append((accepted(text), Draft202012Validator(SCHEMA).is_valid(json.loads(text))))
    print(text, "accepted", seen[-1][0], "valid", seen[-1][1])
sys.exit(0 if seen == [(False, False), (True, True), (True, False)] else "changed")
PY
"$place/venv/bin/python" "$place/keys.py"
