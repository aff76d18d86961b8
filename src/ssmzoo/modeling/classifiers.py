"""Heads that classify sequences, tokens, pairs of documents, and images.

Those of images take pixels. Every other head takes token ids, embeddings or, with
``config.input_channels``, continuous values, and classifies or, with
``config.problem_type = "regression"``, estimates numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from ssmzoo.modeling.compat import CACHE, SequenceClassifierOutputWithPast, renamed_cache
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.head import SSMHead, names_inputs
from ssmzoo.modeling.inputs import (
    BOUNDARIES,
    PACKING,
    given_input,
    refuse_cache,
    refuse_unknown,
)
from ssmzoo.modeling.layers import Linear
from ssmzoo.modeling.losses import (
    cross_entropy,
    loss_of_classes,
    squared_error,
    without_padding,
)
from ssmzoo.modeling.packing import Sequences, without_holes


class _LinearClassifier(SSMHead):
    """A backbone and a linear map."""

    def __init__(self, config: SSMConfig) -> None:
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)
        self.score = Linear(config.hidden_size, self.num_labels, bias=config.classifier_bias)
        self.post_init()


class SSMForSequenceClassification(_LinearClassifier):
    """A backbone and a linear map of one vector a sequence: see ``config.pooling``."""

    def __init__(self, config: SSMConfig) -> None:
        super().__init__(config)
        # transformers would guess by the class's name
        self.loss_type = "ForSequenceClassification"

    @names_inputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Classify each sequence.

        Its tokens are those of ``attention_mask``, of each packed sequence, or, without either, all
        but the ``pad_token_id`` around them. Behind a cache all are tokens, whatever their ids; a
        sequence's first part that may end in that id needs a mask.

        Args:
            input_ids: Token ids ``[B, L]``; or give ``inputs_embeds`` or ``input_values``.
            attention_mask: 1 for tokens, 0 for padding.
            labels: ``[B]`` classes or, for regression, values; ``[S]`` for packed sequences.
            return_dict: Return an output object (default) or a tuple.
            **inputs: Other arguments of :meth:`SSMModel.forward`.

        Returns:
            ``loss``, ``logits [B, num_labels]`` (``[S, num_labels]``), ``cache``.
        """
        renamed_cache(inputs)
        if self.config.pooling != "last" and inputs.get(CACHE) is not None:
            way = f'pooling="{self.config.pooling}"'
            raise ValueError(f"{way} needs the whole sequence in one call, got a cache")
        # positions say where sequences begin, not where they end
        names = ("seq_idx", *BOUNDARIES, CACHE)
        open_ended = attention_mask is None and all(inputs.get(x) is None for x in names)
        if open_ended and input_ids is not None:
            attention_mask = _mask_of_padding(input_ids, self.config.pad_token_id)
        inputs["input_ids"] = input_ids
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        outputs, packing = self.read(inputs)
        logits = self.score(pool(outputs.last_hidden_state, packing, self.config.pooling))
        loss = None if labels is None else loss_of_classes(self, logits, labels)
        kept: dict[str, Any] = {CACHE: getattr(outputs, CACHE)}
        kind = SequenceClassifierOutputWithPast
        return self.answer(kind, outputs, return_dict, loss=loss, logits=logits, **kept)


class SSMForTokenClassification(_LinearClassifier):
    """A backbone and a linear map of every token's output."""

    @partial(names_inputs, cache=False)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **inputs: Any,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """Classify each token; labels are not shifted.

        Args:
            input_ids: Token ids ``[B, L]``; or give ``inputs_embeds`` or ``input_values``.
            attention_mask: 1 for tokens, 0 for padding.
            labels: ``[B, L]`` classes, -100 is ignored; for regression values ``[B, L]`` or
                ``[B, L, num_labels]``, where nan is ignored.
            return_dict: Return an output object (default) or a tuple.
            **inputs: Other arguments of :meth:`SSMModel.forward`, but no cache.

        Returns:
            ``loss`` (mean cross-entropy in nats, or mean squared error) and
            ``logits [B, L, num_labels]``.
        """
        refuse_cache(inputs)
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        outputs, packing = self.read(inputs)
        logits = self.score(outputs.last_hidden_state)
        loss = None if labels is None else self._loss(logits, labels, packing)
        return self.answer(TokenClassifierOutput, outputs, return_dict, loss=loss, logits=logits)

    def _loss(self, logits: Tensor, labels: Tensor, packing: Sequences | None) -> Tensor:
        shape, regression = logits.shape[:2], self.config.problem_type == "regression"
        if regression:
            labels = labels.to(torch.promote_types(torch.float32, labels.dtype))
            if labels.dim() == 2 and self.num_labels == 1:
                labels = labels.unsqueeze(2)
            shape = logits.shape
        if labels.shape != shape:
            wanted = f"{'' if regression else '[B, L] = '}{list(shape)}"
            raise ValueError(f"labels must have shape {wanted}, got {list(labels.shape)}")
        labels = without_padding(labels, packing)
        return squared_error(logits, labels) if regression else cross_entropy(logits, labels)


