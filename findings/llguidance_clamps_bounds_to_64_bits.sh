#!/usr/bin/env bash
# Believed: integer bounds of a JSON schema hold as they are written, or the schema is refused.
# So is: llguidance clamps `maximum` to 2**63 - 1 without a word. Schemas that generators write for unsigned 64-bit numbers (maximum
# 18446744073709551615) admit no value of their upper half, so that a model cannot copy such an id: it is forced into another number.
# Without `maximum` any number of digits is accepted. A `minimum` below -2**63 is an error that names a regular expression.
# Seen: llguidance 1.9.1, Python 3.11, 2026-11-28:
#   maximum 18446744073709551615: 9223372036854775807 True, 9223372036854775808 False, 18446744073709551615 False
#   no maximum: 9223372036854775807 True, 9223372036854775808 True, 18446744073709551615 True
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1 2>/dev/null
cat >"$place/bounds.py" <<'PY'
import json
import sys

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
VALUES = (2**63 - 1, 2**63, 2**64 - 1)


def accepted(schema, value):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if matcher.is_error():
        return matcher.get_error()
    tokens = tokenizer.tokenize_str(str(value))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


bounded = [accepted({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, value) for value in VALUES]
free = [accepted({"type": "integer", "minimum": 0}, value) for value in VALUES]
for words, seen in (("maximum 18446744073709551615", bounded), ("no maximum", free)):
    print(f"{words}:", ", ".join(f"{value} {got}" for value, got in zip(VALUES, seen)))
sys.exit(0 if bounded == [True, False, False] and free == [True] * 3 else "changed")
PY
"$place/venv/bin/python" "$place/bounds.py"
