"""What the two processes of ``test_shared_states`` do."""

import os
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from ssmzoo.data.tokenizer import byte_tokenizer
from ssmzoo.evaluation import SharedPrefixLM
from ssmzoo.evaluation.answers import Answers

QUESTIONS = [SimpleNamespace(args=("a" * 40 + c, d)) for c in "bcde" for d in ("fg", "hi")]


def same(found, wanted):
    """Return whether two lists of answers are equal but for rounding."""
    return all(abs(a[0] - b[0]) < 1e-4 for a, b in zip(found, wanted, strict=True))


def main(place):
    """Be both processes, and fail unless their scores are those of one."""
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    other = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
    score(place)
    if other:
        assert os.waitpid(other, 0)[1] == 0


def score(place):
    model = AutoModelForCausalLM.from_pretrained(place).eval()
    wanted = SharedPrefixLM(model, byte_tokenizer()).loglikelihood(QUESTIONS)
    split = DistributedConfig(tp_size=2)
    parallel = AutoModelForCausalLM.from_pretrained(place, distributed_config=split)
    found = SharedPrefixLM(parallel, byte_tokenizer()).loglikelihood(QUESTIONS)
    assert same(found, wanted)

    rank = os.environ["RANK"]
    kept = Path(place, "kept" + rank)  # on a disk of its own
    for _ in range(2):
        lm = SharedPrefixLM(model, byte_tokenizer(), answers=Answers(kept, suffix=".0"))
        assert same(lm.loglikelihood(QUESTIONS), wanted)
        lines = kept.with_name(kept.name + ".0").read_text().splitlines()
        if rank == "0":  # killed before the other
            kept.with_name(kept.name + ".0").write_text("\n".join(lines[:4]))
        dist.barrier()
