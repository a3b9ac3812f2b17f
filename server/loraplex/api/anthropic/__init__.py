"""Anthropic's Messages API.

- `schemas.MessagesRequest`, `schemas.CountRequest`: what requests may say. `schemas.to_chat`: the chat request that
  one becomes.
- `blocks`, `conversation`: the content blocks of a conversation, and the messages that they are.
- `answers.MessagesAnswer`: the answer, whole or as events.
- `errors.anthropic_error`: a refusal of these routes.
"""
