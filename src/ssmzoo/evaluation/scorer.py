"""lm-eval's model that reads once what requests share.

Importing this module imports lm-eval, torch and transformers; ``evaluate`` does it late.
"""

# lm-eval's decorators hide the types of HFLM and of evaluate
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import lm_eval
import torch
import torch.distributed as dist
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, resolve_max_length
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import ssmzoo.auto  # noqa: F401  # a model may be given by its folder
from ssmzoo.data.tokenizer import is_byte_tokenizer
from ssmzoo.environment.device import usable_device
from ssmzoo.environment.messages import suggestion
from ssmzoo.evaluation.answers import Answers
from ssmzoo.evaluation.likelihoods import Likelihoods, PaddedRows, keeps_state
from ssmzoo.evaluation.planner import Request, Tokens, batch_limits, memory_limit
from ssmzoo.evaluation.reading import Finish, Reading
from ssmzoo.evaluation.results import TokensRead
from ssmzoo.evaluation.shared_states import Held, SharedStates
from ssmzoo.evaluation.sharing import Sharing, process_count, together
from ssmzoo.modeling import load_state_adapter
from ssmzoo.modeling.cache import backbone_of
from ssmzoo.modeling.compat import CACHE
from ssmzoo.modeling.stock import choose_kernels
from ssmzoo_kernels import double

LOG = logging.getLogger("ssmzoo")


