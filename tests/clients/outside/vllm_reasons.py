"""Why a test of vLLM's does not pass against Loraplex, or is not run."""

from __future__ import annotations

import re

TENSORS = "prompts as tensors (`prompt_embeds`): vLLM serves them behind an option of its own"
NOT_RUN: tuple[tuple[str, str], ...] = (
    ("*_prompt_embeds.py", TENSORS),
    ("*/test_prompt_validation.py", TENSORS),
    ("*/test_tensorizer_entrypoint.py", "vLLM's loader for tensorizer's files"),
    ("*/test_extra_content_fields.py", "a model for images"),
    ("*_vlm.py", "a model for images"),
    ("*_vision.py", "a model for images"),
    ("*/test_cohere_*.py", "Cohere's route `/v2/embed`"),
    ("*/test_correctness_mteb.py", "a data set from a hub, and how well another model embeds it"),
    ("*/test_online_dimensions.py", "models that were trained to have their vectors cut"),
    ("*/test_online_long_text.py", "vLLM's option for texts beyond the context"),
    ("*/test_harmony*.py", "gpt-oss and its own message format"),
    ("*/test_mcp_tools.py", "gpt-oss and tools that the server runs"),
    ("*/test_parsable_context.py", "gpt-oss and its own message format"),
    ("*/test_openai_tool_parser.py", "gpt-oss and its own message format"),
    ("*/test_granite4_tool_parser.py", "how well IBM's granite 4 calls tools"),
    ("tool_use/mistral/*", "Mistral's own tokenizer and message format"),
    ("*/correctness/test_lmeval.py", "a data set from a hub, and how well a larger model solves it"),
    ("*/test_token_in_token_out.py", "vLLM's option `--skip-tokenizer-init`"),
    ("*/test_root_path.py", "vLLM's option `--root-path`"),
    ("*/test_uds.py", "vLLM's option `--uds`"),
    (
        "*/test_optional_middleware.py",
        "vLLM's option `--middleware`, Python code of the operator's in the server",
    ),
    ("*/rpc/*", "vLLM's development route `/collective_rpc`"),
    ("*/sagemaker/*", "SageMaker's routes `/ping` and `/invocations`"),
)
"""Files by pattern, and why they are not run: they ask for another model or for what is vLLM's own."""
PASSED, MISSING, DIFFERENT, OTHER, OPEN = "passed", "missing", "different", "not applicable", "unexplained"
ANY = ""
IN_PROCESS = "vLLM's classes in process: no server is asked"
VACUOUS = "passes whatever is answered: it looks at tasks, not at what they return"
NO_TYPES = "passes whatever is answered: it loops over vLLM's list of number types, which is not there"
SENTENCE = "an error is our own sentence; the test looks for words of vLLM's or of pydantic's"
ITS_WORDS = "words of the model that the test names"
OWN_END = "the end of a chat's stream has a chunk of its own, without text"
CONTRADICTION = "`continuous_usage_stats` with `include_usage: false` is a 400; vLLM takes the latter"
UNTRAINED = "calls and reasoning of a model that was trained to them"
UNBOUNDED = "the small model fills a string without `maxLength` until its tokens are used up"
UNASKED = "answers hold vLLM's own fields only where they are asked for, and no null in their place"
RULES: tuple[tuple[str, str, str, str], ...] = (
    (
        ANY,
        r"Skipped: Skipping config",
        OTHER,
        "the same tests with another model's options, which are none to us",
    ),
    (r"test_(?:multiple_lora_adapters|beam_search_with_lora)", ANY, OTHER, VACUOUS),
    (r"\(the file\)$", r"loraplex_stand_in\.", OTHER, IN_PROCESS),
    # What they ask for by name.
    (r"test_invocations", ANY, OTHER, "SageMaker's route `/invocations`"),
    (ANY, r"Unknown field: 'use_beam_search'", MISSING, "beam search"),
    (
        r"test_tokenize_chat",
        r"400 Client Error",
        MISSING,
        "the fields `continue_final_message` and `add_special_tokens` of a conversation in `/tokenize`",
    ),
    (
        ANY,
        r"has no format for calls of tools",
        MISSING,
        "granite's format of calls",
    ),
    (r"test_chat_echo", r"'echo'", MISSING, "the field `echo` in a chat"),
    (
        r"test_extra_fields_allowed",
        ANY,
        DIFFERENT,
        "an unknown field is a 400 that names it; vLLM ignores it",
    ),
    (ANY, r"(?:/v1)?/responses/resp_\w+", MISSING, "stored responses"),
    (ANY, r"'(?:background|previous_response_id)' is not supported", MISSING, "stored responses"),
    (
        ANY,
        r"chat template of '[\w/.-]+' knows no 'reasoning.effort'",
        DIFFERENT,
        "`reasoning.effort` is a 400 where the chat template knows none; vLLM ignores it",
    ),
    (ANY, r"Unknown field: '(\w+)'", MISSING, r"the field `\1`"),
    (ANY, r"'(\w+)' is not supported here", MISSING, r"the field `\1`"),
    (ANY, r"404 Client Error: Not Found for url: http://[\d.:]+(/[\w/]+)", MISSING, r"the route `\1`"),
    (ANY, r"Unknown request URL: \w+ (/[\w/]+)", MISSING, r"the route `\1`"),
    (r"_with_orca_header", ANY, MISSING, "the header `endpoint-load-metrics`"),
    (r"test_server_load", ANY, MISSING, "the route `/load`"),
    (r"test_chat_with_enable_force_include_usage", ANY, MISSING, "the option `--enable-force-include-usage`"),
    (r"return_tokens_as_token_ids", ANY, MISSING, "the option and field `return_tokens_as_token_ids`"),
    (
        ANY,
        r"'prompt_logprobs': input should be greater",
        MISSING,
        "`prompt_logprobs: -1`, the whole vocabulary",
    ),
    # Our answers are other ones, and are meant.
    (
        r"test_hermes_tool_parser.*\[llama\]",
        r"did not start.*There is nothing here",
        DIFFERENT,
        "an adapter's name has no slash: the server that the test asks for cannot be made",
    ),
    (ANY, r"no attribute 'prompt_logprobs'|assert 'prompt_token_ids' in", DIFFERENT, UNASKED),
    (
        r"stream_options",
        r"DID NOT RAISE",
        DIFFERENT,
        "null is as good as a field left out, in `stream_options` too",
    ),
    (
        r"test_chat_streaming",
        r"assert delta.content$",
        DIFFERENT,
        OWN_END,
    ),
    (r"test_custom_role", ANY, DIFFERENT, "roles are those of OpenAI; vLLM takes any"),
    (
        r"test_check_models|test_static_lora_lineage",
        ANY,
        DIFFERENT,
        "an adapter's `root` is its digest, not a path",
    ),
    (r"stream_options_and_logprobs", r"logprobs=None\)\.logprobs", DIFFERENT, OWN_END),
    (ANY, r"'continuous_usage_stats' is only allowed", DIFFERENT, CONTRADICTION),
    (r"test_long_seed", r"greater than or equal", DIFFERENT, SENTENCE),
    (
        r"test_top_logprobs",
        r"valid boolean",
        DIFFERENT,
        '`logprobs: "true"` is a 400: types are not converted',
    ),
    (
        r"test_named_tool_use",
        r"'NoneType' has no len",
        DIFFERENT,
        "`content` is null beside calls, as OpenAI has it; vLLM has an empty text where the function is named",
    ),
    (
        r"test_inconsistent_tool_choice",
        r"DID NOT RAISE",
        DIFFERENT,
        "`tool_choice: {}` asks for nothing",
    ),
    (
        r"test_negative_token_ids|test_params_not_supported",
        r"did not match|literal_error",
        DIFFERENT,
        SENTENCE,
    ),
    (r"embed/test_online\.py::test_chat_request", ANY, MISSING, "the field `messages` in `/v1/embeddings`"),
    (r"_embed_dtype_and_endianness", ANY, OTHER, NO_TYPES),
    (r"::test_use_activation", ANY, MISSING, "the field `use_activation` (`normalize` does it)"),
    (r"::test_pooling_", ANY, MISSING, "the route `/pooling`"),
    (r"test_namespace_tool_separator", ANY, DIFFERENT, "tools in a namespace are not shown to the model"),
    # The tests know their own model's answers.
    (
        r"embed/test_online\.py",
        r"assert 576 == 384|== \[0, 581, ",
        OTHER,
        "sizes and tokens of another model",
    ),
    (
        r"test_(?:parallel_tool_calls|tool_calls)\.py",
        r"None is not None|'NoneType' has no len",
        OTHER,
        UNTRAINED,
    ),
    (r"test_default_includes_reasoning", r"Expected reasoning", OTHER, UNTRAINED),
    (r"test_chat_completion_with_tool_use", r"assert False$", OTHER, UNTRAINED),
    (ANY, r"'max_tokens' == 'tool_use'|'message' == 'reasoning'", OTHER, UNTRAINED),
    (r"responses/test_basic", r"assert '\d+' in ", OTHER, ITS_WORDS),
    (r"responses/test_structured_output", r"== 'science fair'", OTHER, ITS_WORDS),
    (
        r"responses/test_function_call",
        r"assert None is not None|UnboundLocalError|assert 0 >= 2",
        OTHER,
        UNTRAINED,
    ),
    (ANY, r"'max_tokens' == 'end_turn'", OTHER, ITS_WORDS),
    (
        r"test_anthropic_streaming_cache_usage",
        r"assert 16 == 0",
        OTHER,
        "the chat template begins every chat alike, so 16 tokens of a new prompt are cached",
    ),
    (ANY, r"JSONDecodeError: Unterminated string", OTHER, UNBOUNDED),
    (r"test_structured_outputs_choice_chat", r"assert '(\w+)' != '\1'", OTHER, ITS_WORDS),
    (r"test_response_format_json_schema", r"== \{'result'", OTHER, ITS_WORDS),
    (r"test_metrics\.py.*multimodal", ANY, OTHER, "a model for images"),
    (r"test_show_version", r"== '", OTHER, "the version of vLLM itself"),
    (r"test_more_than_one_prompt_logprobs", r"assert 2 == 1", OTHER, ITS_WORDS),
    (
        r"test_complex_message_content",
        r"'1 \+ 1 = 2' == '2'",
        OTHER,
        ITS_WORDS,
    ),
    (r"test_completion_streaming", r"'stop' == 'length'", OTHER, ITS_WORDS),
    (
        r"test_single_",
        r"prompt_tokens(?:=37|=6| == 6)|CompletionUsa",
        OTHER,
        "token counts of the model that the test names",
    ),
    (
        r"test_request_cancellation",
        r"context length is 8192",
        OTHER,
        "wants 10,100 positions; the model has 8,192",
    ),
)
"""Patterns of a test's name and of what it said, the kind of its outcome, and why, with groups of the second one."""


def reason(test: str, outcome: str, text: str) -> tuple[str, str]:
    """The kind of this outcome, and why: from the first rule whose patterns are both found."""
    if outcome == "skipped":
        return OTHER, IN_PROCESS if re.search("in process|checkpoint not found", text) else text.removeprefix(
            "Skipped: "
        )
    for name, said, kind, why in RULES:
        found = re.search(said, text, re.MULTILINE)
        if found and re.search(name, test) and (outcome != "passed" or why in (VACUOUS, NO_TYPES)):
            return kind, found.expand(why)
    if outcome == "passed":
        return PASSED, ""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")] or [text.strip()]
    return OPEN, lines[0][:200]
