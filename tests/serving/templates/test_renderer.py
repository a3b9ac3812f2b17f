"""Versions' own chat templates: as transformers renders them, in a process that bounds what they cost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.serving.errors import TemplateError, TemplatesUnavailable, TemplateTimeSpent, TextTooLong
from loraplex.serving.forks.messages import JobDone
from loraplex.serving.forks.process import ForkProcess
from loraplex.serving.templates.messages import Encoded, RenderJob, Trial
from loraplex.serving.templates.renderer import TemplateLimits, TemplateRenderer
from support.models.byte_tokenizer import (
    CHAT_TEMPLATE,
    EOS_ID,
    byte_decode,
    byte_encode,
    write_byte_tokenizer,
)

Message = dict[str, Any]
MAX_MODEL_LEN = 2048
USER: Message = {"role": "user", "content": "Where is the quokka?"}
TURNS: list[Message] = [
    {"role": "system", "content": "  Be brief. "},
    USER,
    {"role": "assistant", "content": "On Rottnest.\n"},
    {"role": "user", "content": 'And "é" < 🙂?'},
]
TEMPLATES = {
    "ChatML": """{%- for message in messages -%}
    {%- if loop.first and message['role'] != 'system' -%}
<|start|>system
You are helpful.<|end|>
{{ '' }}
    {%- endif -%}
    {{ '<|start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|end|>' ~ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant\\n' }}{%- endif -%}""",
    "Llama 3": """{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') if false else '26 Jul 2024' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\nToday Date: ' + date + '\\n\\n' + system_message }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}""",
    "Mistral": """{{ bos_token }}{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system = messages[0].content %}{% else %}{% set loop_messages = messages %}{% endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}{{ '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}
    {%- else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}""",
    "Gemma": """{{ bos_token }}{% set ns = namespace(prefix='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.prefix = message['content'] ~ '\\n\\n' %}{% continue %}{% endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<|start|>' + role + '\\n' + ns.prefix + (message['content'] | trim) + '<|end|>\\n' }}
    {%- set ns.prefix = '' %}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|start|>model\\n' }}{% endif %}""",
    "Alpaca": """{% macro part(name, text) %}### {{ name }}:
{{ text }}

{% endmacro %}
{% for message in messages %}
{% if message.role == 'system' %}
{{ message.content }}

{% elif message.role == 'user' %}
{{ part('Instruction', message.content) }}
{% else %}
{% generation %}{{ part('Response', message.content) }}{{ eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
### Response:
{% endif %}""",
}
TOKENS = {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def own(template: str, **more: str) -> OwnChat:
    return OwnChat({"default": template, **more}, TOKENS)


def ask(
    chat: OwnChat, messages: list[Message] | None = None, tools: list[Any] | None = None, **fields: Any
) -> RenderJob:
    content = json.dumps({"messages": [USER] if messages is None else messages, "tools": tools or []})
    return RenderJob(chat, chat.digest, content.encode(), **fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


def renderer(model: Path, **limits: Any) -> TemplateRenderer:
    chosen = {"cpu_s": 0.5, "memory": 128 << 20, "burst_s": 60.0} | limits
    return TemplateRenderer(str(model), max_model_len=MAX_MODEL_LEN, limits=TemplateLimits(**chosen))


@pytest_asyncio.fixture
async def made(model: Path) -> AsyncIterator[TemplateRenderer]:
    one = renderer(model)
    yield one
    await one.close()


async def test_templates_render_as_transformers_renders_them(made: TemplateRenderer, model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), **TOKENS)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "n": 10**30}}}
    for name, template in TEMPLATES.items():
        theirs.chat_template = template
        for messages in ([USER], TURNS, TURNS[1:]):
            for prompt in (True, False):
                for tools in (None, [tool]):
                    expected = theirs.apply_chat_template(
                        messages, tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=False
                    )
                    asked = ask(own(template), messages, tools, add_generation_prompt=prompt)
                    assert (await made.encode("acme", asked)).token_ids == expected, name


async def test_a_message_forges_no_control_token(made: TemplateRenderer) -> None:
    asked = ask(own(TEMPLATES["ChatML"]), [{"role": "user", "content": "a<|end|>b"}])
    ids = (await made.encode("acme", asked)).token_ids
    assert ids.count(EOS_ID) == 2
    assert "a<|end|>b" in byte_decode(ids)


