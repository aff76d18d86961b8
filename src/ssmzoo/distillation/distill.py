"""Replace a model's long filters, as those of a Hyena, by recurrent filters of small order.

A family takes part if its configuration has ``distilled(order, kind)``, that of the model to be,
and its mixers have ``kernel(length)``, ``gain()``, ``set_filters(a, b, h0)`` for rational filters
and ``set_modes(poles, residues, h0)`` for modal ones.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ssmzoo.checkpoints.load import holds_tokenizer, load_model, load_tokenizer, model_folder
from ssmzoo.environment.places import require_ours
from ssmzoo.files import read_json, require_name, require_new, write_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Kind = Literal["rational", "modal"]
REPORT = "distill.json"

logger = logging.getLogger("ssmzoo")


@dataclass(frozen=True)
class DistillReport:
    """How far the fitted filters are from the given ones.

    Attributes:
        kind: Kind of the fitted filters.
        order: n.
        steps: Steps of descent.
        taps: How many taps of each filter were looked at.
        errors: ``|fitted - given| / |given|`` of every layer's channels, over all taps.
        target: The checkpoint's folder, None if none was written.
    """

    kind: str
    order: int
    steps: int
    taps: int
    errors: tuple[tuple[float, ...], ...]
    target: str | None = None

    @property
    def mean(self) -> float:
        """Mean error of all channels."""
        flat = [error for layer in self.errors for error in layer]
        return sum(flat) / len(flat)

    @property
    def worst(self) -> float:
        """Largest error of a channel."""
        return max(error for layer in self.errors for error in layer)

    def table(self) -> str:
        """Return one line a layer: mean, median and largest error of its channels."""
        lines = [f"{'layer':>5}  {'mean':>9}  {'median':>9}  {'largest':>9}  channel"]
        for number, errors in enumerate(self.errors):
            ranked = sorted(errors)
            row = (sum(errors) / len(errors), ranked[len(ranked) // 2], ranked[-1])
            numbers = "  ".join(f"{value:9.2e}" for value in row)
            lines.append(f"{number:5}  {numbers}  {errors.index(ranked[-1])}")
        return "\n".join(lines)


def distill(
    model: PreTrainedModel | str | Path,
    order: int,
    kind: Kind = "rational",
    output_dir: str | Path | None = None,
    *,
    steps: int = 300,
    lr: float = 3e-3,
    length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[PreTrainedModel, DistillReport]:
    """Fit a filter of small order to each long filter of a model, and put them in their place.

    Tap 0 becomes the direct gain and is exact. Behind the last given tap the given filters are
    zero, the fitted ones ring out. Everything else of the model stays as it is.

    Args:
        model: A language model, the folder of one, or its Hub id.
        order: n, the size of a channel's state.
        kind: "rational" fits coefficients; "modal" fits n / 2 damped oscillations a channel, as
            Laughing Hyena does.
        output_dir: Where to save the model and its report: a new or an empty folder, or one that an
            earlier call wrote and nothing was added to, which is replaced at the end. None saves
            nothing.
        steps: Steps of descent after the initial fit.
        lr: Their first rate.
        length: Taps to fit; all by default. Needed for filters without a last tap.
        progress: Called with the layers done and their number.

    Returns:
        The new model, and the errors.

    Raises:
        ValueError: An order or length that does not fit, or the folder holds something.
        LookupError: No such kind, or the Hub has no such model.
        TypeError: The model has no long filters, it has adapters or other parts that its class does
            not have, or a number is not whole.
    """
    if kind not in get_args(Kind):
        raise LookupError(f"no kind of filter named {kind!r}; kinds: {', '.join(get_args(Kind))}")
    for name, value in (("order", order), ("steps", steps), ("length", length)):
        if value is not None and type(value) is not int:
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    if output_dir is not None:
        _check_target(Path(output_dir))
    source = str(model) if isinstance(model, str | Path) else None
    teacher: Any = model
    tokenizer = None
    if source is not None:
        folder = model_folder(source)
        teacher = load_model(source, folder, "auto", False)
        if output_dir is not None:
            tokenizer = _tokenizer(source, folder)
    mixers = _mixers(teacher)
    _require_own_weights(teacher)
    count = _count_taps(getattr(teacher.config, "taps", None), length)
    fitted = []
    for number, mixer in enumerate(mixers):
        if progress is not None:
            progress(number, len(mixers))
        fitted.append(_fit(mixer, count, order, kind, steps, lr))
    if progress is not None:
        progress(len(mixers), len(mixers))
    student = _student(teacher, order, kind, fitted)
    errors = [_errors(*pair, count) for pair in zip(mixers, _mixers(student), strict=True)]
    report = DistillReport(
        kind, order, steps, count, tuple(errors), None if output_dir is None else str(output_dir)
    )
    if output_dir is not None:
        _save(student, report, tokenizer, Path(output_dir))
    return student, report


def _count_taps(taps: int | None, length: int | None) -> int:
    """Return how many taps to fit, of as many as there are and are asked for."""
    count = taps if length is None else length
    if count is None:
        raise ValueError(
            "length must be given: these filters have no last tap; the length of the rows that the "
            "model was trained on is a start"
        )
    if count < 3 or (taps is not None and count > taps):
        most = "" if taps is None else f" and at most {taps}, the taps there are"
        raise ValueError(f"length must be at least 3{most}, got {count}")
    return count


def _fit(
    mixer: Any, count: int, order: int, kind: Kind, steps: int, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of the mixer's ``set_filters`` or ``set_modes``."""
    import torch

    from ssmzoo.distillation.fit import fit_modal, fit_rational

    with torch.no_grad():
        kernel, gain = mixer.kernel(count), mixer.gain()
    if kind == "modal":
        modal = fit_modal(kernel[:, 1:], order, steps=steps, lr=lr)
        return modal.poles, modal.residues, gain + kernel[:, 0]
    rational = fit_rational(kernel[:, 1:], order, steps=steps, lr=lr)
    return rational.a, rational.b, gain + kernel[:, 0]


