"""OpenAI's Responses API, without state on the server.

- `schemas.ResponsesRequest`: what a request may say. `schemas.to_chat`: the chat request that it becomes.
- `items`, `conversation`: the items of a conversation, and the messages that they are.
- `tools.offer`: which tools the model is told of.
- `answers.ResponsesAnswer`: the answer, whole or as typed events.
"""
