"""Continuous batching: each answer is that of ``generate`` alone, whoever else is answered."""

from __future__ import annotations

import copy
import gc
import logging
import time

import pytest
import torch
from tests.stock_models import tiny
from tests.zoo import OURS
from tests.zoo import language_model as build
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

import ssmzoo
from ssmzoo import load_family
from ssmzoo.modeling import QuantizedStateCache, StateCache, load_state, prefill
from ssmzoo.modeling.batching.manager import PIECE
from ssmzoo.modeling.batching.prefixes import Prefixes

# DSS's tiny model has modes that grow and ends after 128 tokens
GENERATES = [name for name in OURS if load_family(name).causal_lm_class and name != "dss"]
newer = pytest.mark.skipif(
    not hasattr(ContinuousBatchingManager, "pause"),
    reason="transformers has no pauses yet, and returns one of several answers",
)
ZERO = torch.tensor([0])
GREEDY = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
DRAWN = GenerationConfig(
    max_new_tokens=9, do_sample=True, temperature=0.9, top_k=20, eos_token_id=None, pad_token_id=0
)


def growing():
    """Return a hybrid whose attention keeps all tokens."""
    kinds = load_family("hybrid").tiny["kinds"]
    return build("hybrid", kinds={**kinds, "attention": {"num_attention_heads": 4}})


@pytest.fixture(scope="module")
def model():
    return build("longhorn")


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """transformers logs each request that fails, with its traceback."""
    caplog.set_level(logging.CRITICAL, "ContinuousBatchingLogger")