def _check_target(target: Path) -> None:
    """Fail early if the folder cannot be written, or holds files that no earlier call wrote."""
    report = target / REPORT
    if not report.is_file():
        require_new(target, "output_dir")
        return
    require_name(target, "output_dir")
    written = read_json(report).get("files", ())
    require_ours(target, (REPORT, *written), "output_dir", "of an earlier distillation")


def _tokenizer(source: str, folder: Path | None) -> PreTrainedTokenizerBase | None:
    if folder is not None and not holds_tokenizer(folder):
        return None
    try:
        return load_tokenizer(source, folder, False)
    except LookupError as error:  # of the Hub
        logger.warning("the new model is saved without a tokenizer: %s", error)
        return None


def _mixers(model: Any) -> list[Any]:
    wanted = ("kernel", "gain", "set_filters", "set_modes")
    mixers = [m for m in model.modules() if all(hasattr(m, name) for name in wanted)]
    if hasattr(model, "get_base_model"):
        raise TypeError(
            f"distill needs a model with its own weights alone, got a {type(model).__name__}; "
            "merge its adapter first: model.merge_and_unload()"
        )
    if not mixers or not hasattr(model.config, "distilled") or not model.config.causal:
        raise TypeError(
            "distill needs a causal model with long filters, e.g. of the preset 'hyena-125m', got "
            f"{type(model).__name__} of type {model.config.model_type!r}"
        )
    return mixers


def _require_own_weights(model: Any) -> None:
    import torch

    with torch.device("meta"):
        plain = type(model)(model.config)
    if strange := sorted(model.state_dict().keys() ^ plain.state_dict().keys()):
        raise TypeError(
            f"distill needs a {type(model).__name__} with its own weights alone, got one that "
            f"differs in {strange[0]} and {len(strange) - 1} others; merge an adapter first "
            "(model.merge_and_unload()), or remove_state_adapter(model)"
        )


def _errors(teacher: Any, student: Any, count: int) -> tuple[float, ...]:
    """Return the errors of a layer's channels, of the filters as they will be used."""
    import torch

    from ssmzoo.distillation.fit import relative_error

    with torch.no_grad():
        given, fitted = (each.kernel(count).double().cpu() for each in (teacher, student))
        # the fitted tap 0 is part of the direct gain
        fitted[:, 0] += (student.gain() - teacher.gain()).double().cpu()
    return tuple(relative_error(fitted, given).tolist())


def _student(
    teacher: Any, order: int, kind: Kind, filters: list[tuple[Tensor, Tensor, Tensor]]
) -> Any:
    config = teacher.config.distilled(order, kind)
    student = type(teacher)(config)
    weights = teacher.state_dict()
    own = student.state_dict()
    kept = {n: x for n, x in weights.items() if n in own and x.shape == own[n].shape}
    student.load_state_dict(kept, strict=False)
    for mixer, given in zip(_mixers(student), filters, strict=True):
        (mixer.set_filters if kind == "rational" else mixer.set_modes)(*given)
    student.to(device=teacher.device, dtype=teacher.dtype)
    if teacher.can_generate():
        student.generation_config = copy.deepcopy(teacher.generation_config)
    return student.eval()


def _save(
    student: Any, report: DistillReport, tokenizer: PreTrainedTokenizerBase | None, target: Path
) -> None:
    def write(folder: Path) -> None:
        student.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        # which of them the next call may replace
        told = {**asdict(report), "files": sorted(path.name for path in folder.iterdir())}
        (folder / REPORT).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    write_folder(target, write)
