"""What differs between the supported versions of transformers; runs on both ends."""

import pytest
import torch
from transformers import modeling_outputs

from ssmzoo.modeling import checkpointing
from ssmzoo.modeling.compat import CACHE, enable_gradient_checkpointing
from ssmzoo_longhorn import FAMILY


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_is_on_after_enabling_and_changes_no_gradient(selective, monkeypatch):
    monkeypatch.setattr(checkpointing, "WIDTH", 1)
    torch.manual_seed(0)
    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny)).train()
    ids = torch.randint(96, (2, 9))
    model(ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    enable_gradient_checkpointing(model, selective=selective)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    model(ids, labels=ids).loss.backward()
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


class OldBackbone(FAMILY.causal_lm_class.model_class):
    """As somebody wrote it before transformers 5.24."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        output = super().forward(input_ids, past_key_values=past_key_values, **kwargs)
        kept = {CACHE: output.cache, "last_hidden_state": output.last_hidden_state}
        return modeling_outputs.BaseModelOutputWithPast(**kept)


class OldModel(FAMILY.causal_lm_class):
    model_class = OldBackbone

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
        kwargs["past_key_values"] = past_key_values
        return super().forward(input_ids, attention_mask, **kwargs)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", [FAMILY.causal_lm_class, OldModel])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_a_cache_has_its_new_name_and_its_old_one_everywhere(kind, name):
    torch.manual_seed(0)
    model, ids = kind(FAMILY.config(**FAMILY.tiny)).eval(), torch.randint(3, 96, (2, 9))
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    # a state of other tokens, so that who forgets it is seen
    mixed = torch.cat([ids.flip(0)[:, :5], ids[:, 5:]], dim=1)
    whole, tokens = model(mixed).logits, model.generate(mixed, **settings)
    state = model.prefill(mixed[:, :6])
    begun = model(mixed[:, :5], use_cache=True)
    assert begun.cache is begun[CACHE] is begun.past_key_values
    got = model(ids[:, 5:], **{name: begun.cache})
    torch.testing.assert_close(got.logits, whole[:, 5:])
    longer = model.prefill(ids, **{name: state.cache}).cache
    torch.testing.assert_close(model(ids[:, -1:], **{name: longer}).logits, whole[:, -1:])
    inputs = state.inputs(mixed[:, 6:])
    found = model.generate(ids, **{name: state.cache}, **settings)
    torch.testing.assert_close(found.logits, tokens.logits)
    torch.testing.assert_close(model.generate(**inputs, **settings).logits, tokens.logits)


def test_two_caches_are_refused():
    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny)).eval()
    ids = torch.ones(1, 3, dtype=torch.long)
    cache = model(ids, use_cache=True).cache
    for call in (model, model.model, model.prefill):
        with pytest.raises(ValueError, match="past_key_values must be left out beside cache"):
            call(ids, cache=cache, past_key_values=cache)