class SSMForImageClassification(_LinearClassifier):
    """A backbone of patches and a linear map of the class token, or the mean (``pooling``)."""

    main_input_name = "pixel_values"

    def __init__(self, config: SSMConfig) -> None:
        if config.image_size is None:
            raise ValueError(
                f"{type(self).__name__} needs image_size in its configuration, got None; set it, "
                "patch_size and num_channels, or take a preset for images"
            )
        if config.causal and config.pooling == "last":
            raise ValueError(
                "the class token lies in the middle of the patches, and a causal model would read "
                "none behind it; set directions to read in both, or pooling='mean'"
            )
        if config.problem_type not in (None, "single_label_classification"):
            raise ValueError(
                f"{type(self).__name__} chooses one class: problem_type must be None or "
                f"'single_label_classification', got {config.problem_type!r}"
            )
        _refuse_token_inputs(type(self).__name__, config)
        super().__init__(config)

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput | tuple[Any, ...]:
        """Classify each image.

        Args:
            pixel_values: ``[B, num_channels, image_size, image_size]``, from an image processor.
            labels: ``[B]`` classes.
            output_hidden_states: See :meth:`SSMModel.forward`.
            return_dict: See there.
            **kwargs: See there.

        Returns:
            ``loss`` (mean cross-entropy in nats) and ``logits [B, num_labels]``.

        Raises:
            ValueError: Images of another shape, or labels outside of the classes.
            TypeError: ``pixel_values`` is not a floating-point tensor, or an argument that images
                do not have, such as a mask.
        """
        refuse_unknown(kwargs, SSMForImageClassification.forward)
        asked = {"use_cache": False, "output_hidden_states": output_hidden_states}
        outputs = self.model(pixel_values=pixel_values, return_dict=True, **asked)
        hidden = outputs.last_hidden_state
        if self.config.pooling == "mean":
            pooled = hidden.mean(dim=1)
        else:
            pooled = hidden[:, self.model.embed_images.class_position]
        logits = self.score(pooled)
        loss = None if labels is None else cross_entropy(logits, labels)
        return self.answer(ImageClassifierOutput, outputs, return_dict, loss=loss, logits=logits)


class SSMForPairClassification(SSMHead):
    """Two documents through one backbone, and a classifier of the relation between them.

    Their pooled outputs ``a`` and ``b`` become ``[a, b, a - b, a * b]``, then Linear, GELU, Linear.
    """

    def __init__(self, config: SSMConfig) -> None:
        _refuse_token_inputs(type(self).__name__, config)
        super().__init__(config)
        # transformers would guess by the class's name, and has no pairs
        self.loss_type = "ForSequenceClassification"
        self.num_labels = cast(int, config.num_labels)
        self.compare = Linear(4 * config.hidden_size, config.hidden_size)
        self.score = Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        input_values: Tensor | None = None,
        pair_input_values: Tensor | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Classify pairs of documents; the two of a pair may differ in length.

        Args:
            input_ids: The first documents ``[B, L1]``.
            attention_mask: Their tokens are 1, padding 0; ``[B, L1]``. Without it the
                ``pad_token_id`` around a document is padding.
            pair_input_ids: The second documents ``[B, L2]``.
            pair_attention_mask: As ``attention_mask``, ``[B, L2]``.
            labels: ``[B]`` classes or, for regression, values.
            return_dict: Return an output object (default) or a tuple.
            input_values: Continuous first documents ``[B, L1, C]`` instead.
            pair_input_values: The second ones.
            **inputs: As for :meth:`SSMModel.forward`, but no packed sequences.

        Returns:
            ``loss``, ``logits [B, num_labels]`` and, if asked for, ``hidden_states [2 * B, L, D]``,
            the first documents' before the second ones'.

        Raises:
            TypeError: An argument that pairs do not have.
        """
        refuse_cache(inputs)
        _refuse_packing(inputs)
        name = "input_ids" if input_values is None else "input_values"
        first, mask = self._document(input_ids, input_values, attention_mask)
        second, second_mask = self._document(pair_input_ids, pair_input_values, pair_attention_mask)
        if first.shape[0] != second.shape[0] or first.dtype != second.dtype:
            raise ValueError(
                f"pair_{name} must have the dtype and batch size of {name}, {first.dtype} and "
                f"{len(first)}, got {second.dtype} and {len(second)}"
            )
        # one batch of both, so that a batch norm takes statistics of all documents
        both = {name: _stacked(first, second), "attention_mask": _stacked(mask, second_mask)}
        outputs, packing = self.read({**inputs, **both, "use_cache": False})
        a, b = pool(outputs.last_hidden_state, packing, self.config.pooling).chunk(2)
        logits = self.score(F.gelu(self.compare(torch.cat([a, b, a - b, a * b], dim=1))))
        loss = None if labels is None else loss_of_classes(self, logits, labels)
        return self.answer(SequenceClassifierOutput, outputs, return_dict, loss=loss, logits=logits)

    def _document(
        self, ids: Tensor | None, values: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return one side of the pairs and its mask, by ``pad_token_id`` where none is given."""
        document = given_input({"input_ids": ids, "input_values": values})
        if mask is None and ids is not None:
            mask = _mask_of_padding(ids, self.config.pad_token_id)
        if mask is None:
            mask = document.new_ones(document.shape[:2], dtype=torch.long)
        return document, mask


