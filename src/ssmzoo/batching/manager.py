"""transformers' manager of continuous batching, over states in place of pages of attention.

A request is a row: its prompt is read alone, in pieces between the steps of all others, and then it
joins the batch that decodes. A state has a fixed size, so nothing is paged, moved or recomputed; a
request waits until its state has room. What transformers does with a batch of pages,
:class:`_Processor` does with rows; queues, results, streaming, cancelling and pauses are
transformers'.
"""

from __future__ import annotations

import itertools
import queue
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    RequestState,
    RequestStatus,
)

from ssmzoo.batching.prefixes import Prefixes
from ssmzoo.batching.rows import Rows, tokens_read
from ssmzoo.modeling.cache import RecurrentCache, backbone_of
from ssmzoo.modeling.prompt import versions

PIECE = 128  # tokens between two states of a prompt that are kept
BETWEEN_STEPS = 512  # tokens of prompts that are read while others wait for their next one
MOST_ROWS, MEMORY = 64, 0.6  # where the configuration leaves them open
KEPT_SHARE = 0.25  # of the memory for states: those of prompts


class StateManager(ContinuousBatchingManager):
    """Answers requests by a model that keeps a state; :class:`ContinuousBatchingManager` has the rest.

    Of its configuration count ``max_requests_per_batch``, ``max_memory_percent`` (of free memory,
    for states), ``max_batch_tokens`` (of prompts, between two steps), ``allow_block_sharing``
    (prompts that begin alike are read once), ``return_logprobs``, ``per_request_processors``,
    ``seed`` and ``max_queue_size``.
    """

    def __init__(
        self, model: Any, generation_config: GenerationConfig, config: ContinuousBatchingConfig
    ) -> None:
        # transformers' own looks for pages of attention
        self.model = model.eval()
        self.generation_config, self.continuous_batching_config = generation_config, config
        self.num_return_sequences = generation_config.num_return_sequences or 1
        self.logit_processor = ContinuousBatchingLogitsProcessorList(
            model._get_logits_processor(generation_config),
            config.per_request_processors,
            config.drop_unsupported_processors,
        )
        self.seeds: dict[str, int] = {}
        self.input_queue = queue.Queue(config.max_queue_size)
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

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        *args: Any,
        seed: int | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Add a request, as transformers does.

        Args:
            input_ids: The prompt.
            request_id: Its name; None: a new one.
            *args: As of transformers.
            seed: Of its sampling: the answer is that of ``generate`` after
                ``torch.manual_seed(seed)``. None: drawn from the configuration's seed.
            **kwargs: As of transformers.

        Raises:
            ValueError: The prompt is empty, or holds what is no token of the model.
        """
        count = self.model.get_input_embeddings().num_embeddings
        if not len(input_ids) or not all(0 <= token < count for token in input_ids):
            raise ValueError(
                f"input_ids must be tokens from 0 to {count - 1}, at least one, got "
                f"{[token for token in input_ids if not 0 <= token < count][:3]}"
            )
        if request_id is None:
            with self._request_lock:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
        if seed is not None:
            self.seeds[request_id] = seed
        return super().add_request(input_ids, request_id, *args, **kwargs)

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

    def clear_cancelled(self) -> list[RequestState]:
        """Remove the requests that were cancelled, and return them."""
        found = [self.waiting.pop(name, None) or self.finish(name) for name in self._cancelled]
        self._cancelled.clear()
        return [request for request in found if request is not None]

    def take_oldest(self) -> RequestState:
        """Let the oldest request that waits become active, and return it."""
        name = next(iter(self.waiting))
        request = self.active[name] = self.waiting.pop(name)
        return request

    def finish(self, name: str) -> RequestState | None:
        """Remove a request that is being answered."""
        return self.active.pop(name, None)

    def get_active_request_static_outputs(self, name: str) -> list[int]:
        return self.active[name].generated_tokens if name in self.active else []


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
        self.logit_processor = manager.logit_processor
        self.input_queue, self.cancel_queue = manager.input_queue, manager.cancel_queue
        self.output_router = manager.output_router
        self.background_thread_status = manager.background_thread_status
        self.distributed_helper = manager.distributed_helper
        self.inputs_and_outputs: Any = SimpleNamespace(compute_stream=None)
        self._most_rows = config.max_requests_per_batch or MOST_ROWS
        self._seeds, self._seed = manager.seeds, config.seed
        self._samples = bool(manager.generation_config.do_sample)
        self._model: Any = manager.model
        self._rows = Rows(self._model)
        first, second = self._state_bytes(1), self._state_bytes(2)
        self._state_grows = second > first
        self._bytes = lambda tokens: first + (second - first) * (tokens - 1)
        share = MEMORY if config.max_memory_percent is None else config.max_memory_percent
        free = _free_bytes(self._model.device)
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
        """Forget all requests, and states of other weights."""
        self._requests = self.scheduler = _Requests()
        self._rows = Rows(self._model)
        self._prompt: _Prompt | None = None
        self._outputs: list[RequestState] = []
        self._generators: dict[str, torch.Generator] = {}
        self._numbers = itertools.count()
        self._versions = versions(self._model)

    def warmup(self, model: Any) -> None:
        """Do nothing: a model's first call is like its others."""

    def prepare_next_batch(self) -> bool:
        """Take new requests and drop cancelled ones; return whether there is something to do."""
        if self._update_tp_group_state():
            return False
        requests = self._requests
        for request in requests.clear_cancelled():
            self._forget(request)
        self._rows.keep(requests.active)
        if self._prompt is not None and self._prompt.request.request_id not in requests.active:
            self._prompt = None
        return self.has_pending_requests()

    def has_pending_requests(self) -> bool:
        """Return whether any request waits or is being answered."""
        return bool(self._requests.waiting or self._requests.active)

    @torch.no_grad()
    def _generation_step(self, model: Any) -> None:
        """Decode a token of every row, then read prompts; meanwhile nobody waits for long."""
        if len(self._rows):
            logits = self._rows.step()
            self._answer(self._rows.requests, logits, self._rows.cache)
            self._rows.keep(self._requests.active)
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
        for request in [*self._requests.active.values(), *self._requests.waiting.values()]:
            self._fail(request, error)
        self._requests.waiting.clear()
        self._rows, self._prompt = Rows(self._model), None

    def _next_prompt(self) -> _Prompt | None:
        """Return the prompt to read now; None: there is none, or no room for its state."""
        if self._prompt is not None:
            return self._prompt
        while self._requests.waiting:
            request = next(iter(self._requests.waiting.values()))
            if (why := self._refusal(request)) is not None:
                self._fail(self._requests.take_oldest(), ValueError(why))
                continue
            copies = 1 + request.num_children
            held = sum(map(self._need, self._rows.requests))
            if len(self._rows) and (
                len(self._rows) + copies > self._most_rows
                or held + copies * self._need(request) > self._room
            ):
                return None
            self._requests.take_oldest()
            request.status = RequestStatus.PREFILLING
            if self._versions != (now := versions(self._model)):  # trained in a pause
                self._versions = now
                self._prefixes.clear()
            self._prompt = _Prompt(request, *self._prefixes.longest(request.initial_tokens))
            return self._prompt
        return None

    def _refusal(self, request: RequestState) -> str | None:
        """Return why a request can never be answered, if so."""
        if self._state_grows and request.max_new_tokens is None:
            return "max_new_tokens must be given: the state of this model grows with each token"
        need = (1 + request.num_children) * self._need(request)
        if need > self._room:
            return (
                f"the request needs {need / 2**20:.3g} MiB for its state, and there are "
                f"{self._room / 2**20:.3g}; ask for fewer tokens, or raise max_memory_percent"
            )
        return None

    def _need(self, request: RequestState) -> float:
        """Return how many bytes the state of a request may come to take."""
        new = request.max_new_tokens if self._state_grows else 0
        return self._bytes(len(request.initial_tokens) + (new or 0))

    def _read(self, prompt: _Prompt, budget: int) -> int:
        """Read the next piece of a prompt; behind its last one the request joins the rows."""
        tokens = prompt.request.initial_tokens
        end = min(len(tokens), prompt.read + budget)
        shares = bool(self._prefixes.room)
        if shares:
            end = min(end, (prompt.read // PIECE + 1) * PIECE)
        piece, read = tokens[prompt.read : end], end - prompt.read
        if end < len(tokens):
            prompt.cache, prompt.read = self._rows.read(piece, prompt.cache), end
            if shares and end % PIECE == 0:
                self._prefixes.put(tokens[:end], prompt.cache)
            return read
        logits, cache = self._rows.finish(piece, prompt.cache)
        self._prompt = None
        self._join(prompt.request, logits, cache)
        return read

    def _join(self, request: RequestState, logits: Tensor, cache: RecurrentCache) -> None:
        """Give a request, and its other answers, a first token each and a row each."""
        request.status = RequestStatus.DECODING
        names = [f"{request.request_id}__child#{i}" for i in range(request.num_children)]
        request.num_children = 0
        requests = [request, *(request.fork(name) for name in names)]
        self._requests.active |= {each.request_id: each for each in requests}
        for place, each in enumerate(requests):
            seed = self._seeds.get(request.request_id)
            if seed is None and self._seed is not None:
                seed = self._seed + next(self._numbers)
            generator = torch.Generator(self._model.device)
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed + place)
            self._generators[each.request_id] = generator
        self._answer(requests, logits.expand(len(requests), -1), None)
        left = [each for each in requests if each.status == RequestStatus.DECODING]
        if left:
            self._rows.add(left, cache.selected(torch.zeros(len(left), dtype=torch.long)))

    def _answer(
        self, requests: list[RequestState], logits: Tensor, cache: RecurrentCache | None
    ) -> None:
        """Append a token to each request from its logits ``[R, V]``; hand over what is finished.

        The states behind answers are kept, with which a conversation's next turn begins.
        """
        scores = logits.float()
        if self.logit_processor.do_processing:
            newest = [(r.generated_tokens or r.initial_tokens)[-1:] for r in requests]
            count = self.logit_processor.tensors_required
            room = torch.empty(count, len(requests), dtype=torch.int32, device=scores.device)
            futures = [FutureRequestState(request, True, {}, 1) for request in requests]
            given = self.logit_processor.prepare_tensor_args(futures, room)
            ids: Any = torch.tensor(newest, device=scores.device)
            scores = self.logit_processor(ids, scores, given)
        if self._samples:
            shares = scores.softmax(-1)
            drawn = [
                torch.multinomial(row, 1, generator=self._generators[request.request_id])
                for request, row in zip(requests, shares, strict=True)
            ]
            tokens = torch.cat(drawn)
        else:
            tokens = scores.argmax(-1)
        logprobs: list[Any] = [None] * len(requests)
        if self.cb_config.return_logprobs:
            logprobs = scores.log_softmax(-1).gather(1, tokens[:, None]).flatten().tolist()
        for row, (request, token, logprob) in enumerate(
            zip(requests, tokens.tolist(), logprobs, strict=True)
        ):
            done = request.update_and_check_completion(token, logprob)
            if done:
                if cache is not None and self._prefixes.room:
                    tokens = [*request.initial_tokens, *request.generated_tokens]
                    held = cache.selected(torch.tensor([row]))
                    self._prefixes.put(tokens[: tokens_read(request)], held)
                self._requests.finish(request.request_id)
                self._forget(request)
            if done or request.streaming:
                self._outputs.append(request)

    def _forget(self, request: RequestState) -> None:
        self._generators.pop(request.request_id, None)
        self._seeds.pop(request.request_id, None)

    def _fail(self, request: RequestState, error: Exception) -> None:
        self._handle_request_error(error, request)
        self._requests.finish(request.request_id)
        self._forget(request)

    @torch.no_grad()
    def _state_bytes(self, tokens: int) -> int:
        return self._rows.read([0] * tokens, None).nbytes


def _free_bytes(device: torch.device) -> float:
    """Return the bytes that are free on a device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)


def manager_of(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,  # of pages
) -> StateManager:
    """Return what answers a model's requests; arguments as of ``init_continuous_batching``."""
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(kept, StateManager):
        return kept
    return StateManager(
        model,
        generation_config or model.generation_config,
        continuous_batching_config or ContinuousBatchingConfig(),
    )
