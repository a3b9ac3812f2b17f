"""`PushCallback` against a server that is told what to answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from loraplex.adapters.admission.peft_support import CONFIG_FIELDS, ConfigField
from loraplex.adapters.store.files import CHAT_FILE_BYTES
from loraplex.contrib.transformers import CHAT_FILES, FILES, SERVED_VALUES, PushCallback, PushFailed

Answer = tuple[int, dict[str, str], object]
CREATED: Answer = (201, {}, {"version": "v7", "digest": "sha256:00"})
RELEASED: Answer = (200, {}, {})


class ScriptedServer(ThreadingHTTPServer):
    """Answers as scripted, in order; keeps what it was asked. `gate` holds every answer back until it is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, str, bytes]] = []
        self.arrived = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if "multipart" in self.headers.get("content-type", ""):
            body = b"Content-Type: " + self.headers["content-type"].encode() + b"\r\n\r\n" + body
        self.server.asked.append((self.path, self.headers.get("authorization", ""), body))
        self.server.arrived.release()
        assert self.server.gate.wait(30)
        status, headers, answer = self.server.answers.pop(0)
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


def save(directory: Path, step: int) -> None:
    """As the trainer does it before it calls `on_save`."""
    checkpoint = directory / f"checkpoint-{step}"
    checkpoint.mkdir()
    for name in FILES:
        (checkpoint / name).write_bytes(f"{name} of {step}".encode())


def on_save(
    callback: PushCallback, directory: Path, step: int, *, is_world_process_zero: bool = True
) -> None:
    state = SimpleNamespace(global_step=step, is_world_process_zero=is_world_process_zero)
    callback.on_save(SimpleNamespace(output_dir=str(directory)), state, None)


def uploaded(body: bytes) -> dict[str | None, bytes]:
    message = BytesParser(EmailMessage, policy=HTTP).parsebytes(body)
    return {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
        for part in message.iter_parts()
    }


def callback_for(server: ScriptedServer, **options: object) -> PushCallback:
    return PushCallback("support", tenant="acme", url=server.url, api_key="lpx_key", **options)


KEY = {"id": "0123", "scopes": ["adapters:write", "inference"]}
SERVED = {"name": "tiny", "num_layers": 2, "hidden_size": 64, "max_adapter_rank": 16}
CALLER: Answer = (200, {}, {"kind": "key", "tenant": "acme", "key": KEY, "base": SERVED})


def begin(callback: PushCallback, model: object = None, *, is_world_process_zero: bool = True) -> None:
    state = SimpleNamespace(is_world_process_zero=is_world_process_zero)
    callback.on_train_begin(None, state, None, model=model)


def model_of(rank: int = 8, **config: int) -> SimpleNamespace:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, **config}
    return SimpleNamespace(config=SimpleNamespace(**shape), peft_config={"default": SimpleNamespace(r=rank)})


