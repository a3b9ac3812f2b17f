"""The inference engine: one process, one base model, many adapters in every step.

`build.build_engine` makes an engine of a `config.EngineConfig`. `core.engine_core.EngineCore` takes requests and emits
token events. `ipc.process` runs it as a process. `types` holds the values that travel between the packages: requests,
sequences, step plans and results.
"""
