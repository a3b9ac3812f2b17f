"""The doctor's check of a bucket."""

from __future__ import annotations

from pathlib import Path

import obstore
import pytest

from loraplex.app.doctor import services
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.app.storage.artifacts import artifact_dir, is_bucket
from support.servers.s3_server import BUCKET, s3_server


def settings(url: str, directory: Path) -> Settings:
    return Settings(artifact_url=url, data_dir=directory)


def test_a_bucket_is_written_to_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as s3:
        for name, value in s3.variables().items():
            monkeypatch.setenv(name, value)
        found = services.check_bucket(settings(f"s3://{BUCKET}/adapters", tmp_path))
        assert (found.status, found.remedy) == ("ok", "")
        assert [meta for page in obstore.list(s3.store()) for meta in page] == []
        monkeypatch.setattr(services, "_CONNECT_TIMEOUT_S", 0.3)
        missing = services.check_bucket(settings("s3://no-such-bucket/adapters", tmp_path))
        assert missing.status == "fail"
        assert "AWS_ENDPOINT_URL" in missing.remedy


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3://UPPER/x", "s3://key:secret@bucket/x", "s3://bucket/../x", "s3://bucket/x?y", "gs://b/x"],
)
def test_what_names_no_bucket_stops_the_start(tmp_path: Path, url: str) -> None:
    with pytest.raises(SettingsInvalid, match="--artifact-url"):
        artifact_dir(settings(url, tmp_path))


def test_the_cache_of_a_bucket_is_in_the_data_directory(tmp_path: Path) -> None:
    chosen = settings("s3://bucket", tmp_path)
    assert is_bucket(chosen)
    assert artifact_dir(chosen) == tmp_path.resolve() / "artifact-cache"
