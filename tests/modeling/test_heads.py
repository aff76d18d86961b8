"""What every family has around its mixer: norms, dropout, continuous inputs, heads, groups."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForTokenClassification

from ssmzoo import load_family
from ssmzoo.modeling import BatchNorm, Dropout, LayerState, Sequences
from ssmzoo.modeling.classifiers import pool
from ssmzoo.modeling.compat import CACHE, enable_gradient_checkpointing
from ssmzoo.modeling.packing import find_packing

FAMILY = load_family("longhorn")
SHAPES = [
    {"norm_type": "layer"},
    {"norm_type": "batch"},
    {"prenorm": False},
    {"prenorm": False, "norm_type": "batch", "intermediate_size": 48},
    {"intermediate_size": 48, "residual_in_fp32": False},
    {"norm_type": "none", "residual": False},
]


def build(kind, **fields):
    """Return a float64 model off its initial values, in evaluation mode."""
    torch.manual_seed(0)
    fields = {**FAMILY.tiny, "num_hidden_layers": 2, "pad_token_id": 0, **fields}
    model = getattr(FAMILY, f"{kind}_class")(FAMILY.config_class(**fields)).double()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand_like(tensor)
    return model.eval()


def documents(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 96, (length,), generator=generator) for length in lengths]


def left_padded(rows):
    length = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (length - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(length) >= length - len(row) for row in rows]).long()
    return ids, mask


def near(got, expected):
    return (got - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("fields", SHAPES, ids=lambda f: "-".join(map(str, f.values())))
@torch.no_grad()
def test_every_block_shape_keeps_the_five_forms(fields):
    model = build("causal_lm", **fields)
    rows = documents(9, 5)
    singly = [model(row[None]).logits[0] for row in rows]

    cache, stepped = None, []
    for token in rows[0]:
        output = model(token.view(1, 1), cache=cache, use_cache=True)
        cache = output.cache
        stepped.append(output.logits[0])
    assert near(torch.cat(stepped), singly[0])

    output = model(rows[0][None, :4], use_cache=True)
    rest = model(rows[0][None, 4:], cache=output.cache).logits
    assert near(torch.cat([output.logits, rest], dim=1)[0], singly[0])

    ids, mask = left_padded(rows)
    padded = model(ids, attention_mask=mask).logits
    assert near(padded[1, -5:], singly[1])

    packed = model(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 9, 14])).logits[0]
    assert near(packed, torch.cat(singly))


@torch.no_grad()
def test_without_norm_and_residual_a_layer_is_its_mixer():
    model = build("model", num_hidden_layers=1, norm_type="none", residual=False)
    (row,) = documents(6)
    hidden = model.embed_tokens(row[None])
    expected = model.layers[0].mixer(hidden, LayerState())
    assert torch.equal(model(row[None]).last_hidden_state, expected)
    assert model.bfloat16()(row[None]).last_hidden_state.dtype is torch.bfloat16


def test_batch_norm_learns_from_tokens_and_not_from_padding():
    model, again = (build("causal_lm", norm_type="batch").train() for _ in range(2))
    (row,) = documents(7)
    plain = model(row[None]).logits
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0]])
    ids = torch.full((1, 10), 3)
    ids[0, 2:9] = row
    padded = again(ids, attention_mask=mask).logits[:, 2:9]
    assert near(padded, plain)
    for mine, other in zip(model.buffers(), again.buffers(), strict=True):
        assert near(other.double(), mine.double())


def test_batch_norm_keeps_the_running_statistics_that_torch_keeps():
    own, theirs = BatchNorm(6, eps=1e-5).double(), nn.BatchNorm1d(6, eps=1e-5).double()
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 5, 6, dtype=torch.float64) + seed
        assert near(own(x), theirs(x.flatten(0, 1)).view_as(x))
    assert near(own.running_mean, theirs.running_mean)
    assert near(own.running_var, theirs.running_var)
    assert int(own.num_batches_tracked) == 3


def test_gradient_checkpointing_counts_a_batch_once():
    model = build("causal_lm", norm_type="batch").train()
    enable_gradient_checkpointing(model)
    ids = torch.stack(documents(6, 6))
    model(ids, labels=ids).loss.backward()
    counts = {int(m.num_batches_tracked) for m in model.modules() if isinstance(m, BatchNorm)}
    assert counts == {1}


def test_batch_norm_refuses_a_single_token():
    with pytest.raises(ValueError, match="two tokens or more"):
        build("causal_lm", norm_type="batch").train()(torch.tensor([[3]]))


def test_tied_dropout_drops_whole_features_of_each_sequence():
    torch.manual_seed(0)
    dropout = Dropout(0.5, tied=True)
    out = dropout(torch.ones(1, 12, 64), Sequences.of(torch.tensor([0, 5, 12]), 12))[0]
    first, second = out[:5], out[5:]
    assert (first == first[0]).all()
    assert (second == second[0]).all()
    assert (first[0] != second[0]).any()
    assert set(out.unique().tolist()) == {0.0, 2.0}
    loose = Dropout(0.5, tied=False)(torch.ones(1, 12, 64))[0]
    assert (loose != loose[0]).any()
    assert torch.equal(dropout.eval()(torch.ones(1, 2, 3)), torch.ones(1, 2, 3))


@torch.no_grad()
def test_others_turn_dropout_on_and_off():
    fields = {"dropout": 0.5, "embedding_dropout": 0.5, "drop_path_rate": 0.5}
    model, (row,) = build("causal_lm", **fields), documents(12)
    exact = model(row[None]).logits
    layers = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    assert len(layers) == 5  # of the embedding, and two of each block
    for layer in layers:  # as for an estimate of uncertainty
        layer.train()
        dropped = [not near(model(row[None]).logits, exact) for _ in range(40)]
        assert any(dropped) == (layer.p > 0)
        layer.eval()
    before = model(row[None, :-1], use_cache=True).cache
    for layer in layers:
        layer.train()
        steps = [model(row[None, -1:], cache=copy.deepcopy(before)).logits for _ in range(40)]
        assert any(not near(step, exact[:, -1:]) for step in steps) == (layer.p > 0)
        layer.eval()
    for layer in layers:  # as TRL does it
        layer.p = 0
    assert near(model.train()(row[None]).logits, exact)


@pytest.mark.parametrize("name", ["longhorn", "rtf"])
@torch.no_grad()
def test_steps_on_kernels_drop_too(name):
    torch.manual_seed(0)
    family = load_family(name)
    more = {"block": "hyena"} if name == "rtf" else {}
    config = family.config_class(**{**family.tiny, **more, "dropout": 0.5})
    model, (row,) = family.causal_lm_class(config).eval(), documents(12)
    before = model(row[None, :-1], use_cache=True).cache

    def step():
        return model(row[None, -1:], cache=copy.deepcopy(before)).logits

    exact = step()
    for layer in (m for m in model.modules() if isinstance(m, nn.Dropout) and m.p):
        layer.train()
        assert any(not torch.allclose(step(), exact, atol=1e-3) for _ in range(40)), layer
        layer.eval()
        assert torch.allclose(step(), exact, atol=1e-5)


def test_values_come_in_through_a_linear_layer():
    model = build("sequence_classification", input_channels=1, num_labels=3)
    values = torch.randn(2, 8, dtype=torch.float64)
    logits = model(input_values=values).logits
    assert logits.shape == (2, 3)
    assert torch.equal(model(input_values=values.unsqueeze(2)).logits, logits)
    embeds = model.model.embed_values(values.unsqueeze(2))
    assert torch.equal(model(inputs_embeds=embeds).logits, logits)
    assert model.get_input_embeddings() is None


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_sequence_is_classified_alike_alone_padded_and_packed(pooling):
    model = build("sequence_classification", pooling=pooling, num_labels=4, classifier_bias=True)
    rows = documents(9, 5)
    singly = torch.cat([model(row[None]).logits for row in rows])
    ids, mask = left_padded(rows)
    assert near(model(ids, attention_mask=mask).logits, singly)
    assert near(
        model(ids.flip(1), attention_mask=mask.flip(1)).logits[:1],
        model(rows[0].flip(0)[None]).logits,
    )
    packed = model(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 9, 14])).logits
    assert near(packed, singly)
    if pooling == "mean":
        hidden = model.model(rows[1][None]).last_hidden_state
        assert near(singly[1:], model.score(hidden.mean(dim=1)))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_packed_rows_with_padding_are_classified_sequence_by_sequence(pooling):
    model = build("sequence_classification", pooling=pooling, num_labels=4)
    rows = documents(5, 3, 6)
    singly = torch.cat([model(row[None]).logits for row in rows])
    ids = torch.zeros(2, 9, dtype=torch.long)
    ids[0, :8], ids[1, 3:] = torch.cat(rows[:2]), rows[2]
    mask = torch.tensor([[1] * 8 + [0], [0] * 3 + [1] * 6])
    positions = torch.tensor([[*range(5), *range(3), 0], [0] * 3 + [*range(6)]])
    assert near(model(ids, attention_mask=mask, position_ids=positions).logits, singly)
    given = {"attention_mask": mask[:1], "position_ids": positions[:1]}
    assert near(model(ids[:1], **given).logits, singly[:2])
    whole = model(ids[:1, :8].repeat(2, 1), position_ids=positions[:1, :8].repeat(2, 1)).logits
    assert near(whole, singly[:2].repeat(2, 1))


def test_mean_pooling_trains_alike_padded_and_packed():
    model = build("sequence_classification", pooling="mean", num_labels=4)
    rows, labels = documents(6, 3), torch.tensor([1, 3])
    ids, mask = left_padded(rows)
    padded = torch.autograd.grad(
        model(ids, attention_mask=mask, labels=labels).loss, list(model.parameters())
    )
    packed = torch.autograd.grad(
        model(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 6, 9]), labels=labels).loss,
        list(model.parameters()),
    )
    for mine, other in zip(padded, packed, strict=True):
        assert near(other, mine)


def test_mean_pooling_refuses_a_cache():
    model = build("sequence_classification", pooling="mean")
    (row,) = documents(5)
    cache = model(row[None], use_cache=True).cache
    with pytest.raises(ValueError, match="whole sequence"):
        model(row[None], cache=cache)


def test_regression_of_sequences_is_the_mean_squared_error():
    model = build("sequence_classification", num_labels=1, problem_type="regression")
    ids, labels = torch.stack(documents(6, 6)), torch.tensor([0.5, -1.0], dtype=torch.float64)
    output = model(ids, labels=labels)
    assert near(output.loss, (output.logits[:, 0] - labels).square().mean())


def test_a_classifier_of_any_name_has_its_loss():
    class Judge(FAMILY.sequence_classification_class):
        pass

    torch.manual_seed(0)
    judge = Judge(FAMILY.config_class(**FAMILY.tiny, num_labels=3))
    labels = torch.tensor([2, 0])
    output = judge(torch.stack(documents(5, 5)), labels=labels)
    expected = nn.functional.cross_entropy(output.logits, labels)
    torch.testing.assert_close(output.loss, expected, rtol=0, atol=0)


def test_tokens_are_classified_where_they_stand():
    model = build("token_classification", num_labels=5)
    rows = documents(6, 4)
    ids, mask = left_padded(rows)
    labels = torch.randint(0, 5, ids.shape)
    labels[0, 2] = -100
    output = model(ids, attention_mask=mask, labels=labels)
    counted = mask.bool() & (labels != -100)
    logs = output.logits.float().log_softmax(dim=-1)
    expected = -logs[counted].gather(1, labels[counted, None]).mean()
    assert math.isclose(output.loss.item(), expected.item(), rel_tol=1e-6)
    assert near(output.logits[1, 2:], model(rows[1][None]).logits[0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 5), (2, 6, 1)])
def test_labels_of_tokens_that_are_not_one_a_token_are_named(shape, padded):
    model = build("token_classification", num_labels=5)
    ids, mask = left_padded(documents(6, 4))
    with pytest.raises(ValueError, match=r"labels must have shape \[B, L\] = \[2, 6\], got \["):
        model(
            ids,
            attention_mask=mask if padded else None,
            labels=torch.zeros(shape, dtype=torch.long),
        )


def test_regression_of_tokens_leaves_out_padding_and_nan():
    model = build("token_classification", num_labels=1, problem_type="regression", input_channels=2)
    values = torch.randn(2, 6, 2, dtype=torch.float64)
    labels = torch.randn(2, 6, dtype=torch.float64)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    labels[1, 3] = math.nan
    output = model(input_values=values, attention_mask=mask, labels=labels)
    counted = mask.bool() & ~labels.isnan()
    expected = (output.logits[..., 0] - labels)[counted].square().mean()
    assert near(output.loss, expected)
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    with pytest.raises(ValueError, match="labels must have shape"):
        model(input_values=values, labels=labels[:, :5])


def test_regression_in_half_precision_sums_in_float32():
    model = build("token_classification", num_labels=1, problem_type="regression", input_channels=2)
    values = torch.randn(4, 3000, 2, dtype=torch.float64)
    labels = 30 * torch.ones(4, 3000, dtype=torch.float64)  # squares of 900: a sum beyond 65,504
    with torch.no_grad():
        exact = model(input_values=values, labels=labels).loss
        half = model.half()(input_values=values.half(), labels=labels.half()).loss
    assert half.dtype is torch.float32
    assert abs(half - exact) <= 2e-3 * exact


def test_a_pair_is_judged_by_both_documents_difference_and_product():
    model = build("pair_classification", pooling="mean", num_labels=2)
    first, second = documents(9, 5)
    output = model(first[None], pair_input_ids=second[None], labels=torch.tensor([1]))
    a, b = (model.model(x[None]).last_hidden_state.mean(dim=1) for x in (first, second))
    features = torch.cat([a, b, a - b, a * b], dim=1)
    expected = model.score(nn.functional.gelu(model.compare(features)))
    assert near(output.logits, expected)
    assert near(output.loss, nn.functional.cross_entropy(expected, torch.tensor([1])))
    padded = nn.functional.pad(second, (3, 2))[None]
    assert near(model(first[None], pair_input_ids=padded).logits, expected)
    with pytest.raises(ValueError, match="must have the dtype and batch size of"):
        model(first[None], pair_input_ids=padded.repeat(2, 1))
    with pytest.raises(ValueError, match="got none"):
        model(first[None])
    assert output.hidden_states is None
    shown = model(first[None], pair_input_ids=second[None], output_hidden_states=True)
    assert [tuple(x.shape[:2]) for x in shown.hidden_states] == [(2, 9)] * 3
    places = torch.arange(9)[None]
    with pytest.raises(TypeError, match="takes no position_ids: each row is one document"):
        model(first[None], pair_input_ids=second[None], position_ids=places)


@pytest.mark.parametrize(
    ("kind", "inputs", "shape"),
    [
        ("sequence_classification", ["input_ids"], (2,)),
        ("token_classification", ["input_ids"], (2, 5)),
        ("pair_classification", ["input_ids", "pair_input_ids"], (2,)),
    ],
)
def test_a_label_outside_the_classes_is_named(kind, inputs, shape):
    model = build(kind, num_labels=3)
    ids = dict.fromkeys(inputs, torch.stack(documents(5, 5)))
    labels = torch.full(shape, 2)
    assert model(**ids, labels=labels).loss.isfinite()
    with pytest.raises(TypeError, match=r"labels must be int64, got torch.int32"):
        model(**ids, labels=labels.int())
    labels[-1] = 3
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\], or -100, got 3"):
        model(**ids, labels=labels)


def test_a_token_classifier_loads_with_its_statistics(tmp_path):
    model = build("token_classification", norm_type="batch", num_labels=3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float64)
    state = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_named_groups_do_not_decay_and_take_their_own_rate(monkeypatch):
    mixer = type(build("causal_lm").model.layers[0].mixer)
    monkeypatch.setattr(mixer, "param_group_names", {"D": "ssm", "dt_bias": "dt"})
    model = build("causal_lm")
    groups = model.param_groups(lr=1.0, weight_decay=0.1, groups={"dt": {"lr": 0.5}})
    found = {g.get("name"): g for g in groups[2:]}
    assert found["ssm"]["lr"] == 1.0
    assert found["ssm"]["weight_decay"] == 0.0
    assert found["dt"]["lr"] == 0.5
    assert len(found["dt"]["params"]) == 2
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    torch.optim.AdamW(groups)
    apart = {
        "ssm": {"lr": 0.5, "weight_decay": 0.3},
        "D": {"lr": 2.0},
        "A_log": {"weight_decay": 1},
    }
    with pytest.raises(LookupError, match=r"no parameter group 'A_log'"):
        model.param_groups(lr=1.0, weight_decay=0.1, groups=apart)  # no parameter of it
    del apart["A_log"]
    assert [len(g["params"]) for g in model.param_groups(lr=1.0, weight_decay=0.1, groups={})] == [
        len(g["params"]) for g in groups
    ]
    groups = model.param_groups(lr=1.0, weight_decay=0.1, groups=apart)
    found = {g.get("name"): g for g in groups[2:]}
    assert (found["D"]["lr"], found["D"]["weight_decay"]) == (2.0, 0.3)
    assert found["D"]["params"] == [layer.mixer.D for layer in model.model.layers]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    with pytest.raises(LookupError, match=r"no parameter group 'sm'; did you mean 'ssm'\?"):
        model.param_groups(lr=1.0, weight_decay=0.1, groups={"sm": {"lr": 0.5}})
    with pytest.raises(LookupError, match="no setting 'rate'"):
        model.param_groups(lr=1.0, weight_decay=0.1, groups={"ssm": {"rate": 0.5}})


@torch.no_grad()
def test_reset_rows_start_anew_and_the_others_continue():
    model = build("causal_lm")
    rows = torch.stack(documents(6, 6, 6))
    cache = model(rows[:, :3], use_cache=True).cache
    cache.reset_rows(torch.tensor([1]))
    logits = model(rows[:, 3:], cache=cache).logits
    whole = model(rows).logits[:, 3:]
    assert near(logits[[0, 2]], whole[[0, 2]])
    assert near(logits[1], model(rows[1:2, 3:]).logits[0])
    cache.reset_rows([True, False, True])
    cache.reset_rows([])
    logits = model(rows[:, :2], cache=cache).logits
    assert near(logits[[0, 2]], model(rows[:, :2]).logits[[0, 2]])


class _LooksAhead(FAMILY.config_class):
    model_type = "looks_ahead"

    @property
    def causal(self):
        return False


def test_a_model_without_an_embedding_has_none_to_resize():
    model = build("sequence_classification", input_channels=2, num_labels=3)
    with pytest.raises(ValueError, match=r"needs an embedding of tokens.*input_channels is 2"):
        model.resize_token_embeddings(10)


@pytest.mark.parametrize("kind", ["token_classification", "pair_classification"])
def test_heads_without_a_cache_take_use_cache_false_and_refuse_true(kind):
    family = load_family("s4")
    model = getattr(family, f"{kind}_class")(family.config_class(**family.tiny)).eval()
    ids = {"input_ids": torch.tensor([[3, 4]])}
    if kind == "pair_classification":
        ids["pair_input_ids"] = torch.tensor([[5, 6]])
    assert model(**ids, use_cache=False).logits.equal(model(**ids).logits)
    with pytest.raises(ValueError, match="use_cache must be None or False, got True"):
        model(**ids, use_cache=True)
    given = model.model(ids["input_ids"], use_cache=True)
    cache = getattr(given, CACHE)
    for name in ("cache", "past_key_values"):
        assert model(**ids, **{name: None}).logits.equal(model(**ids).logits)
        with pytest.raises(ValueError, match=f"{name} must be left out, got a StateCache"):
            model(**ids, **{name: cache})
    assert cache.seen_tokens == 2


def test_a_bidirectional_model_has_no_cache_and_generates_nothing():
    config = _LooksAhead(**FAMILY.tiny)
    model = FAMILY.model_class(config)
    assert model(torch.tensor([[3, 4]])).cache is None
    with pytest.raises(ValueError, match="bidirectional and cannot have a cache"):
        model(torch.tensor([[3, 4]]), use_cache=True)
    with pytest.raises(ValueError, match="is bidirectional"):
        FAMILY.causal_lm_class(config)


@pytest.mark.parametrize(
    ("fields", "inputs", "message"),
    [
        ({"input_channels": 1}, {"input_values": torch.ones(1, 4).long()}, "floating point"),
        ({}, {"input_values": torch.zeros(1, 4)}, "takes input_ids, got input_values"),
        ({"input_channels": 2}, {"input_ids": torch.ones(1, 4).long()}, "takes input_values"),
        ({"input_channels": 2}, {"input_values": torch.zeros(1, 4)}, r"\[B, L, 2\], got \[1, 4\]"),
        (
            {"input_channels": 1},
            {"input_values": torch.zeros(1, 0)},
            "at least one token, got L = 0",
        ),
        ({}, {}, "exactly one of"),
    ],
)
def test_inputs_of_the_wrong_kind_are_refused(fields, inputs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build("model", **fields)(**inputs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dropout", 1.0),
        ("embedding_dropout", -0.1),
        ("intermediate_size", 0),
        ("input_channels", 0),
    ],
)
def test_fields_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        FAMILY.config_class(**{field: value})


def test_a_language_model_of_values_is_refused():
    with pytest.raises(ValueError, match="takes continuous values"):
        build("causal_lm", input_channels=1)


def test_the_mean_of_a_long_half_precision_row_does_not_overflow():
    hidden = torch.full((2, 16000, 3), 10.0, dtype=torch.float16)
    mask = torch.ones(2, 16000, dtype=torch.long)
    mask[0, 0] = 0
    packing = find_packing(2, 16000, 0, mask, None, None, None)
    assert torch.equal(pool(hidden, packing, "mean"), torch.full((2, 3), 10.0).half())
