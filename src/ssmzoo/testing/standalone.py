"""A checkpoint's own code: the files that travel compute what the installed family computes."""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ssmzoo.family import Family
from ssmzoo.modeling import SSMForCausalLM
from ssmzoo.publishing.export_code import FindsFamiliesError, code_of, flat_name, require_own_mixers
from ssmzoo.testing.subject import (
    BUDGETS,
    Measured,
    NotApplicable,
    Subject,
    gradients,
    probe,
)

_numbers = itertools.count()


def check_standalone(subject: Subject) -> Measured:
    """The code that travels with a checkpoint gives the same logits, states and gradients."""
    measured = Measured()
    for kind in subject.family.classes:
        if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
            raise NotApplicable(f"{kind.__name__} was made at run time and stands in no file")
    with package_of(subject.family) as name:
        for dtype, budget in BUDGETS.items():
            model = subject.model(dtype)
            exported = as_published(name, model)
            got, expected = (_answers(m, subject) for m in (exported, model))
            measured.compare_all(f"{dtype}", got, expected, budget)
            if dtype == torch.float64:
                got, expected = (_slopes(m, subject) for m in (exported, model))
                measured.compare_all("gradient of", got, expected, budget)
    return measured


def as_published(package: str, model: SSMForCausalLM) -> Any:
    """Return a model of the same weights by the code that travels with a checkpoint."""
    kind, config = type(model), model.config
    made = getattr(_module(package, type(config).__module__), type(config).__name__)
    copied = getattr(_module(package, kind.__module__), kind.__name__)(
        made.from_dict(config.to_dict())
    )
    copied = copied.to(model.dtype).eval()
    copied.load_state_dict(model.state_dict())
    return copied


def _answers(model: SSMForCausalLM, subject: Subject) -> dict[str, Tensor]:
    ids = subject.ids(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        logits = model(ids).logits
        whole = model(ids[:, :7])
        after = model(ids[:, 7:], cache=whole.cache)
        step = model(ids[:, :1], cache=after.cache)
        padded = model(ids, attention_mask=mask).logits
    return {
        "logits": logits,
        "logits after a cache": torch.cat([after.logits, step.logits], dim=1),
        "left-padded logits": padded[mask.bool()],
    }


def _slopes(model: SSMForCausalLM, subject: Subject) -> dict[str, Tensor]:
    logits = model(subject.ids(2, 13)).logits
    return gradients(model, (logits * probe(logits)).sum())


@contextmanager
def package_of(family: Family) -> Iterator[str]:
    """Make a package of a family's exported code, removed at the end, and give its name."""
    spec = ModuleSpec(f"ssmzoo_exported_{next(_numbers)}", None, is_package=True)
    log = logging.getLogger("ssmzoo")
    level = log.level
    try:
        require_own_mixers(family, family.config(**family.tiny).to_dict())
        texts = code_of(family)
    except FindsFamiliesError as error:
        raise NotApplicable(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        spec.submodule_search_locations = [folder]
        sys.modules[spec.name] = module_from_spec(spec)
        importlib.invalidate_caches()
        log.setLevel(logging.ERROR)  # the code says that kernels would be faster
        try:
            yield spec.name
        finally:
            log.setLevel(level)
            for name in [n for n in sys.modules if n.split(".")[0] == spec.name]:
                del sys.modules[name]


def _module(package: str, module: str) -> ModuleType:
    return importlib.import_module(f"{package}.{flat_name(module)}")
