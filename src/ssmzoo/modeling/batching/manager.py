"""transformers' manager of continuous batching, over states in place of pages of attention.

A request is a row: its prompt is read alone, in pieces between the steps of all others, and then it
joins the batch that decodes. A state has a fixed size, so nothing is paged, moved or recomputed; a
request waits until its state has room. What transformers does with a batch of pages,
:class:`_Processor` does with rows; queues, results, streaming, cancelling and pauses are
transformers'.
"""

from __future__ import annotations

import copy
import itertools
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from ssmzoo.modeling.batching.prefixes import Prefixes
from ssmzoo.modeling.batching.rows import DecodingRows, tokens_read
from ssmzoo.modeling.batching.sampling import Sampler
from ssmzoo.modeling.cache import RecurrentCache, StateCache, backbone_of
from ssmzoo.modeling.prompt import CHANGED, PromptState
from ssmzoo.modeling.quantized_cache import QuantizedStateCache
from ssmzoo.modeling.state_memory import free_bytes, state_size

PIECE = 128  # tokens between two states of a prompt that are kept
BETWEEN_STEPS = 512  # tokens of prompts that are read while others wait for their next one
MOST_ROWS, MEMORY = 64, 0.6  # where the configuration leaves them open
KEPT_SHARE = 0.25  # of the memory for states: those of prompts


class StateManager(ContinuousBatchingManager):
    """Answers requests by a model that keeps a state.

    Of its configuration count ``max_requests_per_batch``, ``max_memory_percent`` (of free memory,
    for states), ``max_batch_tokens`` (of prompts, between two steps), ``allow_block_sharing``
    (prompts that begin alike are read once), ``return_logprobs``, ``seed`` and ``max_queue_size``.

    ``add_request`` also takes fields of ``GenerationConfig`` for its request alone, and ``seed``:
    the answer is that of ``generate`` after ``torch.manual_seed(seed)``. Without it seeds are drawn
    by torch, or go up from the configuration's.
    """

    def __init__(
        self, model: Any, generation_config: GenerationConfig, config: ContinuousBatchingConfig
    ) -> None:
        # transformers' own looks for pages of attention
        self.model = model.eval()
        self.generation_config = _completed(model, generation_config)
        self.continuous_batching_config = config
        self.num_return_sequences = self.generation_config.num_return_sequences or 1
        seed = int(torch.randint(2**32, ())) if config.seed is None else config.seed
        self.seeds = itertools.count(seed)  # of requests that bring none
        self.input_queue = queue.Queue(config.max_queue_size)
        self.prompts: dict[tuple[int, ...], PromptState] = {}  # of share, until the next request
        self.cancel_queue = queue.Queue()
        self.output_router = OutputRouter()
        self.background_thread_status = BackgroundThreadStatus()
        self.distributed_helper = DistributedHelper(None, None)
        self.is_tp_driver = True
        self.batch_processor: Any = None
        self.warmed_up = False
        self._generation_thread = self._original_attn_impl = None
        self._request_counter, self._request_lock = 0, threading.Lock()
        self._wake_up_loop = self._has_new_requests = threading.Event()  # 5.17 has the other name
        self._use_prefix_sharing = config.allow_block_sharing

    @classmethod
    def of(
        cls,
        model: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,  # of pages
    ) -> StateManager:
        """Return what answers a model's requests; arguments as of ``init_continuous_batching``."""
        kept = getattr(model, "_cached_continuous_batching_manager", None)
        if isinstance(kept, StateManager):
            return kept
        return cls(
            model,
            generation_config or model.generation_config,
            continuous_batching_config or ContinuousBatchingConfig(),
        )

    def share(self, prompt: PromptState) -> None:
        """Let requests that begin with a prompt that was read start behind it.

        It is kept like those of other requests, as long as there is room and it is used.

        Args:
            prompt: What ``prefill`` or ``load_state`` of ``ssmzoo.modeling`` returned, of one row.

        Raises:
            ValueError: Another model read it, it has several rows, or nothing is shared.
            RuntimeError: The weights changed since.
            TypeError: It is no such prompt.
        """
        if not isinstance(prompt, PromptState):
            raise TypeError(
                f"prompt must be what prefill or load_state returns, got a {type(prompt).__name__}"
            )
        if prompt.model is not self.model:
            raise ValueError(
                "prompt must have been read by the model of this manager; call prefill or "
                "load_state with that"
            )
        if len(prompt.input_ids) != 1 or not prompt.attention_mask.all():
            raise ValueError(
                "prompt must be one row without padding, got input_ids of shape "
                f"{list(prompt.input_ids.shape)}"
            )
        if not self.continuous_batching_config.allow_block_sharing:
            raise ValueError("allow_block_sharing=False shares no prompts; leave it out")
        if not prompt.is_current():
            raise RuntimeError(CHANGED)
        self.prompts[tuple(prompt.input_ids[0, :-1].tolist())] = prompt

    @contextmanager
    def pause(self) -> Generator[None]:
        """Let the caller change the weights; states of those before are shared no more."""
        with super().pause():
            try:
                yield
            finally:
                self.batch_processor.forget_states()

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is None:
            self.batch_processor = _Processor(self)
        else:
            self.batch_processor.reset()
        return self.batch_processor


