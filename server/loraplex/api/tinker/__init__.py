"""Tinker's API, as far as it samples.

- `paths`: `tinker://` paths and sampling sessions, and the models that they name.
- `schemas`: what requests may say; `schemas.to_completion`: the completion that one becomes.
- `answers.SampleAnswer`: the answer, in Tinker's protocol buffers.
- `samples.Samples`: requests that run while their clients ask for the result.
"""
