"""Heads that classify sequences, tokens, pairs of documents, and images.

Those of images take pixels. Every other head takes token ids, embeddings or, with
``config.input_channels``, continuous values, and classifies or, with
``config.problem_type = "regression"``, estimates numbers.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from ssmzoo.modeling.backbone import SSMModel, refuse_cache, refuse_unknown
from ssmzoo.modeling.cache import StateCache
from ssmzoo.modeling.compat import CACHE, SequenceClassifierOutputWithPast, one_cache
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.inputs import given_inputs, named_indices
from ssmzoo.modeling.layers import Linear
from ssmzoo.modeling.packing import PackedRow, without_holes
from ssmzoo.modeling.pretrained import SSMPreTrainedModel


def squared_error(found: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """Return the mean squared error where it counts, 0 where none does."""
    exact = torch.promote_types(torch.float32, found.dtype)  # of whose sums float16 has no numbers
    counts = counts.expand_as(found)
    error = torch.where(counts, found.to(exact) - wanted.nan_to_num().to(exact), 0)
    return error.square().sum() / counts.sum().clamp(min=1)


class _LinearClassifier(SSMPreTrainedModel):
    """A backbone and a linear map."""

    model_class: type[SSMModel]
    # the loss is a batch's mean, so a Trainer that accumulates has to divide
    accepts_loss_kwargs = False

    def __init__(self, config: SSMConfig) -> None:
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)
        self.model = self.model_class(config)
        self.score = Linear(config.hidden_size, self.num_labels, bias=config.classifier_bias)
        self.post_init()


class SSMForSequenceClassification(_LinearClassifier):
    """A backbone and a linear map of each sequence's last token or, ``pooling="mean"``, its mean.

    A subclass names its ``model_class``.
    """

    def __init__(self, config: SSMConfig) -> None:
        super().__init__(config)
        # transformers would guess by the class's name
        self.loss_type = "ForSequenceClassification"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        input_values: Tensor | None = None,
        past_key_values: StateCache | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Classify each sequence.

        Its tokens are those of ``attention_mask``, of each packed sequence, or, without either, all
        but the ``pad_token_id`` around them. What goes on from a cache are tokens, whatever their
        ids; of the first part of a sequence that may end in that id, a mask must say so.

        Args:
            input_ids: See :meth:`SSMModel.forward`, as for all arguments not named here.
            attention_mask: See there.
            position_ids: See there.
            cache: See there.
            inputs_embeds: See there.
            labels: ``[B]`` classes or, for regression, values; ``[S]`` for packed sequences.
            use_cache: See there.
            output_hidden_states: See there.
            return_dict: See there.
            cu_seqlens: See there.
            cu_seq_lens_q: See there.
            seq_idx: See there.
            input_values: See there.
            past_key_values: See there.
            **kwargs: See there.

        Returns:
            ``loss``, ``logits [B, num_labels]`` (``[S, num_labels]``), ``cache``.
        """
        if past_key_values is not None:
            cache = one_cache(cache, past_key_values)
        if return_dict is None:
            return_dict = self.config.return_dict
        if self.config.pooling == "mean" and cache is not None:
            raise ValueError('pooling="mean" needs the whole sequence in one call, got a cache')
        cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        # positions say where sequences begin, not where they end
        open_ended = attention_mask is None and seq_idx is None and cu_seqlens is None
        if open_ended and input_ids is not None and cache is None:
            attention_mask = _mask_of_padding(input_ids, self.config.pad_token_id)
        packing = self.model.find_packing(
            (input_ids, inputs_embeds, input_values),
            cache,
            attention_mask,
            position_ids,
            seq_idx,
            cu_seqlens,
        )
        passed: dict[str, Any] = {CACHE: cache}  # as a family that overrides this expects it
        outputs = self.model(
            input_ids,
            **passed,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            input_values=input_values,
            packing=packing,
            **kwargs,
        )
        logits = self.score(pool(outputs.last_hidden_state, packing, self.config.pooling))
        loss = None
        if labels is not None:
            loss = _loss_of_classes(self, logits, labels)
        kept: dict[str, Any] = {CACHE: getattr(outputs, CACHE)}
        output = SequenceClassifierOutputWithPast(
            **kept,
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
        )
        return output if return_dict else output.to_tuple()


