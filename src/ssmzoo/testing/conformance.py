"""The conformance kit: what the zoo promises of every family, foreign ones too.

One list of checks serves the command line (:func:`check`) and pytest
(:class:`FamilyConformance`). A check is a function ``check_x(subject) -> Measured``; the first line
of its docstring is the promise, its comparisons the evidence.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import textwrap
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from tqdm import tqdm

from ssmzoo.environment.messages import suggestion, without_bars, without_reports
from ssmzoo.family import Family, load_family
from ssmzoo.testing import (
    arguments,
    drawing,
    encoders,
    files,
    forms,
    generation,
    graphs,
    layer,
    standalone,
    training,
)
from ssmzoo.testing.subject import SEED, Measured, NotApplicable, Oracle, Subject

Check: TypeAlias = Callable[[Subject], Measured]

CHECKS: tuple[Check, ...] = (
    drawing.check_initialization,  # of NaN all others fail
    forms.check_oracle,
    forms.check_precision,
    forms.check_chunks,
    forms.check_tokens,
    forms.check_packing,  # to a mixer padding is packing
    forms.check_padding,
    forms.check_flattening_collator,
    forms.check_causality,
    forms.check_fused_steps,
    forms.check_batch,
    forms.check_state_adapter,
    layer.check_layer,
    generation.check_greedy,
    generation.check_sampling,
    generation.check_beams,
    generation.check_assisted,
    generation.check_continuing,
    generation.check_chunked_prefill,
    generation.check_cache_rows,
    generation.check_shared_prefix,
    generation.check_cache_file,
    generation.check_prompt_state,
    generation.check_cache_precision,
    generation.check_wrong_cache,
    files.check_save_and_load,
    files.check_load_in_bfloat16,
    files.check_quantized,
    files.check_closed_config,
    files.check_resized_embeddings,
    standalone.check_standalone,
    graphs.check_export,
    graphs.check_onnx,
    graphs.check_jit_trace,
    arguments.check_inputs_embeds,
    arguments.check_logits_to_keep,
    arguments.check_outputs,
    arguments.check_sequence_classification,
    encoders.check_bidirectional,
    encoders.check_images,
    training.check_gradients,
    training.check_lora,
    training.check_lora_all_linear,
    training.check_lora_parameters,
    training.check_gradient_checkpointing,
    training.check_trainer,
    training.check_compile,
    generation.check_fullgraph,
    training.check_bfloat16,
)


def name_of(check: Check) -> str:
    """Return a check's name: ``check_padding`` is ``"padding"``."""
    return check.__name__.removeprefix("check_")


def promise_of(check: Check) -> str:
    """Return the sentence that a check holds a family to."""
    return (check.__doc__ or name_of(check)).strip().splitlines()[0]


@dataclass(frozen=True)
class CheckResult:
    """What came of one check.

    Attributes:
        name: Its name.
        promise: The sentence it holds the family to.
        status: Whether the family keeps it; "skipped" where there was nothing to check.
        detail: The comparison nearest to its budget, or what went wrong.
        error: That comparison's error, None for a check that compares nothing.
        budget: The largest error allowed there; 0 asks for equal bits.
        seconds: Wall-clock time.
    """

    name: str
    promise: str
    status: Literal["passed", "failed", "skipped"]
    detail: str
    error: float | None
    budget: float | None
    seconds: float


@dataclass(frozen=True)
class Report:
    """What came of all checks of one family."""

    family: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the failed checks."""
        return tuple(r.name for r in self.results if r.status == "failed")

    def table(self) -> str:
        """Return one line per check, more on what failed, and a last line that counts."""
        width = max((len(result.name) for result in self.results), default=0)
        lines = [f"{'check':{width}}  status   error    budget   seconds"]
        for result in self.results:
            numbers = f"{_number(result.error):8} {_number(result.budget):8}"
            lines.append(
                f"{result.name:{width}}  {result.status:7}  {numbers} {result.seconds:7.2f}"
            )
            if result.status != "passed":
                told = f"{result.promise} {result.detail}" if result.status == "failed" else ""
                told = textwrap.shorten(told or result.detail, 400, placeholder=" ...")
                lines.append(textwrap.indent(textwrap.fill(told, 96), "    "))
        counts = {s: sum(r.status == s for r in self.results) for s in ("passed", "failed")}
        skipped = len(self.results) - sum(counts.values())
        lines.append(
            f"{self.family}: {counts['passed']} passed, {counts['failed']} failed, "
            f"{skipped} skipped, {sum(r.seconds for r in self.results):.1f} s"
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the report in plain types; an infinite error becomes null."""
        results = [asdict(result) for result in self.results]
        for result in results:
            if result["error"] is not None and not math.isfinite(result["error"]):
                result["error"] = None
        return {"family": self.family, "ok": self.ok, "checks": results}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.as_dict(), indent=2) + "\n"


