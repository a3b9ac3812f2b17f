"""`python -m loraplex.app.base_model.rebuilt_tokenizer DIR OUT`: transformers' reading of a model's tokenizer.

OUT gets `FOUND`, a `Reading` as JSON, and where the reading differs from tokenizer.json the tokenizer as transformers
has it. torch is kept out of the process: tokenizers need none, and its import takes longer than all the rest.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from loraplex.adapters.store.files import shown
from loraplex.serving.text.tokenizer_comparison import compare, load_tokenizer

FOUND, TOKENIZER = "found.json", "tokenizer.json"
_MOST_REASON = 200
_SPLIT = (
    "tokenizer_config.json has split_special_tokens, by which transformers reads a special token in a text as plain "
    "text; here it stays one token"
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The `name` of transformers' class; `difference` from tokenizer.json in one sentence, "" for none; `failure`: why
    transformers does not read it; `note`: what no tokenizer.json can say of the reading."""

    name: str = ""
    difference: str = ""
    failure: str = ""
    note: str = ""


def read(model_dir: Path, out: Path) -> Reading:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoTokenizer

    try:
        read_by = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
        written: str = read_by.backend_tokenizer.to_str()
        as_it_lies = load_tokenizer((model_dir / TOKENIZER).read_text("utf-8"))
        difference = compare(as_it_lies, load_tokenizer(written))
    except Exception as error:  # a library's, over a stranger's files
        return Reading(
            failure=shown(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", _MOST_REASON)
        )
    name = type(read_by).__name__
    note = _SPLIT if read_by.split_special_tokens else ""
    if difference is None:
        return Reading(name, note=note)
    (out / TOKENIZER).write_text(written, "utf-8")
    return Reading(name, difference.told("by tokenizer.json", f"by transformers' {name}"), note=note)


if __name__ == "__main__":
    target = Path(sys.argv[2])
    (target / FOUND).write_text(json.dumps(asdict(read(Path(sys.argv[1]), target))))