class SSMForTokenClassification(_LinearClassifier):
    """A backbone and a linear map of every token's output. A subclass names its ``model_class``."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        input_values: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """Classify each token; labels are not shifted.

        Args:
            input_ids: See :meth:`SSMModel.forward`, as for all arguments not named here.
            attention_mask: See there.
            position_ids: See there.
            inputs_embeds: See there.
            labels: ``[B, L]`` classes, -100 does not count; for regression values ``[B, L]`` or
                ``[B, L, num_labels]``, where nan does not count.
            output_hidden_states: See there.
            return_dict: See there.
            cu_seqlens: See there.
            cu_seq_lens_q: See there.
            seq_idx: See there.
            input_values: See there.
            **kwargs: See there.

        Returns:
            ``loss`` (mean cross-entropy in nats, or mean squared error) and
            ``logits [B, L, num_labels]``.
        """
        refuse_cache(kwargs)
        if return_dict is None:
            return_dict = self.config.return_dict
        packing = self.model.find_packing(
            (input_ids, inputs_embeds, input_values),
            None,
            attention_mask,
            position_ids,
            seq_idx,
            cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
        )
        outputs = self.model(
            input_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            input_values=input_values,
            packing=packing,
            **kwargs,
        )
        logits = self.score(outputs.last_hidden_state)
        loss = None if labels is None else self._loss(logits, labels, packing)
        output = TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states
        )
        return output if return_dict else output.to_tuple()

    def _loss(self, logits: Tensor, labels: Tensor, packing: PackedRow | Literal[False]) -> Tensor:
        real = packing.mask(len(logits)) if packing else None
        if self.config.problem_type != "regression":
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels must have shape [B, L] = {list(logits.shape[:2])}, "
                    f"got {list(labels.shape)}"
                )
            if real is not None:
                labels = labels.masked_fill(~real.view_as(labels), -100)
            with named_indices("labels", labels, self.num_labels, ignored=-100):
                return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        if labels.dim() == 2 and self.num_labels == 1:
            labels = labels.unsqueeze(2)
        if labels.shape != logits.shape:
            raise ValueError(
                f"labels must have shape {list(logits.shape)}, got {list(labels.shape)}"
            )
        counts = ~labels.isnan()
        if real is not None:
            counts = counts & real.view(*labels.shape[:2], 1)
        return squared_error(logits, labels, counts)


class SSMForImageClassification(_LinearClassifier):
    """A backbone of patches and a linear map of the class token or, ``pooling="mean"``, the mean.

    A subclass names its ``model_class``.
    """

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
        if return_dict is None:
            return_dict = self.config.return_dict
        outputs = self.model(
            pixel_values=pixel_values,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        if self.config.pooling == "mean":
            pooled = hidden.mean(dim=1)
        else:
            pooled = hidden[:, self.model.embed_images.class_position]
        logits = self.score(pooled)
        loss = None
        if labels is not None:
            with named_indices("labels", labels, self.num_labels, ignored=-100):
                loss = F.cross_entropy(logits.float(), labels)
        output = ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states
        )
        return output if return_dict else output.to_tuple()


class SSMForPairClassification(SSMPreTrainedModel):
    """Two documents through one backbone, and a classifier of what they have to do with each other.

    Their pooled outputs ``a`` and ``b`` become ``[a, b, a - b, a * b]``, then Linear, GELU, Linear.
    A subclass names its ``model_class``.
    """

    model_class: type[SSMModel]
    # the loss is a batch's mean, so a Trainer that accumulates has to divide
    accepts_loss_kwargs = False

    def __init__(self, config: SSMConfig) -> None:
        _refuse_token_inputs(type(self).__name__, config)
        super().__init__(config)
        # transformers would guess by the class's name, and has no pairs
        self.loss_type = "ForSequenceClassification"
        self.num_labels = cast(int, config.num_labels)
        self.model = self.model_class(config)
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
        **kwargs: Any,
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
            **kwargs: As for :meth:`SSMModel.forward`, but no packed sequences.

        Returns:
            ``loss``, ``logits [B, num_labels]`` and, if asked for, ``hidden_states [2 * B, L, D]``,
            the first documents' before the second ones'.

        Raises:
            TypeError: An argument that pairs do not have.
        """
        refuse_cache(kwargs)
        _refuse_packing(kwargs)
        if return_dict is None:
            return_dict = self.config.return_dict
        name = "input_ids" if input_values is None else "input_values"
        documents, masks = [], []
        for own, values, mask in (
            (input_ids, input_values, attention_mask),
            (pair_input_ids, pair_input_values, pair_attention_mask),
        ):
            document = given_inputs(own, None, values)
            if mask is None and own is not None:
                mask = _mask_of_padding(own, self.config.pad_token_id)
            if mask is None:
                mask = document.new_ones(document.shape[:2], dtype=torch.long)
            documents.append(document)
            masks.append(mask)
        first, second = documents
        if first.shape[0] != second.shape[0] or first.dtype != second.dtype:
            raise ValueError(
                f"pair_{name} must have the dtype and batch size of {name}, {first.dtype} and "
                f"{len(first)}, got {second.dtype} and {len(second)}"
            )
        length = max(first.shape[1], second.shape[1])
        # one batch of both, so that a batch norm sees what it would see of single documents
        both = torch.cat([_lengthened(x, length) for x in documents])
        mask = torch.cat([_lengthened(x, length) for x in masks])
        packing = self.model.find_packing((both,), None, mask, None, None, None)
        outputs = self.model(
            **{name: both}, use_cache=False, return_dict=True, packing=packing, **kwargs
        )
        a, b = pool(outputs.last_hidden_state, packing, self.config.pooling).chunk(2)
        logits = self.score(F.gelu(self.compare(torch.cat([a, b, a - b, a * b], dim=1))))
        loss = None
        if labels is not None:
            loss = _loss_of_classes(self, logits, labels)
        output = SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states
        )
        return output if return_dict else output.to_tuple()