def prompts_of(model, count: int = 10) -> list[list[int]]:
    """Return prompts of up to 300 tokens, two of which begin like others."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 300, (count,), generator=generator).tolist()
    high = model.get_input_embeddings().num_embeddings
    prompts = [torch.randint(3, high, (n,), generator=generator).tolist() for n in lengths]
    longest = max(prompts, key=len)
    prompts[-2] = longest[: len(longest) - 20] + prompts[-2][:30]
    prompts[-1] = [*longest, 5]
    return prompts


def alone(model, prompt: list[int], config: GenerationConfig = GREEDY, seed: int | None = None):
    """Return what ``generate`` answers, and the log-probabilities of that."""
    if seed is not None:
        torch.manual_seed(seed)
    output = model.generate(
        torch.tensor([prompt]),
        generation_config=config,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(prompt) :]
    scores = torch.cat(output.logits).log_softmax(-1)
    return tokens.tolist(), scores.gather(1, tokens[:, None]).flatten()


def same_as_alone(model, prompts: list[list[int]], **options) -> None:
    config = ContinuousBatchingConfig(return_logprobs=True, **options)
    answers = model.generate_batch(
        prompts, generation_config=GREEDY, continuous_batching_config=config
    )
    assert len(answers) == len(prompts)
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        tokens, scores = alone(model, prompt)
        assert answer.error is None
        assert answer.prompt_ids == prompt
        assert answer.generated_tokens == tokens
        # float32 sums over a prompt that is read in other pieces
        torch.testing.assert_close(torch.tensor(answer.logprobs), scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GENERATES)
def test_answers_are_those_of_generate(name):
    family_model = build(name)
    same_as_alone(family_model, prompts_of(family_model), max_requests_per_batch=3)


def test_answers_of_a_growing_hybrid_are_those_of_generate():
    hybrid = growing()
    same_as_alone(hybrid, prompts_of(hybrid), max_requests_per_batch=3)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_answers_of_accelerated_models_are_those_of_generate(name):
    stock = tiny(name)
    ssmzoo.accelerate(stock)
    same_as_alone(stock, prompts_of(stock), max_requests_per_batch=3)


def test_attention_of_transformers_is_refused():
    stock = tiny("bamba")
    ssmzoo.accelerate(stock)
    with pytest.raises(ValueError, match="BambaForCausalLM has attention"):
        stock.generate_batch([[4, 5, 6]])


def test_prompts_are_read_in_pieces_between_steps(model):
    options = {"max_batch_tokens": 16, "allow_block_sharing": False}
    same_as_alone(model, prompts_of(model, 5), **options)


def results(manager, names, seconds: float = 60.0) -> dict:
    """Wait for the answers to some requests; a hang fails."""
    found, end = {}, time.monotonic() + seconds
    while names - found.keys():
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found[result.request_id] = result
        assert time.monotonic() < end
    return found


@pytest.fixture
def manager(model):
    config = ContinuousBatchingConfig(max_requests_per_batch=4)
    with model.continuous_batching_context_manager(
        generation_config=DRAWN, continuous_batching_config=config
    ) as found:
        yield found


def test_what_is_drawn_depends_on_the_seed_alone(model, manager):
    prompts = {f"{seed}": [5, 6, 7 + seed] for seed in range(6)}
    for name, prompt in prompts.items():
        manager.add_request(prompt, request_id=name, seed=int(name))
    answers = results(manager, prompts.keys())
    for name, prompt in prompts.items():
        assert answers[name].generated_tokens == alone(model, prompt, DRAWN, int(name))[0]


def test_a_request_may_have_its_own_temperature(model, manager):
    manager.add_request([5, 6, 7], request_id="cold", temperature=1e-4)
    manager.add_request([5, 6, 7], request_id="other")
    answers = results(manager, {"cold", "other"})
    assert answers["cold"].generated_tokens == alone(model, [5, 6, 7])[0]


def test_what_generate_fills_in_and_forbids_counts(model):
    config = GenerationConfig(
        do_sample=True, repetition_penalty=1.5, no_repeat_ngram_size=2, max_new_tokens=12
    )
    with model.continuous_batching_context_manager(generation_config=config) as found:
        names = [found.add_request([5, 6, 7], seed=seed) for seed in range(3)]
        answers = results(found, {*names})
    for seed, name in enumerate(names):
        assert answers[name].generated_tokens == alone(model, [5, 6, 7], config, seed)[0]


def test_torchs_seed_is_that_of_the_answers(model):
    told = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        answers = model.generate_batch([[5, 6, 7], [8, 9]], generation_config=DRAWN)
        told.append([answer.generated_tokens for answer in answers.values()])
    assert told[0] == told[1] != told[2]


@newer
def test_several_answers_of_one_prompt_differ_and_come_again(model):
    config = GenerationConfig(**{**DRAWN.to_diff_dict(), "num_return_sequences": 3})
    options = ContinuousBatchingConfig(seed=4, max_requests_per_batch=2)
    first, second = (
        model.generate_batch(
            [[5, 6, 7], [8, 9]], generation_config=config, continuous_batching_config=options
        )
        for _ in range(2)
    )
    told = {name: answer.generated_tokens for name, answer in first.items()}
    assert len(told) == 6
    assert len({*map(tuple, told.values())}) == 6
    assert told == {name: answer.generated_tokens for name, answer in second.items()}


def test_tokens_stream(model, manager):
    manager.add_request([5, 6, 8], request_id="streams", streaming=True, seed=3)
    seen = [result.generated_tokens for result in manager.request_id_iter("streams")]
    whole = alone(model, [5, 6, 8], DRAWN, 3)[0]
    assert seen == [whole[: n + 1] for n in range(9)]


def test_an_answer_ends_at_its_end_token(model):
    tokens = alone(model, [5, 6, 7])[0]
    (answer,) = model.generate_batch(
        [[5, 6, 7]], generation_config=GenerationConfig(eos_token_id=tokens[3], max_new_tokens=9)
    ).values()
    assert answer.generated_tokens == tokens[: tokens.index(tokens[3]) + 1]


def test_cancelled_requests_leave_and_disturb_nobody(model, manager):
    for n in range(12):
        manager.add_request([5] * (1 + 150 * (n % 3)), request_id=f"gone {n}", max_new_tokens=10**6)
    manager.add_request([5, 6, 7], request_id="stays", seed=1)
    for n in range(12):
        manager.cancel_request(f"gone {n}")
    answers = results(manager, {"stays"})
    assert answers["stays"].generated_tokens == alone(model, [5, 6, 7], DRAWN, 1)[0]
    processor = manager.batch_processor
    assert not processor.has_pending_requests()
    assert not processor._samplers


BAD = {
    "empty": ([], {}, "at least one token"),
    "high": ([5, 10**6], {}, "got 1000000"),
    "low": ([5, -1], {}, "got -1"),
    "argument": ([5], {"nonsense": 1}, "no argument 'nonsense'"),
    "turned": ([[5, 6]], {}, "must be a list of tokens"),
    "cold": ([5], {"temperature": 0.0}, "temperature"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_fails_alone(model, manager, case):
    prompt, options, message = BAD[case]
    manager.add_request([5, 6, 7], request_id="good", seed=1)
    manager.add_request(prompt, request_id="bad", **options)
    answers = results(manager, {"good", "bad"})
    assert message in answers["bad"].error
    assert answers["good"].generated_tokens == alone(model, [5, 6, 7], DRAWN, 1)[0]


@newer
def test_an_error_in_a_prompt_fails_its_request_alone(model, monkeypatch):
    forward = type(model).forward

    def fails(self, input_ids, **rest):
        if 77 in input_ids:
            raise RuntimeError("no 77")
        return forward(self, input_ids, **rest)

    monkeypatch.setattr(type(model), "forward", fails)
    prompts = [[5, 6], [5, 77], [7, 8]]
    config = GenerationConfig(**{**DRAWN.to_diff_dict(), "num_return_sequences": 2})
    answers = [*model.generate_batch(prompts, generation_config=config).values()]
    assert [answer.error for answer in answers] == [None] * 2 + ["no 77"] * 2 + [None] * 2


def test_an_error_in_a_step_ends_all_requests_and_the_thread(model, monkeypatch):
    forward, calls = type(model).forward, []

    def fails(self, input_ids, **rest):
        calls.append(input_ids.shape)
        if len(calls) == 5:
            raise RuntimeError("out of luck")
        return forward(self, input_ids, **rest)

    monkeypatch.setattr(type(model), "forward", fails)
    answers = model.generate_batch([[5, 6], [7, 8]], generation_config=GREEDY)
    assert [answer.error for answer in answers.values()] == ["out of luck"] * 2


def test_states_that_grow_need_a_bound_on_tokens():
    hybrid = growing()
    endless = GenerationConfig(do_sample=False, eos_token_id=None)
    (answer,) = hybrid.generate_batch([[5, 6]], generation_config=endless).values()
    assert "max_new_tokens must be given" in answer.error
    config = ContinuousBatchingConfig(max_memory_percent=1e-5)
    long = GenerationConfig(do_sample=False, max_new_tokens=10**7)
    (answer,) = hybrid.generate_batch(
        [[5, 6]], generation_config=long, continuous_batching_config=config
    ).values()
    assert "raise max_memory_percent" in answer.error


def test_a_growing_state_is_as_long_as_its_longest_request():
    hybrid = growing()
    with hybrid.continuous_batching_context_manager(
        generation_config=GREEDY,
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=2),
    ) as found:
        lengths = []
        for turn in range(12):  # the rows of two requests at a time overlap
            found.add_request([5, 6, 7], request_id=f"{turn}", max_new_tokens=5 + turn % 3)
        names = {f"{turn}" for turn in range(12)}
        rows, step = found.batch_processor._rows, found.batch_processor._rows.step

        def measured():
            logits = step()
            lengths.append(max(s["keys"].shape[1] for s in rows.cache.get_states() if "keys" in s))
            return logits

        rows.step = measured
        results(found, names)
    assert max(lengths[2:]) <= 3 + 7 + 7


def test_padding_for_longer_rows_is_not_kept_and_counts_as_memory(monkeypatch):
    from ssmzoo.modeling.batching import manager as module

    hybrid = growing()
    kept = []
    put = Prefixes.put
    monkeypatch.setattr(
        Prefixes,
        "put",
        lambda self, tokens, cache: (
            kept.append((len(tokens), cache.nbytes)) or put(self, tokens, cache)
        ),
    )
    most = []
    step = module.DecodingRows.step

    def measured(self):
        logits = step(self)
        most.append(self.cache.nbytes)
        return logits

    monkeypatch.setattr(module.DecodingRows, "step", measured)
    room = 3.2 * hybrid(torch.zeros(1, 330, dtype=torch.long), use_cache=True).cache.nbytes
    monkeypatch.setattr(module, "free_bytes", lambda device: room / (0.6 * 0.75))
    prompts = [[5] * 320, *([6, n] for n in range(3, 12))]
    same_as_alone(hybrid, prompts)
    assert max(most) <= room
    sizes = {
        hybrid(torch.zeros(1, n, dtype=torch.long), use_cache=True).cache.nbytes: n for n, _ in kept
    }
    assert {size for _, size in kept} <= sizes.keys()


def test_memory_bounds_how_many_are_answered_at_once(model, monkeypatch):
    from ssmzoo.modeling.batching import manager as module

    monkeypatch.setattr(module, "free_bytes", lambda device: 2.5 * row / (0.6 * 0.75))
    row = model(torch.tensor([[5]]), use_cache=True).cache.nbytes
    most = []
    step = module.DecodingRows.step

    def measured(self):
        most.append(len(self))
        return step(self)

    monkeypatch.setattr(module.DecodingRows, "step", measured)
    same_as_alone(model, [[5, 6, n] for n in range(7, 12)])
    assert max(most) == 2
    monkeypatch.setattr(module, "free_bytes", lambda device: row)
    with pytest.raises(ValueError, match="max_memory_percent must leave room"):
        model.generate_batch([[5]], generation_config=GREEDY)


def test_shared_beginnings_are_read_once(model, monkeypatch):
    from ssmzoo.modeling.batching import manager as module

    read = []
    for name in ("read", "finish"):
        own = getattr(module.DecodingRows, name)

        def measured(self, tokens, cache, own=own):
            read.append(len(tokens))
            return own(self, tokens, cache)

        monkeypatch.setattr(module.DecodingRows, name, measured)
    shared = torch.arange(2 * PIECE + 40).remainder(90).tolist()
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        read.clear()  # a state was measured
        answers = []
        for prompt in ([*shared, 5], [*shared, 6]):
            name = manager.add_request(prompt)
            answers.append(results(manager, {name})[name].generated_tokens)
            assert answers[-1] == alone(model, prompt)[0]
        assert read == [PIECE, PIECE, 41, 41]
        turn = [*shared, 6, *answers[-1], 7]  # a conversation goes on
        name = manager.add_request(turn)
        assert results(manager, {name})[name].generated_tokens == alone(model, turn)[0]
        assert read[4:] == [2]


@newer
def test_states_of_other_weights_are_dropped():
    changed = build("longhorn")
    prompt = [5, 6] * PIECE
    with changed.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        results(manager, {manager.add_request([*prompt, 7])})
        with manager.pause(), torch.no_grad():
            changed.get_output_embeddings().weight.mul_(-1)
            changed.model.layers[0].mixer.out_proj.weight.mul_(2)
        name = manager.add_request([*prompt, 7])
        assert results(manager, {name})[name].generated_tokens == alone(changed, [*prompt, 7])[0]


@pytest.mark.parametrize("kind", [None, QuantizedStateCache])
def test_a_prompt_from_a_file_is_not_read_again(model, monkeypatch, tmp_path, kind):
    from ssmzoo.modeling.batching import manager as module

    read, own = [], module.DecodingRows.finish

    def finish(self, tokens, cache):
        read.append(len(tokens))
        return own(self, tokens, cache)

    monkeypatch.setattr(module.DecodingRows, "finish", finish)
    prompt = torch.arange(50).remainder(90).tolist()
    prefill(model, torch.tensor([prompt])).save_pretrained(tmp_path)
    config = copy.deepcopy(GREEDY)
    config.cache_implementation = kind and "quantized"
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        manager.share(load_state(tmp_path, model))
        ask = [*prompt, 5, 6]
        name = manager.add_request(ask)
        tokens = results(manager, {name})[name].generated_tokens
        assert read == [3]  # the last token of the prompt was not read
        assert type(manager.batch_processor._new_cache()) is (kind or StateCache)
        kept = [*manager.batch_processor._prefixes._held.values()]
        assert {(type(cache), cache.seen_tokens >= 49) for cache in kept} == {
            (kind or StateCache, True)
        }
        if kind is None:
            assert tokens == alone(model, ask)[0]
        assert len(tokens) == GREEDY.max_new_tokens


@newer
def test_only_prompts_of_this_model_as_it_is_are_shared():
    changed, other, prompt = build("longhorn"), build("longhorn"), torch.tensor([[5, 6] * PIECE])
    with changed.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        with pytest.raises(ValueError, match="must have been read by the model of this manager"):
            manager.share(prefill(other, prompt))
        with pytest.raises(ValueError, match=r"one row without padding, got .* \[2, 256\]"):
            manager.share(prefill(changed, prompt.expand(2, -1)))
        with pytest.raises(ValueError, match="one row without padding"):
            manager.share(prefill(changed, prompt, torch.ones_like(prompt).index_fill(1, ZERO, 0)))
        with pytest.raises(TypeError, match="what prefill or load_state returns, got a str"):
            manager.share("my-prompt")
        before = prefill(changed, prompt)
        manager.share(before)
        with manager.pause(), torch.no_grad():
            changed.model.layers[0].mixer.out_proj.weight.mul_(2)
            manager.share(prefill(changed, torch.tensor([[5, 6, 7, 8]])))
        with pytest.raises(RuntimeError, match="weights changed since it read this prompt"):
            manager.share(before)
        ask = [*prompt[0].tolist(), 7]
        name = manager.add_request(ask)
        assert results(manager, {name})[name].generated_tokens == alone(changed, ask)[0]
        assert (5, 6, 7) in manager.batch_processor._prefixes._held
    unshared = ContinuousBatchingConfig(allow_block_sharing=False)
    with (
        changed.continuous_batching_context_manager(
            generation_config=GREEDY, continuous_batching_config=unshared
        ) as manager,
        pytest.raises(ValueError, match="allow_block_sharing=False shares no prompts"),
    ):
        manager.share(prefill(changed, prompt))


def test_a_kept_manager_knows_no_state_of_other_weights():
    changed, prompt = build("longhorn"), [5, 6] * PIECE
    for _ in range(2):
        answers = changed.generate_batch(
            [prompt], generation_config=GREEDY, persistent_manager=True
        )
        tokens = [x.generated_tokens for x in answers.values()]
        assert tokens == [alone(changed, prompt)[0]]
        changed.model.layers[0].mixer.out_proj.weight.data.mul_(-2)


def test_a_manager_is_kept_and_begins_again(model):
    for _ in range(2):
        answers = model.generate_batch([[5, 6]], generation_config=GREEDY, persistent_manager=True)
        assert [x.generated_tokens for x in answers.values()] == [alone(model, [5, 6])[0]]
    model.destroy_cached_continuous_batching_manager()


def live_tensors():
    gc.collect()
    return sum(isinstance(kept, torch.Tensor) for kept in gc.get_objects())


def test_many_requests_with_cancels_and_errors_leave_nothing_behind(model):
    generator = torch.Generator().manual_seed(0)
    draw = lambda high: int(torch.randint(high, (), generator=generator))  # noqa: E731
    config = ContinuousBatchingConfig(max_requests_per_batch=16, allow_block_sharing=False)
    left = []
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=config
    ) as manager:
        for half in (range(500), range(500, 1000)):
            wanted = set()
            for n in half:
                name, kind = f"{n}", draw(10)
                prompt = [] if kind == 0 else [3 + draw(90) for _ in range(1 + draw(40))]
                manager.add_request(prompt, request_id=name, max_new_tokens=1 + draw(20))
                if kind == 1:
                    manager.cancel_request(name)
                else:
                    wanted.add(name)
            answers = results(manager, wanted)
            assert sum(a.error is not None for a in answers.values()) > 10
            processor = manager.batch_processor
            assert processor._rows.cache is None
            assert not processor.has_pending_requests()
            assert not processor._samplers
            left.append(live_tensors())
    assert left[1] <= left[0]


def test_prefixes_keep_what_was_used_last(model):
    def state(*tokens):
        return model(torch.tensor([tokens]), use_cache=True).cache

    size = state(1).nbytes
    kept = Prefixes(2 * size)
    kept.put([1, 2], state(1, 2))
    kept.put([1, 2, 3], state(1, 2, 3))
    assert kept.longest([1, 2, 3])[0] == 2  # the last token's logits are wanted
    kept.put([4], state(4))  # in place of the one not asked for
    assert (len(kept), kept.nbytes) == (2, 2 * size)
    assert kept.longest([1, 2, 3, 4])[0] == 2
    assert kept.longest([7]) == (0, None)
    _, copied = kept.longest([4, 5])
    before = copy.deepcopy(copied).get_states()
    model(torch.tensor([[5]]), cache=copied)
    _, again = kept.longest([4, 5])
    for held, old in zip(again.get_states(), before, strict=True):
        assert all(held[name].equal(old[name]) for name in old)
    Prefixes(size - 1).put([1], state(1))
    kept.clear()
    assert (len(kept), kept.nbytes) == (0, 0)


def test_a_conversation_goes_on_from_the_state_of_its_own_row(model):
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    config = ContinuousBatchingConfig(return_logprobs=True)
    with model.continuous_batching_context_manager(
        generation_config=GREEDY, continuous_batching_config=config
    ) as manager:
        asked = {manager.add_request(prompt): prompt for prompt in prompts}
        answers = results(manager, {*asked})
        assert len(manager.batch_processor._prefixes) == len(prompts)
        for name, prompt in asked.items():
            turn = [*prompt, *answers[name].generated_tokens, 3]
            again = manager.add_request(turn)
            answer, (tokens, scores) = results(manager, {again})[again], alone(model, turn)
            assert answer.generated_tokens == tokens
            torch.testing.assert_close(torch.tensor(answer.logprobs), scores, rtol=1e-4, atol=1e-5)


@newer
def test_a_state_of_several_weights_is_not_kept():
    changed = build("longhorn")
    with changed.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        name = manager.add_request([5, 6, 7], streaming=True, max_new_tokens=1000)
        answers = manager.request_id_iter(name)
        next(answers)
        with manager.pause(), torch.no_grad():
            assert name in manager.batch_processor._requests.active
            changed.model.layers[0].mixer.out_proj.weight.mul_(-2)
        *_, last = answers
        assert last.is_finished()
        assert len(manager.batch_processor._prefixes) == 0
