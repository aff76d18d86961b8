"""The paper's embeddings, and its read-out: the token whose embedding is nearest to the output.

What surprises: a frozen row is not a parameter, so optimizer, weight decay and parameter count
leave it out; the weight then has one row fewer than there are tokens.

Dimensions: B batch, L length, D hidden, V vocabulary.
"""

import math

import torch
from torch import Tensor, nn

# added to squared distances: their root's slope then falls to 0 smoothly within a millionth of an
# embedding, where it would jump from one direction to the opposite
UNDER_ROOT = 1e-12


def with_frozen_row(
    weight: Tensor,  # [V, D], or [V - 1, D] with a frozen row
    frozen: int | None,
) -> Tensor:
    """Return the whole table ``[V, D]``: ones in the frozen row, the weight's rows elsewhere."""
    if frozen is None:
        return weight
    return torch.cat([weight[:frozen], weight.new_ones(1, weight.shape[1]), weight[frozen:]])


def softmin_logits(
    distances: Tensor,  # [..., V]
) -> Tensor:
    """Return ``logit(softmin(d))``: ``-d_m - log sum_{m' != m} exp(-d_m')``, ``[..., V]``.

    Finite where the softmin rounds to 0 or 1; takes as much time and memory as the distances. Only
    the nearest token can have a probability p above one half: its sum over the other tokens is
    computed separately. For every other token ``1 - p`` loses no digits.
    """
    scores = -distances
    place = scores.argmax(dim=-1, keepdim=True)
    nearest = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, place, 1)
    others = scores.masked_fill(nearest, -torch.inf).logsumexp(dim=-1, keepdim=True)
    # not amax: among several that are nearest it would share its slope out
    total = torch.logaddexp(scores.gather(-1, place), others)
    log_p = (scores - total).masked_fill(nearest, -1.0)  # whatever, but not log 1
    return torch.where(nearest, scores - others, log_p - torch.log1p(-log_p.exp()))


class FrozenRowEmbedding(nn.Embedding):
    """An embedding of V tokens, one of which is all ones; ``weight [V - 1, D]`` has the others.

    Args:
        num_embeddings: V.
        embedding_dim: D.
        frozen: The token that is not trained.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, frozen: int) -> None:
        super().__init__(num_embeddings - 1, embedding_dim)
        self.num_embeddings = num_embeddings
        self.frozen = frozen

    def forward(self, input: Tensor) -> Tensor:
        """Map token ids ``[...]`` to ``[..., D]``."""
        own = input == self.frozen
        rows = (input - (input > self.frozen).to(input.dtype)).masked_fill(own, 0)
        return super().forward(rows).masked_fill(own.unsqueeze(-1), 1.0)

    def extra_repr(self) -> str:
        """Show the frozen token in ``print(model)``."""
        return f"{super().extra_repr()}, frozen={self.frozen}"


class NearestEmbedding(nn.Module):
    """Logits from the Euclidean distances between an output and all embeddings.

    ``weight`` is the embedding's. Computed in float32 at least; the result has the weight's dtype.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, frozen: int | None) -> None:
        super().__init__()
        rows = num_embeddings if frozen is None else num_embeddings - 1
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim))
        self.frozen = frozen

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., V]``."""
        exact = torch.promote_types(torch.float32, hidden_states.dtype)
        table = with_frozen_row(self.weight, self.frozen).to(exact)
        with torch.autocast(hidden_states.device.type, enabled=False):
            distances = euclidean(hidden_states.to(exact), table)
        return softmin_logits(distances).to(self.weight.dtype)


def euclidean(
    x: Tensor,  # [..., D]
    table: Tensor,  # [V, D]
) -> Tensor:
    """Return ``sqrt(|x - table_m|^2 + 1e-12)``, ``[..., V]``.

    Computed from the differences, because ``|x|^2 - 2 x y + |y|^2`` cancels for near vectors.
    """
    flat = x.reshape(-1, x.shape[-1])
    distances = torch.cdist(flat, table, compute_mode="donot_use_mm_for_euclid_dist")
    return (distances.square() + UNDER_ROOT).sqrt().view(*x.shape[:-1], table.shape[0])


def first_rows(embedding: nn.Embedding, start: str | list[list[float]]) -> Tensor:
    """Return the rows that an embedding starts with: orthonormal ones, or those that are given."""
    if isinstance(start, str):
        return _orthonormal_rows(embedding)
    tokens, width = embedding.weight.shape
    if len(start) != tokens or any(len(row) != width for row in start):
        widths = sorted({len(row) for row in start})
        raise ValueError(
            f"embedding_init must hold {tokens} rows of {width} numbers, one for each token that "
            f"is not frozen, got {len(start)} of {' and '.join(map(str, widths or [0]))}"
        )
    for place, row in enumerate(start):
        if not all(map(math.isfinite, row)):
            raise ValueError(f"embedding_init must be finite, got {row} as row {place}")
    return torch.tensor(start)


def _orthonormal_rows(embedding: nn.Embedding) -> Tensor:
    """Return rows of Q^T from QR decompositions of uniform numbers, as many at once as they have.

    A frozen token's row is drawn, and then left out.
    """
    width, count = embedding.embedding_dim, embedding.num_embeddings
    pieces = [
        torch.linalg.qr(torch.rand(width, min(width, count - start)))[0].T
        for start in range(0, count, width)
    ]
    rows = torch.cat(pieces)
    if isinstance(embedding, FrozenRowEmbedding):
        rows = torch.cat([rows[: embedding.frozen], rows[embedding.frozen + 1 :]])
    return rows