class TestBeforeATraining:
    def test_the_server_is_asked_whose_the_key_is(self, server: ScriptedServer, tmp_path: Path) -> None:
        server.answers = [CALLER, CREATED, RELEASED]
        callback = PushCallback("support", url=server.url, api_key="lpx_key")
        begin(callback, model_of())
        save(tmp_path, 10)
        on_save(callback, tmp_path, 10)
        callback.wait()
        asked = [path for path, _, _ in server.asked]
        assert asked[0] == "/admin/v1/caller"
        assert asked[1] == "/admin/v1/tenants/acme/adapters/support/versions"

    def test_without_a_beginning_the_tenant_is_asked_for_later(
        self, server: ScriptedServer, tmp_path: Path
    ) -> None:
        server.answers = [CALLER, CREATED, RELEASED]
        callback = PushCallback("support", url=server.url, api_key="lpx_key")
        save(tmp_path, 10)
        on_save(callback, tmp_path, 10)
        callback.wait()
        assert [pushed.version for pushed in callback.pushed] == ["v7"]

    def refused(self, server: ScriptedServer, answer: Answer, model: object = None, **options: object) -> str:
        server.answers = [answer]
        callback = PushCallback("support", url=server.url, api_key="lpx_key", **{"timeout_s": 0.5, **options})
        with pytest.raises(PushFailed) as caught:
            begin(callback, model)
        return str(caught.value)

    def test_a_wrong_key(self, server: ScriptedServer) -> None:
        wrong: Answer = (401, {}, {"code": "invalid_api_key", "detail": "Incorrect API key provided"})
        said = self.refused(server, wrong)
        assert (
            "refuses the key of LORAPLEX_API_KEY, or api_key: 401 invalid_api_key: Incorrect API key" in said
        )

    def test_a_key_that_may_not_push(self, server: ScriptedServer) -> None:
        poor = (
            200,
            {},
            {"kind": "key", "tenant": "acme", "key": KEY | {"scopes": ["inference"]}, "base": SERVED},
        )
        assert "the key 0123 lacks the scope adapters:write" in self.refused(server, poor)

    def test_another_tenants_key(self, server: ScriptedServer) -> None:
        said = self.refused(server, CALLER, tenant="rival")
        assert "the key is of the tenant 'acme', not 'rival'" in said

    def test_another_base(self, server: ScriptedServer) -> None:
        said = self.refused(server, CALLER, model_of(hidden_size=96))
        assert "the model has 2 layers of width 96, and the server's base 'tiny' has 2 of 64" in said
        assert "rank 32 is above the server's 16" in self.refused(server, CALLER, model_of(rank=32))

    def test_a_vocabulary_that_was_padded(self, server: ScriptedServer) -> None:
        grown = (200, {}, CALLER[2] | {"base": SERVED | {"vocab_size": 264}})  # type: ignore[operator]
        said = self.refused(server, grown, model_of(vocab_size=320))
        assert "the model has 320 rows of embeddings, and the server's base 'tiny' has 264" in said
        assert "chat_template_path" in said
        for same in (grown, CALLER):  # an older server does not tell
            server.answers = [same]
            begin(callback_for(server), model_of(vocab_size=264))

    @pytest.mark.parametrize("field", CONFIG_FIELDS, ids=lambda field: field.name)
    def test_what_the_server_would_refuse_of_each_field(
        self, server: ScriptedServer, field: ConfigField
    ) -> None:
        """`FIELD_RULES` decide there; this file has a table of its own, for machines without Loraplex."""
        values = field.refused if field.codes == ("unsupported_feature",) else ()
        for value in values:
            model = model_of()
            setattr(model.peft_config["default"], field.name, value)
            said = self.refused(server, CALLER, model)
            assert f"{field.name} = {json.dumps(value)} is not served" in said
        for value in field.accepted if field.name in SERVED_VALUES else ():
            model = model_of()
            setattr(model.peft_config["default"], field.name, value)
            server.answers = [CALLER]
            begin(callback_for(server), model)

    def test_what_peft_itself_makes_of_a_config(self, server: ScriptedServer) -> None:
        from peft import LoraConfig

        model = model_of()
        for given, told in (
            ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"]'),
            ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
            ({"bias": "all"}, 'bias = "all"'),
            ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa"'),
        ):
            model.peft_config["default"] = LoraConfig(target_modules=["q_proj"], **given)
            assert told in self.refused(server, CALLER, model)
        model.peft_config["default"] = LoraConfig(
            task_type="CAUSAL_LM", use_dora=True, trainable_token_indices=[1], exclude_modules=["x"]
        )
        server.answers = [CALLER]
        begin(callback_for(server), model)
        model.peft_config["default"] = LoraConfig(
            task_type="SEQ_CLS", modules_to_save=["classifier", "score"]
        )
        server.answers = [CALLER]
        begin(callback_for(server), model)

    def test_no_server_and_another_ones(self, server: ScriptedServer) -> None:
        callback = PushCallback("support", url="http://127.0.0.1:9", api_key="lpx_key", timeout_s=0.5)
        with pytest.raises(PushFailed, match=r"127\.0\.0\.1:9 cannot be reached .*LORAPLEX_URL"):
            begin(callback)
        assert "is it a Loraplex server?" in self.refused(server, (404, {}, {"detail": "Not Found"}))
        assert "is no Loraplex server" in self.refused(server, (200, {}, {"object": "list"}))

    def test_a_busy_server_is_asked_again(self, server: ScriptedServer) -> None:
        server.answers = [(503, {}, {"code": "engine_restarting", "detail": "starting"}), CALLER]
        callback = PushCallback("support", url=server.url, api_key="lpx_key")
        begin(callback)
        assert len(server.asked) == 2

    def test_other_ranks_ask_nothing(self, server: ScriptedServer) -> None:
        begin(callback_for(server), is_world_process_zero=False)
        assert not server.asked


