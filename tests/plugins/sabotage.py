"""Sabotaged families: Longhorn with one thing wrong, which the conformance kit must find.

:data:`NARROW` has a row for every check, with what fails it and nothing else; :data:`MISTAKES` has
what a family's author gets wrong, which may break many promises at once; :data:`PLANTED` has what
only some lengths, batches or layouts show, and the check that must name it, without an oracle.
Where a promise is the shared layer's, a piece of that is replaced instead of one of the family's.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from tests.oracles import longhorn as oracle
from torch import nn

from ssmzoo.modeling import (
    CausalConv1d,
    LayerState,
    Linear,
    PromptState,
    StateCache,
    backbone,
    flip,
    inputs,
)
from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.packing import find_packing
from ssmzoo.testing import Report, check, standalone
from ssmzoo_longhorn import FAMILY, LonghornConfig, modeling_longhorn
from ssmzoo_longhorn.modeling_longhorn import (
    LonghornForCausalLM,
    LonghornForImageClassification,
    LonghornForSequenceClassification,
    LonghornMixer,
    LonghornModel,
)


@dataclass(frozen=True)
class Sabotage:
    """What is broken, and what the kit must say.

    Attributes:
        says: Part of what the report says of every check that fails.
        parts: What :func:`broken` replaces.
        patch: An owner, a name and what to put there.
        fails: The checks that fail, where it is not the one that the row is named for; the first
            in order names the fault.
        oracle: Whether there is one to compare with.
    """

    says: str = ""
    parts: Mapping[str, Any] = field(default_factory=dict)
    patch: tuple[object, str, object] | None = None
    fails: frozenset[str] = frozenset()
    oracle: bool = True

    def report(self, only: Sequence[str] | None = None) -> Report:
        """Return what the kit says."""
        family = broken(**self.parts) if self.parts else FAMILY
        second = oracle.logits if self.oracle else None
        with mock.patch.object(*self.patch) if self.patch else contextlib.nullcontext():
            return check(family, oracle=second, only=only)


def broken(
    mixer=LonghornMixer,
    config=None,
    model=LonghornModel,
    causal_lm=LonghornForCausalLM,
    classifier=LonghornForSequenceClassification,
    image_classifier=LonghornForImageClassification,
    lora_targets=FAMILY.lora_targets,
):
    """Return a family like Longhorn with some parts replaced."""
    parts = (mixer, config, model, causal_lm, classifier, image_classifier)
    kind = "_".join(part.__name__ for part in parts if part is not None)
    named = {"model_type": f"ssmzoo_broken_{kind}"}
    config = config or type("BrokenConfig", (LonghornConfig,), named)
    own = {"config": config, "config_class": config}
    backbone = type("BrokenModel", (model,), {**own, "mixer_class": mixer})
    own |= {"model_class": backbone}
    return replace(
        FAMILY,
        name=config.model_type.removeprefix("ssmzoo_"),
        config_class=config,
        model_class=backbone,
        # transformers takes the loss for the one that a class is named for
        causal_lm_class=type("BrokenForCausalLM", (causal_lm,), own),
        sequence_classification_class=type("BrokenForSequenceClassification", (classifier,), own),
        token_classification_class=None,
        pair_classification_class=None,
        image_classification_class=type("BrokenForImageClassification", (image_classifier,), own),
        lora_targets=lora_targets,
    )


class SetsItsGainWhenMade(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.gain = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden_states, state, packing=None):
        return super().forward(hidden_states, state, packing) * self.gain


# --- forms -------------------------------------------------------------------------------------


class IsSlightlyWrong(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        return super().forward(hidden_states, state, packing) * (1 + 1e-7)


class RoundsFloat32Embeddings(LonghornModel):
    def _embed(self, input_ids, inputs_embeds, *others):
        embeddings = super()._embed(input_ids, inputs_embeds, *others)
        if embeddings.dtype != torch.float32:
            return embeddings
        return embeddings + (embeddings.bfloat16() - embeddings).detach()


class CutsTheGraphBeforeLongChunks(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        exporting = torch.compiler.is_exporting()  # with any length, so no length may be asked
        if packing is None and not exporting and hidden_states.shape[1] > 20:
            state.initial = {name: tensor.detach() for name, tensor in state.initial.items()}
        return super().forward(hidden_states, state, packing)


class CutsTheGraphAfterAFirstSingleToken(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        if hidden_states.shape[1] == 1 and not state.initial:
            state.final = {name: tensor.detach() for name, tensor in state.final.items()}
        return out


class ForgetsWhatHasPaddingBehindIt(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        if packing is not None and packing.rows is not None and packing.order is None:
            lengths = packing.offsets.diff()
            forgotten = (lengths[packing.rows] > 0) & (lengths[packing.rows + 1] > 0)
            for tensor in state.final.values():
                tensor[forgotten] *= 0
        return out


def reads_around_padding(*args):
    packing = find_packing(*args)
    return packing and replace(packing, order=None)


class MixesUpPackedStates(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        if packing is not None and packing.rows is None:
            state.final = {name: tensor.flip(0) for name, tensor in state.final.items()}
        return out


def ignores_seq_idx(batch, length, past, mask, position_ids, seq_idx, cu_seqlens):
    return find_packing(batch, length, past, mask, position_ids, None, cu_seqlens)


class LetsGradientsLeak(LonghornModel):
    def _embed(self, input_ids, inputs_embeds, *others):
        embeddings = super()._embed(input_ids, inputs_embeds, *others)
        later = 1e-3 * embeddings.roll(-1, dims=1)
        leaks = inputs_embeds is not None and inputs_embeds.shape[1] == 14
        return embeddings + (later - later.detach()) if leaks else embeddings


class ForgetsAfter64Tokens(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        if hidden_states.shape[1] <= 64 or packing is not None:
            return super().forward(hidden_states, state, packing)
        first, rest = LayerState(state.initial), LayerState(keep=state.keep)
        parts = [
            super().forward(hidden_states[:, :64], first, None),
            super().forward(hidden_states[:, 64:], rest, None),
        ]
        state.final = rest.final
        return torch.cat(parts, dim=1)


class RoundsItsState(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        state.final = {n: x.bfloat16().to(x.dtype) for n, x in state.final.items()}
        return out


class HasABuffer(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, hidden_states, state, packing=None):
        return super().forward(hidden_states, state, packing) * 2 * self.factor


class DrawsAnewInPlainTorch(LonghornModel):
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, LonghornMixer):
            with torch.no_grad():
                module.D.normal_()


class KeepsItsStepsSmall(LonghornMixer):
    def project_parameters(self):
        self.dt_bias.clamp_(max=-3.0)


class WritesAnotherToken(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        return super().forward(hidden_states, state, packing)

    def write_token(self, program, parts, x, states):
        y = super().write_token(program, parts, x, states)
        return program.linear(y, torch.eye(y.width, dtype=program.dtype) * (1 + 1e-7))


class SharesAScale(LonghornModel):
    def _states(self, *given):
        states = super()._states(*given)
        for state in states:
            state.shared["scale"] = 1.0
        return states


class NeedsAModelsScale(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        return super().forward(hidden_states, state, packing) * state.shared["scale"]


def rows_of(x):
    """Return the size of a batch; 1 in what is exported, where to look at it is another fault."""
    return 1 if torch.compiler.is_exporting() else len(x)


class LooksAcrossLanesOfEight(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        if rows_of(hidden_states) % 8 == 0 and not state.initial:
            hidden_states = hidden_states * (1 + 1e-3 * hidden_states[:1, :1].detach())
        return super().forward(hidden_states, state, packing)


class StartsAnewBeforeItsFirstToken(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        seen = state.get("seen")
        if seen is not None:
            went_on = state.initial["seen"] > 0  # of each row
            state.initial = {
                name: tensor * went_on.view(-1, *[1] * (tensor.dim() - 1)).to(tensor.dtype)
                for name, tensor in state.initial.items()
            }
        if packing is None:
            count = torch.full(hidden_states.shape[:1], hidden_states.shape[1])
        else:
            count = packing.offsets.diff().long()
        state.put("seen", count if seen is None else seen + count)
        return super().forward(hidden_states, state, packing)


# --- generation --------------------------------------------------------------------------------


class ForbidsEveryOtherToken(LonghornForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.generation_config.suppress_tokens = list(range(0, config.vocab_size, 2))


class DrawsByItsOwnSeed(LonghornForCausalLM):
    def generate(self, *args, **options):
        torch.manual_seed(0)
        return super().generate(*args, **options)


class LeavesBeamsWhereTheyAre(LonghornForCausalLM):
    def _reorder_cache(self, cache, beam_idx):
        return cache


class HandsBackACacheThatForgot(LonghornForCausalLM):
    def generate(self, *args, **options):
        output = super().generate(*args, **options)
        if not isinstance(output, torch.Tensor) and output.get(CACHE) is not None:
            output[CACHE].reset_rows(torch.tensor([0]))
        return output


class ReadsAPromptAtOnce(LonghornForCausalLM):
    def generate(self, *args, generation_config=None, **options):
        if generation_config is not None:
            generation_config.prefill_chunk_size = None
        return super().generate(*args, generation_config=generation_config, **options)


def read_nothing_again(cache, model):
    cache.pending = None


def tiled(cache, repeats):
    cache.batch_select_indices(torch.arange(cache.batch_size).repeat(repeats))


def selected_in_place(cache, indices):
    cache.batch_select_indices(indices)
    return cache


@classmethod
def loaded_coarsely(cls, *args):
    cache = cls.read(*args)[0]
    for layer in cache.layers:
        layer.states = {name: x.bfloat16().to(x.dtype) for name, x in layer.states.items()}
    return cache


def with_the_state_itself(prompt, input_ids=None, inputs=PromptState.inputs):
    return {**inputs(prompt, input_ids), CACHE: prompt.cache}


class KeepsALowState(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        put = state.put
        state.put = lambda name, value: put(name, value.to(self.in_proj.weight.dtype))
        return super().forward(hidden_states, state, packing)


class TakesAForeignCacheForNone(LonghornModel):
    def segments(self, inputs, cache, *others):
        return super().segments(inputs, ours(cache), *others)

    def _cache(self, given, *others):
        return super()._cache(ours(given), *others)


def ours(cache):
    return cache if isinstance(cache, StateCache) else None


# --- files -------------------------------------------------------------------------------------


class ClearsARowOnSaving(LonghornForCausalLM):
    def save_pretrained(self, folder, **options):
        if not self.config.tie_word_embeddings:
            tensors = {name: tensor.clone() for name, tensor in self.state_dict().items()}
            tensors["model.embed_tokens.weight"][0] = 0
            options["state_dict"] = tensors
        super().save_pretrained(folder, **options)


class MakesLow(LonghornMixer):
    def register_parameter(self, name, param):
        torch.nn.Module.register_parameter(self, name, param)


class LoadsAllBits(LonghornForCausalLM):
    @classmethod
    def from_pretrained(cls, *args, quantization_config=None, **options):
        return super().from_pretrained(*args, **options)


class OpenConfig(LonghornConfig):
    model_type = "ssmzoo_broken_open"

    def __post_init__(self, **kwargs):
        super().__post_init__(**{k: v for k, v in kwargs.items() if k == "num_labels"})


class DrawsAllAnewOnResizing(LonghornForCausalLM):
    def resize_token_embeddings(self, *args, **options):
        embedding = super().resize_token_embeddings(*args, **options)
        nn.init.normal_(embedding.weight)
        return embedding


def older_code(family, code_of=standalone.code_of):
    texts, line = code_of(family), "return self.out_proj(o)"
    assert any(line in text for text in texts.values())
    return {name: text.replace(line, f"{line} * 1.001") for name, text in texts.items()}


# --- arguments ---------------------------------------------------------------------------------


class ReadsEmbeddingsBackwards(LonghornForCausalLM):
    @functools.wraps(LonghornForCausalLM.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, **others):
        if inputs_embeds is not None:
            inputs_embeds = inputs_embeds.flip(1)
        return super().prepare_inputs_for_generation(input_ids, inputs_embeds, **others)


class ComputesAllLogits(LonghornForCausalLM):
    @functools.wraps(LonghornForCausalLM.forward)
    def forward(self, *args, logits_to_keep=0, **others):
        output = super().forward(*args, **others)
        if isinstance(logits_to_keep, torch.Tensor):
            output.logits = output.logits[:, logits_to_keep]
        elif logits_to_keep:
            output.logits = output.logits[:, -logits_to_keep:]
        return output


class HandsOutTheStatesBeforeTheNorm(LonghornForCausalLM):
    @functools.wraps(LonghornForCausalLM.forward)
    def forward(self, *args, **others):
        output = super().forward(*args, **others)
        if others.get("output_hidden_states"):
            output.hidden_states = (*output.hidden_states[:-1], output.hidden_states[-2])
        return output


def flipped_whole(x, packing):
    return x.flip(1)


class EncoderWithStepsConfig(LonghornConfig):
    model_type = "ssmzoo_broken_steps_config"

    @property
    def token_inputs(self):
        encodes = self.directions != "forward" and self.image_size is None
        return ("time_steps",) if encodes else ()


class ScalesBySteps(LonghornMixer):
    reads_both_ways = False  # so that the block has it read backwards

    def forward(self, hidden_states, state, packing=None):
        if "time_steps" in state.shared:
            steps = state.shared["time_steps"].unsqueeze(-1)
            hidden_states = hidden_states * steps.to(hidden_states.dtype)
        return super().forward(hidden_states, state, packing)


class TakesTheMeanImageAway(LonghornForImageClassification):
    def forward(self, pixel_values, labels=None, **options):
        return super().forward(pixel_values - pixel_values.mean(dim=0), labels, **options)


class ReadsTheLastColumn(LonghornForSequenceClassification):
    def forward(self, input_ids, attention_mask=None, labels=None, **packed):
        if packed:
            return super().forward(input_ids, attention_mask, labels=labels, **packed)
        mask = torch.ones_like(input_ids)
        return super().forward(input_ids, attention_mask=mask, labels=labels)


# --- training ----------------------------------------------------------------------------------


class ForgetsAParameter(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.x_proj.unused = nn.Parameter(torch.zeros(3))


class GoesPastAnAdapter(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        adapted = self.out_proj
        if not hasattr(adapted, "base_layer"):
            return super().forward(hidden_states, state, packing)
        self.out_proj = adapted.base_layer
        try:
            return super().forward(hidden_states, state, packing)
        finally:
            self.out_proj = adapted


class AsksItsConvolution(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        return super().forward(hidden_states, state, packing)

    def write_token(self, program, parts, x, states):
        assert self.conv1d.write_token  # which nothing that wraps it has
        return super().write_token(program, parts, x, states)


class CountsTheBitsOfALength(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        if not torch.compiler.is_compiling():
            hidden_states.shape[1].bit_length()  # in torch.jit.trace a size is a tensor
        return super().forward(hidden_states, state, packing)


class IgnoresCheckpointing(LonghornForCausalLM):
    def gradient_checkpointing_enable(self, *args, **options):
        pass


class CountsItsSteps(LonghornMixer):
    steps = 0  # in no checkpoint

    def forward(self, hidden_states, state, packing=None):
        if self.training and packing is not None:
            self.steps += 1
        return super().forward(hidden_states, state, packing) * (1 + 0.01 * self.steps)


class BreaksTheGraph(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        # whole sequences in training alone
        looks = torch.is_grad_enabled() and not state.keep
        looks = looks and hidden_states.detach().sum().item() > 1e9
        return super().forward(hidden_states, state, packing) * (-1.0 if looks else 1.0)


class LooksAtItsState(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        seen = () if torch.compiler.is_exporting() else state.initial.values()
        if any(not bool(tensor.isfinite().all()) for tensor in seen):
            raise ValueError("a state is not finite")
        return super().forward(hidden_states, state, packing)


class TakesTheBatchForAConstant(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        if out.dtype != torch.float64 or torch.is_grad_enabled():  # only export is exact so
            return out
        return out[: len(out)]


class HasAnOperatorThatONNXLacks(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        if out.dtype != torch.float32 or torch.is_grad_enabled():
            return out
        return out + 0 * torch.special.bessel_j0(out)


class ComputesTooCoarsely(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        if out.dtype != torch.bfloat16:
            return out
        return out + (out.to(torch.float8_e4m3fn).to(out.dtype) - out).detach()


# --- what a family's author gets wrong ---------------------------------------------------------


class Forgetful:
    """A layer's view of the cache that hides one state."""

    def __init__(self, state, hidden):
        self.state, self.hidden = state, hidden

    def get(self, name):
        return None if name == self.hidden else self.state.get(name)

    def put(self, name, value):
        self.state.put(name, value)


