"""What several families' tests compare: logits of a call and its cache, padded and alone."""

import numpy as np
import torch


def relative(got, expected):
    """Largest error relative to the largest entry; nan stays nan and fails every comparison."""
    got, expected = (np.asarray(x, dtype=np.float64) for x in (got, expected))
    assert got.shape == expected.shape
    return np.abs(got - expected).max() / np.abs(expected).max()


def tokens(batch, length, seed=0, vocab_size=61):
    return torch.from_numpy(np.random.default_rng(seed).integers(vocab_size, size=(batch, length)))


@torch.no_grad()
def run(model, input_ids, cache=None, **kwargs):
    """Logits as float64, and the cache."""
    out = model(input_ids, cache=cache, use_cache=True, **kwargs)
    return out.logits.double(), out.cache


def assert_left_padding_changes_nothing(model, lengths, tolerance=1e-10):
    """Rows of these lengths, padded on the left, are as alone, and so is what follows them."""
    width = max(lengths)
    rows = [tokens(1, n, seed=n) for n in lengths]
    padded = torch.cat([torch.nn.functional.pad(r, (width - r.shape[1], 0), value=7) for r in rows])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    got, cache = run(model, padded, attention_mask=mask)
    more = tokens(len(rows), 4, seed=20)
    longer = torch.cat([mask, torch.ones(len(rows), 4, dtype=mask.dtype)], dim=1)
    later = run(model, more, cache, attention_mask=longer)[0]
    for i, row in enumerate(rows):
        alone, state = run(model, row)
        assert relative(got[i : i + 1, width - lengths[i] :], alone) <= tolerance
        assert relative(later[i : i + 1], run(model, more[i : i + 1], state)[0]) <= tolerance
