"""No task of the event loop can end without notice: it is supervised, or something waits for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.servers.live_server import REPOSITORY

PORTIONS = ("server", "adapters", "kernels", "admin", "migrations")
MAKERS = ("create_task", "ensure_future")
NOT_SUPERVISED = {
    "BackgroundTasks.start": "the supervisor",
    "Budgets._refreshed": "requests wait for what it does; it gives each of them the failure",
    "RedisLink._connect": "calls wait for what it reads; it gives each of them the failure, and logs a bug",
    "LocalEngine.on_ready": "waited for, or until the process has gone",
    "GenerationEndpoint._answer": "waited for",
    "watch_client": "waits for the server's word that the client has gone; ends with the answer",
    "EngineSupervisor._on_lost": "supervises the engine by rules of its own; its end is logged",
    "ForkPool._begin_start": "requests wait for it; it gives each of them the failure",
    "GrammarChecker._verdict": "waited for, by every request with the same text",
    "TemplateRenderer._answer": "waited for, unless its caller has gone; its work is bounded",
    "ForkProcess.__init__": "its end is the loss of the process, which every request that waits is told",
    "Listening.__init__": "the server waits for it, and ends with an error where it ends",
    "_serve_on": "waited for",
    "RayReplicas._begin": "waited for; its end is logged",
    "RayReplicas._retire": "waited for at the end; the old manager ends with it in any case",
    "EventProcess.run": "waited for when the process has ended",
    "RayLife._run": "waited for; what either raises is the life's own",
    "RayEngine.__init__": "waited for; its failure is the replica's, by check_health",
    "_run": "waited for",
    "listen_for_engines": "it logs its failure and tries again; waited for when the port closes",
    "_drain": "waited for",
    "StopSignals.first_task": "waited for",
    "StopSignals.second_task": "waited for",
    "Members.listen": "goes on after each connection that it cannot take; waited for when the port closes",
    "_Handshake.secure": "its failure is the connection's end, which is logged, and the handshake has its time",
    "Members.welcome": "its failure is the session's end, which is logged",
    "HandingOver.begin": "ends with its engine, a drain or the server; what it does not hand on is computed again",
    "Generation._events": "waited for",
    "Shadows._start_some": "it counts its failure; its requests have their deadline, and a drain cancels it",
    "VersionChecks.start": "it logs its failure, and gives it to the uploads that wait for it",
    "Samples.submit": "its failure is the sample's answer; what it runs logs each request",
    "SurplusRemoval.after": "it logs what it could not remove, and the next push tries again",
    "TenantCapacity.in_thread": "waited for, until its request is cancelled",
    "answers": "waited for, or cancelled",
    "BaseErrors._on_ended": "it logs its failure; what it did not find waits for the next",
    "BatchRunner.run": "what it raises ends the runner, which is supervised",
    "BatchRunner._begin": "its end is logged, and its lines are taken again when their lease ends",
    "BatchRunner._run_part": "waited for",
    "BatchRunner._pause": "waited for, or cancelled",
    "BaseErrors.start": "it logs its failure; the version keeps its report, and the next server measures again",
}
"""Where tasks are made, and why their failure is noticed."""


def makers(node: ast.AST, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """The function that makes a task, and what it calls for that. A task group is no task: it waits for its own."""
    for child in ast.iter_child_nodes(node):
        inner = path
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (*path, child.name)
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Attribute)
            and child.func.attr in MAKERS
        ):
            yield ".".join(path), child.func.attr
        yield from makers(child, inner)


def test_every_task_is_supervised_or_waited_for() -> None:
    found = {
        name
        for portion in PORTIONS
        for source in (REPOSITORY / portion).rglob("*.py")
        if "bench" not in source.parts
        for name, _ in makers(ast.parse(source.read_text()))
    }
    assert found == set(NOT_SUPERVISED)
