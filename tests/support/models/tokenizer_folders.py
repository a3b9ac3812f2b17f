"""Folders with a tokenizer of each class that transformers 5 writes again, and of one that it takes as it lies."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from loraplex.serving.text.tokenizer_comparison import PROBES

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's split: numbers of up to three digits."""
CLASSES = {
    "LlamaTokenizer": ("llama", {"legacy": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "LlamaTokenizerFast": ("llama", {"legacy": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "Qwen2Tokenizer": ("qwen2", {}),
    "GPT2Tokenizer": ("starcoder2", {}),
    "GPTNeoXTokenizerFast": ("gpt_neox", {}),
    "PreTrainedTokenizerFast": ("llama", {}),
}  # fmt: skip
"""By the name of the class: model_type, and the rest of tokenizer_config.json."""


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|padding|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*PROBES, *PROBES], trainer)
    return tokenizer


def with_spaces_as_letters() -> Tokenizer:
    """A tokenizer as Llama 2's: each text begins with a space, behind a special token too."""
    letters = ("▁", *map(chr, range(33, 127)))
    merges = [("▁", "H"), ("▁H", "e"), ("l", "l"), ("0", "2"), ("2", "02"), ("▁", "▁")]
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        *map("".join, merges),
    ]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_folder(folder: Path, name: str, *, with_config: bool = True) -> Path:
    """A folder whose tokenizer_config.json names this class of `CLASSES`, with a config.json or beside one."""
    model_type, config = CLASSES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = with_spaces_as_letters() if name.startswith("Llama") else byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    if with_config:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 600}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **config}))
    return folder
