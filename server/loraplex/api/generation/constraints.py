"""From what a request says of its answer's form to a grammar that was checked."""

from __future__ import annotations

from loraplex.api.generation.kinds import Request
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.generation.tool_use import Reading
from loraplex.api.openai.structured_output.constraint import constraint_of
from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar.checker import GrammarChecker


async def checked_grammar(
    request: Request, reading: Reading, tenant_id: str, grammars: GrammarChecker, capacity: TenantCapacity
) -> str | None:
    """The grammar that each answer must follow; None if it is free. `grammars` checks it. Raises
    ApiError (400) that names the field, and what `grammars` raises."""
    if (with_tools := reading.constraint) is not None:
        try:
            await grammars.check(tenant_id, with_tools.text)
        except GrammarRefused as error:
            raise with_tools.refusal(error) from error
        return with_tools.text
    if request.form_field is None:
        return None
    constraint = await capacity.in_thread(
        tenant_id, constraint_of, request.response_format, request.structured_outputs
    )
    if constraint is None:
        return None
    try:
        if constraint.gbnf:
            return await grammars.lark_of_gbnf(tenant_id, constraint.text)
        await grammars.check(tenant_id, constraint.text)
    except GrammarRefused as error:
        raise constraint.refusal(error) from error
    return constraint.text
