"""Encoders: models that read in both directions, and classifiers of images."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import AutoModelForImageClassification

from ssmzoo.modeling import SSMForImageClassification, SSMModel
from ssmzoo.testing.subject import (
    BUDGETS,
    EXACT,
    Measured,
    NotApplicable,
    Subject,
    gradients,
    gradients_of,
    probe,
    require,
    require_error,
)

LENGTHS = (9, 1, 6)
IMAGES = {"image_size": 12, "patch_size": 4, "num_labels": 3}


def check_bidirectional(subject: Subject) -> Measured:
    """In both directions outputs depend on both sides, the same alone, padded and packed.

    A row that is read backwards by layers whose directions are swapped has the same outputs, also
    where a model needs ``token_inputs``: steps, which are uneven here, between the same times.
    """
    measured = Measured()
    ways: tuple[Literal["both-shared", "both-separate"], ...] = ("both-shared", "both-separate")
    rows = [subject.ids(1, length, seed=length)[0] for length in LENGTHS]
    for directions in ways:
        classifier = subject.classifier(torch.float64, directions=directions, pooling="mean")
        model: SSMModel = classifier.model
        require_error(
            ValueError, (), "a language model", lambda way=directions: subject.fresh(directions=way)
        )
        own = [_steps(model, _times(row)) for row in rows]
        require_error(
            ValueError,
            (),
            "use_cache=True",
            lambda m=model, s=own[0]: m(rows[0][None], use_cache=True, **s),
        )

        embeds = model.embed_tokens(rows[0][None]).detach().requires_grad_()
        times = _times(rows[0]).requires_grad_()
        outputs = model(inputs_embeds=embeds, **_steps(model, times)).last_hidden_state
        middle = LENGTHS[0] // 2
        (slope,) = torch.autograd.grad(
            (outputs[0, middle] * probe(outputs[0, middle])).sum(), embeds, retain_graph=True
        )
        influence = slope[0].abs().amax(dim=1)
        for side, tokens in (("before", influence[:middle]), ("after", influence[middle + 1 :])):
            # convolutions by FFT leave rounding
            seen = bool(tokens.max() > EXACT * influence.max())
            require(seen, f"{directions}: no token {side} an output changes it")
        if not any(layer.mixer.reads_both_ways for layer in cast(Any, model.layers)):
            _compare_reversed(measured, directions, model, embeds, times, outputs)

        each = [model(row[None], **own[i]).last_hidden_state[0] for i, row in enumerate(rows)]
        alone = torch.cat(each)
        slopes = gradients(model, (alone * probe(alone)).sum())
        for name, batch, real in _batches(rows, own):
            got = model(**batch).last_hidden_state[real]
            measured.compare(f"{directions}, {name}: outputs", got, alone, EXACT)
            found = gradients(model, (got * probe(alone)).sum())
            measured.compare_all(f"{directions}, {name}: gradient of", found, slopes, EXACT)
    return measured


def check_images(subject: Subject) -> Measured:
    """Images alone and in a batch have equal logits; each patch counts; wrong images raise."""
    kind: Any = subject.family.image_classification_class
    if kind is None or not issubclass(kind, SSMForImageClassification):
        raise NotApplicable("it has no classifier of patches")
    measured = Measured()
    model: Any = subject.build(kind, torch.float64, {**IMAGES, "directions": "both-shared"})
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 3, 12, 12, generator=generator, dtype=torch.float64)
    labels = torch.tensor([2, 0, 1])
    images.requires_grad_()
    output = model(pixel_values=images, labels=labels)
    with torch.no_grad():
        singly = torch.cat([model(pixel_values=image[None]).logits for image in images])
        measured.compare("logits of a batch", output.logits, singly, EXACT)
        loss = torch.nn.functional.cross_entropy(singly.float(), labels)
        measured.compare("loss", output.loss.float(), loss, BUDGETS[torch.float32])
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = AutoModelForImageClassification.from_pretrained(folder).eval()
            measured.compare("logits after loading", loaded(images).logits, output.logits, EXACT)
    (slope,) = torch.autograd.grad((output.logits * probe(output.logits)).sum(), images)
    patches = slope.unfold(2, 4, 4).unfold(3, 4, 4).abs().amax(dim=(1, 4, 5))
    require(
        bool((patches > EXACT * patches.max()).all()), "some patch of an image changes no logit"
    )
    for what, pixels, classes, named in (
        ("images of another size", images[:, :, :8], None, "pixel_values"),
        ("images of other channels", images[:, :1], None, "pixel_values"),
        ("labels outside of the classes", images, labels + 1, "labels"),
    ):
        require_error(
            ValueError, (named,), what, lambda x=pixels, y=classes: model(pixel_values=x, labels=y)
        )
    return measured


def _batches(
    rows: list[Tensor], steps: list[dict[str, Tensor]]
) -> list[tuple[str, dict[str, Tensor], tuple[Any, ...]]]:
    """Return batches of all rows, with the places ``[B, L]`` of the rows' tokens in order."""
    found, widest = [], max(map(len, rows)) + 2
    for side in ("left", "right", "inner"):
        ids = torch.ones(len(rows), widest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        # steps of padding may be zero
        more = {name: torch.zeros(ids.shape, dtype=torch.float64) for name in steps[0]}
        for i, row in enumerate(rows):
            place: Any = slice(len(row)) if side == "right" else slice(widest - len(row), None)
            if side == "inner":  # behind the second token
                place = torch.arange(len(row))
                place[2:] += widest - len(row)
            ids[i, place], mask[i, place] = row, 1
            for name in more:
                more[name][i, place] = steps[i][name]
        batch = {"input_ids": ids, "attention_mask": mask, **more}
        found.append((f"{side} padding", batch, (mask.bool(),)))
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    more = {name: torch.cat([own[name] for own in steps], dim=1) for name in steps[0]}
    packed = {"input_ids": torch.cat(rows)[None], "cu_seqlens": ends, **more}
    return [*found, ("packed", packed, (0,))]


def _times(row: Tensor) -> Tensor:
    """Return uneven times of a row's tokens, ``[1, L]``: steps of a tenth to three."""
    generator = torch.Generator().manual_seed(len(row))
    steps = 0.1 + 2.9 * torch.rand(1, len(row), generator=generator, dtype=torch.float64)
    return steps.cumsum(1)


def _steps(model: SSMModel, times: Tensor) -> dict[str, Tensor]:
    """Return the model's ``token_inputs`` at these times: the steps between them, the first 1."""
    first = torch.ones_like(times[:, :1])
    names = enumerate(model.config.token_inputs, start=1)
    return {name: torch.cat([first, scale * times.diff(dim=1)], dim=1) for scale, name in names}


def _compare_reversed(
    measured: Measured,
    directions: str,
    model: SSMModel,
    embeds: Tensor,
    times: Tensor,
    outputs: Tensor,
) -> None:
    """Compare outputs and gradients with those of the row read backwards."""
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    leaves = {"embeddings": embeds, "times": times, **parameters}
    with _swapped_directions(model):
        steps = _steps(model, (times[:, -1:] - times).flip(1))
        turned = model(inputs_embeds=embeds.flip(1), **steps).last_hidden_state.flip(1)
    measured.compare(f"{directions}: reversed outputs", turned, outputs, EXACT)
    found, expected = (gradients_of(leaves, (y * probe(y)).sum()) for y in (turned, outputs))
    what = f"{directions}: reversed outputs' gradient of"
    measured.compare_all(what, found, expected, EXACT)


@contextlib.contextmanager
def _swapped_directions(model: Any) -> Iterator[None]:
    """Let the mixers that read backwards read forwards, and the others backwards."""

    def swap() -> None:
        for block in model.layers:
            if block.reverse is not None:
                block.mixer, block.reverse["mixer"] = block.reverse["mixer"], block.mixer

    swap()
    try:
        yield
    finally:
        swap()
