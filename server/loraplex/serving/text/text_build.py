"""The build that decides the tokens of a text, for fingerprints of answers."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

from loraplex.adapters.admission.chat_files import MORE_TEMPLATES

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json",
)  # fmt: skip
"""Those that `TextProcessor` reads beside chat templates."""
_LIBRARIES = ("tokenizers", "jinja2")


def template_files(model_dir: Path) -> dict[str, Path]:
    """Files of chat templates by the templates' names, as transformers reads them."""
    named = {
        file.stem: file for file in sorted((model_dir / MORE_TEMPLATES).glob("*.jinja")) if file.is_file()
    }
    default = model_dir / "chat_template.jinja"
    return ({"default": default} if default.is_file() else {}) | named


def text_build(model_dir: Path) -> str:
    """A digest of a model's tokenizer and chat template, of the code that applies them, and of its libraries. Raises
    OSError."""
    digest = hashlib.sha256(" ".join(map(version, _LIBRARIES)).encode())
    sources = sorted(Path(__file__).parent.glob("*.py"))
    for path in (*sources, *(model_dir / name for name in _FILES), *template_files(model_dir).values()):
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