def _refuse_token_inputs(name: str, config: SSMConfig) -> None:
    if config.token_inputs:
        raise ValueError(
            f"{name} cannot give its backbone {', '.join(config.token_inputs)}, which this "
            "configuration asks for with every token; turn that off, or take a classifier of "
            "sequences or tokens"
        )


def _refuse_packing(kwargs: dict[str, Any]) -> None:
    """Fail for arguments of packed sequences, and take them out: each row is one document."""
    for name in PACKING:
        if kwargs.pop(name, None) is not None:
            raise TypeError(
                f"a classifier of pairs takes no {name}: each row is one document, whose padding "
                "attention_mask and pair_attention_mask tell"
            )


def pool(hidden_states: Tensor, packing: Sequences | None, pooling: str) -> Tensor:
    """Return one vector a sequence: the output at its last token, or the mean over its tokens.

    Args:
        hidden_states: ``[B, L, D]``.
        packing: Where the sequences lie; None: every row is one.
        pooling: ``"last"`` or ``"mean"``, the values of :attr:`SSMConfig.pooling`.

    Returns:
        ``[B, D]``, ``[S, D]`` for packed sequences.

    Raises:
        ValueError: A sequence without tokens.
    """
    if packing is None:
        return hidden_states[:, -1] if pooling == "last" else hidden_states.mean(dim=1)
    if packing.order is not None:
        hidden_states = packing.flat(hidden_states).view_as(hidden_states)
    lengths, ends = packing.offsets.diff(), packing.offsets[1:]
    if packing.rows is not None:
        lengths, ends = lengths[packing.rows], ends[packing.rows]
    if not torch.compiler.is_compiling() and bool((lengths == 0).any()):
        raise ValueError(
            "every sequence must have at least one token, got none in sequence "
            f"{int((lengths == 0).int().argmax())}"
        )
    if pooling == "last":
        return hidden_states.flatten(0, 1)[(ends - 1).clamp(min=0)]
    # a sum of many half-precision numbers overflows
    exact = hidden_states.to(torch.promote_types(torch.float32, hidden_states.dtype))
    if packing.padded:
        real = packing.real()
        assert real is not None
        weight = real.view(*exact.shape[:2], 1).to(exact.dtype)
        mean = (exact * weight).sum(dim=1) / lengths.unsqueeze(1)
    else:
        offsets = packing.offsets.to(exact.device)
        mean = torch.segment_reduce(exact.flatten(0, 1), "mean", offsets=offsets, axis=0)
        if packing.rows is not None:
            mean = mean[packing.rows]
    return mean.to(hidden_states.dtype)


def _mask_of_padding(input_ids: Tensor, pad: int | None) -> Tensor | None:
    if pad is None:
        return None
    return without_holes((input_ids != pad).long())


def _stacked(first: Tensor, second: Tensor) -> Tensor:
    """Return both as one batch of ``[2 * B, L, ...]``, the shorter with zeros behind it.

    Zeros are valid token ids; the masks mark them as padding.
    """
    length = max(first.shape[1], second.shape[1])
    missing = [x.new_zeros(len(x), length - x.shape[1], *x.shape[2:]) for x in (first, second)]
    return torch.cat([torch.cat([first, missing[0]], 1), torch.cat([second, missing[1]], 1)])