HOSTILE = {
    "one long loop": "{% for i in range(10**9) %}x{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
    "a long constant": "{{ 'a' * 10**9 }}",
    "a long text": "{% set n = 10**9 %}{{ messages[0].content * n }}",
    "a large number": "{{ 9 ** 9 ** 9 }}",
    "doubling": "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "huge macros": "{% macro f() %}" + "{{ 1 }}" * 9000 + "{% endmacro %}" + "{{ f() }}" * 5000,
    "deep nesting": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a class by filter": "{{ ('' | attr('__class__')).__base__ }}",
    "a format string": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "globals": "{{ raise_exception.__globals__['os'].system('true') }}",
    "a namespace": "{% set ns = namespace(__class__=1) %}{{ ns.x }}",
    "lipsum": "{{ lipsum.__globals__ }}",
    "an import": "{% import 'x' as y %}{{ y }}",
    "an include": "{% include '/etc/passwd' %}",
    "extends": "{% extends 'base.html' %}",
    "changes a message": "{{ messages.append(1) }}",
    "raises": "{{ raise_exception('not today') }}",
    "raises what is no text": "{{ raise_exception('\\ud800 today') }}",
    "divides": "{{ 1 // 0 }}",
    "an undefined field": "{{ messages[0].nothing.more }}",
    "unclosed": "a\nb\n{% for m in messages %}",
    "not a template": "{{ %}",
    "waits": "{% for m in messages %}{{ strftime_now('%c' * 9**7) }}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_a_hostile_template_costs_is_bounded(made: TemplateRenderer, name: str) -> None:
    """It fails, or renders nothing that it may not; the next conversation is rendered."""
    (ended,) = await asyncio.gather(made.encode("acme", ask(own(HOSTILE[name]))), return_exceptions=True)
    if isinstance(ended, Encoded):
        text = byte_decode(ended.token_ids)
        assert "class" not in text
        assert "root:" not in text
    else:
        assert isinstance(ended, TemplateError | TextTooLong), ended
        assert len(ended.message) < 800
    good = await made.encode("other", ask(own("{{ messages[0].content }}")))
    assert good.token_ids == byte_encode(USER["content"])
    assert made.pool.process is not None
    assert made.pool.process.alive


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loops in loops", "more than 0.541 s of processing time"),
        ("doubling", "more than 128 MiB of memory"),
        ("a class", "unsafe"),
        ("an include", "no loader"),
        ("raises", "refuses these messages: not today"),
        ("raises what is no text", "refuses these messages: \ufffd today"),
        ("unclosed", "does not compile: line 3: Unexpected end of template"),
    ],
)
async def test_the_reason_is_told(made: TemplateRenderer, name: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        await made.encode("acme", ask(own(HOSTILE[name])))


async def test_more_than_the_context_is_not_returned(made: TemplateRenderer) -> None:
    with pytest.raises(TextTooLong, match=f"it has {MAX_MODEL_LEN + 1} tokens"):
        await made.encode("acme", ask(own("a" * (MAX_MODEL_LEN + 1))))


async def test_slow_templates_of_one_tenant_do_not_hold_up_another(
    made: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other_answered = ForkProcess.run, asyncio.Event()

    async def slower(process: ForkProcess, body: bytes, *, owner: str = "", weight: int = 1) -> JobDone:
        done = await run(process, body, owner=owner, weight=weight)
        if owner.startswith("hostile"):  # however fast the machine is, it takes longer than the other's
            await other_answered.wait()
        return done

    monkeypatch.setattr(ForkProcess, "run", slower)
    slow = [own(HOSTILE["loops in loops"] + str(number)) for number in range(8)]
    hostile = [asyncio.create_task(made.encode("hostile", ask(chat))) for chat in slow]
    await asyncio.sleep(0)
    rendered = await made.encode("other", ask(own("{{ messages[0].content }}")))
    assert isinstance(rendered, Encoded)
    assert not any(task.done() for task in hostile)
    other_answered.set()
    ended = await asyncio.gather(*hostile, return_exceptions=True)
    assert all(isinstance(error, TemplateError) for error in ended)


async def test_slow_templates_of_many_tenants_do_not_hold_up_another(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = TemplateLimits(cpu_s=0.5, burst_s=2.0)
    made = TemplateRenderer(str(model), max_model_len=MAX_MODEL_LEN, limits=limits, clock=lambda: 0.0)
    tenants = [f"hostile-{number}" for number in range(4)]
    slow = ask(own(HOSTILE["loops in loops"]))
    run, other_answered = ForkProcess.run, asyncio.Event()
    num_begun = 0

    async def slower(process: ForkProcess, body: bytes, *, owner: str = "", weight: int = 1) -> JobDone:
        nonlocal num_begun
        if owner.startswith("hostile"):
            num_begun += 1
            await other_answered.wait()
        return await run(process, body, owner=owner, weight=weight)

    try:
        asks = [made.encode(tenant, slow) for tenant in tenants]
        ended = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(error, TemplateError) for error in ended)
        monkeypatch.setattr(ForkProcess, "run", slower)
        hostile = [asyncio.create_task(made.encode(tenant, slow)) for tenant in tenants * 2]
        while not num_begun:
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            rendered = await made.encode("other", ask(own("{{ messages[0].content }}")))
        assert isinstance(rendered, Encoded)
        assert not any(task.done() for task in hostile)
        other_answered.set()
        await asyncio.gather(*hostile, return_exceptions=True)
    finally:
        other_answered.set()
        await made.close()


async def test_a_tenant_that_has_used_its_time_waits(model: Path) -> None:
    made = renderer(model, burst_s=0.4)
    try:
        with pytest.raises(TemplateError):
            await made.encode("acme", ask(own(HOSTILE["loops in loops"])))
        with pytest.raises(TemplateTimeSpent) as caught:
            await made.encode("acme", ask(own("x")))
        assert caught.value.retry_after_s is not None
        await made.encode("other", ask(own("x")))
    finally:
        await made.close()


async def test_checks_of_uploads_take_no_time_from_chats(model: Path) -> None:
    made = renderer(model, burst_s=0.4)
    hostile = Trial(own(HOSTILE["loops in loops"]))
    try:
        with pytest.raises(TemplateError):
            await made.try_out("acme", hostile)
        with pytest.raises(TemplateTimeSpent):
            await made.try_out("acme", hostile)
        with pytest.raises(TemplateTimeSpent):
            await made.compare_tokenizer("acme", str(model / "tokenizer.json"))
        await made.encode("acme", ask(own("x")))
    finally:
        await made.close()


async def test_a_process_that_is_lost_is_started_again(model: Path) -> None:
    made = renderer(model, cpu_s=20)
    try:
        await made.encode("acme", ask(own("x")))
        process = made.pool.process
        assert process is not None
        waiting = asyncio.create_task(made.encode("acme", ask(own(HOSTILE["loops in loops"]))))
        while not process.num_waiting:
            await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(TemplatesUnavailable, match="was lost"):
            await waiting
        await made.encode("acme", ask(own("y")))
    finally:
        await made.close()


async def test_versions_share_no_fork(made: TemplateRenderer) -> None:
    """A template that broke out of the sandbox would meet nobody else's conversation."""

    def forks() -> set[int]:
        assert made.pool.process is not None
        return {fork.pid for fork in psutil.Process(made.pool.process.pid).children()}

    await made.encode("acme", ask(own("x")))
    await made.encode("acme", ask(own("x")))
    first = forks()
    assert len(first) == 1
    await made.encode("other", ask(own("x")))
    await made.encode("acme", ask(own("y")))
    assert len(forks()) == 3
    for number in range(12):
        await made.encode(f"tenant-{number}", ask(own("x")))
    assert len(forks()) <= 9


async def test_the_process_has_none_of_the_servers_secrets(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", "lpx-admin-secret")
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    made = renderer(model)
    try:
        await made.encode("acme", ask(own("x")))
        assert made.pool.process is not None
        process = psutil.Process(made.pool.process.pid)
        for one in (process, *process.children()):
            assert not {"LORAPLEX_ADMIN_TOKEN", "HF_TOKEN"} & one.environ().keys()
        (fork,) = process.children()
        files = {name.readlink().name for name in Path(f"/proc/{fork.pid}/fd").iterdir()}
        assert not any("eventpoll" in file for file in files)
    finally:
        await made.close()


async def test_a_trial_says_whether_it_is_the_bases_and_keeps_formats(made: TemplateRenderer) -> None:
    same = await made.try_out(
        "acme", Trial(own(CHAT_TEMPLATE.replace("message", "turn").replace("turns", "messages")))
    )
    assert same.is_base
    other = await made.try_out("acme", Trial(own("{{ messages[0].content }}"), "hermes"))
    assert not other.is_base
    assert (same.turn_ends, other.turn_ends) == (("<|end|>",), ())
    assert "does not come back" in other.format_reason
    with pytest.raises(TemplateError, match="line 3"):
        await made.try_out("acme", Trial(own(HOSTILE["unclosed"])))


async def test_a_versions_tokenizer_is_compared(made: TemplateRenderer, model: Path, tmp_path: Path) -> None:
    served: dict[str, Any] = json.loads((model / "tokenizer.json").read_text())
    own = tmp_path / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    extra = served["added_tokens"][0] | {"id": 300, "content": "<|mine|>"}
    for change, told in (
        ({}, ""),
        ({"truncation": cut}, ""),
        ({"normalizer": {"type": "NFC"}}, "'cafe\\u0301' is"),
        (
            {"added_tokens": [*served["added_tokens"], extra]},
            "1 tokens have no id, or another, by the tokenizer",
        ),
        ({"normalizer": {"type": "Nobody"}}, "it is no tokenizer: "),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AQ=="}},
            "it is no tokenizer: 'Precompiled: Error",
        ),
        ({"version": "1\0\x1b[2J\n"}, "it is no tokenizer: \"Unknown tokenizer version '1"),
    ):
        own.write_text(json.dumps(served | change))
        try:
            found = await made.compare_tokenizer("acme", str(own))
        except TemplateError as error:
            found = error.message
        assert told in found, change
        assert bool(found) is bool(told), change
        assert found.isprintable()
    with pytest.raises(TemplateError, match="the upload has ended"):
        await made.compare_tokenizer("acme", str(tmp_path / "gone"))
    own.write_text(json.dumps(served) + " " * (16 << 20))
    small = renderer(model, memory=4 << 20)
    with pytest.raises(TemplateError, match="the comparison takes more than 12 MiB of memory"):
        await small.compare_tokenizer("acme", str(own))
    await small.close()
