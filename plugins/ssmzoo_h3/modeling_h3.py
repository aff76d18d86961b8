"""H3: hungry hungry hippos, state spaces for language modeling (arXiv 2212.14052).

What surprises: a layer multiplies tokens three times, so it is no filter of its input; both of its
state spaces are. Layers of ``attn_layer_idx`` have the same four projections with attention between
them. Filters are computed anew in each forward pass, from float64 exponents.

Dimensions: B batch, L length, D hidden, d of a head, H = D / d heads, N the order of the state
spaces, n = N / 2 stored modes, S sequences, P tokens of the past.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    DerivedValue,
    Dynamics,
    LayerState,
    Linear,
    ModuleParts,
    Sequences,
    SSMForCausalLM,
    SSMForImageClassification,
    SSMForSequenceClassification,
    SSMForTokenClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    State,
    UnservedError,
    attend,
    recurrent,
    right_aligned,
    rotary_turns,
    rotated,
    split_heads,
    token_positions,
)
from ssmzoo_kernels import diagonal_step, double, fft_conv, powers, vandermonde, vandermonde_state
from ssmzoo_kernels.token_step import Program, Value

from .configuration_h3 import H3Config

_SLOW = ("log_dt", "A_log", "A_imag", "B", "shift_B")


class H3Mixer(SSMMixer):
    """``out_proj(q * diagonal(shift(k) v^T))`` for each head, or causal attention of q, k and v.

    The shift state space filters keys with N taps; the diagonal one filters every entry of a head's
    outer product with an endless sum of exponentials (the paper's Algorithm 1).
    """

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys(_SLOW, "ssm")
    startable_states = frozenset({"shift", "ssm"})
    config: H3Config

    def __init__(self, config: H3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width, order = config.hidden_size, config.d_state
        heads, pairs = width // config.head_dim, order // 2
        self.q_proj, self.k_proj, self.v_proj = (Linear(width, width) for _ in range(3))
        self.attends = layer_idx in (config.attn_layer_idx or [])
        self.out_proj = Linear(width, width, role="attention_end" if self.attends else "mixer_end")
        if self.attends:
            return
        self.shift_B = nn.Parameter(torch.empty(width, order))
        self.shift_C = nn.Parameter(torch.empty(width, order))
        self.shift_D = nn.Parameter(torch.empty(width))
        self.log_dt = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads, pairs))
        self.A_imag = nn.Parameter(torch.empty(heads, pairs))
        self.B = nn.Parameter(torch.empty(heads, pairs, 2))
        self.C = nn.Parameter(torch.empty(heads, pairs, 2))
        self.D = nn.Parameter(torch.empty(heads))
        self._table: DerivedValue[list[Tensor]] = DerivedValue()

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``.

        The state is ``shift [B, N - 1, D]``, the last keys, and ``ssm [B, d * d, H, n, 2]``; of
        attention ``keys`` and ``values [B, P, D]``, the newest last, and ``seen [B]``.
        """
        q, k, v = (f(hidden_states) for f in (self.q_proj, self.k_proj, self.v_proj))
        mixed = (self._attend if self.attends else self._filter)(q, k, v, state, packing)
        return self.out_proj(mixed.to(hidden_states.dtype))

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`, of layers without attention."""
        if self.attends:
            raise UnservedError
        q, k, v = (parts.linear(program, x, name) for name in ("q_proj", "k_proj", "v_proj"))
        taps, *tables = parts.derived(self._decode_tables)
        shift = states["shift"]
        layout = {"silu": False, "channels_last": True}
        past = (shift.number, shift.like.shape[1], shift.like.dtype)
        k = program.causal_conv1d(k, taps.T.contiguous(), None, *past, **layout)
        decay, readout = (torch.view_as_real(table).contiguous() for table in tables)
        D, state = parts.weight(self, "D"), recurrent(program, states["ssm"])
        return parts.linear(
            program, program.products(q, k, v, decay, readout, D, state), "out_proj"
        )

    def taps(self) -> Tensor:
        """Return the filter of the keys, ``[D, N]``: ``C shift^l B``, with D in its first tap."""
        late, _ = fft_conv(self.shift_C.flip(1).T[None], self.shift_B)  # backwards, [1, N, D]
        direct = F.pad(self.shift_D[:, None], (0, self.shift_C.shape[1] - 1))
        return late[0].T.flip(1) + direct

    def modes(self) -> tuple[Tensor, Tensor]:
        """Return exponents ``log Abar`` and ``2 C Bbar`` by the rule of ``disc``, [H, n] each."""
        A = torch.complex(-double(self.A_log).exp(), double(self.A_imag))
        B, C = (torch.view_as_complex(double(x)) for x in (self.B, self.C))
        dt = double(self.log_dt).exp()[:, None]
        exact = torch.promote_types(torch.complex64, self.C.dtype)
        if self.config.disc == "zoh":
            exponent = dt * A
            readout = 2 * C * B * torch.expm1(exponent) / A
            return exponent, readout.to(self.C.device, exact)
        half = dt * A / 2
        readout = 2 * C * B * dt / (1 - half)
        return torch.log((1 + half) / (1 - half)), readout.to(self.C.device, exact)

    def dynamics(self, hidden_states: Tensor) -> Dynamics | None:
        """Return kernels, poles and time steps of the diagonal state spaces; attention has none."""
        if self.attends:
            return None
        exponent, readout = self.modes()
        kernel = vandermonde(readout, exponent, hidden_states.shape[1])
        return Dynamics(kernel, poles=exponent.exp(), time_steps=self.log_dt.exp())

    def _filter(
        self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, packing: Sequences | None
    ) -> Tensor:
        """Filter keys, then their products with values; all are ``[B, L, D]``."""
        self._table.refresh(k, state)
        exact = torch.promote_types(torch.float32, k.dtype)
        q, k, v = (x.to(exact) for x in (q, k, v))
        goes_on = len(state.initial) > 0 and packing is None and not torch.is_grad_enabled()
        one = goes_on and k.shape[1] == 1
        if one:
            taps, *tables = self._decode_tables()
            past = state.initial["shift"]
            last = torch.cat([past[:, 1:], k], dim=1)
            k = (past * taps[:-1]).sum(1, keepdim=True) + taps[-1] * k
        else:
            tables = []
            taps, start = self.taps().to(exact), state.get("shift")
            k, last = fft_conv(k, taps, None, start, cu_seqlens=packing, output_final_state=True)
        state.put("shift", cast(Tensor, last).contiguous())
        size = self.config.head_dim
        # features of a head are neighbours; [B, L, d, H]
        shape = (*k.shape[:2], k.shape[2] // size, size)
        q, k, v = (x.reshape(shape).transpose(2, 3) for x in (q, k, v))
        kv = (k[:, :, :, None] * v[:, :, None]).flatten(2)  # [B, L, d * d * H]
        y = self._step(kv[:, 0], state, *tables) if one else self._convolve(kv, state, packing)
        y = y.reshape(*y.shape[:2], size, size, y.shape[2] // size**2)
        return (y * q[:, :, :, None]).sum(2).flatten(2)

    def _convolve(self, u: Tensor, state: LayerState, packing: Sequences | None) -> Tensor:
        """Filter products ``[B, L, d * d * H]``, and leave the state after them."""
        tokens, rows, start = u.shape[1], None, state.get_row("ssm")
        keeps = state.keep or start is not None
        if packing is not None and (keeps or packing.rows is not None):
            rows = packing.aligned()
            u, packing = rows.gather(u), None
        batch, length, width = u.shape
        exponent, readout = self.modes()
        heads, modes = exponent.shape
        copies = width // heads
        taps = max(1, length) if packing is None else packing.kernel_length()
        kernel = vandermonde(readout, exponent, taps).to(u.dtype)
        y, _ = fft_conv(u, kernel.repeat(copies, 1), self.D.repeat(copies), cu_seqlens=packing)
        if keeps:
            ended = u if rows is None else right_aligned(u, rows.lengths)
            ended = split_heads(ended, copies).transpose(1, 2).flatten(0, 1)
            new = vandermonde_state(ended, exponent).view(batch, copies, heads, modes)
            if start is not None:
                z = torch.view_as_complex(start)
                y = y + vandermonde(readout * z, exponent, length, offset=1).flatten(1, 2).mT
                steps = length if rows is None else rows.lengths[:, None, None, None]
                new = new + powers(exponent, steps, z) * z
            state.put_row("ssm", torch.view_as_real(new))
        return y if rows is None else rows.scatter(y, tokens)

    def _step(self, u: Tensor, state: LayerState, decay: Tensor, readout: Tensor) -> Tensor:
        """Advance by one token ``[B, d * d * H]`` without gradients; ``[B, 1, d * d * H]``."""
        z = torch.view_as_complex(state.initial["ssm"])
        per_head = u.view(-1, decay.shape[0])
        y, new = diagonal_step(per_head, z.flatten(0, 1), decay, None, readout, self.D)
        state.put("ssm", torch.view_as_real(new.view(z.shape)))
        return y.view(u.shape[0], 1, u.shape[1])

    def _decode_tables(self) -> list[Tensor]:
        return self._table.get(self, None, self._tables)

    def _tables(self) -> list[Tensor]:
        """Return the factors of a step: taps [N, D], the first one last, decay and read-out."""
        exponent, readout = self.modes()
        return [self.taps().flip(1).T.contiguous(), exponent.exp().to(readout), readout]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, packing: Sequences | None
    ) -> Tensor:
        """Attend to all tokens; all are ``[B, L, D]``. Keys are kept as they are turned."""
        q, k, v = (split_heads(x, self.config.num_attention_heads) for x in (q, k, v))
        if self.config.rotary_dim is not None:
            position = token_positions(k, state.get("seen"), packing)
            turns = rotary_turns(position, self.config.rotary_dim, k.dtype)
            q, k = rotated(q, turns), rotated(k, turns)
        return attend(q, k, v, state, packing).flatten(2)


class H3PreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of H3 models."""

    config: H3Config

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters.

        Linear layers as the embedding, with biases 0, those that end attention and MLP over
        sqrt(2 num_hidden_layers); ``log_dt`` U(ln dt_min, ln dt_max); A -1/2 + i pi n, B 1, both
        parts of C N(0, 1/2); ``shift_B`` (1, 0, ..., 0), ``shift_C`` U(+-1/sqrt(N)); D's N(0, 1).
        """
        super()._init_weights(module)
        config = self.config
        if isinstance(module, nn.Linear):
            ends = getattr(module, "role", "") in ("attention_end", "mlp_end")
            scale = (2 * config.num_hidden_layers) ** -0.5 if ends else 1.0
            init.normal_(module.weight, std=config.initializer_range * scale)
        elif isinstance(module, H3Mixer) and not module.attends:
            for parameter in (module.shift_B, module.B):  # 1 in the first place of rows and pairs
                one = torch.eye(1, parameter.shape[-1], device=parameter.device)
                init.copy_(parameter, one.expand_as(parameter))
            bound = config.d_state**-0.5
            init.uniform_(module.shift_C, -bound, bound)
            init.normal_(module.shift_D)
            init.normal_(module.D)
            init.uniform_(module.log_dt, math.log(config.dt_min), math.log(config.dt_max))
            init.constant_(module.A_log, math.log(0.5))
            modes = torch.arange(config.d_state // 2, device=module.A_imag.device)
            init.copy_(module.A_imag, (math.pi * modes).expand_as(module.A_imag))
            init.normal_(module.C, std=0.5**0.5)


class H3Model(H3PreTrainedModel, SSMModel):
    """H3's backbone."""

    mixer_class = H3Mixer


H3ForCausalLM = SSMForCausalLM.of(H3Model)
H3ForImageClassification = SSMForImageClassification.of(H3Model)
H3ForSequenceClassification = SSMForSequenceClassification.of(H3Model)
H3ForTokenClassification = SSMForTokenClassification.of(H3Model)
