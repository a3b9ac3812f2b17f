"""The data plane: OpenAI's API over HTTP, and the metrics.

- `application.create_data_app`: the data port; `deps.ApiServices` is what it is built from.
- `generation`: the path of one chat or completion. `openai`: its wire. `metrics`: what is counted.
- `errors`: every error answer. `edge`: the layers around all routes. `drain`: a server's end.
- `routes`: a typed function for each path. `route.DataRoute` is their class: it asks who calls before anything else.
- `documents`: the OpenAPI document.
"""
