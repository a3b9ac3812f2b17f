"""The tokenizer of a GGUF file, its chat templates and the ids that end an answer, as files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from loraplex.adapters.store.files import shown
from loraplex.app.base_model.gguf_file import GgufUnsupported, Metadata

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's expression, as `ByteLevel` has it."""
SPLITS: dict[str, Sequence[PreTokenizer]] = {
    "gpt-2": [ByteLevel(add_prefix_space=False)],
    "smollm": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
    "default": [
        Split(Regex(r"[\p{P}\$\+<=>\^~\|]+"), "isolated"),
        Split(Regex(_WORDS), "isolated"),
        Split(Regex(r"\p{N}+"), "isolated"),
        Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""The parts that split a text, by llama.cpp's names (`tokenizer.ggml.pre`)."""

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS["qwen2"] = [Split(Regex(_QWEN2), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""The tokens that end an answer in llama.cpp, by their names in the keys."""
_SAMPLING = "general.sampling."
SENTENCEPIECE = "llama"
"""llama.cpp's name of a vocabulary of SentencePiece, whatever the model."""
_SPACE = "\u2581"
_MOST_CHARACTERS = 1024
"""Characters of a token of SentencePiece: each place in it may join two others."""
_TYPES = {TokenType.NORMAL, TokenType.UNUSED, TokenType.CONTROL, TokenType.USER_DEFINED}
_SENTENCEPIECE_TYPES = {TokenType.UNKNOWN, TokenType.BYTE}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as transformers does."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_tokenizer(metadata: Metadata, tokenizer: Tokenizer, target: Path) -> None:
    """Write what belongs to texts into the directory `target`: tokenizer, chat template, ids that end an answer."""
    write_json(target / "generation_config.json", token_ids(metadata) | _sampling(metadata))
    tokenizer.save(str(target / "tokenizer.json"))
    write_json(target / "tokenizer_config.json", _tokenizer_config(metadata))
    if len(templates := _templates(metadata)) == 1:
        (target / "chat_template.jinja").write_text(next(iter(templates.values())), "utf-8")


def token_ids(metadata: Metadata) -> dict[str, int]:
    """The ids of tokens by the names that config.json has for them."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {
        f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in names.items()
    }
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _sampling(metadata: Metadata) -> dict[str, Any]:
    """The options of sampling that a file asks for, by transformers' names."""
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    options = {key.removeprefix(_SAMPLING): metadata[key] for key in metadata if key.startswith(_SAMPLING)}
    return {names.get(name, name): value for name, value in options.items()}


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that the file describes: byte-level BPE, or BPE over a vocabulary of SentencePiece. Raises
    GgufUnsupported for another kind."""
    kind, split = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    if kind != SENTENCEPIECE and (kind != "gpt2" or split not in SPLITS):
        raise GgufUnsupported(
            f"the tokenizer {shown(kind)} with the split {shown(split)} is not converted: 'gpt2' with "
            f"{', '.join(SPLITS)} is, and '{SENTENCEPIECE}'"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    known = _TYPES | (_SENTENCEPIECE_TYPES if kind == SENTENCEPIECE else set())
    if unknown := set(types) - known:
        kinds = ", ".join(map(str, sorted(unknown)))
        raise GgufUnsupported(
            f"its tokenizer.ggml.token_type has {kinds}: tokens of these types are not converted"
        )
    if kind == SENTENCEPIECE:
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        tokenizer = _byte_level(metadata, tokens, SPLITS[split])
    begins = []
    if metadata.get("tokenizer.ggml.add_bos_token", kind == SENTENCEPIECE):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        begins = [(_token(tokens, "bos", bos), bos)]
    first = [token for token, _ in begins]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A:0"], pair=[*first, "$A:0", *first, "$B:1"], special_tokens=begins
    )
    ends = {number for name in _ENDS if (number := _token_id(metadata, name)) is not None}
    added = [
        AddedToken(token, normalized=False, special=kind == TokenType.CONTROL or number in ends)
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) or number in ends
    ]
    # Gemma's tokens of spaces are spelled otherwise in the vocabulary.
    tokenizer.add_tokens([token for token in added if tokenizer.token_to_id(token.content) is not None])
    return tokenizer


def _byte_level(metadata: Metadata, tokens: list[str], parts: Sequence[PreTokenizer]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    no_affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, **no_affixes))
    tokenizer.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(list(parts))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """Gemma's merges are in the order of its tokens, those of others in that of the scores."""
    architecture = metadata["general.architecture"]
    of_gemma, prefix = architecture.startswith("gemma"), metadata.get("tokenizer.ggml.add_space_prefix", True)
    if of_gemma:
        tokens = [_SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
    if (longest := max(map(len, tokens), default=0)) > _MOST_CHARACTERS:
        raise GgufUnsupported(f"its tokenizer.ggml.tokens have one of {longest} characters")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    if not merges:
        scores = metadata["tokenizer.ggml.scores"]
        if len(scores) != len(tokens):
            raise GgufUnsupported(
                f"its tokenizer.ggml.scores are {len(scores)}, and it has {len(tokens)} tokens"
            )
        ranks = range(0, -len(tokens), -1) if of_gemma else scores
        merges = _merges(vocab, dict(zip(tokens, ranks, strict=True)))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    begin = [normalizers.Prepend(_SPACE)] if architecture == "phi3" else []
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if of_gemma or begin:
        tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    if begin or (prefix and not of_gemma):
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocab: Mapping[str, int], ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs of tokens that make a token, those of the highest rank first."""
    found = []
    for token, rank in ranks.items():
        halves = ((token[:place], token[place:]) for place in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(rank, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda pair: pair[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _token_id(metadata: Metadata, name: str) -> int | None:
    number: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return number


def _token(tokens: list[str], name: str, number: int) -> str:
    """The token that the metadata name by its id. Raises GgufUnsupported."""
    if not 0 <= number < len(tokens):
        raise GgufUnsupported(
            f"its metadata's tokenizer.ggml.{name}_token_id is {number}, and it has {len(tokens)} tokens"
        )
    return tokens[number]


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    short = {"unknown": "unk", "padding": "pad", "seperator": "sep"}
    named = {
        f"{short.get(name, name)}_token": _token(tokens, name, number)
        for name in ("bos", *_ENDS, "unknown", "padding", "seperator", "cls", "mask")
        if (number := _token_id(metadata, name)) is not None
    }
    found = {**named, "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    templates = _templates(metadata)
    if len(templates) > 1:
        found["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return found


def _templates(metadata: Metadata) -> dict[str, str]:
    """The chat templates by name."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    return ({"default": default} if default else {}) | named