def _refuse_token_inputs(name: str, config: SSMConfig) -> None:
    if config.token_inputs:
        raise ValueError(
            f"{name} cannot give its backbone {', '.join(config.token_inputs)}, which this "
            "configuration asks for with every token; turn that off, or take a classifier of "
            "sequences or tokens"
        )


def _refuse_packing(kwargs: dict[str, Any]) -> None:
    """Take out what says where packed sequences lie; each row of a pair is one document."""
    for name in ("position_ids", "seq_idx", "cu_seqlens", "cu_seq_lens_q"):
        if kwargs.pop(name, None) is not None:
            raise TypeError(
                f"a classifier of pairs takes no {name}: each row is one document, whose padding "
                "attention_mask and pair_attention_mask tell"
            )


def _loss_of_classes(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    with named_indices("labels", labels, logits.shape[-1], ignored=-100):
        return model.loss_function(
            logits=logits, labels=labels, pooled_logits=logits, config=model.config
        )


def pool(hidden_states: Tensor, packing: PackedRow | Literal[False], pooling: str) -> Tensor:
    """Return one vector a sequence: the output at its last token, or the mean over its tokens.

    Args:
        hidden_states: ``[B, L, D]``.
        packing: Where the sequences lie; False: every row is one.
        pooling: ``"last"`` or ``"mean"``.

    Returns:
        ``[B, D]``, ``[S, D]`` for packed sequences.

    Raises:
        ValueError: A sequence without tokens.
    """
    if not packing:
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


def _lengthened(x: Tensor, length: int) -> Tensor:
    """Put zeros behind ``[B, L, ...]``; as token ids they are read but never counted."""
    missing = x.new_zeros(x.shape[0], length - x.shape[1], *x.shape[2:])
    return torch.cat([x, missing], dim=1)


__all__ = [
    "SSMForImageClassification",
    "SSMForPairClassification",
    "SSMForSequenceClassification",
    "SSMForTokenClassification",
    "pool",
]
