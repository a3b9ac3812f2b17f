"""Where a server's artifacts are, by its settings."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from loraplex.adapters.sources.urls import AllowedSources
from loraplex.adapters.store.interface import Store
from loraplex.adapters.store.open_store import BUCKET_SCHEME, open_store
from loraplex.app.settings import Settings, SettingsInvalid


def artifact_dir(settings: Settings) -> Path:
    """The folder of the artifact store, `artifacts` in the data directory by default; with a bucket that of its cache.
    Raises SettingsInvalid."""
    if not settings.artifact_url:
        return settings.data_dir.resolve() / "artifacts"
    if is_bucket(settings):
        return settings.data_dir.resolve() / "artifact-cache"
    url = urlsplit(settings.artifact_url)
    if url.scheme != "file" or url.netloc not in ("", "localhost") or not url.path:
        raise SettingsInvalid(
            f"--artifact-url: file:///DIR or s3://BUCKET/PREFIX is expected (got '{settings.artifact_url[:80]}')."
        )
    return Path(unquote(url.path))


def is_bucket(settings: Settings) -> bool:
    """Whether artifacts are kept in a bucket. Raises SettingsInvalid for a URL that names none."""
    if not settings.artifact_url.startswith(BUCKET_SCHEME):
        return False
    try:
        AllowedSources([settings.artifact_url])
    except ValueError as error:
        raise SettingsInvalid(f"--artifact-url: {error} (got '{settings.artifact_url[:80]}').") from None
    return True


def artifact_store(settings: Settings) -> Store:
    """Raises SettingsInvalid, StoreFull, StoreFailed, OSError."""
    folder = artifact_dir(settings)
    return open_store(settings.artifact_url, folder, cache_bytes=settings.artifact_cache_size)
