"""What a checkpoint answers, asked alike in the test's process and in one without anything of ours.

As a script (``standalone_probe.py MODELS ANSWERS TASKS``) it is that other process: it refuses
every import of ours and of Triton, loads all models by the Auto classes, and then lets lm-eval
score one. It imports torch and transformers only.
"""

import importlib.abc
import importlib.metadata
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HEADS = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")


class RefuseOurs(importlib.abc.MetaPathFinder):
    """Finds nothing of ours, and hides it from those who ask for its version."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("ssmzoo") or name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide_ours():
    sys.meta_path.insert(0, RefuseOurs())
    version = importlib.metadata.version

    def other_version(name):
        if name.startswith("ssmzoo"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.metadata.version = other_version


def ids(batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(96, (batch, length), generator=generator)


def answers(model):
    """Return what a language model says, before and after a step of training."""
    tokens = ids(2, 13, seed=1)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    found = {}
    with torch.no_grad():
        found["logits"] = model(tokens).logits
        found["left padding"] = model(tokens, attention_mask=mask).logits[mask.bool()]
        first = model(tokens[:, :7], use_cache=True)
        rest = model(tokens[:, 7:], cache=first.cache)
        step = model(tokens[:, :1], cache=rest.cache)
        found["state hand-over"] = torch.cat([first.logits, rest.logits, step.logits], dim=1)
        found["generation"] = model.generate(
            tokens, attention_mask=mask, max_new_tokens=6, do_sample=False
        )
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        found["loss"] = loss.detach()[None]
        found["logits after a step of training"] = model(tokens).logits
    return {name: tensor.contiguous() for name, tensor in found.items()}


def judged(model):
    """Return what a classifier of sequences says."""
    with torch.no_grad():
        return {"logits": model(ids(2, 13, seed=1)).logits}


def load(folder, head, **options):
    import transformers

    return getattr(transformers, head).from_pretrained(folder, trust_remote_code=True, **options)


def main(models, out, tasks):
    hide_ours()
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.utils import logging

    logging.disable_progress_bar()
    facts = {}
    for folder in sorted(Path(models).iterdir()):
        name = folder.name
        model, classifier = (load(folder / head, head).eval() for head in HEADS)
        save_file(answers(model), Path(out, f"{name}.safetensors"))
        save_file(judged(classifier), Path(out, f"{name}-classifier.safetensors"))
        # a model that has learnt something takes its code along when transformers saves it
        model.save_pretrained(Path(out, "again", name))
        again = load(Path(out, "again", name), HEADS[0]).eval()
        with torch.no_grad():
            tokens = ids(1, 9, seed=2)
            same = torch.equal(again(tokens).logits, model(tokens).logits)
        mapped = json.loads((folder / HEADS[0] / "config.json").read_text())["auto_map"]
        facts[name] = {
            "module": type(model).__module__,
            "again": same,
            "copied": sorted(path.name for path in Path(out, "again", name).iterdir()),
            "heads": {
                auto: get_class_from_dynamic_module(reference, folder / HEADS[0]).__name__
                for auto, reference in mapped.items()
            },
        }
    if "HF_ENDPOINT" in os.environ:  # each file by itself, into a folder named after the commit
        model = load("tester/longhorn", HEADS[0]).eval()
        with torch.no_grad():
            logits = model(ids(2, 13, seed=1)).logits
        save_file({"logits": logits}, Path(out, "from-hub.safetensors"))
    forbidden = [n for n in sys.modules if n.split(".")[0].startswith("ssmzoo")]
    facts["forbidden"] = forbidden + [n for n in sys.modules if n.split(".")[0] == "triton"]
    Path(out, "facts.json").write_text(json.dumps(facts))
    score(Path(tasks), Path(out, "lm-eval"))


def score(tasks, out):
    """Run lm-eval's own command line on the model beside its task."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", "--model", "hf", "--tasks", "spelling", "--include_path", str(tasks)]
    sys.argv += ["--model_args", f"pretrained={tasks / 'model'},trust_remote_code=True"]
    sys.argv += ["--device", "cpu", "--batch_size", "4", "--log_samples"]
    sys.argv += ["--output_path", str(out)]
    cli_evaluate()


if __name__ == "__main__":
    main(*sys.argv[1:])
