"""Encoders: models that read in both directions, and classifiers of images."""

from __future__ import annotations

import tempfile
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForImageClassification

from ssmzoo.modeling import SSMForImageClassification, SSMModel
from ssmzoo.testing.subject import (
    BUDGETS,
    Measured,
    NotApplicable,
    Subject,
    gradients,
    probe,
    require,
)

EXACT = BUDGETS[torch.float64]
LENGTHS = (9, 1, 6)
IMAGES = {"image_size": 12, "patch_size": 4, "num_labels": 3}


def check_bidirectional(subject: Subject) -> Measured:
    """In both directions outputs depend on both sides, the same alone, padded and packed."""
    measured = Measured()
    ways: tuple[Literal["both-shared", "both-separate"], ...] = ("both-shared", "both-separate")
    rows = [subject.ids(1, length, seed=length)[0] for length in LENGTHS]
    for directions in ways:
        classifier = subject.classifier(torch.float64, directions=directions, pooling="mean")
        model: SSMModel = classifier.model
        _refuses(lambda way=directions: subject.fresh(directions=way), "a language model")
        _refuses(lambda m=model: m(rows[0][None], use_cache=True), "use_cache=True")

        embeds = model.embed_tokens(rows[0][None]).detach().requires_grad_()
        outputs = model(inputs_embeds=embeds).last_hidden_state
        middle = LENGTHS[0] // 2
        (slope,) = torch.autograd.grad(
            (outputs[0, middle] * probe(outputs[0, middle])).sum(), embeds, retain_graph=True
        )
        influence = slope[0].abs().amax(dim=1)
        for side, tokens in (("before", influence[:middle]), ("after", influence[middle + 1 :])):
            # convolutions by FFT leave rounding
            seen = bool(tokens.max() > EXACT * influence.max())
            require(seen, f"{directions}: no token {side} an output changes it")
        if directions == "both-shared" and not model.mixer_class.reads_both_ways:
            turned = model(inputs_embeds=embeds.flip(1)).last_hidden_state
            measured.compare("reversed outputs", turned, outputs.flip(1), EXACT)

        alone = torch.cat([model(row[None]).last_hidden_state[0] for row in rows])
        slopes = gradients(model, (alone * probe(alone)).sum())
        for name, batch, real in _batches(rows):
            got = model(**batch).last_hidden_state[real]
            measured.compare(f"{directions}, {name}: outputs", got, alone, EXACT)
            found = gradients(model, (got * probe(alone)).sum())
            measured.compare_all(f"{directions}, {name}: gradient of", found, slopes, EXACT)
    return measured


def check_images(subject: Subject) -> Measured:
    """Images are classified one by one as in a batch; all of a picture counts; wrong ones raise."""
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
        _refuses(lambda x=pixels, y=classes: model(pixel_values=x, labels=y), what, named)
    return measured


def _batches(rows: list[Tensor]) -> list[tuple[str, dict[str, Tensor], tuple[Any, ...]]]:
    """Return batches of all rows, and where in ``[B, L]`` the rows' tokens then lie, in order."""
    found, widest = [], max(map(len, rows)) + 2
    for side in ("left", "right"):
        ids = torch.ones(len(rows), widest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            place = slice(len(row)) if side == "right" else slice(widest - len(row), None)
            ids[i, place], mask[i, place] = row, 1
        batch = {"input_ids": ids, "attention_mask": mask}
        found.append((f"{side} padding", batch, (mask.bool(),)))
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    packed = {"input_ids": torch.cat(rows)[None], "cu_seqlens": ends}
    return [*found, ("packed", packed, (0,))]


def _refuses(call: Any, what: str, named: str = "") -> None:
    try:
        call()
    except ValueError as error:
        require(named in str(error), f"the error about {what} does not name {named}: {error}")
    else:
        raise AssertionError(f"{what} must raise a ValueError")
