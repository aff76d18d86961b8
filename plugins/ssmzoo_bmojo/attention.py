"""Attention to a window, and to memories of tokens before it.

Dimensions as in ``modeling_bmojo.py``.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssmzoo.modeling import (
    LayerState,
    Linear,
    ModuleParts,
    RMSNorm,
    Sequences,
    State,
    UnservedError,
    attend,
    recurrent,
    rotated,
)
from ssmzoo_kernels import eidetic_attention, innovation
from ssmzoo_kernels.token_step import Program, Value

from .configuration_bmojo import BMojoConfig
from .memory import (
    Call,
    Eidetic,
    Turns,
    blanked,
    by_sequence,
    choose_eidetic,
    joined,
    newest,
    open_scores,
    rolled_on,
    score_table,
    taken,
    unrolled,
)


class BMojoAttention(nn.Module):
    """Attend to window, fading and eidetic memory with one softmax; a layer may lack memories.

    ``out = o_proj(sum softmax(q [k_window | k_fading | k_eidetic] / sqrt(d)) [v ...])``; with
    ``qk_norm`` q and all k are normed first, then turned.
    """

    def __init__(self, config: BMojoConfig, kind: str) -> None:
        super().__init__()
        width, heads, groups, size = (
            config.hidden_size,
            config.heads,
            config.groups,
            config.head_width,
        )
        self.window = None if kind == "attention" else config.sliding_window
        remembers = kind in ("bmojo", "bmojo_f")
        self.fading = config.num_fading_tokens if remembers else 0
        self.eidetic = config.num_eidetic_tokens if kind == "bmojo" else 0
        self.offset = config.fading_mode == "offset" and self.fading > 0
        self.masks = config.eidetic_overlap == "mask"
        self.relative = config.innovation_error == "relative"
        self.heads, self.groups, self.size = heads, groups, size
        self.theta = config.rope_theta if config.use_rope else None
        biased = config.attention_bias
        self.q_proj = _projection(width, heads * size, biased)
        self.k_proj = _projection(width, groups * size, biased)
        self.v_proj = _projection(width, groups * size, biased)
        out_bias = config.attention_out_bias
        self.o_proj = Linear(heads * size, width, out_bias, role="attention_end")
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.fading_norm = None
        self.memory_k_proj = self.memory_v_proj = None
        if self.fading:
            if config.fading_norm:
                self.fading_norm = RMSNorm(width, config.rms_norm_eps)
            if not config.tie_memory_proj:
                self.memory_k_proj = _projection(width, groups * size, biased)
                self.memory_v_proj = _projection(width, groups * size, biased)
                # in lists, or they would be registered twice
                self.memory_k_proj.copy_of = [self.k_proj]  # pyright: ignore[reportArgumentType]
                self.memory_v_proj.copy_of = [self.v_proj]  # pyright: ignore[reportArgumentType]
        halves = config.innovation_weights == "exp"
        weights = [0.5**i if halves else 1.0 for i in range(config.innovation_span)]
        self.innovation_weights = [weight / sum(weights) for weight in weights]
        # outputs of the state-space model that the next call looks back at
        self.history = max(
            len(self.innovation_weights) if self.eidetic else 0,
            self.fading if not self.offset else 0,
        )

    def forward(
        self,
        tokens: Tensor,  # [B, L, D]
        outputs: Tensor | None,  # [B, L, D]
        state: LayerState,
        packing: Sequences | None = None,
    ) -> Tensor:
        """Attend from ``[B, L, D]`` to the memories; ``outputs`` are the state-space model's.

        The state is ``seen [B]``, ``keys_ring`` and ``values_ring [B, w, G, d]``, with position p
        in slot ``p % w``, and, with memories, ``outputs [B, max(k, m_f), D]``, ``fading_*``,
        ``eidetic_*``, ``scores`` of the open chunk. Without a window it is that of ``attend``.
        """
        shape = tokens.shape[:2]
        call = self._call(tokens, state, packing)
        turns = None if self.theta is None else call.turns(self.size, self.theta, tokens.dtype)
        q = self.q_proj(tokens).view(call.tokens, self.heads, self.size)
        q = _placed(q, self.q_norm, turns)
        k, v = self._projected(tokens.flatten(0, 1), turns, self.k_proj, self.v_proj)
        q, keys, values = (by_sequence(x, shape) for x in (q, k, v))
        if self.window is None:
            return self.o_proj(attend(q, keys, values, state, packing).flatten(2))
        names = ("keys_ring", "values_ring")
        held = past = state.get(names[0]), state.get(names[1])
        if held[0] is not None and held[1] is not None:
            past = unrolled(call, held[0]), unrolled(call, held[1])
        options: dict[str, Any] = {}
        if self.offset and outputs is not None:
            options |= self._late(call, outputs, turns, state)
        if (self.eidetic or self.fading) and outputs is not None:
            options |= self._memories(call, outputs, packing, k, v, past, state)
        if state.keep:
            state.put("seen", call.now.clone())
            for name, ring, old, new in zip(names, held, past, (k, v), strict=True):
                state.put(name, rolled_on(call, ring, old, new))
        out = eidetic_attention(
            q,
            keys,
            values,
            window=self.window,
            past_k=past[0],
            past_v=past[1],
            seen=call.seen,
            cu_seqlens=packing,
            **options,
        )
        return self.o_proj(out.flatten(2))

    def write_token(
        self,
        program: Program,
        parts: ModuleParts,
        x: Value,
        y: Value | None,
        states: Mapping[str, State],
    ) -> Value:
        """Write one token of :meth:`forward` that ends no chunk.

        ``x`` and ``y`` are its tokens and outputs; layers without a window or with the "offset"
        mode have no such program.
        """
        if self.window is None or self.offset:
            raise UnservedError
        numbers = {
            name: state.number
            if name in ("seen", "eidetic_positions")
            else recurrent(program, state)
            for name, state in states.items()
            if name.startswith(("seen", "keys", "values", "outputs", "scores", "fading", "eidetic"))
        }
        seen, window = numbers["seen"], self.window
        q, k, v = (parts.linear(program, x, f"{name}_proj") for name in "qkv")
        if self.q_norm is not None:
            q, k = (
                parts.norm(program, z, name, group=self.size)
                for z, name in ((q, "q_norm"), (k, "k_norm"))
            )
        theta = parts.setting(self, "theta")
        if theta is not None:
            q, k = (program.rotate(z, self.size, theta, seen) for z in (q, k))
        program.keep(k, numbers["keys_ring"], window, seen)
        program.keep(v, numbers["values_ring"], window, seen)
        memories, hidden = [], None
        for name, count in (("eidetic", self.eidetic), ("fading", self.fading)):
            if count and y is not None:
                memories.append((count, numbers[f"{name}_keys"], numbers[f"{name}_values"]))
        if self.eidetic and y is not None and parts.setting(self, "masks"):
            hidden = numbers["eidetic_positions"]
        out = program.attend(
            q,
            (self.heads, self.groups),
            (window, numbers["keys_ring"], numbers["values_ring"]),
            memories,
            seen,
            self.size**-0.5,
            hidden,
        )
        if self.history and y is not None:
            outputs, weights, scores = (self.history, numbers["outputs"]), None, (1, 0)
            if self.eidetic:
                kept = parts.setting(self, "innovation_weights")
                weights = torch.tensor(kept, dtype=program.dtype)
                scores = window, numbers["scores"]
            relative = parts.setting(self, "relative")
            program.innovate(y, outputs, seen, weights, scores, relative=relative)
        out = parts.linear(program, out, "o_proj")
        program.count(seen, 1)
        return out

    def _call(self, tokens: Tensor, state: LayerState, packing: Sequences | None) -> Call:
        """Return the call that all layers with this window share."""
        name = "call", self.window
        if name not in state.shared:
            batch, length, _ = tokens.shape
            if packing is None:
                offsets = torch.arange(batch + 1, device=tokens.device) * length
            else:
                offsets = packing.offsets
            seen = state.get("seen")
            if seen is None:
                seen = torch.zeros(offsets.shape[0] - 1, dtype=torch.int64, device=tokens.device)
            state.shared[name] = Call(
                offsets,
                seen,
                1 if self.window is None else self.window,
                batch * length,
                equal=packing is None,
                following=state.keep,
            )
        return state.shared[name]

    def _memories(
        self,
        call: Call,
        y: Tensor,  # [B, L, D]
        packing: Sequences | None,
        k: Tensor,  # [T, G, d]
        v: Tensor,
        past: tuple[Tensor | None, Tensor | None],
        state: LayerState,
    ) -> dict[str, Any]:
        """Return the op's arguments for the chunks' memories; store the states carried on."""
        eidetic, fading = self.eidetic, 0 if self.offset else self.fading
        before, options, pairs = state.get("outputs"), {}, []
        if eidetic:
            chosen = self._choose(call, y, packing, before, state)
            pairs.append(self._remember(call, chosen, k, v, past, state))
            if self.masks:  # fading tokens are none that the window holds
                at = chosen.positions[call.reads()]
                options["mem_positions"] = F.pad(at, (0, fading), value=-1)
        if fading:
            pairs.append(self._summarize(call, y.flatten(0, 1), before, state))
        if self.history and state.keep:
            state.put("outputs", newest(call, before, y.flatten(0, 1), self.history))
        if not pairs:
            return options
        keys, values = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in zip(*pairs, strict=True))
        options |= {"mem_k": keys, "mem_v": values}
        order = call.order(eidetic, fading)
        if order is not None:
            for name, rows in options.items():
                places = order.view(*order.shape, *(1,) * (rows.dim() - 2))
                options[name] = torch.take_along_dim(rows, places, dim=1)
        return options | {"mem_count": call.counts(eidetic, fading)}

    def _choose(
        self,
        call: Call,
        y: Tensor,
        packing: Sequences | None,
        before: Tensor | None,
        state: LayerState,
    ) -> Eidetic:
        """Choose the tokens whose outputs were predicted worst, and cache the scores."""
        weights = self.innovation_weights
        recent = None if before is None else before[:, -len(weights) :]
        scores, _ = innovation(y, weights, recent, cu_seqlens=packing, relative=self.relative)
        scores = scores.flatten()
        if call.looks and call.tokens and not float(scores.max()) < math.inf:
            token = int((~scores.isfinite()).nonzero()[0])
            raise ValueError(
                "innovations must be finite to choose eidetic tokens, got "
                f"{scores[token]} at token {token} of the call: the state-space model's outputs "
                "there are not finite, or their squares overflow"
            )
        grid = score_table(state.get("scores"), scores, call)[call.score_places()]
        held, past = None, 0
        old_scores, old_positions = state.get("eidetic_scores"), state.get("eidetic_positions")
        if old_scores is not None and old_positions is not None:
            held, past = (old_scores, old_positions), call.window
        chosen = choose_eidetic(call, grid, self.eidetic, held, past)
        if state.keep:
            absent = call.empty_after(self.eidetic)
            state.put("scores", open_scores(call, grid))
            state.put("eidetic_scores", blanked(chosen.scores[call.leaves()], absent))
            state.put("eidetic_positions", blanked(chosen.positions[call.leaves()], absent))
        return chosen

    def _remember(
        self,
        call: Call,
        chosen: Eidetic,
        k: Tensor,
        v: Tensor,
        past: tuple[Tensor | None, Tensor | None],
        state: LayerState,
    ) -> list[Tensor]:
        """Return keys and values of each chunk's eidetic memory: raw tokens as they were."""
        read = []
        for name, old, new in zip(("keys", "values"), past, (k, v), strict=True):
            held = state.get(f"eidetic_{name}")
            if held is not None and call.depth() == 1:  # no chunk ends, no other row is wanted
                table = held.flatten(0, 1)
            else:
                table = joined(old, new, held)
            read.append(taken(table, chosen.rows[call.reads()]))  # [n, m_e, G, d]
            if state.keep:
                kept = taken(table, chosen.rows[call.leaves()])
                state.put(f"eidetic_{name}", blanked(kept, call.empty_after(self.eidetic)))
        return read

    def _summarize(
        self, call: Call, y: Tensor, before: Tensor | None, state: LayerState
    ) -> list[Tensor]:
        """Return keys and values of each chunk's fading memory: the outputs just before it."""
        past = 0 if before is None else self.history
        rows, _, absent = call.fading(self.fading, past)
        turns = None
        if self.theta is not None:
            turns = call.fading_turns(self.fading, past, self.size, self.theta, y.dtype)
        outputs = blanked(taken(joined(before, y), rows), absent)  # [F, m_f, D]
        read = []
        for name, new in zip(("keys", "values"), self._fading(outputs, turns), strict=True):
            held = state.get(f"fading_{name}")  # an open chunk's were fixed when it was opened
            if held is None:
                held = new.new_zeros(call.sequences, *new.shape[1:])
            table = torch.cat([held, new])  # [S + F, m_f, G, d]
            read.append(taken(table, call.fading_places(following=False)))
            if state.keep:
                state.put(f"fading_{name}", taken(table, call.fading_places(following=True)))
        return read

    def _late(
        self, call: Call, y: Tensor, turns: Turns | None, state: LayerState
    ) -> dict[str, Any]:
        """Return the fading stream of the "offset" mode."""
        assert self.window is not None
        options: dict[str, Any] = {"late_span": self.fading}
        for name, new in zip("kv", self._fading(y.flatten(0, 1), turns), strict=True):
            old = state.get(f"late_{name}")
            if state.keep:
                state.put(f"late_{name}", newest(call, old, new, self.window + self.fading))
            options |= {
                f"late_{name}": by_sequence(new, y.shape[:2]),
                f"late_past_{name}": old,
            }
        return options

    def _fading(self, y: Tensor, turns: Turns | None) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[..., G, d]`` of outputs of the state-space model."""
        if self.fading_norm is not None:
            y = self.fading_norm(y)
        k_proj = self.k_proj if self.memory_k_proj is None else self.memory_k_proj
        v_proj = self.v_proj if self.memory_v_proj is None else self.memory_v_proj
        return self._projected(y, turns, k_proj, v_proj)

    def _projected(
        self, x: Tensor, turns: Turns | None, k_proj: nn.Module, v_proj: nn.Module
    ) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:-1], self.groups, self.size)
        if not x.numel() and not torch.compiler.is_compiling():
            plain = type(getattr(k_proj, "weight", None)) in (Tensor, nn.Parameter)
            if not plain:  # torchao quantises no input without rows
                none = x.new_empty(shape)
                return none, none
        return _placed(k_proj(x).view(shape), self.k_norm, turns), v_proj(x).view(shape)


def _placed(x: Tensor, norm: RMSNorm | None, turns: Turns | None) -> Tensor:
    """Norm heads ``[..., H, d]``, and turn their halves, the more the later; each if at all."""
    y = x if norm is None else norm(x)
    return (y if turns is None else rotated(y, turns)).to(x.dtype)


def _projection(inputs: int, outputs: int, bias: bool) -> Linear:
    """Return a linear map whose initial weights are normal."""
    return Linear(inputs, outputs, bias, role="attention")
