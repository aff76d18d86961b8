"""COFFEE's classifier of small images: four recurrences, each reading from another side.

What surprises: there is no embedding and no other layer; a row of pixels is a token.

Dimensions: B batch, P side of the square that is read, E classes.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from ssmzoo.modeling import LayerState, Linear

from .configuration_coffee import CoffeeConfig
from .modeling_coffee import CoffeeMixer, CoffeePreTrainedModel

_SIDES = 4


class CoffeeForImageClassification(CoffeePreTrainedModel):
    """COFFEE over rows, columns, reversed rows and reversed columns of a square of pixels.

    Each of the four has its own parameters. Their last outputs, concatenated to ``[4 P]``, go
    through Linear, GELU, Linear. P is ``hidden_size``; larger images are cropped to their center.
    """

    main_input_name = "pixel_values"
    supports_gradient_checkpointing = False
    # the loss is a batch's mean, so a Trainer that accumulates has to divide
    accepts_loss_kwargs = False

    def __init__(self, config: CoffeeConfig) -> None:
        super().__init__(config)
        for name, wanted in (
            ("block", "bare"),
            ("num_hidden_layers", 1),
            ("norm_type", "none"),
            ("residual", False),
        ):
            if getattr(config, name) != wanted:
                raise ValueError(
                    f"CoffeeForImageClassification needs {name}={wanted!r}, got "
                    f"{getattr(config, name)!r}; see the preset coffee-mnist"
                )
        self.num_labels = cast(int, config.num_labels)
        side = config.hidden_size
        self.scans = nn.ModuleList(CoffeeMixer(config, i) for i in range(_SIDES))
        self.hidden = Linear(_SIDES * side, side)
        self.score = Linear(side, self.num_labels)
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> ImageClassifierOutput | tuple[Any, ...]:
        """Classify each image.

        Args:
            pixel_values: ``[B, H, W]`` or ``[B, 1, H, W]``, floating point; H and W are P at least.
            labels: ``[B]`` classes.
            return_dict: Return an output object (default) or a tuple.

        Returns:
            ``loss`` (mean cross-entropy in nats) and ``logits [B, num_labels]``.

        Raises:
            ValueError: Images of another shape, or too small.
            TypeError: ``pixel_values`` is not a floating-point tensor.
        """
        rows = self._cropped(pixel_values).to(self.hidden.weight.dtype)
        columns = rows.transpose(1, 2)
        sides = (rows, columns, rows.flip(1), columns.flip(1))
        seen = [scan(x, LayerState())[:, -1] for scan, x in zip(self.scans, sides, strict=True)]
        logits = self.score(F.gelu(self.hidden(torch.cat(seen, dim=1))))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        if return_dict is None:
            return_dict = self.config.return_dict
        output = ImageClassifierOutput(loss=loss, logits=logits)
        return output if return_dict else output.to_tuple()

    def get_input_embeddings(self) -> None:
        """Return None: pixels are read as they are."""

    def _cropped(self, pixels: Tensor) -> Tensor:
        """Return the center ``[B, P, P]`` of images, rounded as torchvision's ``center_crop``."""
        side = self.config.hidden_size
        if not isinstance(pixels, Tensor):
            raise TypeError(
                f"pixel_values must be a tensor [B, H, W] or [B, 1, H, W], got "
                f"{type(pixels).__name__}"
            )
        if pixels.dim() == 4 and pixels.shape[1] == 1:
            pixels = pixels.squeeze(1)
        if pixels.dim() != 3 or min(pixels.shape[1:]) < side:
            raise ValueError(
                "pixel_values must have shape [B, H, W] or [B, 1, H, W] with H and W of at least "
                f"hidden_size = {side}, got {list(pixels.shape)}"
            )
        if not pixels.is_floating_point():
            raise TypeError(
                f"pixel_values must be floating point, got {pixels.dtype}; scale them to [0, 1], "
                "for uint8 by / 255"
            )
        top, left = (round((size - side) / 2) for size in pixels.shape[1:])
        return pixels[:, top : top + side, left : left + side]