class SharedPrefixLM(HFLM):
    """lm-eval's ``HFLM`` that reads once what requests share, for models that keep a state.

    Also different: transformers' recurrent layers run on our kernels; log-softmax is float32
    whatever the weights are; a tokenizer that opens every text with BOS is not charged for
    predicting it in rolling scores; progress bars keep to terminals; the processes of a launcher
    share the requests, and every process gets all answers.

    It is lm-eval's model ``ssmzoo``: ``lm_eval.simple_evaluate(model=SharedPrefixLM(...), ...)``.

    Args:
        pretrained: A causal language model, or its name or folder.
        tokenizer: Its tokenizer; None: the one saved with it.
        batch_size: Rows of a forward pass; "auto": as many as 16,384 tokens make, fewer where
            memory ends. 1 where padding would change a row.
        state_memory: MiB of states that are kept at once; None: half of what is free.
        stock: Leave transformers' recurrent models without our kernels.
        state_adapter: A folder with a state adapter.
        answers: Keeps finished requests, for a call that goes on where one was killed.
        **options: As of ``HFLM``.

    Raises:
        ValueError: An argument is unusable.
        FileNotFoundError: ``state_adapter`` holds no state adapter.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int | str = 1,
        state_memory: float | None = None,
        stock: bool = False,
        state_adapter: str | None = None,
        answers: Answers | None = None,
        **options: Any,
    ) -> None:
        # a context, and the same with an answer
        self._latest = functools.lru_cache(maxsize=2)(self._encode)
        rows, tokens = batch_limits(batch_size)
        self._memory = memory_limit(state_memory)
        with _unknown_arguments():
            super().__init__(
                pretrained=pretrained,
                tokenizer=tokenizer,
                batch_size=rows,
                **{
                    "backend": "causal",
                    "softmax_dtype": "float32",
                    "device": str(usable_device(None)),
                    **options,
                },
            )
        self._reads_bytes = is_byte_tokenizer(self.tokenizer)
        if isinstance(pretrained, str):
            choose_kernels(self.model, stock)
        if state_adapter is not None:
            load_state_adapter(state_adapter, self.model)
        # the processes share requests below lm-eval, which sees one
        self._rank, self._world_size = 0, 1
        # those that a model is split over read the same together
        split = getattr(self.model, "tp_size", None) is not None
        if not getattr(self.model.config, "decodable", True):
            rows = 1
        self.batch_size_per_gpu = rows
        kept = Answers() if answers is None else answers
        self._sharing = Sharing(kept, 1 if split else process_count(), self._shrink)
        self._silent = not sys.stderr.isatty() or (process_count() > 1 and dist.get_rank() > 0)
        # the rows that have read prompts but their last tokens, from which _model_generate goes on
        self._begun: tuple[Held, dict[Tokens, int]] | None = None
        self._choose_likelihoods(rows, tokens)
        self.reading = Reading(silent=self._silent)
        self.whole = False  # whether the texts of the next task are read whole

    def _choose_likelihoods(self, rows: int, tokens: int | None) -> None:
        """Choose how requests are read, in calls of at most so many rows and tokens."""
        self._rows, self._call_tokens = rows, tokens
        self.states: SharedStates | None = None
        self._likelihoods: Likelihoods = PaddedRows(self, rows=rows, tokens=tokens)
        if keeps_state(self.model):
            self.states = self._likelihoods = SharedStates(
                self.model, rows=rows, tokens=tokens, memory=self._memory, autocast=self._autocast
            )

    def _shrink(self) -> bool:
        """Make calls half as large, unless their size was asked for."""
        if self._call_tokens is None or self._rows == 1:
            return False
        self._choose_likelihoods(max(1, self._rows // 2), self._call_tokens // 2)
        return True

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def reads_any_length(self) -> bool:
        """Tell whether the model declares no limit and goes on from a state of any text."""
        return self.states is not None and not resolve_max_length(
            self.config, self.tokenizer, default=0
        )

    @property
    def window(self) -> int:
        """Tokens that the model reads at once."""
        return int(self.max_length)

    def counts(self) -> TokensRead:
        """Return what all processes read since ``reading`` was reset."""
        numbers = self.reading.alone, self.reading.read
        each = together(
            [[rank] for rank in range(self._sharing.processes)], lambda mine: {mine[0]: numbers}
        )
        alone, read = (sum(column) for column in zip(*each.values(), strict=True))
        return {"shared_states": self.states is not None, "read": read, "alone": alone}

    def make_room(self, tokens: int) -> None:
        """Let prompts be as long as a task needs where the model declares no limit of its own.

        lm-eval's own rule, 2048, stays the least; longer prompts are cut from the left, with a
        warning in the log.
        """
        self._max_length = resolve_max_length(self.config, self.tokenizer, default=0) or max(
            self._DEFAULT_MAX_LENGTH, tokens
        )

    def run(
        self, tasks: dict[str, Any], *, limit: int | None, bootstrap_draws: int, keep_samples: bool
    ) -> dict[str, Any]:
        """Score loaded tasks with lm-eval's evaluator, and return all that it reports."""
        outcome = lm_eval.evaluate(
            lm=self,
            task_dict=tasks,
            limit=limit,
            bootstrap_iters=bootstrap_draws,
            log_samples=keep_samples,
        )
        assert outcome is not None
        return dict(outcome)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Return the tokens of a text; lm-eval asks for a context once for each answer."""
        return [*self._latest(string, add_special_tokens, self.add_bos_token, **options)]

    def _encode(
        self, string: str, add_special_tokens: bool | None, _: bool | None, **options: Any
    ) -> tuple[int, ...]:
        if self._reads_bytes and not options:
            return tuple(string.encode())
        return tuple(super().tok_encode(string, add_special_tokens, **options))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """Score continuations; see ``HFLM``."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self._silent)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts; see ``HFLM``."""
        adds_bos, self.add_bos_token = self.add_bos_token, False
        try:
            texts = [self.tok_encode(request.args[0]) for request in requests]
        finally:
            self.add_bos_token = adds_bos
        if self.whole:
            whole = [(self.prefix_token_id, *text) for text in texts]
            return self._sharing.answer("whole text", whole, _in_turn, self._score_texts)
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=text,
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for text in texts
        ]
        found = iter(self._loglikelihood_tokens([*chain(*windows)]))
        totals = [sum(value for value, _ in islice(found, len(mine))) for mine in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        asked = [_request(c, k, int(self.max_length)) for _, c, k in requests]
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        if cut := sum(n > len(r.tokens) for n, r in zip(lengths, asked, strict=True)):
            LOG.warning(
                "%d of %d requests are longer than the model's window of %d tokens: they are cut "
                "from the left",
                *(cut, len(asked), self.max_length),
            )
        found = self._sharing.answer("loglikelihood", asked, self._divide, self._score)
        for (strings, _, _), answer in zip(requests, found, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return found

    def _divide(self, requests: Sequence[Request], parts: int) -> list[list[int]]:
        return self._likelihoods.divide(requests, parts)

    def _score(self, requests: Sequence[Request], finish: Finish[tuple[float, bool]]) -> None:
        self._likelihoods.loglikelihoods(requests, finish, self.reading)

    @torch.no_grad()
    def _score_texts(self, texts: Sequence[Tokens], finish: Finish[float]) -> None:
        """Score each text from its first token to its last, a piece at a time."""
        count = sum(len(text) - 1 for text in texts)
        self.reading.start(count, count)
        for index, text in enumerate(texts):
            tokens = torch.tensor([text])
            cache, total = backbone_of(self.model).cache_class(self.config), 0.0
            for begin in range(0, len(text) - 1, self._DEFAULT_MAX_LENGTH):
                piece = tokens[:, begin : begin + self._DEFAULT_MAX_LENGTH + 1].to(self.device)
                logits = self.model(piece[:, :-1], **{CACHE: cache}).logits.float()
                answers = logits.log_softmax(-1).gather(2, piece[:, 1:, None])
                total += double(answers).sum().item()
                self.reading.add(answers.shape[1])
            finish(index, total)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate; see ``HFLM``.

        Raises:
            ValueError: A task samples, and there are several processes; or it generates more tokens
                than the model's window has.
        """
        if any(request.args[1].get("do_sample") for request in requests):
            if self._sharing.processes > 1:
                raise ValueError(
                    f"task {requests[0].task_name!r} samples, and several processes would draw "
                    "other numbers than one; score it without a launcher"
                )
            return super().generate_until(requests, disable_tqdm or self._silent)
        asked = [self._prompt(*request.args) for request in requests]
        return self._sharing.answer("text", asked, self._divide_prompts, self._generate)

    def _prompt(self, context: str, options: dict[str, Any]) -> Prompt:
        """Return a prompt with its tokens, as ``HFLM`` cuts them."""
        new = int(normalize_gen_kwargs(options, self.max_gen_toks).get("max_gen_toks", 0))
        if (room := self.max_length - new) < 1:
            raise ValueError(
                f"max_gen_toks must be less than the model's window of {self.max_length} tokens, "
                f"got {new}"
            )
        ids, _ = self.tok_batch_encode(
            [context], left_truncate_len=room, truncation=bool(self.truncation)
        )
        return Prompt(context, json.dumps(options), tuple(ids[0].tolist()))

    def _divide_prompts(self, prompts: Sequence[Prompt], parts: int) -> list[list[int]]:
        if self.states is None:
            return _in_turn(prompts, parts)
        return self.states.divide([Request(prompt.tokens, 0) for prompt in prompts], parts)

    def _generate(self, prompts: Sequence[Prompt], finish: Finish[str]) -> None:
        """Generate for prompts in batches of equal options."""
        groups: dict[str, list[int]] = {}
        for index in sorted(range(len(prompts)), key=lambda i: -len(prompts[i].tokens)):
            groups.setdefault(prompts[index].options, []).append(index)
        for group in groups.values():
            for part in self._prompts_behind_states(prompts, group):
                # behind states, which are read in wider calls, as many rows as were read
                read = 0 if self._begun is None else len(self._begun[0].input_ids)
                rows = self.batch_size_per_gpu = max(self._rows, read)
                for begin in range(0, len(part), rows):
                    chunk = part[begin : begin + rows]
                    asked: Any = [SimpleNamespace(args=prompts[i].arguments()) for i in chunk]
                    texts = super().generate_until(asked, disable_tqdm=True)
                    for index, text in zip(chunk, texts, strict=True):
                        finish(index, text)
        self._begun, self.batch_size_per_gpu = None, self._rows

    def _prompts_behind_states(
        self, prompts: Sequence[Prompt], group: list[int]
    ) -> Iterator[list[int]]:
        """Yield a group's prompts, of which a model with states has read all but the last tokens.

        Then ``self._begun`` are the rows from which :meth:`_model_generate` goes on.
        """
        if self.states is None:
            count = sum(len(prompts[i].tokens) for i in group)
            self.reading.start(count, count)
            yield group
            self.reading.add(count)
            return
        requests = [Request(prompts[i].tokens, 0) for i in group]
        for batch, held, _ in self.states.read(requests, self.reading):
            ends = [(row, i) for row, read in enumerate(batch.reads) for i in read.last]
            self._begun = held, {requests[i].tokens: row for row, i in ends}
            yield [group[i] for _, i in ends]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        if self._begun is None:
            return super()._model_generate(context, max_length, stop, **options)
        begun, row_of = self._begun
        mask = options.pop("attention_mask").bool()
        prompts = zip(context, mask, strict=True)
        held = begun.rows([row_of[tuple(ids[real].tolist())] for ids, real in prompts])
        more = max_length - context.shape[1]
        real = torch.cat([held.attention_mask, mask[:, -1:]], 1)
        ids = torch.cat([held.input_ids, context[:, -1:]], 1)
        # all but the last are read: generate only shows them to penalties of repetition
        ids = ids.masked_fill(real == 0, self.tokenizer.pad_token_id)
        ids = ids.gather(1, real.argsort(dim=1, stable=True))
        options["attention_mask"] = real
        if held.cache is not None:
            options[CACHE] = held.cache
        found = super()._model_generate(ids, ids.shape[1] + more, stop, **options)
        return torch.cat([context, found[:, ids.shape[1] :]], 1)


@dataclass(frozen=True)
class Prompt:
    """A prompt that a text is generated behind; options are JSON, as they decide a batch."""

    context: str
    options: str
    tokens: Tokens

    def arguments(self) -> tuple[str, dict[str, Any]]:
        """Return the arguments of a request, as lm-eval gives them."""
        return self.context, json.loads(self.options)


@contextlib.contextmanager
def _unknown_arguments() -> Iterator[None]:
    """Turn transformers' error of an argument that nothing takes into a ValueError."""
    try:
        yield
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        known = {**signature(SharedPrefixLM).parameters, **signature(HFLM).parameters}
        name = unknown[1]
        raise ValueError(
            f"neither ssmzoo, lm-eval nor the model takes an argument {name!r}"
            f"{suggestion(name, known)}"
        ) from None


def _request(context: list[int], continuation: list[int], window: int) -> Request:
    """Return a request cut from the left to a window, as ``HFLM`` cuts it.

    Raises:
        ValueError: There is nothing to score, or nothing that it is predicted from.
    """
    if not 1 <= len(continuation) <= window:
        raise ValueError(
            f"a continuation must have between 1 and {window} tokens, the model's window, got "
            f"{len(continuation)}"
        )
    if not context:  # lm-eval gives the blanks at a context's end to the continuation
        raise ValueError("a context must be empty or have more than blanks, got blanks alone")
    return Request(tuple((context + continuation)[-(window + 1) :]), len(continuation))


def _in_turn(requests: Sequence[object], parts: int) -> list[list[int]]:
    return [list(range(part, len(requests), parts)) for part in range(parts)]
