"""A mixer as a layer of a network of one's own, without the model around it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ssmzoo.modeling import SSMLayer
from ssmzoo.testing.forms import compare
from ssmzoo.testing.subject import EXACT, SEED, Measured, Subject, require, require_error

LENGTH = 40
PIECES = [5, 1, 1, 1, 2, 30]
PACKED = (13, 1, 26)


def check_layer(subject: Subject) -> Measured:
    """A layer without a model gives the same whole, in pieces and packed, and all of it learns.

    Its mixer needs no state. In both directions later tokens count, and there is no state.
    """
    measured = Measured()
    layer = _layer(subject)
    x = _inputs(layer, 2, LENGTH)
    whole, state, parts = _run(layer, x), None, []
    measured.same("the mixer without a state", _run(layer.mixer, x), whole)
    for piece in x.split(PIECES, dim=1):
        part, state = _run(layer, piece, state=state, return_state=True)
        parts.append(part)
    slopes = compare(measured, layer, "in pieces:", torch.cat(parts, dim=1), whole)
    idle = [name for name, slope in slopes.items() if not slope.any()]
    require(not idle, f"no gradient reaches {', '.join(idle)}")

    row, later = _inputs(layer, 1, LENGTH), _inputs(layer, len(PACKED), 3)
    ends = torch.tensor([0, *PACKED]).cumsum(0)
    alone = [
        _run(layer, torch.cat([first, more[None]], dim=1))[0]
        for first, more in zip(row.split(PACKED, dim=1), later, strict=True)
    ]
    got, state = _run(layer, row, cu_seqlens=ends, return_state=True)
    after = _run(layer, later, state=state)
    turns = zip(got[0].split(PACKED), after, strict=True)
    compare(measured, layer, "packed:", [torch.cat(parts) for parts in turns], alone)
    again = _run(layer.mixer, row, packing=ends)
    measured.compare("the mixer with boundaries", again, got, EXACT)

    for directions in ("both-shared", "both-separate"):
        turned = _layer(subject, directions=directions)
        got = _run(turned, row, cu_seqlens=ends)[0].split(PACKED)[-1]
        own = row[:, -PACKED[-1] :]
        measured.compare(f"{directions}, packed", got, _run(turned, own)[0], EXACT)
        own = torch.cat([own[:, :-1], own[:, -1:] + 1], dim=1)
        change = (_run(turned, own)[0, -2] - got[-2]).abs().max() / got.abs().max()
        require(
            bool(change > EXACT), f"{directions}: the last token does not change the one before"
        )
        what = f"{directions}: return_state=True"
        require_error(
            ValueError, ("state",), what, lambda x=turned: _run(x, row, return_state=True)
        )
    return measured


def _layer(subject: Subject, **changes: Any) -> SSMLayer:
    """Return the first layer of the tiny model, drawn anew."""
    model_class: Any = subject.family.model_class
    made = subject.build(lambda config: SSMLayer(model_class, config), torch.float64, changes)
    return cast(SSMLayer, made)


def _inputs(layer: SSMLayer, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + batch)
    size = batch, length, layer.config.hidden_size
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _run(layer: Any, x: Tensor, **named: Any) -> Any:
    """Call a layer or a mixer, with steps of one where it takes steps."""
    steps = {name: torch.ones_like(x[..., 0]) for name in layer.config.token_inputs}
    return layer(x, **steps, **named)
