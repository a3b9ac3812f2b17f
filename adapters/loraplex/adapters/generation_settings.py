"""The settings of a generation_config.json beside the tokens that end an answer. None is followed: a request says how
its tokens are sampled. Those that ask for something are named, so that nobody believes the answers have them.

The names are those of transformers' GenerationConfig, 4.30 to 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.store.files import shown

STOP_STRINGS = "stop_strings"
OF_REQUESTS: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
}
"""Settings that a request has too, with the values of a request that says nothing."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "length_penalty": (1.0,),
    "typical_p": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "guidance_scale": (1.0,),
    "num_return_sequences": (1,),
    "remove_invalid_values": (True,),
}
"""Settings of other kinds with values that ask for nothing, beside null, false, 0 and what is empty."""
_WITHOUT_EFFECT = frozenset({
    "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config", "_commit_hash", "return_dict_in_generate", "max_time", "low_memory", "cache_implementation",
    "cache_config", "return_legacy_cache", "compile_config", "disable_compile", "continuous_batching_config",
    "prefill_chunk_size", "is_assistant", "prompt_lookup_num_tokens", "max_matching_ngram_size", "target_lookbehind",
    "speculation_type", "use_mtp", "use_cache", "max_cache_len", "max_length", "max_new_tokens", "early_stopping",
    "_name_or_path", "trust_remote_code", "chat_format", "max_context_size", "max_window_size", "user_token_id",
    "assistant_token_id", "system_token_id",
})  # fmt: skip
"""Settings of how a library computes, whatever their value, and the longest answer: a request and the context say
it."""
_PREFIXES = ("output_", "assistant_", "num_assistant_")
_MOST_NAMED = 6
_QUOTE = "'"


@dataclass(frozen=True, slots=True)
class NotFollowed:
    """Settings that ask for something, with their values, as lists in words: those that a request can say, and those
    that nothing here does; "" for none."""

    of_requests: str
    of_none: str

    @property
    def told(self) -> str:
        """A sentence about them, without its end."""
        words = [f"{self.of_requests}: requests say these themselves"] if self.of_requests else []
        words += [f"{self.of_none}: nothing here follows it"] if self.of_none else []
        return f"generation_config.json has {'; '.join(words)}"


def not_followed(given: Mapping[str, Any], is_token: Callable[[str], bool]) -> NotFollowed | None:
    """None where nothing is asked for. `is_token`: stop strings that are tokens end an answer, and so are followed."""
    asked: list[str] = []
    of_none: list[str] = []
    for name, said in given.items():
        value = _other_stops(said, is_token) if name == STOP_STRINGS else said
        if name in _WITHOUT_EFFECT or name.startswith(_PREFIXES) or value in _neutral(name):
            continue
        (asked if name in OF_REQUESTS else of_none).append(
            f"{shown(name, 40).strip(_QUOTE)} {shown(value, 40)}"
        )
    return NotFollowed(_listed(asked), _listed(of_none)) if asked or of_none else None


def stop_strings(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of `stop_strings`, one or a list."""
    value = given.get(STOP_STRINGS)
    return tuple(text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str))


def _other_stops(value: Any, is_token: Callable[[str], bool]) -> Any:
    """Stop strings without those that are tokens."""
    listed = value if isinstance(value, list) else [value]
    return [text for text in listed if text is not None and not (isinstance(text, str) and is_token(text))]


def _neutral(name: str) -> tuple[Any, ...]:
    if name in OF_REQUESTS:
        return None, *OF_REQUESTS[name]
    return None, False, 0, "", [], {}, *_NEUTRAL.get(name, ())


def _listed(asked: list[str]) -> str:
    more = f" and {len(asked) - _MOST_NAMED} more" if len(asked) > _MOST_NAMED else ""
    return ", ".join(asked[:_MOST_NAMED]) + more
