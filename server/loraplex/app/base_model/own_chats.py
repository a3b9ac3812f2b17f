"""Chat files that versions bring: compared with the served base at an upload, and used if the server does so."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loraplex.adapters.admission.chat_files import ChatFiles, OwnChat
from loraplex.adapters.errors import AdapterRefused
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.db.database import Database
from loraplex.control.db.read_through import ReadThrough
from loraplex.control.types import ResolvedModel, Serving
from loraplex.http.text import printable
from loraplex.serving.errors import ServingError, TemplateError, TextTooLong
from loraplex.serving.templates.messages import Encoded, RenderJob, Trial
from loraplex.serving.templates.renderer import TemplateRenderer
from loraplex.serving.text.own_chat import TEMPLATE_CHECK, TOKENIZER_CHECK, ChatFound, compare_chat
from loraplex.serving.text.processor import TextProcessor

_MAX_WORDS = 1000
KEPT_CHATS = 256
"""Chats that are kept, of at most 128 KiB each, and usually of 5."""


class OwnChatsOfVersions:
    """Reads them from the database once, as they never change, and renders with them."""

    def __init__(self, database: Database, catalog: Catalog, renderer: TemplateRenderer) -> None:
        self._catalog = catalog
        self._renderer = renderer
        self._read: ReadThrough[tuple[str, str, int], OwnChat] = ReadThrough(
            database, ttl_s=math.inf, capacity=KEPT_CHATS, aged_by=lambda _: ()
        )

    async def of(self, model: ResolvedModel) -> OwnChat | None:
        ref = model.adapter
        if ref is None or model.serving.chat_digest is None:
            return None
        key = (ref.tenant_id, ref.name, ref.version)
        get = self._catalog.get_chat
        return await self._read.get(key, get, ref.tenant_id, ref.name, f"v{ref.version}")

    async def encode(self, tenant: str, conversation: RenderJob) -> Encoded:
        return await self._renderer.encode(tenant, conversation)


class ChatExaminer:
    """`own_serves`: the server renders chats with versions' own templates."""

    def __init__(
        self, text: TextProcessor, eos_ids: Collection[int], renderer: TemplateRenderer, *, own_serves: bool
    ) -> None:
        self._text = text
        self._eos_ids = eos_ids
        self._renderer = renderer
        self._own_serves = own_serves

    async def __call__(self, tenant: str, files: ChatFiles, serving: Serving) -> ChatFound:
        """Raises AdapterRefused for a template that does not compile, and for formats that it does not keep, where it
        renders the version's chats; TemplateTimeSpent and TemplatesUnavailable."""
        found = await self._examined(tenant, files, serving)
        if files.tokenizer is None:
            return found
        note = await self._tokenizer_note(tenant, files.tokenizer)
        return replace(found, checks=(*found.checks, note))

    async def _tokenizer_note(self, tenant: str, path: Path) -> Mapping[str, Any]:
        difference = ""
        try:
            if await asyncio.to_thread(_digest, path) != self._text.tokenizer_digest:
                difference = await self._renderer.compare_tokenizer(tenant, str(path))
        except ServingError as error:
            detail = f"warning: the version's tokenizer.json could not be compared: {_words(error.message)}"
            return {"name": TOKENIZER_CHECK, "ok": False, "detail": detail}
        if not difference:
            return {
                "name": TOKENIZER_CHECK,
                "ok": True,
                "detail": "it gives the tokens of the one that serves",
            }
        detail = f"warning: another tokenizer serves than the version's own: {difference}"
        return {"name": TOKENIZER_CHECK, "ok": False, "detail": detail}

    async def _examined(self, tenant: str, files: ChatFiles, serving: Serving) -> ChatFound:
        found = await self._compared(files)
        if found.own is None or not found.own.templates:
            return found
        trial = Trial(found.own)
        if self._own_serves:
            trial = Trial(found.own, serving.tool_format, serving.reasoning_format)
        try:
            tried = await self._renderer.try_out(tenant, trial)
        except (TemplateError, TextTooLong) as error:
            if self._own_serves:
                raise AdapterRefused(
                    "config_invalid",
                    f"{_words(error.message)}. Mend it, or leave it out, and the base's template serves.",
                ) from error
            detail = (
                f"warning: {_words(error.message)}. It is not kept; the base's renders the version's chats"
            )
            note = {"name": TEMPLATE_CHECK, "ok": False, "detail": detail}
            without = await self._compared(replace(files, templates={}))
            return replace(without, checks=(note, *without.checks))
        if tried.format_reason:
            raise AdapterRefused(
                "unsupported_feature",
                f"The version's chat template cannot be served with its formats: {_words(tried.format_reason)}.",
                feature="tool_format",
            )
        if not tried.is_base:
            return await self._compared(files, tried.turn_ends) if tried.turn_ends else found
        note = {"name": TEMPLATE_CHECK, "ok": True, "detail": "it renders conversations as the base's does"}
        without = await self._compared(replace(files, templates={}))
        return replace(without, checks=(note, *without.checks))

    async def _compared(self, files: ChatFiles, written: Sequence[str] = ()) -> ChatFound:
        # A file may list hundreds of thousands of tokens.
        return await asyncio.to_thread(
            compare_chat, files, self._text, self._eos_ids, own_serves=self._own_serves, written=written
        )


def _words(message: str) -> str:
    """A message that may hold words of the version's template or tokenizer, for a report and for terminals."""
    return printable(message.rstrip("."), _MAX_WORDS)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
