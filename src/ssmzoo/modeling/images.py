"""How images become sequences of patches.

Dimensions: B batch, C channels, P side of a patch, N patches, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from ssmzoo.modeling.configuration import SSMConfig


class ImageEmbedding(nn.Module):
    """Patches through a linear map, row by row, a class token in their middle, and positions.

    ``[p_1 .. p_(N // 2), class, p_(N // 2 + 1) .. p_N] + positions`` with ``p = W patch + b``.

    Attributes:
        param_group_names: Class token and positions have no weight decay.
    """

    param_group_names: ClassVar[Mapping[str, str]] = {
        "class_token": "positions",
        "positions": "positions",
    }

    def __init__(self, config: SSMConfig) -> None:
        super().__init__()
        assert config.image_size is not None
        width, side = config.hidden_size, config.image_size
        patches = (side // config.patch_size) ** 2
        self.shape = [config.num_channels, side, side]
        self.projection = nn.Conv2d(
            config.num_channels, width, config.patch_size, stride=config.patch_size
        )
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, patches + 1, width))
        self.class_position = patches // 2

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Map images ``[B, C, H, W]`` to ``[B, N + 1, D]``.

        Raises:
            ValueError: Images of another shape.
            TypeError: No floating-point tensor.
        """
        if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
            is_tensor = isinstance(pixel_values, Tensor)
            got = pixel_values.dtype if is_tensor else f"a {type(pixel_values).__name__}"
            raise TypeError(
                f"pixel_values must be a floating-point tensor, got {got}; the model's image "
                "processor makes it from images"
            )
        if pixel_values.dim() != 4 or list(pixel_values.shape[1:]) != self.shape:
            sizes = ", ".join(map(str, self.shape))
            raise ValueError(
                f"pixel_values must have shape [B, C, H, W] = [B, {sizes}], got "
                f"{list(pixel_values.shape)}; the model's image processor makes them so"
            )
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))
        patches = patches.flatten(2).transpose(1, 2)  # [B, N, D]
        token = self.class_token.expand(len(patches), -1, -1)
        before, after = patches[:, : self.class_position], patches[:, self.class_position :]
        return torch.cat([before, token, after], dim=1) + self.positions