def check(
    family: str | Family,
    *,
    oracle: Oracle | None = None,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
) -> Report:
    """Hold a family's tiny model to the zoo's promises; a bar on a terminal says how far it is.

    Args:
        family: Its name, or the family itself if it is not installed.
        oracle: A second implementation, ``(weights, config, input_ids) -> logits``: a dict of
            numpy arrays by parameter name, the configuration's fields, ids ``[B, L]`` to logits
            ``[B, L, V]``. Without one that check is skipped. :func:`load_oracle` takes one from a
            file.
        only: Names of the checks to run; all by default.
        skip: Names of checks to leave out.

    Returns:
        The report; ``report.ok`` says whether the family conforms. A fault of the family never
        raises.

    Raises:
        LookupError: No such family, or no such check.
        ValueError: ``only`` and ``skip`` leave no check.
    """
    known = {name_of(function): function for function in CHECKS}
    for argument, names in (("only", only or ()), ("skip", skip)):
        for name in names:
            if name not in known:
                raise LookupError(
                    f"{argument}: no check named {name!r}{suggestion(name, known)}; "
                    f"checks: {', '.join(known)}"
                )
    wanted = known if only is None else only
    chosen = [f for name, f in known.items() if name in wanted and name not in skip]
    if not chosen:
        raise ValueError(
            f"only and skip must leave a check to run, got only {', '.join(wanted) or 'nothing'} "
            f"and skip {', '.join(skip) or 'nothing'}; name fewer in skip or more in only"
        )
    subject = Subject(load_family(family) if isinstance(family, str) else family, oracle)
    results = []
    with tqdm(total=len(chosen), desc=subject.family.name, disable=None, leave=False) as bar:
        for function in chosen:
            bar.set_postfix_str(name_of(function))
            results.append(run(function, subject))
            bar.update()
    return Report(subject.family.name, tuple(results))


def run(function: Check, subject: Subject) -> CheckResult:
    """Run one check; nothing it raises goes through."""
    start = time.perf_counter()
    measured: Measured | None = None
    try:
        measured = measure(function, subject)
        worst = measured.worst
        status = "passed" if worst is None or worst.ok else "failed"
        detail = measured.told
    except NotApplicable as reason:
        status, detail = "skipped", str(reason)
    except AssertionError as broken:
        status, detail = "failed", str(broken)
    except Exception as error:
        status, detail = "failed", f"{type(error).__name__}: {error}{_where(error, subject)}"
    worst = measured.worst if measured is not None else None
    return CheckResult(
        name=name_of(function),
        promise=promise_of(function),
        status=status,
        detail=detail,
        error=None if worst is None else worst.size,
        budget=None if worst is None else worst.budget,
        seconds=time.perf_counter() - start,
    )


def _where(error: Exception, subject: Subject) -> str:
    """Return the family's own line that an error comes from, "" if none is on the way."""
    home = Path(inspect.getfile(subject.family.model_class)).parent
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent == home]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def measure(function: Check, subject: Subject) -> Measured:
    """Run one check with a fixed seed; the caller's random numbers and logging stay as they are."""
    with (
        without_bars(),
        without_reports(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        # libraries call each other by names that the next release drops
        for package in ("transformers", "peft", "accelerate"):
            warnings.filterwarnings("ignore", category=FutureWarning, module=package)
        torch.manual_seed(SEED)
        return function(subject)


class FamilyConformance:
    """The checks as a pytest class; a subclass that names a family is a whole test file.

    ::

        class TestToy(FamilyConformance):
            family = "toy"
            oracle = staticmethod(toy_logits)

    Attributes:
        family: Its name, or the family itself.
        oracle: As in :func:`check`, wrapped in ``staticmethod``.
    """

    family: ClassVar[str | Family]
    oracle: ClassVar[Oracle | None] = None

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make one test of every check."""
        if "promise" in metafunc.fixturenames:
            metafunc.parametrize("promise", CHECKS, ids=name_of)

    def test_promise(self, promise: Check) -> None:
        """Fail with the promise, the worst comparison and its budget."""
        __tracebackhide__ = True
        try:
            measured = measure(promise, _subject(type(self)))
        except NotApplicable as reason:
            raise unittest.SkipTest(str(reason)) from None
        worst = measured.worst
        if worst is not None and not worst.ok:
            raise AssertionError(
                f"{promise_of(promise)} {measured.told}: error {worst.size:.2e} exceeds "
                f"{worst.budget:.2e}"
            )


@functools.cache
def _subject(suite: type[FamilyConformance]) -> Subject:
    family = suite.family
    return Subject(load_family(family) if isinstance(family, str) else family, suite.oracle)


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"
