"""A tokenizer whose tokens are bytes, as the files of a model directory and as two functions.

Ids 0…255 are the bytes; 256 is "<|end|>" (end of a turn), 257 "<|start|>", 258 "<|pad|>", 259 "<think>" (an added
token that is not special). Its chat template is ChatML's with those marks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from loraplex.serving.text.detokenize import CHAR_TO_BYTE

EOS_ID, START_ID, PAD_ID, THINK_ID = 256, 257, 258, 259
ADDED = {"<|end|>": EOS_ID, "<|start|>": START_ID, "<|pad|>": PAD_ID, "<think>": THINK_ID}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PAD_TOKEN = {"__type": "AddedToken", "content": "<|pad|>", "normalized": False, "special": True}
"""As transformers writes a token that is more than its text."""


def byte_encode(text: str) -> list[int]:
    """The tokens of a text that holds no added token."""
    return list(text.encode())


def byte_decode(token_ids: Iterable[int]) -> str:
    """The text of these tokens, the added ones left out."""
    return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")


def write_byte_tokenizer(
    directory: Path, *, chat_template: str | None = CHAT_TEMPLATE, special: Sequence[str] = ()
) -> Path:
    """Puts tokenizer.json, tokenizer_config.json and the chat template into a model directory. Returns it.
    `special` are more special tokens, with the ids from 260 on."""
    added = ADDED | {content: PAD_ID + 2 + index for index, content in enumerate(special)}
    directory.mkdir(parents=True, exist_ok=True)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content != "<think>",
            }
            for content, token_id in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(CHAR_TO_BYTE),
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    config = {"eos_token": "<|end|>", "pad_token": PAD_TOKEN, "bos_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template, "utf-8")
    return directory
