"""The objectives of runs: the model's arguments, the loss and its targets, and the metrics.

The loop trains by ``pieces``, ``targets`` and ``loss_of``, and validates by ``evaluate`` and
``metrics``. The loss is a mean over the batch's targets; a validation adds up sums over batches and
processes, so it does not depend on either. Labels that do not count, at padding and where nothing
is asked, are -100 for classes and nan for values, because -100 is a possible value.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmzoo.data.rows import Rows
from ssmzoo.recipe import HIGHER_IS_BETTER
from ssmzoo.tasks.common import IGNORED, counted

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ssmzoo.data.labelled import Examples
    from ssmzoo.tasks import Supervised

logger = logging.getLogger("ssmzoo")


class Objective(ABC):
    """The base of all objectives.

    Attributes:
        metric: The one of :meth:`metrics` that ranks models.
        metric_names: Those that ``train.stop_at`` may name.
        test_metrics: Those that are the score of a test split, the most important first.
        loss_name: The loss in words, with its unit.
        options: Arguments of the model that are no tensors.
        independent: Whether a target is an example of its own.
        sums: How many numbers :meth:`measure` returns.
    """

    metric = "loss"
    metric_names: tuple[str, ...] = ("loss", "accuracy")
    test_metrics: tuple[str, ...] = ("loss",)
    loss_name = "loss in nats per token"
    independent = False
    sums = 3

    @property
    def higher(self) -> bool:
        """Whether more of the metric is better."""
        return self.metric in HIGHER_IS_BETTER

    def __init__(self, model: nn.Module) -> None:
        known = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in known else {}

    @abstractmethod
    def batch(self, part: Any) -> dict[str, torch.Tensor]:
        """Return a model's arguments."""

    def pieces(self, part: Any) -> list[Any]:
        """Return the pieces to run forward and backward in turn; their losses add up."""
        return [self.batch(part)]

    def loss_of(
        self, forward: Callable[..., Any], piece: Any, part: int, targets: int
    ) -> torch.Tensor:
        """Return a piece's loss, as a share of the mean over its part's targets.

        Args:
            forward: Runs the model on a batch.
            piece: One of :meth:`pieces`.
            part: Which of a step's micro-batches it comes from.
            targets: Of that micro-batch.
        """
        if targets:
            return forward(piece).loss
        # the mean of nothing is not a number; other processes wait for gradients
        with_logits = {"skip_logits": False} if "skip_logits" in self.options else {}
        return 0.0 * forward(piece, **with_logits).logits.float().sum()

    def carried(self) -> dict[str, torch.Tensor]:
        """Return, by name, the states carried to the next step."""
        return {}

    def carry_on(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        """Begin the next step with the states that :meth:`carried` returned."""
        assert not tensors

    @abstractmethod
    def targets(self, part: Any) -> int:
        """Return how many targets the loss of this part is a mean over; it may be none."""

    def evaluate(self, forward: Callable[..., Any], part: Any) -> torch.Tensor:
        """Return the sums of :meth:`measure` over a part, on which ``forward`` runs the model."""
        batch = self.batch(part)
        return self.measure(forward(batch), batch, part)

    @abstractmethod
    def measure(self, output: Any, batch: dict[str, torch.Tensor], part: Any) -> torch.Tensor:
        """Return sums over a batch: of the losses, of the metric, and the number of targets."""

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Return the sums of :meth:`measure` over nothing."""
        import torch

        return torch.zeros(self.sums, dtype=torch.float64, device=device)

    def metrics(self, sums: torch.Tensor) -> dict[str, float | int]:
        """Return a validation's metrics from its sums."""
        loss, right, targets = sums.tolist()
        return {"loss": loss / targets, "accuracy": right / targets, "targets": int(targets)}


MANY_WORDS = 16_384  # from here on logits take more memory than they save time


class CausalLM(Objective):
    """Predict the next token; of a large vocabulary without logits, where the model can.

    Args:
        model: Rows are packed into one, their seams marked by ``cu_seqlens``, if it takes that.
        packs: Whether the rows hold several documents at all.
    """

    def __init__(self, model: nn.Module, *, packs: bool) -> None:
        from ssmzoo.modeling import SSMForCausalLM

        super().__init__(model)
        if isinstance(model, SSMForCausalLM):
            config = model.config
            self.options["skip_logits"] = config.skip_logits or config.vocab_size >= MANY_WORDS
        self._positions = most_positions(model)
        takes_boundaries = "cu_seqlens" in inspect.signature(model.forward).parameters
        self.packed = packs and takes_boundaries
        if packs and not takes_boundaries:
            logger.warning(
                "%s takes no cu_seqlens: documents that share a row see each other",
                type(model).__name__,
            )

    def batch(self, part: Rows) -> dict[str, torch.Tensor]:
        """Return a model's arguments: packed into one row [1, n * L], or rows [n, L].

        Raises:
            ValueError: A row longer than the model's table of positions.
        """
        import torch

        _require_positions(self._positions, part.input_ids.shape[1])
        arrays = {"input_ids": part.input_ids, "labels": part.labels}
        if self.packed:
            arrays = {name: array.reshape(1, -1) for name, array in arrays.items()}
            ends = [*np.flatnonzero(part.starts), part.starts.size]
            arrays["cu_seqlens"] = np.array(ends, np.int32)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def targets(self, part: Rows) -> int:
        """Return how many tokens are predicted."""
        return part.targets

    def measure(self, output: Any, batch: dict[str, torch.Tensor], part: Rows) -> torch.Tensor:
        """Return sums over a batch: of the losses, of hits, and the number of targets."""
        logits: torch.Tensor = output.logits
        labels = batch["labels"][:, 1:].to(logits.device)
        right = (logits[:, :-1].argmax(-1) == labels).sum()
        sums = self.zeros(logits.device)
        if part.targets:  # the mean of nothing is not a number
            sums[0] = output.loss.double() * part.targets
        sums[1], sums[2] = right, part.targets
        return sums


class Labelled(Objective):
    """Predict the labels of a task's examples.

    Args:
        model: The model, with the task's head.
        task: The task; its lengths become the attention mask.
    """

    def __init__(self, model: nn.Module, task: Supervised) -> None:
        super().__init__(model)
        self._kind = task.kind
        self._by_token = task.objective.startswith("token_") or task.objective == "causal_lm"
        self._positions = most_positions(model)
        self.independent = not self._by_token

    def batch(self, part: Examples) -> dict[str, torch.Tensor]:
        """Return a model's arguments.

        Raises:
            ValueError: An example longer than the model's table of positions.
        """
        return self._in_reach(self._arguments(part))

    def _in_reach(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in ("input_ids", "pair_input_ids", "input_values"):
            if name in batch:
                _require_positions(self._positions, batch[name].shape[1])
        return batch

    def _arguments(self, part: Examples) -> dict[str, torch.Tensor]:
        import torch

        inputs, lengths = part.batch.inputs, part.batch.lengths
        if self._kind == "token_pairs":
            arrays = {}
            for side, prefix in enumerate(("", "pair_")):
                longest = lengths[:, side].max()
                arrays[f"{prefix}input_ids"] = inputs[:, side, :longest]
                arrays[f"{prefix}attention_mask"] = _mask(lengths[:, side], longest)
        elif self._kind == "images":
            arrays = {"pixel_values": inputs}
        else:
            name = "input_ids" if self._kind == "tokens" else "input_values"
            arrays = {name: inputs}
            # a classifier without a mask would take zeros at the ends of tokens for padding
            judged_whole = self._kind == "tokens" and not self._by_token
            if judged_whole or (lengths < inputs.shape[1]).any():
                arrays["attention_mask"] = _mask(lengths, inputs.shape[1])
        arrays["labels"] = self._labels(part)
        return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()}

    def targets(self, part: Examples) -> int:
        """Return how many labels count; none of a stand-in's does."""
        return int(counted(self._labels(part)).sum()) if part.counts else 0

    def measure(self, output: Any, batch: dict[str, torch.Tensor], part: Examples) -> torch.Tensor:
        """Return sums over a batch: of the losses, of the metric, and the number of targets."""
        logits: torch.Tensor = output.logits
        sums = self.zeros(logits.device)
        if count := self.targets(part):
            sums[0] = output.loss.double() * count
            sums[1] = self._metric_sum(logits, batch["labels"].to(logits.device))
            sums[2] = count
        return sums

    def _metric_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the numerator of the metric: for classes, the number of hits."""
        return (logits.argmax(-1) == labels).sum()

    def _labels(self, part: Examples) -> np.ndarray:
        """Return the labels, those of padding marked as not counting."""
        labels = part.batch.labels
        if not self._by_token:
            return labels
        inside = np.arange(labels.shape[1]) < part.batch.lengths[:, None]
        nothing = np.nan if labels.dtype.kind == "f" else IGNORED
        return np.where(inside, labels, np.array(nothing, labels.dtype))


class Classification(Labelled):
    """Classify each sequence, or each token."""

    metric = "accuracy"
    test_metrics = ("accuracy",)
    loss_name = "loss in nats"


class Regression(Labelled):
    """Estimate the value of each sequence, or of each token."""

    metric = "rmse"
    metric_names = ("loss", "rmse")
    test_metrics = ("rmse",)
    loss_name = "mean squared error"

    def metrics(self, sums: torch.Tensor) -> dict[str, float | int]:
        """Return a validation's metrics from its sums."""
        loss, squares, targets = sums.tolist()
        return {"loss": loss / targets, "rmse": (squares / targets) ** 0.5, "targets": int(targets)}

    def _metric_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        import torch

        error = logits.double().reshape(labels.shape) - labels
        return torch.where(labels.isnan(), 0.0, error).square().sum()


class Forecast(Regression):
    """Forecast the values that follow each series; errors are means over steps and channels."""

    metric = "mse"
    metric_names = ("loss", "mse", "mae")
    test_metrics = ("mse", "mae")
    loss_name = "squared error of the forecast and along the series"
    sums = 4

    def measure(self, output: Any, batch: dict[str, torch.Tensor], part: Examples) -> torch.Tensor:
        """Return sums over a batch: losses, number of targets, squared and absolute errors."""
        import torch

        labels = batch["labels"].to(output.logits.device)
        known = ~labels.isnan()
        error = torch.where(known, output.logits.double() - labels, 0.0)
        sums = self.zeros(error.device)
        if part.counts:
            sums[0], sums[1] = output.loss.double() * known.sum(), known.sum()
            sums[2], sums[3] = error.square().sum(), error.abs().sum()
        return sums

    def metrics(self, sums: torch.Tensor) -> dict[str, float | int]:
        """Return a validation's metrics from its sums."""
        loss, targets, squares, sizes = sums.tolist()
        errors = {"loss": loss / targets, "mse": squares / targets, "mae": sizes / targets}
        return {**errors, "targets": int(targets)}


class LabelledLM(Labelled):
    """Predict the next token where the task asks for one.

    If the model takes ``logits_to_keep``, only those columns of a batch get logits. Columns after
    the last of them are not read.
    """

    metric = "accuracy"
    metric_names = ("loss", "accuracy", "exact_match")
    test_metrics = ("exact_match", "accuracy", "loss")
    sums = 6

    def __init__(self, model: nn.Module, task: Supervised) -> None:
        super().__init__(model, task)
        self._chooses = "logits_to_keep" in inspect.signature(model.forward).parameters

    def batch(self, part: Examples) -> dict[str, torch.Tensor]:
        """Return a model's arguments.

        Raises:
            ValueError: As for all tasks.
        """
        import torch

        arrays, (_, columns) = self._arguments(part), self._shifted(part)
        del arrays["labels"]
        batch = {name: x[:, : columns[-1] + 1] for name, x in arrays.items()}
        if self._chooses:
            batch["logits_to_keep"] = torch.from_numpy(columns)
        return self._in_reach(batch)

    def pieces(self, part: Examples) -> list[dict[str, torch.Tensor]]:
        """Return a model's arguments and, under ``targets``, the labels of its logits."""
        import torch

        return [{**self.batch(part), "targets": torch.from_numpy(self._shifted(part)[0])}]

    def loss_of(
        self, forward: Callable[..., Any], piece: dict[str, torch.Tensor], part: int, targets: int
    ) -> torch.Tensor:
        """Return the mean over a part's ``targets``."""
        from ssmzoo.modeling.losses import loss_sum

        logits = forward({name: x for name, x in piece.items() if name != "targets"}).logits
        return loss_sum(logits, piece["targets"]) / max(1, targets)  # 0 where nothing counts

    def measure(self, output: Any, batch: dict[str, torch.Tensor], part: Examples) -> torch.Tensor:
        """Return sums over a batch: of the losses, of hits, targets, and three of examples.

        That is how many are all right, how many are right at the last target, and how many count.
        """
        import torch

        from ssmzoo.modeling.losses import loss_sum

        logits: torch.Tensor = output.logits
        sums = self.zeros(logits.device)
        if part.counts:
            labels, _ = self._shifted(part)
            targets = torch.from_numpy(labels).to(logits.device)
            asked = torch.from_numpy(counted(labels)).to(logits.device)
            right = logits.argmax(-1) == targets
            sums[0] = loss_sum(logits, targets)
            sums[1], sums[2] = right.sum(), asked.sum()
            asking = asked.any(dim=1)  # a row that asks nothing is no example
            sums[3] = ((right | ~asked).all(dim=1) & asking).sum()
            last = asked.shape[1] - 1 - asked.flip(1).byte().argmax(dim=1)
            sums[4] = (right & asked)[torch.arange(len(right)), last].sum()
            sums[5] = asking.sum()
        return sums

    def metrics(self, sums: torch.Tensor) -> dict[str, float | int]:
        """Return a validation's metrics from its sums.

        Of an exact match all of an example is right, of ``last_accuracy`` the last of its targets.
        """
        whole, last, examples = sums[3:].tolist()
        shares = {"exact_match": whole / examples, "last_accuracy": last / examples}
        return {**super().metrics(sums[:3]), **shares, "examples": int(examples)}

    def _labels(self, part: Examples) -> np.ndarray:
        """Return the labels; the first token of an example is never predicted."""
        labels = super()._labels(part)
        labels[:, 0] = IGNORED
        return labels

    def _shifted(self, part: Examples) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels of the logits [B, K], and the columns where something is asked.

        Where nothing is asked, the first one stands for them.
        """
        labels = self._labels(part)[:, 1:]
        columns = np.flatnonzero(counted(labels).any(axis=0))
        columns = columns if columns.size else np.zeros(1, np.int64)
        return labels[:, columns if self._chooses else slice(columns[-1] + 1)], columns


def labelled(model: nn.Module, task: Supervised) -> Labelled:
    """Return the objective of a task."""
    regression = task.objective.endswith("regression")
    own = {"causal_lm": LabelledLM, "forecast": Forecast}
    kind = own.get(task.objective, Regression if regression else Classification)
    return kind(model, task)


def _mask(lengths: np.ndarray, width: int) -> np.ndarray:
    return (np.arange(width) < lengths[:, None]).astype(np.int64)


def _require_positions(most: int | None, length: int) -> None:
    if most is not None and length > most:
        raise ValueError(
            "model.config.max_position_embeddings must be at least the length of the inputs, "
            f"got {most} and {length} tokens"
        )


def most_positions(model: nn.Module) -> int | None:
    """Return how many positions a model has embeddings of, None if it has no table of them."""
    from torch import nn

    tables = ("position_embeddings", "embed_positions", "wpe")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in tables:
            return getattr(model.config, "max_position_embeddings", module.num_embeddings)
    return None
