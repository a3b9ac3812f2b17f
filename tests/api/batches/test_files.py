"""`/v1/files` over HTTP: OpenAI's client unchanged, and forms that are wrong."""

from __future__ import annotations

import httpx
import openai
import pytest

from support.http import multipart
from support.http.data_plane import DataPlane

DATA = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
PURPOSE = multipart.part("purpose", b"batch")
FILE = multipart.part("file", DATA, filename="in.jsonl")


def post(plane: DataPlane, *parts: bytes, body: bytes | None = None, key: str = "lpx_acme") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": multipart.CONTENT_TYPE}
    content = multipart.body(*parts) if body is None else body
    return plane.http.post(f"{plane.url}/v1/files", content=content, headers=headers)


def test_openais_client(plane: DataPlane) -> None:
    client = plane.client()
    made = client.files.create(file=("größe.jsonl", DATA * 3000), purpose="batch")
    assert (made.object, made.bytes, made.purpose) == ("file", 3000 * len(DATA), "batch")
    assert (made.filename, made.status) == ("größe.jsonl", "processed")
    assert client.files.retrieve(made.id) == made
    assert made.id in [file.id for file in client.files.list()]
    assert client.files.content(made.id).content == DATA * 3000
    with pytest.raises(openai.NotFoundError) as caught:
        plane.client("lpx_rival").files.content(made.id)
    assert caught.value.code == "file_not_found"
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


def test_pages_of_a_list(plane: DataPlane) -> None:
    client = plane.client("lpx_rival")
    ids = [client.files.create(file=("f.jsonl", DATA), purpose="batch").id for _ in range(3)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    assert client.files.list(limit=2, order="asc").has_more
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.list(after="file-none")
    assert (caught.value.code, caught.value.param) == ("invalid_cursor", "after")


def test_the_client_says_when_it_expires(plane: DataPlane) -> None:
    expires = {"anchor": "created_at", "seconds": 3600}
    made = plane.client().files.create(file=("f.jsonl", DATA), purpose="batch", expires_after=expires)
    assert made.expires_at == made.created_at + 3600


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([FILE], "purpose"),
        ([multipart.part("purpose", b"fine-tune"), FILE], "purpose"),
        ([PURPOSE], "file"),
        ([PURPOSE, FILE, FILE], "file"),
        ([PURPOSE, PURPOSE, FILE], "purpose"),
        ([multipart.part("purpose", b"x" * 300), FILE], "purpose"),
        ([PURPOSE, multipart.part("file", b"\n\n", filename="f")], "file"),
        ([PURPOSE, multipart.part("file", b"{}\n" * 50_001, filename="f")], "file"),
        ([PURPOSE, multipart.part("file", b"x" * (5 << 20), filename="f")], "file"),
        ([PURPOSE, FILE, multipart.part("model", b"x")], "model"),
        ([PURPOSE, FILE, multipart.part("expires_after[seconds]", b"7200")], "expires_after[anchor]"),
    ],
)
def test_a_wrong_form_names_its_field_and_leaves_nothing(
    plane: DataPlane, parts: list[bytes], param: str
) -> None:
    before = [file.id for file in plane.client().files.list()]
    answer = post(plane, *parts)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert [file.id for file in plane.client().files.list()] == before
    with plane.services.database.read() as session:
        from loraplex.control.db.batch_tables import StoredFile

        assert session.query(StoredFile).filter(~StoredFile.ready).count() == 0


def test_a_cut_form_and_a_form_without_its_type(plane: DataPlane) -> None:
    cut = post(plane, body=PURPOSE + FILE)
    assert cut.status_code == 400
    assert "ends before its last boundary" in cut.json()["error"]["message"]
    plain = plane.http.post(f"{plane.url}/v1/files", json={}, headers={"Authorization": "Bearer lpx_acme"})
    assert (plain.status_code, plain.json()["error"]["param"]) == (415, "Content-Type")


def test_who_may(plane: DataPlane) -> None:
    for key, status in (("nobody", 401), ("lpx_usage", 403), ("admin", 403)):
        assert post(plane, PURPOSE, FILE, key=key).status_code == status
