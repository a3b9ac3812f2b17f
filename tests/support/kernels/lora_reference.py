"""The formula of batched LoRA with loops in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraplex.kernels.lora.site_groups import SiteGroup


def lora_reference(
    x: torch.Tensor,
    y: torch.Tensor,
    group: SiteGroup,
    rows: Sequence[dict[str, tuple[torch.Tensor, torch.Tensor, float]] | None],
    vectors: Sequence[dict[str, tuple[torch.Tensor, torch.Tensor]] | None] | None = None,
) -> torch.Tensor:
    """The formula of `loraplex.kernels.lora.dispatch`. `rows[t]` maps a site's name to PEFT's own A [R, K],
    B [N_i, R] and scaling, or is None for a base row; `vectors[t]` maps it to g [N_i] and c [N_i] in the same way.
    Returns a new float64 tensor shaped like y."""
    out = y.double().clone()
    for t, adapter in enumerate(rows):
        column = 0
        for site, width in zip(group.sites, group.out_features, strict=True):
            if adapter is not None and site in adapter:
                a, b, scaling = adapter[site]
                moved = None if vectors is None else (vectors[t] or {}).get(site)
                if moved is not None:
                    g, c = moved
                    out[t, column : column + width] = (
                        out[t, column : column + width] * g.double() + c.double()
                    )
                out[t, column : column + width] += scaling * (b.double() @ (a.double() @ x[t].double()))
            column += width
    return out
