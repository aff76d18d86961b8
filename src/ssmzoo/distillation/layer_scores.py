"""How much the attention of each layer is missed where it sees a window of tokens alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmzoo.evaluation.text import read_documents
from ssmzoo.files import appears_whole, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_ROWS, _LENGTH = 8, 1024  # of the text that is read
_WINDOW = _LENGTH // 8
logger = logging.getLogger("ssmzoo")


@dataclass(frozen=True)
class LayerScores:
    """The loss of a model where one of its attention layers sees a window alone.

    Attributes:
        loss: Of the whole model, in nats a token.
        harm: By layer, how much the loss rises where this layer sees a window of ``window`` tokens.
        window: Tokens.
        tokens: How many were predicted.
    """

    loss: float
    harm: dict[int, float]
    window: int
    tokens: int

    def least(self, count: int) -> list[int]:
        """Return the layers whose windows harm least, in their order."""
        return sorted(sorted(self.harm, key=self.harm.__getitem__)[:count])

    def table(self) -> str:
        """Return the table as text."""
        lines = [f"{'layer':>5}  {'loss rises by':>13}"]
        lines += [f"{layer:>5}  {harm:>13.4f}" for layer, harm in self.harm.items()]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Write ``layers.json`` and its picture ``layers.png``."""
        from matplotlib.figure import Figure

        write_json(folder / "layers.json", asdict(self), indent=2)
        figure = Figure(figsize=(8, 3.5), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        axes.bar(list(self.harm), list(self.harm.values()), color="#33658a")
        axes.set(xlabel="layer", ylabel="nats a token", xticks=list(self.harm))
        axes.set_title(f"Loss with a window of {self.window} tokens in one layer", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        with appears_whole(folder / "layers.png") as unfinished:
            figure.savefig(unfinished, format="png")


def score_layers(
    network: Any, tokenizer: Any, text: str, count: int, progress: Callable[[int, int], None]
) -> LayerScores:
    """Score the attention layers of a hybrid by held-out text.

    Args:
        network: The hybrid.
        tokenizer: Its own.
        text: A file or a folder of text; its first 8,192 tokens are read, in rows of 1,024.
        count: How many layers will be chosen.
        progress: Called with the layers that are done, and all.

    Raises:
        ValueError: The text has fewer tokens than a row, or fewer layers than ``count`` attend to
            all tokens.
    """
    import torch

    # enough characters for the tokens that are read
    ids = tokenizer("\n".join(read_documents(text))[: 64 * _ROWS * _LENGTH])["input_ids"]
    rows = min(_ROWS, len(ids) // _LENGTH)
    if rows == 0:
        raise ValueError(f"text must have at least {_LENGTH} tokens, got {len(ids)} in {text}")
    read = torch.tensor(ids[: rows * _LENGTH]).view(rows, _LENGTH)
    mixers = {i: layer.mixer for i, layer in enumerate(network.model.layers)}
    whole = {i: mixer for i, mixer in mixers.items() if getattr(mixer, "window", 0) is None}
    if not whole:
        raise ValueError("model must have layers that attend to all tokens, got one without")
    if count > len(whole):
        raise ValueError(f"layers must be best:N with N from 1 to {len(whole)}, got best:{count}")
    loss, harm = _loss(network, read), {}
    for done, (index, mixer) in enumerate(whole.items()):
        progress(done, len(whole))
        with _windowed(mixer):
            harm[index] = _loss(network, read) - loss
    progress(len(whole), len(whole))
    helped = [index for index, value in harm.items() if value < 0]
    if 2 * len(helped) >= len(whole):
        logger.warning(
            "a window of %d tokens lowers the loss in %d of %d layers: the model does not know "
            "texts of %d tokens, and layers are not told apart",
            *(_WINDOW, len(helped), len(whole), _LENGTH),
        )
    return LayerScores(loss, harm, _WINDOW, rows * (_LENGTH - 1))


def _loss(network: Any, rows: Tensor) -> float:
    import torch

    with torch.no_grad():
        losses = [network(row[None], labels=row[None]).loss.double() for row in rows]
    return float(torch.stack(losses).mean())


@contextmanager
def _windowed(mixer: Any) -> Iterator[None]:
    mixer.window = _WINDOW
    try:
        yield
    finally:
        mixer.window = None
