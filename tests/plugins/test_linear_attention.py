"""Gated linear attention: seven papers' models by their oracle, their sizes, and stock layers.

The judge is ``tests/oracles/linear_attention.py``, float64 numpy from the papers alone.
"""

from dataclasses import replace

import pytest
from tests.oracles import linear_attention as oracle

from ssmzoo.testing import FamilyConformance
from ssmzoo_linear_attention import FAMILY

SMALL = {"hidden_size": 32, "intermediate_size": None, "num_hidden_layers": 2, "vocab_size": 96}
SMALL |= {"num_heads": 4, "head_k_dim": 6, "head_v_dim": 5, "norm_type": "rms"}
RANKS = {"decay_rank": 3, "gate_rank": 3}


def small(preset, **fields):
    """Return a preset's fields at a size for tests."""
    chosen = FAMILY.presets[preset]
    return {**chosen, **SMALL, **{k: v for k, v in RANKS.items() if k in chosen}, **fields}


class TestKDA(FamilyConformance):
    family = "linear_attention"
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestRetNet(FamilyConformance):
    # a head's output is divided by its size: where that is near 0, a rounding turns its sign
    family = replace(FAMILY, tiny=small("retnet-125m", rms_norm_eps=1e-3))
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestMamba2(FamilyConformance):
    family = replace(FAMILY, tiny=small("mamba2-130m", num_key_heads=2))
    oracle = staticmethod(oracle.logits)


@pytest.mark.variant
class TestLinearTransformer(FamilyConformance):
    family = replace(FAMILY, tiny=small("linear-transformer-mnist"))
    oracle = staticmethod(oracle.logits)
