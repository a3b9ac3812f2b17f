"""The comparison of what uploads bring for their chats with the served base."""

from __future__ import annotations

from collections.abc import Collection

from loraplex.adapters.admission.chat_files import ChatFiles
from loraplex.admin.services import ExamineChat
from loraplex.serving.text.own_chat import ChatFound, compare_chat
from loraplex.serving.text.processor import TextProcessor


def chat_examiner(text: TextProcessor, eos_ids: Collection[int]) -> ExamineChat:
    async def examine(tenant_id: str, files: ChatFiles) -> ChatFound:
        return compare_chat(files, text, eos_ids, own_serves=False)

    return examine
