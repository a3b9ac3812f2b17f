"""Every way to cut an upload's bytes gives the same parts; every broken one is refused with a reason."""

from __future__ import annotations

import contextlib
import random

import pytest

from loraplex.adapters.store.files import MAX_CONFIG_BYTES
from loraplex.admin.problem import Problem
from loraplex.admin.uploads.multipart import Part, UploadParser
from support.http.multipart import BOUNDARY, CONTENT_TYPE, body, end, files, in_pieces, part

CONFIG = b'{"peft_type": "LORA"}'
TENSORS = bytes(range(256)) * 40 + b"\r\n--" + BOUNDARY[:-1].encode() + b"\r\n" + b"\r" * 100 + b"\n--"


def parse(raw: bytes, *, size: int = 1 << 16, content_type: str = CONTENT_TYPE, max_bytes: int = 1 << 24):
    parser = UploadParser(content_type, max_bytes=max_bytes)
    found: dict[Part, bytes] = {}
    for chunk in in_pieces(raw, size):
        for which, data in parser.feed(chunk):
            found[which] = found.get(which, b"") + data
    assert set(found) <= parser.finish()
    return found


def refusal(raw: bytes, **options) -> Problem:
    with pytest.raises(Problem) as caught:
        parse(raw, **options)
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 64, 1000, 1 << 16])
def test_parts_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    assert parse(files(CONFIG, TENSORS), size=size) == {Part.CONFIG: CONFIG, Part.TENSORS: TENSORS}


def test_random_cuts() -> None:
    raw = files(CONFIG, TENSORS)
    for seed in range(100):
        rng = random.Random(seed)
        parser = UploadParser(CONTENT_TYPE, max_bytes=1 << 24)
        rest, found = raw, b""
        while rest:
            cut = rng.randint(1, 300)
            found += b"".join(data for which, data in parser.feed(rest[:cut]) if which is Part.TENSORS)
            rest = rest[cut:]
        parser.finish()
        assert found == TENSORS


def test_bodies_of_real_clients_are_read() -> None:
    two = {Part.CONFIG: CONFIG, Part.TENSORS: b"x"}
    kind = b"Content-Type: application/octet-stream\r\n"
    assert (
        parse(
            body(
                part("adapter_model.safetensors", b"x", filename="/tmp/whatever.bin", headers=kind),
                part("adapter_config.json", CONFIG),
            )
        )
        == two
    )
    assert (
        parse(
            body(
                part("files", CONFIG, filename="adapter_config.json"),
                part("files", b"x", filename="adapter_model.safetensors"),
            )
        )
        == two
    )
    assert parse(body(part("archive", b"PK..", filename="a.zip"))) == {Part.ARCHIVE: b"PK.."}
    quoted = f'multipart/form-data; charset=utf-8; boundary="{BOUNDARY}"'
    assert parse(files(CONFIG, b"x"), content_type=quoted) == two


