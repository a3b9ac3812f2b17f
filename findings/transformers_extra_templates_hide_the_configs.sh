#!/usr/bin/env bash
# Believed: a file in additional_chat_templates/ adds a template to those of tokenizer_config.json, as its name says.
# So is: as soon as the folder has one, AutoTokenizer drops the `chat_template` of tokenizer_config.json, without a warning. A folder
# whose default template is in the config (as transformers before 4.51 and many hubs have it) loses it when somebody adds
# additional_chat_templates/tool_use.jinja: a chat with tools works, and one without raises ValueError for want of a default template.
# Move the config's template to chat_template.jinja in the same change.
# Seen: transformers 5.23.0, tokenizers 0.23.3, 2026-11-28:
#   config alone: a chat is 'plain'; with the folder: templates ['tool_use'], a chat raises ValueError, with tools it is 'tools'
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" --quiet --disable-pip-version-check install transformers==5.23.0 tokenizers==0.23.3 jinja2 2>/dev/null
cat >"$place/templates.py" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

folder = Path(sys.argv[1])
plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
plain.chat_template = "plain"
plain.save_pretrained(folder, save_jinja_files=False)
assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "plain"
talk, tools = [{"role": "user", "content": "a"}], [{"type": "function", "function": {"name": "f", "parameters": {}}}]
alone = AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, tokenize=False)
(folder / "additional_chat_templates").mkdir()
(folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
both = AutoTokenizer.from_pretrained(folder)
try:
    without = both.apply_chat_template(talk, tokenize=False)
except ValueError:
    without = ValueError
used = both.apply_chat_template(talk, tools=tools, tokenize=False)
names = sorted(both.chat_template) if isinstance(both.chat_template, dict) else both.chat_template
print(f"config alone: a chat is {alone!r}; with the folder: templates {names}, a chat is {without}, with tools it is {used!r}")
sys.exit(0 if (alone, names, without, used) == ("plain", ["tool_use"], ValueError, "tools") else 1)
PY
"$place/venv/bin/python" "$place/templates.py" "$place/saved" 2>/dev/null
