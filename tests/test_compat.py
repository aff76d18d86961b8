"""What differs between the supported versions of transformers; runs on both ends."""

import pytest
import torch

from ssmzoo.modeling.compat import CACHE, enable_gradient_checkpointing
from ssmzoo_longhorn import FAMILY


def test_checkpointing_is_on_after_enabling_and_changes_no_gradient():
    torch.manual_seed(0)
    model = FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny)).train()
    ids = torch.randint(96, (2, 9))
    model(ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    enable_gradient_checkpointing(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    model(ids, labels=ids).loss.backward()
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@torch.no_grad()
def test_a_cache_has_its_new_name_and_its_old_one_everywhere():
    torch.manual_seed(0)
    model, ids = (
        FAMILY.causal_lm_class(FAMILY.config(**FAMILY.tiny)).eval(),
        torch.ones(1, 9).long(),
    )
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    whole, tokens = model(ids).logits, model.generate(ids, **settings)
    for name in ("cache", "past_key_values"):
        begun = model(ids[:, :5], use_cache=True)
        assert begun.cache is begun[CACHE] is begun.past_key_values
        got = model(ids[:, 5:], **{name: begun.cache})
        torch.testing.assert_close(got.logits, whole[:, 5:])
        state = model.prefill(ids[:, :6])
        assert model.prefill(ids, **{name: state.cache}).num_tokens == 9
        assert torch.equal(model.generate(ids, **{name: state.cache}, **settings), tokens)
    assert CACHE in state.inputs()
    with pytest.raises(ValueError, match="past_key_values must be left out beside cache"):
        model(ids, cache=begun.cache, past_key_values=begun.cache)