class _Requests:
    """Requests that wait, the oldest first, and those that are being answered, by their names.

    Its methods without a line of their own are those of transformers' ``Scheduler``.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, RequestState] = {}
        self.active: dict[str, RequestState] = {}
        self._cancelled: set[str] = set()

    def add_waiting_request(self, request: RequestState) -> None:
        self.waiting[request.request_id] = request

    def set_request_cancellation(self, name: str) -> None:
        self._cancelled.add(name)

    def drop_cancelled(self) -> None:
        """Remove the requests that were cancelled."""
        for name in self._cancelled:
            self.waiting.pop(name, None)
            self.active.pop(name, None)
        self._cancelled.clear()

    def take_oldest(self) -> RequestState:
        """Let the oldest request that waits become active, and return it."""
        name = next(iter(self.waiting))
        request = self.active[name] = self.waiting.pop(name)
        return request


@dataclass
class _Prompt:
    """A request whose prompt is being read: how many tokens were, and the state behind them."""

    request: RequestState
    read: int
    cache: RecurrentCache | None


class _Processor(ContinuousBatchProcessor):
    """One step after another; its methods are those that the manager's loop calls."""

    use_async_batching = False

    def __init__(self, manager: StateManager) -> None:
        config = manager.continuous_batching_config
        self.cb_config = config
        self.input_queue, self.cancel_queue = manager.input_queue, manager.cancel_queue
        self._prompts = manager.prompts
        self.output_router = manager.output_router
        self.background_thread_status = manager.background_thread_status
        self.distributed_helper = manager.distributed_helper
        self.inputs_and_outputs: Any = SimpleNamespace(compute_stream=None)
        # arguments of requests are looked at when their turn comes
        self.logit_processor: Any = SimpleNamespace(check_kwargs=lambda kwargs: None)
        self._most_rows = config.max_requests_per_batch or MOST_ROWS
        self._config = manager.generation_config
        self._seeds = manager.seeds
        self._model: Any = manager.model
        self._bytes = state_size(self._model, self._new_cache)
        first = self._bytes(1)
        self._state_grows = self._bytes(2) > first
        share = MEMORY if config.max_memory_percent is None else config.max_memory_percent
        free = free_bytes(self._model.device)
        memory = free * share
        if memory < first:
            raise ValueError(
                f"max_memory_percent must leave room for a state of {first / 2**20:.3g} MiB, got "
                f"{share} of {free / 2**20:.3g} MiB"
            )
        kept = KEPT_SHARE if config.allow_block_sharing else 0.0
        self._room, self._prefixes = memory * (1 - kept), Prefixes(memory * kept)
        self._between = config.max_batch_tokens or BETWEEN_STEPS
        self.reset()

    def __repr__(self) -> str:
        return f"{len(self._rows)} rows, {len(self._requests.waiting)} requests wait"

    def __del__(self) -> None:
        """Leave torch's memory as it is, unlike transformers' processor."""

    def reset(self) -> None:
        """Forget all requests and states: the weights may be others."""
        self._requests = self.scheduler = _Requests()  # pyright: ignore[reportAttributeAccessIssue]
        self._rows = DecodingRows(self._model, self._new_cache)
        self._prompt: _Prompt | None = None
        self._outputs: list[RequestState] = []
        self._samplers: dict[str, Sampler] = {}
        self._mixed: set[str] = set()  # requests whose states are of several weights
        self._prefixes.clear()

    def _new_cache(self) -> RecurrentCache:
        """Return what keeps the state of a new request."""
        backbone, kind = backbone_of(self._model), self._config.cache_implementation
        if kind != "quantized":
            return backbone.cache_class(backbone.config)
        if not issubclass(backbone.cache_class, StateCache):
            raise ValueError(
                "cache_implementation must be left out, got 'quantized', which of "
                "transformers' models is for attention's keys and values"
            )
        return QuantizedStateCache(backbone.config)

    def forget_states(self) -> None:
        """Share no state that was made so far."""
        self._prefixes.clear()
        self._mixed = {*self._requests.active}

    def warmup(self, model: Any) -> None:
        """Do nothing: a model's first call is like its others."""

    def prepare_next_batch(self) -> bool:
        """Take new requests and drop cancelled ones; return whether there is something to do."""
        if self._update_tp_group_state():
            return False
        self._requests.drop_cancelled()
        self._keep_active()
        if (
            self._prompt is not None
            and self._prompt.request.request_id not in self._requests.active
        ):
            self._prompt = None
        return self.has_pending_requests()

    def has_pending_requests(self) -> bool:
        """Return whether any request waits or is being answered."""
        return bool(self._requests.waiting or self._requests.active)

    @torch.no_grad()
    def _generation_step(self, model: Any) -> None:
        """Decode a token of every row, then read prompts; meanwhile nobody waits for long."""
        if len(self._rows):
            self._answer(self._rows.requests, self._rows.step())
            self._keep_active()
        budget = self._between
        while budget > 0 and (prompt := self._next_prompt()) is not None:
            try:
                budget -= self._read(prompt, budget)
            except Exception as error:  # of one request: the others go on
                self._prompt = None
                self._fail(prompt.request, error)

    def update_batch(self) -> None:
        """Hand over the answers of the last step."""
        outputs = [request.to_generation_output() for request in self._outputs]
        self._outputs = []
        self.output_router.deliver_batch(outputs)

    def fail_all_requests(self, error: Exception) -> None:
        """Fail the requests that are being answered, and those that wait."""
        self.update_batch()
        for request in [*self._requests.active.values(), *self._requests.waiting.values()]:
            self._fail(request, error)
        self._requests.waiting.clear()
        self._rows, self._prompt = DecodingRows(self._model, self._new_cache), None

    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        """Hand over a failed request, and each other answer that was asked of it."""
        asked = [state, *(state.fork(name) for name in _other_names(state))]
        for request in asked:
            self.output_router.fail_and_deliver(request, error)

    def _fail(self, request: RequestState, error: Exception) -> None:
        self._requests.active.pop(request.request_id, None)
        self._handle_request_error(error, request)

    def _keep_active(self) -> None:
        """Drop the rows, and what else is kept, of requests that ended or were cancelled."""
        active = self._requests.active
        self._rows.keep(active)
        for name in self._samplers.keys() - active.keys():
            del self._samplers[name]

    def _next_prompt(self) -> _Prompt | None:
        """Return the prompt to read now; None: there is none, or no room for its state."""
        if self._prompt is not None:
            return self._prompt
        while self._requests.waiting:
            request = next(iter(self._requests.waiting.values()))
            try:
                self._require_answerable(request)
            except Exception as error:
                self._fail(self._requests.take_oldest(), error)
                continue
            rows = len(self._rows) + 1 + request.num_children
            # shorter states that grow are padded to the longest one
            need = max(map(self._need, [request, *self._rows.requests]))
            if len(self._rows) and (rows > self._most_rows or rows * need > self._room):
                return None
            self._requests.take_oldest()
            request.status = RequestStatus.PREFILLING
            self._keep_prompts()
            self._prompt = _Prompt(request, *self._prefixes.longest(request.initial_tokens))
            return self._prompt
        return None

    def _keep_prompts(self) -> None:
        """Keep the states of prompts that were read elsewhere."""
        while self._prompts:
            tokens, prompt = self._prompts.popitem()
            if not prompt.is_current():
                continue
            cache = self._new_cache()
            cache.set_states(prompt.cache.full_states())
            cache.seen_tokens, cache.adapter = prompt.cache.seen_tokens, prompt.cache.adapter
            self._prefixes.put(tokens, cache)

    def _require_answerable(self, request: RequestState) -> None:
        """Fail unless a request can be answered.

        Raises:
            ValueError: It has no tokens, others than the model's, or too many for the memory.
        """
        tokens, count = request.initial_tokens, len(self._model.get_input_embeddings().weight)
        if not tokens:
            raise ValueError("input_ids must hold at least one token")
        strange = [t for t in tokens if not (isinstance(t, int) and 0 <= t < count)]
        if strange:
            raise ValueError(
                f"input_ids must be a list of tokens from 0 to {count - 1}, got {strange[0]!r:.99}"
            )
        if self._state_grows and request.max_new_tokens is None:
            raise ValueError(
                "max_new_tokens must be given: the state of this model grows with each token"
            )
        need = (1 + request.num_children) * self._need(request)
        if need > self._room:
            raise ValueError(
                f"the request needs {need / 2**20:.3g} MiB for its state, and there are "
                f"{self._room / 2**20:.3g}; ask for fewer tokens, or raise max_memory_percent"
            )

    def _need(self, request: RequestState) -> float:
        """Return how many bytes the state of a request may come to take."""
        new = request.max_new_tokens if self._state_grows else 0
        return self._bytes(len(request.initial_tokens) + (new or 0))

    def _read(self, prompt: _Prompt, budget: int) -> int:
        """Read the next piece of a prompt; behind its last one the request joins the rows."""
        tokens, shares = prompt.request.initial_tokens, bool(self._prefixes.room)
        end = min(len(tokens), prompt.read + budget)
        if shares:
            end = min(end, (prompt.read // PIECE + 1) * PIECE)
        piece, read = tokens[prompt.read : end], end - prompt.read
        if end < len(tokens):
            prompt.cache, prompt.read = self._rows.read(piece, prompt.cache), end
            if shares and end % PIECE == 0 and prompt.request.request_id not in self._mixed:
                self._prefixes.put(tokens[:end], prompt.cache)
            return read
        logits, cache = self._rows.finish(piece, prompt.cache)
        self._prompt = None
        self._join(prompt.request, logits, cache)
        return read

    def _join(self, request: RequestState, logits: Tensor, cache: RecurrentCache) -> None:
        """Give a request, and its other answers, a first token each and a row each."""
        options = dict(request.logit_processor_kwargs)
        seed = options.pop("seed", None)
        seeds: Iterator[int] = self._seeds if seed is None else itertools.count(seed)
        others = _other_names(request)
        samplers = [
            Sampler(self._model, self._config, request.initial_tokens, options, next(seeds))
            for _ in range(1 + len(others))
        ]
        request.status, request.num_children = RequestStatus.DECODING, 0
        requests = [request, *(request.fork(name) for name in others)]
        for each, sampler in zip(requests, samplers, strict=True):
            self._requests.active[each.request_id] = each
            self._samplers[each.request_id] = sampler
        self._answer(requests, logits.expand(len(requests), -1), joins=True)
        left = [each for each in requests if each.request_id in self._requests.active]
        if left:
            try:
                self._rows.add(left, cache.selected(torch.zeros(len(left), dtype=torch.long)))
            except Exception as error:
                for each in left:
                    self._fail(each, error)

    def _answer(
        self, requests: Sequence[RequestState], logits: Tensor, *, joins: bool = False
    ) -> None:
        """Append a token to each request from its logits ``[R, V]``; hand over what is finished.

        The states behind answers are kept, with which a conversation's next turn begins, but not
        those of requests that only just join.
        """
        for row, request in enumerate(requests):
            try:
                token, scores = self._samplers[request.request_id].choose(request, logits[row])
            except Exception as error:
                self._fail(request, error)
                continue
            told = self.cb_config.return_logprobs
            share = float(scores.log_softmax(-1)[token]) if told else None
            done = request.update_and_check_completion(token, share)
            if done:
                if self._prefixes.room and not joins and request.request_id not in self._mixed:
                    tokens = [*request.initial_tokens, *request.generated_tokens]
                    self._prefixes.put(tokens[: tokens_read(request)], self._rows.state(row))
                del self._requests.active[request.request_id]
            if done or request.streaming:
                self._outputs.append(request)


def _other_names(request: RequestState) -> list[str]:
    """Return the names of a request's answers behind its first, as transformers has them."""
    return [f"{request.request_id}__child#{i}" for i in range(request.num_children)]


def _completed(model: Any, config: GenerationConfig) -> GenerationConfig:
    """Return the configuration as ``generate`` completes it; how many answers and tokens stays."""
    completed, _ = model._prepare_generation_config(copy.deepcopy(config))
    for name in ("num_return_sequences", "max_new_tokens"):
        setattr(completed, name, getattr(config, name))
    model._prepare_special_tokens(completed, True, device=model.device)
    return completed
