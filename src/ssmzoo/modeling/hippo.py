"""HiPPO-LegS, the matrix that structured state spaces start at."""

import functools

import numpy as np
import torch
from torch import Tensor


def hippo_legs(order: int) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonalise HiPPO-LegS, which is ``V (-1/2 + i w) V* - p p^T`` with ``p_n = sqrt(n + 1/2)``.

    V is unitary, because -1/2 and a skew matrix are normal. Its columns come in conjugate pairs,
    of which one is returned.

    Args:
        order: Rows of the matrix, an even number.

    Returns:
        The frequencies w above 0, rising, ``[order / 2]``, and their columns of V, ``[order,
        order / 2]`` complex128; ``|V* p|``, ``[order / 2]``, which V* p is where the vectors' free
        phases make it positive. All in double precision, on the CPU.
    """
    frequencies, vectors, low_rank = (torch.tensor(x, device="cpu") for x in _legs(order))
    return frequencies, vectors, low_rank


@functools.cache
def _legs(order: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # arrays: a cached tensor would be of whatever mode or device it was first asked for in
    p = np.sqrt(np.arange(order) + 0.5)
    size = np.outer(p, p)
    frequencies, vectors = np.linalg.eigh(1j * (np.tril(size, -1) - np.triu(size, 1)))
    above = vectors[:, order // 2 :]
    return frequencies[order // 2 :], above, np.abs(above.T @ p)
