"""What a request to /v1/responses becomes, and what is refused by name. The messages are those that the chat template
gets."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.api.errors import ApiError
from loraplex.api.openai.parsing import parse_request
from loraplex.api.responses.schemas import ResponsesRequest, chat_fields, to_chat
from loraplex.api.sealed import seal

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
SUB = {"type": "function", "name": "sub", "description": "Subtract."}
USER = {"role": "user", "content": "hi"}
SEARCH = {"type": "web_search", "external_web_access": True}


def asked(**fields: Any) -> ResponsesRequest:
    return parse_request(ResponsesRequest, {"model": "m", "input": "hi", **fields})


def chat(**fields: Any) -> dict[str, Any]:
    return chat_fields(asked(**fields))


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_text_is_what_the_user_says() -> None:
    assert chat(instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_items_of_one_turn_are_one_message() -> None:
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "I ", "annotations": [], "logprobs": []},
                {"type": "output_text", "text": "add."},
            ],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "add",
            "arguments": '{"a":1}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
        {"type": "message", "role": "assistant", "content": "Two.", "phase": "final_answer"},
        {"role": "user", "content": "Thanks."},
    ]
    assert chat(input=given)["messages"] == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "reasoning": "Hm.",
            "content": "I add.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "0"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Thanks."},
    ]


@pytest.mark.parametrize(
    "item",
    [
        {"content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": seal("other")},
        {"encrypted_content": seal("Hm.")},
        {"summary": [{"type": "summary_text", "text": "Hm."}]},
    ],
)
def test_reasoning_comes_back(item: dict[str, Any]) -> None:
    given = [{"type": "reasoning", "summary": [], **item}, {"role": "assistant", "content": "4"}]
    messages = chat(input=[*given, {"role": "user", "content": "and?"}])["messages"]
    assert messages[0] == {"role": "assistant", "reasoning": "Hm.", "content": "4"}


@pytest.mark.parametrize("item", [{"encrypted_content": "gAAAA"}, {"summary": None, "status": "failed"}, {}])
def test_reasoning_that_holds_nothing_here_is_left_out(item: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    given = [call, {"type": "reasoning", "id": "rs", "summary": [], **item}, {**call, "call_id": "d"}]
    messages = chat(input=[*given, {"role": "user", "content": "and?"}])["messages"]
    assert [message["role"] for message in messages] == ["assistant", "user"]
    assert len(messages[0]["tool_calls"]) == 2
    assert "reasoning" not in messages[0]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [('{"a": "half', '{"a": "half'), ("[]", "[]"), (None, "{}"), ({"a": 1}, '{"a":1}')],
)
def test_an_earlier_call_goes_in_as_it_was_written(given: Any, arguments: str) -> None:
    call = {"type": "function_call", "call_id": "c" * 300, "name": "add", "arguments": given, "id": "x" * 400}
    output = {"type": "function_call_output", "call_id": "c" * 300, "output": "Not run."}
    called, result = to_chat(asked(input=[call, output])).messages
    assert (called.tool_calls or [])[0].function.arguments == arguments
    assert result.tool_call_id == (called.tool_calls or [])[0].id
    with pytest.raises(ApiError, match="must be a JSON object"):
        asked(
            input=[{"role": "user", "content": "hi"}, {**call, "call_id": "c", "id": "x", "arguments": "["}]
        )


def test_earlier_items_of_other_servers() -> None:
    cited = {"type": "output_text", "text": "a", "annotations": [{"type": "url_citation"}]}
    given = [
        {"role": "user", "content": [{"type": "input_transcript", "transcript": "Patch it."}]},
        {"type": "custom_tool_call", "id": "ctc_1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "output": [{"type": "output_text", "text": "Done."}]},
        {"type": "function_call", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "output": {"sum": 4}},
        {
            "role": "assistant",
            "content": [cited, {"type": "summary_text", "text": "b"}],
            "status": "searching",
        },
        {"role": "user", "content": "and?"},
    ]
    told = [message.for_template() for message in to_chat(asked(input=given)).messages]
    assert [message["content"] for message in told] == [
        "Patch it.",
        "",
        "Done.",
        "",
        '{"sum":4}',
        "ab",
        "and?",
    ]
    assert told[1]["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": "*** Begin"}
    for call, result in ((1, 2), (3, 4)):
        assert told[result]["tool_call_id"] == told[call]["tool_calls"][0]["id"]
    # An image holds no text, and what another server has summarised cannot be read: neither is passed over.
    seen = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    assert refused(input=[seen, *given[5:]]).param == "input[0].content[0].type"
    sealed = {"type": "compaction", "encrypted_content": "gAAAA"}
    assert refused(input=[sealed, *given[5:]]).param == "input[0].encrypted_content"


@pytest.mark.parametrize(
    ("items", "told"),
    [
        (
            [{"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "q"}}],
            [{"role": "assistant", "content": '{"type":"web_search_call","action":{"query":"q"}}'}],
        ),
        (
            [{"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "r", "error": None}],
            [
                {
                    "role": "assistant",
                    "content": '{"type":"mcp_call","name":"f","arguments":"{}","output":"r","error":null}',
                }
            ],
        ),
        (
            [
                {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "f"}]},
                {"type": "mcp_approval_request", "id": "a", "name": "f", "arguments": "{}"},
                {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
            ],
            [],
        ),
    ],
)
def test_what_another_server_did_itself_goes_in_as_text(
    items: list[dict[str, Any]], told: list[dict[str, Any]]
) -> None:
    later = {"role": "assistant", "content": "k"}
    messages = chat(input=[USER, *items, USER, later, USER])["messages"]
    assert [message for message in messages if message["content"] not in ("hi", "k", "")] == told


def test_tools_of_another_server_that_the_client_ran() -> None:
    items = [
        {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "b", "stderr": ""}]},
    ]
    messages = chat(input=[USER, *items, {"role": "assistant", "content": "k"}, USER])["messages"]
    calls = [message["tool_calls"][0] for message in messages if message.get("tool_calls")]
    assert [call["function"] for call in calls] == [
        {"name": "local_shell", "arguments": '{"command":["ls"]}'},
        {"name": "shell", "arguments": '{"commands":["ls"]}'},
    ]
    results = [message for message in messages if message["role"] == "tool"]
    assert [result["content"] for result in results] == ["a.txt", '[{"stdout":"b","stderr":""}]']
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in calls]


@pytest.mark.parametrize(
    "kind", ["image_generation_call", "computer_call", "computer_call_output", "item_reference"]
)
def test_items_of_images_and_of_a_store_stay_refused(kind: str) -> None:
    given = [
        {"type": kind, "id": "x", "call_id": "x", "result": "aa"},
        {"role": "assistant", "content": "k"},
        USER,
    ]
    assert refused(input=given).param == "input[0].type"


def test_reasoning_after_a_call_begins_another_turn() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "2"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    messages = chat(input=[thought, call, output, thought, {"role": "assistant", "content": "2"}])["messages"]
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    assert [message.get("reasoning") for message in messages] == ["Hm.", None, "Hm."]


def test_sampling_has_the_names_of_chat() -> None:
    fields = chat(
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=7,
        stop="x",
        min_tokens=1,
        speculation=False,
        logit_bias={"5": 1},
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        stream=True,
        user="u",
        reasoning={"effort": "low"},
        store=False,
        background=False,
        truncation="disabled",
        previous_response_id=None,
    )
    del fields["messages"]
    assert fields == {
        "model": "m",
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 7,
        "stop": ["x"],
        "min_tokens": 1,
        "speculation": False,
        "logit_bias": {"5": 1.0},
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "user": "u",
        "reasoning_effort": "low",
    }


def test_a_schema_is_a_response_format() -> None:
    schema = {"type": "object", "properties": {}}
    text = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
    assert chat(text=text)["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": schema, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat(text={"format": {"type": "text"}})


def test_what_is_no_function_is_not_offered() -> None:
    deferred = {**ADD, "name": "later", "defer_loading": True}
    found = asked(tools=[SEARCH, ADD, deferred, {"type": "custom", "name": "apply_patch"}, SUB])
    fields = chat_fields(found)
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["add", "sub"]
    assert fields["tool_choice"] == "auto"
    # Errors name the place in what the client sent.
    assert found.client_field("tools[1].function.parameters") == "tools[4].parameters"
    assert (
        found.client_field("response_format.json_schema.schema.properties.x")
        == "text.format.schema.properties.x"
    )
    assert found.client_field("messages[3].content") == "input"
    assert found.client_field("max_completion_tokens") == "max_output_tokens"


@pytest.mark.parametrize(
    ("choice", "becomes"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "sub"}, {"type": "function", "function": {"name": "sub"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "sub"}}],
                },
            },
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none"),
    ],
)
def test_choices(choice: Any, becomes: Any) -> None:
    fields = chat(tools=[SEARCH, ADD, SUB], tool_choice=choice, parallel_tool_calls=False)
    assert fields["tool_choice"] == becomes
    assert fields["parallel_tool_calls"] is False
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["add", "sub"]


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ("required", "tool_choice"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "mcp", "server_label": "s"}, "tool_choice.type"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
    ],
)
def test_a_choice_that_needs_what_is_not_offered_is_refused(choice: Any, field: str) -> None:
    error = refused(tools=[SEARCH], tool_choice=choice)
    assert (error.code, error.param) == ("unsupported_field", field)


@pytest.mark.parametrize(
    ("fields", "field", "code"),
    [
        ({"store": True}, "store", "unsupported_field"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_field"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_field"),
        ({"background": True}, "background", "unsupported_field"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_field"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "unsupported_field"),
        ({"truncation": "auto"}, "truncation", "invalid_value"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_field"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "unsupported_field"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_field"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "unsupported_field"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"nobody": 1}, "nobody", "unsupported_field"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": 3}, "input", "invalid_value"),
        ({"input": ["hi"]}, "input[0]", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type", "unsupported_field"),
        ({"input": [{"type": "web_search_call", "id": "m"}]}, "input[0].type", "unsupported_field"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_value"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_field",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]},
            "input[0].encrypted_content",
            "unsupported_field",
        ),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type", "unsupported_field"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}},
            "tool_choice.name",
            "invalid_value",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str, code: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code) == (field, code)
    assert error.message.endswith(".")


def test_a_changed_seal_is_not_ours() -> None:
    sealed = seal("Hm. ünïcode")
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed[:-4] + "AAA="}
    assert refused(input=[item]).param == "input[0].encrypted_content"
    given = [{**item, "encrypted_content": sealed}, {"role": "user", "content": "x"}]
    assert chat(input=given)["messages"][0]["reasoning"] == "Hm. ünïcode"


@pytest.mark.parametrize("kind", [["message"], [], {}])
def test_a_type_that_is_no_text_is_refused_in_earlier_items(kind: Any) -> None:
    behind = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    part = {"type": kind, "text": "x"}
    for item, field in (
        ({"type": kind, "role": "user", "content": "a"}, "input[0].type"),
        ({"role": "user", "content": [part]}, "input[0].content[0].type"),
        ({"type": "reasoning", "summary": [part]}, "input[0].summary[0].type"),
        ({"type": "function_call_output", "call_id": "c", "output": [part]}, "input[0].output[0].type"),
    ):
        assert refused(input=[item, *behind]).param == field
