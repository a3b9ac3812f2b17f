"""The engines that a server serves with, as one: `engines.Engines` is what the API uses. `session.EngineSession` is one
engine; `local.LocalEngine` runs its process, `loraplex.serving.dialling.remote.RemoteEngine` has dialled in."""