@pytest.mark.parametrize("release", [True, False])
def test_each_push_is_logged(
    server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, release: bool
) -> None:
    caplog.set_level("INFO")
    server.answers = [CREATED, RELEASED]
    callback = callback_for(server, release=release)
    save(tmp_path, 10)
    on_save(callback, tmp_path, 10)
    callback.wait()
    (line,) = [record.getMessage() for record in caplog.records if "step 10" in record.getMessage()]
    words = "released" if release else "not released: loraplex release promote support v7"
    assert line.startswith(f"step 10 is 'support@v7' (sha256:00), {words}, ")
    assert callback.pushed[0].released is release


def test_a_checkpoint_is_uploaded_and_takes_the_traffic(server: ScriptedServer, tmp_path: Path) -> None:
    server.answers = [CREATED, RELEASED]
    callback = callback_for(server)
    save(tmp_path, 10)
    on_save(callback, tmp_path, 10)
    callback.wait()
    (upload, key, body), (promote, _, change) = server.asked
    assert upload == "/admin/v1/tenants/acme/adapters/support/versions"
    assert key == "Bearer lpx_key"
    assert uploaded(body) == {name: f"{name} of 10".encode() for name in FILES}
    assert promote == "/admin/v1/tenants/acme/adapters/support/release/promote"
    assert json.loads(change) == {"version": "v7"}
    (pushed,) = callback.pushed
    assert (pushed.step, pushed.version, pushed.digest) == (10, "v7", "sha256:00")


def test_without_a_release_the_traffic_stays(server: ScriptedServer, tmp_path: Path) -> None:
    server.answers = [CREATED]
    callback = callback_for(server, release=False)
    save(tmp_path, 10)
    on_save(callback, tmp_path, 10)
    callback.wait()
    assert len(server.asked) == len(callback.pushed) == 1