CONFIG_PART = part("adapter_config.json", CONFIG)
TENSORS_PART = part("adapter_model.safetensors", b"x")
BROKEN = {
    "empty": b"",
    "no parts": end(),
    "not multipart at all": b"just some text " * 100,
    "another boundary": files(CONFIG, b"x").replace(BOUNDARY.encode(), b"some-other-boundary"),
    "ends in the middle of a file": files(CONFIG, b"x" * 500)[:-300],
    "ends without the last boundary": CONFIG_PART + TENSORS_PART,
    "ends in a header": CONFIG_PART + b"--" + BOUNDARY.encode() + b"\r\nContent-Dispo",
    "the config is missing": body(TENSORS_PART),
    "the tensors are missing": body(CONFIG_PART),
    "the config twice": body(CONFIG_PART, CONFIG_PART, TENSORS_PART),
    "the archive twice": body(part("archive", b"a"), part("archive", b"b")),
    "an archive and files": body(CONFIG_PART, TENSORS_PART, part("archive", b"a")),
    "files after an archive": body(part("archive", b"a"), CONFIG_PART),
    "an unknown part": body(CONFIG_PART, TENSORS_PART, part("optimizer.pt", b"x")),
    "a thousand parts": body(*(part(f"p{i}", b"") for i in range(1000))),
    "a path for a name": body(CONFIG_PART, part("../../adapter_model.safetensors", b"x")),
    "a path for a file name": body(CONFIG_PART, part("file", b"x", filename="../adapter_model.safetensors")),
    "no name": body(b"--" + BOUNDARY.encode() + b"\r\nContent-Disposition: form-data\r\n\r\nx\r\n"),
    "no disposition": body(b"--" + BOUNDARY.encode() + b"\r\nContent-Type: text/plain\r\n\r\nx\r\n"),
    "an attachment": body(
        b"--" + BOUNDARY.encode() + b"\r\nContent-Disposition: attachment; name=archive\r\n\r\nx\r\n"
    ),
    "a disposition twice": body(
        part("archive", b"x", headers=b'Content-Disposition: form-data; name="x"\r\n')
    ),
    "a base64 part": body(part("archive", b"eA==", headers=b"Content-Transfer-Encoding: base64\r\n")),
    "an endless header": body(part("archive", b"x", headers=b"X-Long: " + b"y" * 100_000 + b"\r\n")),
    "an endless header name": b"--" + BOUNDARY.encode() + b"\r\n" + b"X" * 100_000,
    "many headers": body(part("archive", b"x", headers=b"".join(b"X-%d: y\r\n" % i for i in range(50)))),
    "a header without a colon": b"--" + BOUNDARY.encode() + b"\r\nnonsense\r\n\r\nx\r\n" + end(),
    "zeros": b"\0" * 5000,
}


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_bodies_are_400(name: str, size: int) -> None:
    problem = refusal(BROKEN[name], size=size)
    assert (problem.status, problem.code) == (400, "invalid_multipart")
    assert problem.message.isascii()
    assert len(problem.message) < 400


def test_an_unknown_part_is_told_as_such() -> None:
    """ "config" is a likely guess; the words must not read as if it had not come."""
    message = refusal(body(part("config", b"{}"), TENSORS_PART)).message
    assert "The part 'config' is none that an upload has. Send adapter_config.json" in message


@pytest.mark.parametrize("name", ["a preamble", "another boundary", "not multipart at all", "zeros"])
def test_a_body_that_does_not_begin_with_its_boundary_is_told_so(name: str) -> None:
    bodies = BROKEN | {"a preamble": b"This is a form.\r\n" + files(CONFIG, b"x")}
    assert "does not begin with the boundary" in refusal(bodies[name]).message


def test_no_prefix_of_a_good_body_is_taken_for_the_whole() -> None:
    raw = files(CONFIG, b"x" * 50)
    last = raw.rindex(b"--")
    for length in range(last):
        assert refusal(raw[:length]).code == "invalid_multipart"


def test_random_damage_never_escapes_as_anything_but_a_problem() -> None:
    raw = files(CONFIG, b"x" * 200)
    for seed in range(3000):
        rng = random.Random(seed)
        broken = bytearray(raw)
        for _ in range(rng.randint(1, 8)):
            kind, at = rng.randrange(3), rng.randrange(len(broken))
            if kind == 0:
                broken[at] = rng.randrange(256)
            elif kind == 1:
                del broken[at : at + rng.randint(1, 20)]
            else:
                broken[at:at] = rng.choice([b"\r\n", b"--", BOUNDARY.encode(), b"\0", b'"', b";"])
        with contextlib.suppress(Problem):
            parse(bytes(broken), size=rng.choice([1, 13, 1 << 16]))


def test_sizes() -> None:
    exact = files(b"c" * MAX_CONFIG_BYTES, b"x")
    assert len(parse(exact)[Part.CONFIG]) == MAX_CONFIG_BYTES
    assert refusal(files(b"c" * (MAX_CONFIG_BYTES + 1), b"x")).status == 413
    assert parse(files(b"c" * 10, b"x" * 90), max_bytes=100)
    problem = refusal(files(b"c" * 10, b"x" * 91), max_bytes=100)
    assert (problem.status, problem.code) == (413, "too_large")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("", 415),
        ("application/json", 415),
        ("application/octet-stream", 415),
        ("multipart/mixed; boundary=x", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400),
        ("multipart/form-data; boundary=" + "x" * 71, 400),
    ],
)
def test_content_types(content_type: str, status: int) -> None:
    assert refusal(files(CONFIG, b"x"), content_type=content_type).status == status
