"""A loss without logits is the loss, and has its gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ssmzoo import load_family
from ssmzoo.modeling import losses

WORDS = 61


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(losses, "_PIECE", 7 * WORDS)  # seven tokens


def model(*, tied=True, dtype=torch.float64, name="longhorn"):
    family = load_family(name)
    torch.manual_seed(0)
    fields = {**family.tiny, "vocab_size": WORDS, "tie_word_embeddings": tied}
    return family.causal_lm_class(family.config(**fields)).to(dtype).train()


def in_full(network, kept=None, **inputs):
    """Return the loss by its definition, of all logits, in their own precision."""
    labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    items = inputs.pop("num_items_in_batch", None)
    logits = network(**inputs, use_cache=False).logits
    if shifted is None:
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        if kept is not None:
            shifted = shifted.masked_fill(~kept, -100)
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), shifted.flatten(), reduction="sum", ignore_index=-100
    )
    return total / ((shifted != -100).sum() if items is None else items)


def gradients(network, loss):
    network.zero_grad()
    (3 * loss).backward()  # the slope of what the loss goes into counts
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def cases():
    ids = torch.randint(WORDS, (3, 17), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, 9:] = 0, 0
    real = mask.bool() & nn.functional.pad(mask[:, 1:], (0, 1)).bool()
    content = ids.masked_fill(mask == 0, -100)
    seams = torch.tensor([0, 3, 20, 51])
    row = {"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "cu_seqlens": seams}
    within = torch.ones(1, 51, dtype=torch.bool)
    within[0, seams[1:] - 1] = False
    ignored = ids.masked_fill(ids < 20, -100)
    return {
        "plain": ({"input_ids": ids, "labels": ids}, None),
        "ignored": ({"input_ids": ids, "labels": ignored}, None),
        "padded": ({"input_ids": ids, "labels": content, "attention_mask": mask}, real),
        "packed": (row, within),
        "items": ({"input_ids": ids, "labels": ignored, "num_items_in_batch": 77}, None),
        "shifted": ({"input_ids": ids, "shift_labels": ignored}, None),
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", cases())
def test_loss_and_gradients_are_those_of_all_logits(case, tied):
    inputs, kept = cases()[case]
    network = model(tied=tied)
    wanted = in_full(network, kept, **inputs)
    true = gradients(network, wanted)
    output = network(**inputs, skip_logits=True)
    assert output.logits is None
    assert abs(output.loss - wanted) < 1e-12
    found = gradients(network, output.loss)
    assert found.keys() == true.keys()
    for name, slope in true.items():
        assert (found[name] - slope).norm() <= 1e-12 * slope.norm(), name


def test_low_precision_loses_no_more_than_all_logits_do():
    (inputs, _), network = cases()["plain"], model(tied=False)
    exact = gradients(network, in_full(network, **inputs))
    low = model(tied=False, dtype=torch.bfloat16)
    errors = []
    for skip in (False, True):
        found = gradients(low, low(**inputs, skip_logits=skip).loss)["lm_head.weight"]
        errors.append(((found - exact["lm_head.weight"]).norm()).item())
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.filterwarnings("default::FutureWarning")  # PEFT's own
def test_a_wrapped_head_is_called_as_it_is():
    network = get_peft_model(model(tied=False), LoraConfig(target_modules=["lm_head"], r=2)).train()
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    inputs, _ = cases()["plain"]
    true = gradients(network, in_full(network, **inputs))
    found = gradients(network, network(**inputs, skip_logits=True).loss)
    assert "lora" in "".join(true)
    for name, slope in true.items():
        assert (found[name] - slope).norm() <= 1e-12 * slope.norm(), name


def test_the_field_asks_for_it_in_training_and_with_labels_alone():
    (inputs, _), network = cases()["plain"], model()
    network.config.skip_logits = True
    assert network(**inputs).logits is None
    assert network(**inputs, skip_logits=False).logits is not None
    assert network(inputs["input_ids"]).logits is not None
    assert network.eval()(**inputs).logits is not None


def test_nothing_to_predict_has_no_mean_and_no_gradient():
    network = model()
    ids = cases()["plain"][0]["input_ids"]
    loss = network(ids, labels=torch.full_like(ids, -100), skip_logits=True).loss
    assert loss.isnan()


def test_a_label_that_is_no_token_is_named():
    inputs = dict(cases()["plain"][0])
    inputs["labels"] = inputs["labels"] + WORDS
    with pytest.raises(ValueError, match=r"labels must be in \[0, 60\], or -100, got"):
        model()(**inputs, skip_logits=True)


def test_no_more_logits_exist_than_a_piece_has():
    network, seen = model(), []
    network.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits.numel()))
    network(**cases()["plain"][0], skip_logits=True)
    assert seen == [7 * WORDS] * 7 + [2 * WORDS]


def test_a_head_whose_parameters_are_replaced_in_a_call_is_refused():
    class Sharded(nn.Linear):  # as FSDP does to a head that it wraps alone
        def forward(self, x):
            return nn.functional.linear(x, self.weight.detach())

    network = model(tied=False)
    network.lm_head = Sharded(network.config.hidden_size, WORDS, bias=False).double()
    with pytest.raises(ValueError, match="skip_logits needs a head that computes with its own"):
        network(**cases()["plain"][0], skip_logits=True)


def test_training_takes_a_part_without_targets_where_the_field_asks_for_no_logits():
    from ssmzoo.training.objectives import CausalLM

    network = model()
    network.config.skip_logits = True
    objective = CausalLM(network, packs=False)
    batch = {"input_ids": cases()["plain"][0]["input_ids"]}
    batch["labels"] = torch.full_like(batch["input_ids"], -100)

    def forward(piece, **options):
        return network(**piece, **{**objective.options, **options})

    assert objective.loss_of(forward, batch, 0, 0) == 0


def test_the_bias_of_a_head_learns_too():
    (inputs, _), network = cases()["ignored"], model(tied=False)
    network.lm_head = nn.Linear(network.config.hidden_size, WORDS).double()
    true = gradients(network, in_full(network, **inputs))
    found = gradients(network, network(**inputs, skip_logits=True).loss)
    assert "lm_head.bias" in true
    assert found.keys() == true.keys()
    for name, slope in true.items():
        assert (found[name] - slope).norm() <= 1e-12 * slope.norm(), name


def test_labels_at_padding_are_the_callers():
    network, ids = model(), torch.arange(12).view(2, 6)
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    output = network(ids, attention_mask=mask, labels=ids)
    logits = output.logits[:, :-1].float().flatten(0, 1)
    wanted = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert abs(output.loss - wanted) < 1e-6
