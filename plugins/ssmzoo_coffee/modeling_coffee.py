"""COFFEE: context-selective state-space models with feedback gates (arXiv 2510.14027).

The recurrence is the op `feedback_scan`.

What surprises: nothing mixes features inside the recurrence, and a gate does not see the current
token; lambda, gates, state and skip are always float32. A model with ``lambda_param="clamp"`` must
be projected after every optimizer step: our trainer does, transformers' with
``ssmzoo.training.callbacks``.

Dimensions: B batch, L length, D hidden, E inner, N state, K conv width, S sequences, T tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ssmzoo.modeling import (
    CausalConv1d,
    Dynamics,
    LayerState,
    Linear,
    ModuleParts,
    Sequences,
    SSMForCausalLM,
    SSMForPairClassification,
    SSMForSequenceClassification,
    SSMForTokenClassification,
    SSMMixer,
    SSMModel,
    SSMPreTrainedModel,
    State,
    Trajectories,
    recurrent,
)
from ssmzoo_kernels import double, feedback_scan, selective_scan
from ssmzoo_kernels.token_step import Program, Value

from .configuration_coffee import CoffeeConfig
from .readout import FrozenRowEmbedding, NearestEmbedding, first_rows, with_frozen_row

SLOWEST, FASTEST = 1e-3, 0.9  # of initial -lambda / lambda_max
SHUT = 1e-3  # a gate below it lets nothing in
_AT_ONCE = 2**21  # state entries that the gauges look at together
SSM_PARAMETERS = ("lam", "lam_raw", "w", "B", "C", "w_gamma", "A_log", "D")


class CoffeeMixer(SSMMixer):
    """Mix tokens by COFFEE's recurrence (the paper's Eq. 7), alone or between projections.

    ``s = sigmoid(w x[t-1])``, ``x[t] = x[t-1] + s (lam x[t-1] + u[t])``, ``y[t] = sum_n C x[t]``;
    the block "gated" takes ``[u | z] = in_proj(h)``, ``u = SiLU(conv1d(u))`` and returns
    ``out_proj((y + D u) SiLU(z))``, the block "bare" takes u = h and returns y.
    """

    param_group_names: ClassVar[Mapping[str, str]] = dict.fromkeys(SSM_PARAMETERS, "ssm")
    config: CoffeeConfig
    # each variant has some of these, ``[E, N]``
    lam: Tensor
    lam_raw: Tensor
    w: Tensor
    B: Tensor
    C: Tensor
    w_gamma: Tensor
    A_log: Tensor

    def __init__(self, config: CoffeeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        inner, variant = config.d_inner, config.variant
        self.gated = config.block == "gated"
        if self.gated:
            self.in_proj = Linear(config.hidden_size, 2 * inner, bias=False)
            self.conv1d = CausalConv1d(inner, config.d_conv, config.conv_bias)
            self.out_proj = Linear(inner, config.hidden_size, bias=False, role="mixer_end")
        if variant in ("token_gate", "s6"):
            self.dt_proj = Linear(inner, inner, bias=False, role="token_reader")
        if variant == "s6":
            self.x_proj = Linear(inner, 2 * config.d_state, bias=False, role="token_reader")
            names = ["A_log"]
        else:
            names = ["lam" if config.lambda_param == "clamp" else "lam_raw", "C"]
            names += ["w"] if variant != "token_gate" else []
            names += ["B"] if variant in ("token_gate", "input_matrix") else []
            names += ["w_gamma"] if config.output_filter else []
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(inner, config.d_state)))
        self.D = nn.Parameter(torch.ones(inner)) if config.use_skip else None

    def forward(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None = None
    ) -> Tensor:
        """Map ``[B, L, D]`` to ``[B, L, D]``; the state is ``conv`` and ``ssm [B, E, N]``."""
        u, z = self._branches(hidden_states, state, packing)
        y = self.scan(u, state, packing)
        return y if z is None else self.out_proj(y * F.silu(z))

    def scan(self, u: Tensor, state: LayerState, packing: Sequences | None = None) -> Tensor:
        """Run the recurrence over ``[B, L, E]`` from the cached state; cache the final state."""
        initial = state.get("ssm")
        if self.config.variant == "s6":
            B, C = self.x_proj(u).chunk(2, dim=-1)  # [B, L, N] each
            y, final = selective_scan(
                u,
                self.dt_proj(u),
                -self.A_log.exp(),
                B,
                C,
                self.D,
                initial_state=initial,
                cu_seqlens=packing,
                discretization="zoh",
            )
        else:
            lam, w, C, w_gamma = self.coefficients()
            config = self.config
            y, final = feedback_scan(
                u,
                lam,
                w,
                C,
                w_gamma,
                self.D,
                self._drive(u),
                initial,
                cu_seqlens=packing,
                gate="linear" if config.variant == "linear_feedback" else "sigmoid",
                solver=config.solver,
                tolerance=config.newton_tol,
                max_iterations=config.newton_iters,
            )
        state.put("ssm", final)
        return y

    def write_token(
        self, program: Program, parts: ModuleParts, x: Value, states: Mapping[str, State]
    ) -> Value:
        """Write one token of :meth:`forward`."""
        z = drive = None
        variant = parts.setting(self.config, "variant")
        if self.gated:
            u, z = parts.linear(program, x, "in_proj").chunk(2)
            conv = parts.within("conv1d", CausalConv1d)
            x = conv.root.write_token(program, conv, u, states["conv"])
        if variant == "s6":
            B, C = parts.linear(program, x, "x_proj").chunk(2)
            y = program.selective(
                x,
                parts.linear(program, x, "dt_proj"),
                B,
                C,
                z,
                parts.weight(self, "A_log"),
                parts.weight(self, "D", optional=True),
                None,
                recurrent(program, states["ssm"]),
                zoh=True,
            )
            return y if z is None else parts.linear(program, y, "out_proj")
        if variant == "token_gate":
            drive = parts.linear(program, x, "dt_proj")
        elif variant == "no_feedback":
            drive = x
        clamped = parts.setting(self.config, "lambda_param") == "clamp"
        most = parts.setting(self.config, "lambda_max")
        own = [name for name in SSM_PARAMETERS if self._parameters.get(name) is not None]
        found = {name: parts.weight(self, name) for name in own}
        y = program.feedback(
            x,
            drive,
            found["lam" if clamped else "lam_raw"],
            found.get("w"),
            found.get("B"),
            found["C"],
            found.get("w_gamma"),
            found.get("D"),
            recurrent(program, states["ssm"]),
            sigmoid_to=0.0 if clamped else most,
            linear=variant == "linear_feedback",
        )
        return y if z is None else parts.linear(program, program.gated(z, y), "out_proj")

    def lambdas(self) -> Tensor:
        """Return lambda, ``[E, N]``, in ``[-lambda_max, 0]``; S6's is ``-exp(A_log)``."""
        if self.config.variant == "s6":
            return -self.A_log.exp()
        if self.config.lambda_param == "clamp":
            return self.lam
        return -self.config.lambda_max * self.lam_raw.sigmoid()

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return ``lam, w, C, w_gamma`` of the recurrence without B, ``[E, N]`` each.

        With B its state is ``x / B``, so B goes to whatever reads the state.
        """
        lam, C = self.lambdas(), self.C
        w = torch.ones_like(lam) if self.config.variant == "token_gate" else self.w
        w_gamma = self.w_gamma if self.config.output_filter else None
        if self.config.variant in ("token_gate", "input_matrix"):
            B = self.B
            C, w_gamma = C * B, None if w_gamma is None else w_gamma * B
            if self.config.variant == "input_matrix":
                w = w * B
        return lam, w, C, w_gamma

    @torch.no_grad()
    def project_parameters(self) -> None:
        """Clamp lambda to ``[-lambda_max, 0]``."""
        if "lam" in self._parameters:
            self.lam.clamp_(-self.config.lambda_max, 0)

    def check_parameters(self) -> None:
        """Check that lambda is in ``[-lambda_max, 0]``, as after a projection.

        Raises:
            ValueError: An entry is outside; the message names the layer and the value.
        """
        if "lam" not in self._parameters or self.lam.is_meta:
            return
        lam, most = self.lam.detach(), self.config.lambda_max
        # in float32, in which it may have been projected: -0.1 there is below -0.1 in float64
        single = lam.float()
        wrong = ~((single >= -most) & (single <= 0))  # nan too
        if bool(wrong.any()):
            raise ValueError(
                f"lam of layer {self.layer_idx} must be in [{-most}, 0], got "
                f"{float(lam[wrong][0]):.4g}: the checkpoint has another lambda_max, or was "
                "trained without ssmzoo.training.callbacks.ProjectParameters; to project it, load "
                "its weights with load_state_dict and call project_parameters()"
            )

    def gauges(self, hidden_states: Tensor) -> dict[str, Tensor]:
        """Measure the recurrence's Jacobian and its closed gates at an input ``[B, L, D]``.

        ``largest_jacobian`` is the largest ``|d x[t] / d x[t-1]|``, ``shut_gates`` the share of
        gates below 1e-3, ``growing_lanes`` the share of the state's entries whose mean
        ``log |d x[t] / d x[t-1]|`` is positive. S6 has none: its entries only ever decay.
        """
        if self.config.variant == "s6":
            return {}
        u, _ = self._branches(hidden_states, LayerState(), None)
        largest, shut, logs = [], [], []
        for gate, slope in self._steps(u):
            largest.append(slope.abs().max())
            shut.append((gate < SHUT).sum())
            logs.append(_log(slope).sum(dim=1))
        total = torch.stack(logs).sum(dim=0)  # [B, E N]
        return {
            "largest_jacobian": torch.stack(largest).max(),
            "shut_gates": torch.stack(shut).sum() / (u.shape[1] * total.numel()),
            "growing_lanes": (total > 0).double().mean(),
        }

    def dynamics(self, hidden_states: Tensor) -> Dynamics:
        """Return the mean decay: the geometric mean of ``|d x[t] / d x[t-1]|`` over tokens."""
        u, _ = self._branches(hidden_states, LayerState(), None)
        if self.config.variant == "s6":
            dt = F.softplus(self.dt_proj(u)).mean(dim=(0, 1))  # [E]
            return Dynamics(decay=(dt[:, None] * self.lambdas()).exp(), depends_on_input=True)
        logs = torch.stack([_log(slope).sum(dim=(0, 1)) for _, slope in self._steps(u)])
        decay = (logs.sum(dim=0) / (u.shape[0] * u.shape[1])).exp()
        return Dynamics(decay=decay.view(u.shape[2], -1), depends_on_input=True)

    def _branches(
        self, hidden_states: Tensor, state: LayerState, packing: Sequences | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the inputs of the recurrence and of its output's gate, ``[B, L, E]`` each."""
        if not self.gated:
            return hidden_states, None
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)
        u, conv_state = self.conv1d(x, state.get("conv"), packing)
        state.put("conv", conv_state)
        return u, z

    def _drive(self, u: Tensor) -> Tensor | None:
        """Return the gates' input where it is not the state, ``[B, L, E]``."""
        if self.config.variant == "token_gate":
            return self.dt_proj(u)
        return u if self.config.variant == "no_feedback" else None

    def _steps(self, u: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, a few tokens at a time, gates and ``d x[t] / d x[t-1]``, ``[B, T, E N]``."""
        exact = torch.promote_types(torch.float32, u.dtype)
        lam, w = (x.to(exact).flatten() for x in self.coefficients()[:2])
        states, entries = self.config.d_state, lam.numel()
        drive = self._drive(u)
        linear = self.config.variant == "linear_feedback"
        tokens = max(1, _AT_ONCE // (u.shape[0] * entries))
        state = lam.new_zeros(u.shape[0], entries, 1)
        for some_u, some_drive in zip(
            u.split(tokens, dim=1),
            (u if drive is None else drive).split(tokens, dim=1),
            strict=True,
        ):
            # every entry of the state as a channel of its own, whose output is its state
            inputs, driven = (
                x.to(exact).repeat_interleave(states, dim=2) for x in (some_u, some_drive)
            )
            x, after = feedback_scan(
                inputs,
                lam[:, None],
                w[:, None],
                torch.ones_like(w)[:, None],
                drive=None if drive is None else driven,
                initial_state=state,
                gate="linear" if linear else "sigmoid",
            )
            before = torch.cat([state.transpose(1, 2), x[:, :-1]], dim=1)
            opened = w * (before if drive is None else driven)
            gate = opened if linear else opened.sigmoid()
            slope = 1 + lam * gate
            if drive is None:
                rise = w if linear else w * gate * (1 - gate)
                slope = slope + rise * (lam * before + inputs)
            yield gate, slope
            state = after


def _log(slope: Tensor) -> Tensor:
    return double(slope).abs().clamp(min=torch.finfo(torch.float32).tiny).log()


class CoffeePreTrainedModel(SSMPreTrainedModel):
    """Loading and initialisation of COFFEE models."""

    config: CoffeeConfig

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as every transformers model does, and check lambda's range.

        Raises:
            ValueError: A file is damaged, or lambda is outside its range.
            OSError: A file is missing.
        """
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, CoffeeMixer):
                module.check_parameters()
        return loaded

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another embedding, or read-out, where the two are one table.

        So does every adapter on it: PEFT puts its own module in the place of the one it adapts.

        Raises:
            ValueError: It would be read in as one table and read out by another.
        """
        if name in ("embed_tokens", "lm_head") and self.config.head == "nearest_embedding":
            held = self._modules.get(name)
            if held is not None and value is not held:
                raise ValueError(
                    f"{name} must not be replaced with head='nearest_embedding', which computes "
                    f"distances to the embedding, got {type(value).__name__}; to change its values "
                    "copy them into embed_tokens.weight, to change the vocabulary call "
                    "resize_token_embeddings, and put no adapter or modules_to_save on either"
                )
        super().__setattr__(name, value)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize the vocabulary as in every transformers model; a frozen row is kept.

        New tokens start from N(0, initializer_range^2) if the configuration lists initial rows.

        Raises:
            ValueError: The frozen token would be cut off.
        """
        frozen = self.config.frozen_embedding_index
        if new_num_tokens is None and pad_to_multiple_of is None:
            return super().resize_token_embeddings()
        if not isinstance(pad_to_multiple_of, int | None):  # transformers has an error for it
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of)
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if frozen is not None and size <= frozen:
            raise ValueError(
                f"new_num_tokens must be above the frozen token's index {frozen}, got {size}"
            )
        if not isinstance(self.config.embedding_init, str):
            self.config.embedding_init = "normal"
        if frozen is None:
            return super().resize_token_embeddings(size, None, mean_resizing)
        embedding = super().resize_token_embeddings(size - 1, None, mean_resizing)
        embedding.num_embeddings = self.config.vocab_size = self.vocab_size = size
        return embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial parameters; rates are ``r = 0.001 ... 0.9``, evenly in logarithms.

        ==================== ========================== ========== ===============
        ..                   ssm_init "spread"          "paper"    "integrator"
        ==================== ========================== ========== ===============
        ``lam``, ``lam_raw`` lambda = -lambda_max r     lambda = 0 lambda = 0
        ``w``                N(0, r)                    N(0, 1)    1
        ``C``, ``w_gamma``   N(0, r / N)                N(0, 1)    1
        ``B``                1                          N(0, 1)    1
        ``x_proj, dt_proj``  U(+-1/sqrt(E))             N(0, 1)    U(+-1/sqrt(E))
        ==================== ========================== ========== ===============

        ==================== =====================================================
        ``A_log``            ln 1 ... ln N
        ``D``, norms         1
        embedding, head      N(0, initializer_range^2), orthonormal rows, or given
        ``in_proj``          U(+-1/sqrt(D))
        ``conv1d`` and bias  U(+-1/sqrt(K))
        ``out_proj``         U(+-1/sqrt(E)) / sqrt(2 num_hidden_layers)
        ==================== =====================================================
        """
        super()._init_weights(module)
        config, role = self.config, getattr(module, "role", "")
        if isinstance(module, CoffeeMixer):
            self._init_mixer(module)
        elif isinstance(module, nn.Embedding) and config.embedding_init != "normal":
            init.copy_(module.weight, first_rows(module, config.embedding_init))
        elif role == "mixer_end":
            weight = cast(nn.Linear, module).weight
            bound = (weight.shape[1] * 2 * config.num_hidden_layers) ** -0.5
            init.uniform_(weight, -bound, bound)
        elif role == "token_reader" and config.ssm_init == "paper":
            init.normal_(cast(nn.Linear, module).weight)

    def _init_mixer(self, mixer: CoffeeMixer) -> None:
        config, own = self.config, dict(mixer.named_parameters(recurse=False))
        shape = config.d_inner, config.d_state
        first, last = (torch.tensor(x).log().item() for x in (SLOWEST, FASTEST))
        rates = torch.linspace(first, last, config.d_state).exp().expand(shape)
        spread = config.ssm_init == "spread"
        known = {
            "lam": -config.lambda_max * rates if spread else torch.zeros(shape),
            "lam_raw": rates.logit(),
            "A_log": torch.arange(1, config.d_state + 1).float().log().expand(shape),
            "D": torch.ones(config.d_inner),
        }
        ones = {"spread": ("B",), "paper": (), "integrator": ("w", "C", "w_gamma", "B")}
        known |= dict.fromkeys(ones[config.ssm_init], torch.ones(shape))
        variances = {"w": rates, "C": rates / config.d_state, "w_gamma": rates / config.d_state}
        for name, parameter in own.items():
            value = known.get(name)
            if value is None:
                value = torch.randn(shape) * (variances[name].sqrt() if spread else 1)
            init.copy_(parameter, value)


class CoffeeModel(CoffeePreTrainedModel, SSMModel):
    """COFFEE's backbone."""

    mixer_class = CoffeeMixer

    def make_embedding(self, config: CoffeeConfig) -> nn.Embedding:
        """Return the embedding, with a frozen row if the configuration has one."""
        if config.frozen_embedding_index is None:
            return super().make_embedding(config)
        return FrozenRowEmbedding(
            config.vocab_size, config.hidden_size, config.frozen_embedding_index
        )

    def trajectories(self, input_ids: Tensor) -> Trajectories | None:
        """Return the output's path among the embeddings, or None without ``"nearest_embedding"``.

        Coordinates are the two dimensions or, of more, the embeddings' first two singular vectors.
        """
        if self.config.head != "nearest_embedding" or self.config.hidden_size < 2:
            return None
        table = with_frozen_row(self.embed_tokens.weight, self.config.frozen_embedding_index)
        y = self(input_ids, use_cache=False).last_hidden_state
        if table.shape[1] > 2:
            plane = torch.linalg.svd(table, full_matrices=False).Vh[:2].T  # [D, 2]
            table, y = table @ plane, y @ plane
        return Trajectories(input_ids, F.pad(y, (0, 0, 1, 0)), table)


class CoffeeForCausalLM(CoffeePreTrainedModel, SSMForCausalLM):
    """COFFEE with a language-model head."""

    model_class = CoffeeModel

    def make_head(self, config: CoffeeConfig) -> nn.Module:
        """Return the head that the configuration names."""
        if config.head == "linear":
            return super().make_head(config)
        return NearestEmbedding(
            config.vocab_size, config.hidden_size, config.frozen_embedding_index
        )


CoffeeForSequenceClassification = SSMForSequenceClassification.of(CoffeeModel)
CoffeeForTokenClassification = SSMForTokenClassification.of(CoffeeModel)
CoffeeForPairClassification = SSMForPairClassification.of(CoffeeModel)
