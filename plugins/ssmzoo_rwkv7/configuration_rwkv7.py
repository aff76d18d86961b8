"""Configuration of RWKV-7."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from ssmzoo.modeling import SSMConfig


@strict
class RWKV7Config(SSMConfig):
    """RWKV-7; the defaults are the paper's 191M model, RWKV-7 World 0.1B.

    The paper's ranks grow with the width: the presets have them.

    Attributes:
        head_dim: N, rows and columns of a head's state; it divides the hidden size.
        d_channel: Inner width of channel mixing; None: four times the hidden size.
        decay_rank: Rank of the decays' projection.
        rate_rank: Of the in-context learning rates'.
        value_rank: Of the mixture with the first layer's values.
        gate_rank: Of the output gate's.
    """

    model_type = "ssmzoo_rwkv7"
    attribute_map: ClassVar[dict[str, str]] = {
        **{**SSMConfig.attribute_map, "norm_eps": "rms_norm_eps"},
        **{"decay_low_rank_dim": "decay_rank", "a_low_rank_dim": "rate_rank"},
        **{"v_low_rank_dim": "value_rank", "gate_low_rank_dim": "gate_rank"},
    }

    vocab_size: int = 65536
    num_hidden_layers: int = 12
    norm_type: Literal["rms", "layer", "batch", "none"] = "layer"
    tie_word_embeddings: bool = False
    head_dim: int = 64
    d_channel: int | None = None
    decay_rank: int = 64
    rate_rank: int = 64
    value_rank: int = 32
    gate_rank: int = 128

    def check(self) -> None:
        """Check that sizes are at least 1, and that heads share out the width."""
        super().check()
        self.check_counts("head_dim", "d_channel")
        self.check_counts("decay_rank", "rate_rank", "value_rank", "gate_rank")
        if self.hidden_size % self.head_dim:
            raise ValueError(
                f"head_dim must divide hidden_size, got {self.head_dim} and {self.hidden_size}"
            )