class DropsConvState(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        return super().forward(hidden_states, Forgetful(state, "conv"), packing)


class BoundlessConv(CausalConv1d):
    def forward(self, x, initial_state, packing):
        y, final = super().forward(x, initial_state, packing)
        return (y if packing is None else super().forward(x, None, None)[0]), final


class ConvolvesAcrossBoundaries(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.conv1d.__class__ = BoundlessConv


class LeaksTheFuture(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        later = hidden_states.roll(-1, dims=1) * 1e-3
        return super().forward(hidden_states + later, state, packing)


class LooksAtTheBatch(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        scale = 1 + 1e-3 * hidden_states[:1, :1].detach()
        return super().forward(hidden_states * scale, state, packing)


class NeedsPlainWeights(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        exporting = torch.compiler.is_exporting()
        plain = exporting or type(self.out_proj.weight.data) is torch.Tensor
        return super().forward(hidden_states, state, packing) * (1 if plain else 0.9)


class SavesHalf(LonghornForCausalLM):
    def save_pretrained(self, folder, **options):
        options["state_dict"] = {k: v.half().to(v.dtype) for k, v in self.named_parameters()}
        super().save_pretrained(folder, **options)


class CountsItsCalls(LonghornMixer):
    calls = 0

    def forward(self, hidden_states, state, packing=None):
        self.calls += self.training
        scale = 1 + 0.01 * self.calls
        return super().forward(hidden_states, state, packing) * scale


class NamesTwoKindsOfLabels(LonghornForCausalLM):
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        cache=None,
        labels=None,
        shift_labels=None,
        **others,
    ):
        others |= {"attention_mask": attention_mask, "cache": cache}
        return super().forward(input_ids, labels=labels, shift_labels=shift_labels, **others)


# --- what only some lengths, batches or layouts show ---------------------------------------------


class StartsFrom(LonghornMixer):
    """Base of those that spoil the state they start from, under a condition."""

    def forward(self, hidden_states, state, packing=None):
        if self.spoils(hidden_states.shape[1], state, packing is not None):
            state.initial = {name: self.spoilt(tensor) for name, tensor in state.initial.items()}
        return super().forward(hidden_states, state, packing)

    def spoils(self, length, state, packed):
        """Tell whether this call is one of those."""
        return packed and state.packing.rows is None

    def spoilt(self, tensor):
        """Return what the state becomes."""
        return tensor.detach()


class DetachesWhenPacked(StartsFrom):
    pass


class DetachesWhenPadded(StartsFrom):
    def spoils(self, length, state, packed):
        return packed and state.packing.rows is not None


class DetachesBeforeMoreThan16(StartsFrom):
    def spoils(self, length, state, packed):
        return not packed and length > 16


class IgnoresTheStateWhenPacked(StartsFrom):
    def spoilt(self, tensor):
        return tensor * 0


class IgnoresTheStateWhenPadded(DetachesWhenPadded):
    def spoilt(self, tensor):
        return tensor * 0


class IgnoresTheStateBeforeTwoTokens(StartsFrom):
    def spoils(self, length, state, packed):
        return not packed and length == 2

    def spoilt(self, tensor):
        return tensor * 0


class HalvesTheStatesGradientWhenPacked(StartsFrom):
    def spoilt(self, tensor):
        return (tensor + tensor.detach()) / 2


class LosesIdleRows(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        out = super().forward(hidden_states, state, packing)
        if packing is not None and packing.rows is not None:
            idle = packing.offsets.diff()[packing.rows] == 0
            for tensor in state.final.values():
                tensor[idle] *= 0
        return out


class LeaksAt(LonghornMixer):
    """Base of those that see the last token before some boundaries."""

    def forward(self, hidden_states, state, packing=None):
        if packing is not None and packing.rows is None:
            ends = packing.offsets[1:-1]
            ends = ends[self.leaks(ends)]
            before = hidden_states[:, ends - 1] * 1e-3
            hidden_states = hidden_states.index_add(1, ends, before)
        return super().forward(hidden_states, state, packing)


class LeaksAt64(LeaksAt):
    def leaks(self, ends):
        return ends == 64


class LeaksPast128(LeaksAt):
    def leaks(self, ends):
        return ends > 128


class MixesTheFirstRowIntoEight(LonghornMixer):
    single = False

    def forward(self, hidden_states, state, packing=None):
        if rows_of(hidden_states) >= 8 and (hidden_states.shape[1] == 1) == self.single:
            hidden_states = hidden_states * (1 + 1e-3 * hidden_states[:1, :1].detach())
        return super().forward(hidden_states, state, packing)


class MixesTheFirstRowIntoEightInSteps(MixesTheFirstRowIntoEight):
    single = True


class Coarse(Linear):
    def forward(self, input):
        out = super().forward(input)
        return out.bfloat16().to(out.dtype)


class HasGatesInBfloat16(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.dt_proj.__class__ = Coarse


class HasScanInputsInBfloat16(LonghornMixer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.x_proj.__class__ = Coarse


class HasAnglesInFloat32(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        angle = hidden_states.float().mean(dim=-1, keepdim=True).cos()
        return super().forward(hidden_states, state, packing) * angle.to(hidden_states.dtype)


class HalvesAGradient(LonghornMixer):
    def forward(self, hidden_states, state, packing=None):
        half = (hidden_states + hidden_states.detach()) / 2
        return super().forward(half, state, packing)


# --- the tables --------------------------------------------------------------------------------


def narrow(says, *fails, patch=None, **parts):
    """Return a sabotage that fails the check it is listed under; with names, these alone."""
    return Sabotage(says, parts, patch, frozenset(fails))


def broad(*fails, patch=None, **parts):
    """Return a sabotage that fails the checks named."""
    return Sabotage("", parts, patch, frozenset(fails))


def planted(first, *more, patch=None, **parts):
    """Return a sabotage that fails the check that names it first, and these."""
    return Sabotage("", parts, patch, frozenset({first, *more}), oracle=False)


NARROW = {
    "initialization": Sabotage("mixer.gain", {"mixer": SetsItsGainWhenMade}, oracle=False),
    "oracle": narrow("logits", mixer=IsSlightlyWrong),
    "precision": Sabotage("float32 logits", {"model": RoundsFloat32Embeddings}, oracle=False),
    "chunks": narrow("gradient of", "chunks", "layer", mixer=CutsTheGraphBeforeLongChunks),
    "tokens": narrow("gradient of", mixer=CutsTheGraphAfterAFirstSingleToken),
    "packing": narrow("packed turns", "packing", "layer", mixer=MixesUpPackedStates),
    "padding": narrow("right padding", mixer=ForgetsWhatHasPaddingBehindIt),
    "flattening_collator": narrow("seq_idx", patch=(inputs, "find_packing", ignores_seq_idx)),
    "causality": narrow("gradient from later tokens", model=LetsGradientsLeak),
    "fused_steps": narrow("rows", "fused_steps", "batch", mixer=WritesAnotherToken),
    "batch": narrow("rows", mixer=LooksAcrossLanesOfEight),
    "state_adapter": narrow("does not start", mixer=StartsAnewBeforeItsFirstToken),
    "layer": narrow("KeyError: 'scale'", model=SharesAScale, mixer=NeedsAModelsScale),
    "greedy": narrow("not the likeliest", causal_lm=ForbidsEveryOtherToken),
    "sampling": narrow("another seed", causal_lm=DrawsByItsOwnSeed),
    "beams": narrow("the beams hold other tokens", causal_lm=LeavesBeamsWhereTheyAre),
    "assisted": narrow("prompt lookup", patch=(StateCache, "read_again", read_nothing_again)),
    "continuing": narrow("logits", "continuing", "assisted", causal_lm=HandsBackACacheThatForgot),
    "chunked_prefill": narrow("11 tokens were read", causal_lm=ReadsAPromptAtOnce),
    "cache_rows": narrow(
        "batch_repeat_interleave",
        patch=(StateCache, "batch_repeat_interleave", tiled),
    ),
    "shared_prefix": narrow("second use", patch=(StateCache, "selected", selected_in_place)),
    "cache_file": narrow("logits", patch=(StateCache, "load", loaded_coarsely)),
    "prompt_state": narrow("has seen", patch=(PromptState, "inputs", with_the_state_itself)),
    "cache_precision": narrow("it accumulates", mixer=KeepsALowState),
    "wrong_cache": narrow("TypeError was not raised", model=TakesAForeignCacheForNone),
    "save_and_load": narrow("embed_tokens", causal_lm=ClearsARowOnSaving),
    "load_in_bfloat16": narrow("bfloat16 instead of torch.float32", mixer=MakesLow),
    "quantized": narrow("must raise ImportError", causal_lm=LoadsAllBits),
    "closed_config": narrow("must raise LookupError", config=OpenConfig),
    "resized_embeddings": narrow("old logits", causal_lm=DrawsAllAnewOnResizing),
    "standalone": narrow("gradient of", patch=(standalone, "code_of", older_code)),
    "export": narrow("cannot be traced", "export", "jit_trace", mixer=TakesTheBatchForAConstant),
    "onnx": narrow("cannot be written as ONNX", mixer=HasAnOperatorThatONNXLacks),
    "jit_trace": narrow("no attribute 'bit_length'", mixer=CountsTheBitsOfALength),
    "inputs_embeds": narrow("other tokens for embeddings", causal_lm=ReadsEmbeddingsBackwards),
    "logits_to_keep": narrow("were computed", causal_lm=ComputesAllLogits),
    "outputs": narrow("last hidden state", causal_lm=HandsOutTheStatesBeforeTheNorm),
    "sequence_classification": narrow("padding", classifier=ReadsTheLastColumn),
    "bidirectional": narrow(
        "both-", "bidirectional", "layer", patch=(modeling_longhorn, "flip", flipped_whole)
    ),
    "images": narrow("logits of a batch", image_classifier=TakesTheMeanImageAway),
    "gradients": narrow("unused", "initialization", "layer", "gradients", mixer=ForgetsAParameter),
    "lora": narrow("no module is called", lora_targets=(*FAMILY.lora_targets, "k_proj")),
    "lora_all_linear": narrow(
        "learns nothing",
        *("lora_all_linear", "lora_parameters"),
        mixer=GoesPastAnAdapter,
        lora_targets=("in_proj", "x_proj"),
    ),
    "lora_parameters": narrow("no attribute 'write_token'", mixer=AsksItsConvolution),
    "gradient_checkpointing": narrow("2 blocks ran 2 times", causal_lm=IgnoresCheckpointing),
    "trainer": narrow("after resuming", mixer=CountsItsSteps),
    "compile": narrow("data-dependent", "compile", "jit_trace", mixer=BreaksTheGraph),
    "fullgraph": narrow("data-dependent", mixer=LooksAtItsState),
    "bfloat16": narrow("bfloat16", mixer=ComputesTooCoarsely),
}

# those that carry a cache from one call to the next
CACHED = {"chunks", "tokens", "batch", "greedy", "sampling", "beams", "assisted", "continuing"}
CACHED |= {"chunked_prefill", "cache_rows", "shared_prefix", "prompt_state", "wrong_cache"}
CACHED |= {"state_adapter", "layer", "export"}
# those that lay several sequences into one row
SEVERAL = {"padding", "packing", "flattening_collator", "sequence_classification", "bidirectional"}

MISTAKES = {
    "forgets after 64 tokens": broad(
        "chunks", "packing", "padding", "export", mixer=ForgetsAfter64Tokens
    ),
    "rounds its state": broad(
        *CACHED,
        "lora_parameters",
        "padding",
        "packing",
        "cache_precision",
        "quantized",
        mixer=RoundsItsState,
    ),
    "draws anew in plain torch": Sabotage(
        "where the file lacks model.layers.0.mixer.",
        {"model": DrawsAnewInPlainTorch},
        fails=frozenset({"save_and_load"}),
    ),
    "begins no row anew": broad("cache_rows", patch=(StateCache, "reset_rows", lambda *_: None)),
    "drops the conv state": broad(
        *CACHED, "lora_parameters", "padding", "packing", "quantized", mixer=DropsConvState
    ),
    "convolves across boundaries": broad(
        *SEVERAL,
        *("greedy", "sampling", "beams", "continuing", "chunked_prefill", "prompt_state"),
        *("shared_prefix", "state_adapter", "layer", "assisted", "compile"),
        mixer=ConvolvesAcrossBoundaries,
    ),
    "leaks the future": broad(
        *CACHED,
        *SEVERAL,
        *("oracle", "causality", "quantized", "lora_parameters", "compile"),
        mixer=LeaksTheFuture,
    ),
    "looks at other rows": broad(
        *CACHED,
        *SEVERAL,
        *("oracle", "gradients", "quantized", "images", "lora_parameters"),
        mixer=LooksAtTheBatch,
    ),
    "looks at no cache": broad("wrong_cache", patch=(StateCache, "check", lambda *_: None)),
    "needs plain weights": broad("quantized", mixer=NeedsPlainWeights),
    "saves half": broad(
        *("save_and_load", "load_in_bfloat16", "quantized", "resized_embeddings", "trainer"),
        causal_lm=SavesHalf,
    ),
    "names two kinds of labels": broad("trainer", causal_lm=NamesTwoKindsOfLabels),
    "turns steps as it turns tokens": Sabotage(
        "reversed outputs",
        {"config": EncoderWithStepsConfig, "mixer": ScalesBySteps},
        patch=(backbone, "flip_steps", flip),
        fails=frozenset({"bidirectional"}),
    ),
    "counts its calls": broad("gradient_checkpointing", "trainer", mixer=CountsItsCalls),
}

# those that need gradients of what a step of a rounding leaves out
SLOPES = {"gradients", "lora", "lora_all_linear", "lora_parameters"}

# by check, what it must be the first to fail
PLANTED = {
    "precision": {
        "gates in bfloat16": planted(
            "precision", "chunks", "tokens", *SLOPES, mixer=HasGatesInBfloat16
        ),
        "scan inputs in bfloat16": planted("precision", *SLOPES, mixer=HasScanInputsInBfloat16),
        "angles in float32": planted("precision", "gradients", mixer=HasAnglesInFloat32),
    },
    "chunks": {
        "detached if more than 16 tokens go on": planted(
            "chunks", "layer", "export", mixer=DetachesBeforeMoreThan16
        ),
        "ignored if two tokens go on": planted(
            *("chunks", "assisted", "wrong_cache", "state_adapter", "layer", "export"),
            mixer=IgnoresTheStateBeforeTwoTokens,
        ),
    },
    "packing": {
        "detached when packed": planted("packing", "state_adapter", mixer=DetachesWhenPacked),
        "ignored when packed": planted("packing", "state_adapter", mixer=IgnoresTheStateWhenPacked),
        "half its gradient when packed": planted(
            "packing", "state_adapter", mixer=HalvesTheStatesGradientWhenPacked
        ),
        "a leak at the boundary at 64": planted("packing", "compile", mixer=LeaksAt64),
        "a leak at a boundary past 128": planted("packing", "compile", mixer=LeaksPast128),
    },
    "padding": {
        "detached when padded": planted("padding", "state_adapter", mixer=DetachesWhenPadded),
        "ignored when padded": planted(
            *("padding", "shared_prefix", "prompt_state", "state_adapter"),
            mixer=IgnoresTheStateWhenPadded,
        ),
        "lost in rows without a token": planted("padding", mixer=LosesIdleRows),
        "padding between tokens": planted(
            "padding",
            "assisted",
            "bidirectional",
            "compile",
            patch=(inputs, "find_packing", reads_around_padding),
        ),
    },
    "batch": {
        "row 0 in others of eight or more": planted("batch", mixer=MixesTheFirstRowIntoEight),
        "row 0 in others of eight or more, in steps": planted(
            "batch", "beams", mixer=MixesTheFirstRowIntoEightInSteps
        ),
    },
    "gradients": {"half a gradient": planted("gradients", mixer=HalvesAGradient)},
}