def test_training_goes_on_and_only_the_newest_waiting_checkpoint_is_pushed(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.answers = [CREATED, RELEASED, CREATED, RELEASED]
    server.gate.clear()
    callback = callback_for(server)
    for step in (1, 2, 3):
        save(tmp_path, step)
        on_save(callback, tmp_path, step)
        if step == 1:
            assert server.arrived.acquire(timeout=30)
        # As `save_total_limit` does; what was saved is pushed all the same.
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    server.gate.set()
    callback.wait()
    bodies = [body for path, _, body in server.asked if path.endswith("/versions")]
    assert [uploaded(body)[FILES[1]] for body in bodies] == [
        f"{FILES[1]} of {step}".encode() for step in (1, 3)
    ]
    assert [pushed.step for pushed in callback.pushed] == [1, 3]


def test_a_busy_server_is_asked_again_with_the_whole_files(server: ScriptedServer, tmp_path: Path) -> None:
    busy: Answer = (503, {"retry-after": "0.1"}, {"code": "server_overloaded", "detail": "too many uploads"})
    server.answers = [busy, CREATED, busy, RELEASED]
    callback = callback_for(server)
    save(tmp_path, 5)
    on_save(callback, tmp_path, 5)
    callback.wait()
    assert [path.rsplit("/", 1)[1] for path, _, _ in server.asked] == ["versions"] * 2 + ["promote"] * 2
    assert uploaded(server.asked[1][2])[FILES[0]] == f"{FILES[0]} of 5".encode()
    assert not callback.failures


def test_a_server_that_stays_away_is_given_up(server: ScriptedServer, tmp_path: Path) -> None:
    server.answers = [(503, {"retry-after": "60"}, {"code": "draining", "detail": "restarting"})]
    callback = callback_for(server, timeout_s=5)
    save(tmp_path, 5)
    on_save(callback, tmp_path, 5)
    callback.wait()
    (failure,) = callback.failures
    assert "step 5" in str(failure)
    assert "503 draining: restarting (tried for 5 s)" in str(failure)


def test_a_refused_checkpoint_is_reported_and_the_next_one_pushed(
    server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal: Answer = (422, {}, {"code": "non_finite", "detail": "lora_A of layer 3 has NaN"})
    server.answers = [refusal, CREATED, RELEASED]
    callback = callback_for(server)
    for step in (1, 2):
        save(tmp_path, step)
        on_save(callback, tmp_path, step)
        callback.wait()
    assert (
        "the checkpoint of step 1 was not pushed to 'support': 422 non_finite: lora_A of layer 3 has NaN"
        in caplog.text
    )
    callback.on_train_end(None, None, None)
    assert [pushed.step for pushed in callback.pushed] == [2]


def test_strict_ends_the_training(server: ScriptedServer, tmp_path: Path) -> None:
    server.answers = [(422, {}, {"code": "non_finite", "detail": "NaN"})]
    callback = callback_for(server, strict=True)
    save(tmp_path, 1)
    on_save(callback, tmp_path, 1)
    with pytest.raises(PushFailed, match="non_finite"):
        callback.on_train_end(None, None, None)


def test_a_model_without_adapter_files_is_named(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    callback = callback_for(server)
    on_save(callback, tmp_path, 3)
    callback.wait()
    (failure,) = callback.failures
    assert FILES[0] in str(failure)
    assert not server.asked


def test_pickled_weights_are_named_with_the_setting_that_saves_safetensors(
    server: ScriptedServer, tmp_path: Path
) -> None:
    callback = callback_for(server)
    save(tmp_path, 3)
    weights = tmp_path / "checkpoint-3" / "adapter_model.safetensors"
    weights.rename(weights.with_name("adapter_model.bin"))
    on_save(callback, tmp_path, 3)
    callback.wait()
    assert "save_safetensors=True" in str(callback.failures[0])
    assert server.asked == []


def test_other_ranks_push_nothing(server: ScriptedServer, tmp_path: Path) -> None:
    callback = callback_for(server)
    save(tmp_path, 3)
    on_save(callback, tmp_path, 3, is_world_process_zero=False)
    callback.wait()
    assert not server.asked


def test_without_a_key_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
    with pytest.raises(ValueError, match="LORAPLEX_API_KEY"):
        PushCallback("support", tenant="acme")


def test_torch_and_the_rest_of_loraplex_are_not_imported() -> None:
    program = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
import loraplex.contrib.transformers
others = [name for name in sys.modules if name.startswith("loraplex.") and "contrib" not in name]
assert not others, others
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_checkpoint_has_for_its_chats_is_sent_too(server: ScriptedServer, tmp_path: Path) -> None:
    assert tuple(CHAT_FILE_BYTES) == CHAT_FILES  # it may be copied to where Loraplex is not installed
    server.answers = [CREATED, RELEASED]
    callback = callback_for(server)
    save(tmp_path, 10)
    (tmp_path / "checkpoint-10" / "chat_template.jinja").write_text("{{ messages }}")
    on_save(callback, tmp_path, 10)
    callback.wait()
    assert uploaded(server.asked[0][2])["chat_template.jinja"] == b"{{ messages }}"
