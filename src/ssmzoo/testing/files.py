"""Files: weights, configurations and resized vocabularies come back as they were saved."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    TorchAoConfig,
)

from ssmzoo.modeling import SSMForCausalLM
from ssmzoo.testing.subject import (
    BUDGETS,
    Measured,
    NotApplicable,
    Subject,
    relative,
    require,
    require_error,
)


def check_save_and_load(subject: Subject) -> Measured:
    """Saved and loaded by the Auto classes, every tensor and the logits are equal bit for bit."""
    measured = Measured()
    ids = subject.ids(2, 9)
    for tied in (True, False):
        model = subject.fresh(tie_word_embeddings=tied)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            stored = load_file(Path(folder) / "model.safetensors")
            loaded = _load(folder)
        theirs = {**dict(model.named_parameters()), **_persistent_buffers(model)}
        require(
            stored.keys() == theirs.keys(),
            "the file's tensors are not the parameters and persistent buffers: "
            f"{sorted(stored.keys() ^ theirs.keys())}",
        )
        for name, tensor in stored.items():
            measured.same(f"the file's {name}", tensor, theirs[name])
        _same_tensors(measured, loaded, model)
        shared = loaded.lm_head.weight is loaded.get_input_embeddings().weight
        require(shared == tied, f"tie_word_embeddings={tied}, and the weights do not follow it")
        with torch.no_grad():
            measured.same("logits", loaded(ids).logits, model(ids).logits)
    _lacking_one(measured, subject.fresh())
    return measured


def _lacking_one(measured: Measured, model: SSMForCausalLM) -> None:
    """Where a file lacks an SSM parameter, that is drawn anew and nothing else."""
    of_a_mixer = [n for n, _ in model.named_parameters() if n.startswith("model.layers.0.mixer.")]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
        for missing in of_a_mixer:
            if missing.endswith((".weight", ".bias")):
                continue
            rest = {name: tensor for name, tensor in stored.items() if name != missing}
            save_file(rest, path, metadata={"format": "pt"})
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
            for name, tensor in loaded.named_parameters():
                if name != missing:
                    what = f"{name}, where the file lacks {missing}"
                    measured.same(what, tensor, model.get_parameter(name))


def _persistent_buffers(model: SSMForCausalLM) -> dict[str, torch.Tensor]:
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def check_load_in_bfloat16(subject: Subject) -> Measured:
    """Loaded in bfloat16 a model is the one cast in memory: SSM parameters stay float32."""
    measured = Measured()
    model, cast = subject.fresh(), subject.model(torch.bfloat16)
    kept = [name for name, p in cast.named_parameters() if p.dtype == torch.float32]
    for name in kept:
        measured.same(f"{name} after the cast", cast.get_parameter(name), model.get_parameter(name))
    for source in (model, cast):  # also a checkpoint written in mixed precision
        with tempfile.TemporaryDirectory() as folder:
            source.save_pretrained(folder)
            _same_tensors(measured, _load(folder, dtype=torch.bfloat16), cast)
    drawn = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    low = [name for name in kept if drawn.get_parameter(name).dtype != torch.float32]
    require(not low, f"AutoModel.from_config draws {low} in bfloat16")
    require(drawn.config.dtype == torch.bfloat16, "AutoModel.from_config forgets its dtype")
    return measured


def check_quantized(subject: Subject) -> Measured:
    """Linear layers load in 8 and in 4 bits by torchao, and nothing else loses a bit.

    The kernels round a layer's inputs to 16 bits: that may cost a hundredth of what the weights' 8
    or 4 bits cost. Without bitsandbytes its configuration raises: nothing loads in full precision
    instead.
    """
    measured = Measured()
    model, ids = subject.fresh(), subject.ids(2, 9)
    _refuses_few_bits(model)
    quantization, granularity = _torchao()
    configs = {
        "8 bits": quantization.Int8WeightOnlyConfig(),
        "4 bits": quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # pyright: ignore[reportAttributeAccessIssue]
            granularity=granularity.PerAxis(0),
        ),
    }
    for bits, config in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = _load(folder, quantization_config=TorchAoConfig(config))
        plain, lowered = copy.deepcopy(model), 0
        with torch.no_grad():
            for name, parameter in loaded.named_parameters():
                mine = plain.get_parameter(name)
                if type(parameter.data) in (torch.Tensor, torch.nn.Parameter):
                    measured.same(f"{bits}: {name}", parameter, mine)
                else:
                    untyped: Any = parameter
                    mine.copy_(untyped.dequantize())
                    lowered += 1
            require(lowered > 0, f"{bits}: no linear layer was quantised")
            whole, exact = loaded(ids).logits, plain(ids).logits
            budget = BUDGETS[torch.float32] + relative(bits, exact, model(ids).logits) / 100
            measured.compare(f"{bits}: logits", whole, exact, budget)
            cache, steps = None, []
            for token in ids.split(1, dim=1):
                output = loaded(token, cache=cache, use_cache=True)
                cache = output.cache
                steps.append(output.logits)
        measured.compare(f"{bits}: steps", torch.cat(steps, dim=1), whole, budget)
    return measured


def _refuses_few_bits(model: SSMForCausalLM) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for bits in ("8bit", "4bit"):
            chosen = BitsAndBytesConfig(load_in_8bit=bits == "8bit", load_in_4bit=bits == "4bit")
            require_error(
                ImportError,
                ("bitsandbytes",),
                f"{bits} without bitsandbytes",
                lambda config=chosen: _load(folder, quantization_config=config),
            )


def _torchao() -> tuple[Any, Any]:
    if importlib.util.find_spec("torchao") is None:
        raise NotApplicable("torchao is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it cannot load without a GPU
        return (
            importlib.import_module("torchao.quantization"),
            importlib.import_module("torchao.quantization.granularity"),
        )


def check_closed_config(subject: Subject) -> Measured:
    """A configuration is named after its family, survives its file, and refuses misspelt fields."""
    config = subject.config()
    wanted = f"ssmzoo_{subject.family.name}"
    require(
        config.model_type == wanted,
        f"model_type must be {wanted!r}, got {config.model_type!r}, which may be another's",
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        loaded = {**AutoConfig.from_pretrained(folder).to_dict(), "_name_or_path": ""}
        require(loaded == config.to_dict(), "the file gives another configuration")
        inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        for field in dataclasses.fields(config):
            if field.name not in inherited:
                wrong = f"{field.name}_"
                require_error(
                    LookupError,
                    (wrong, "did you mean"),
                    f"the field {wrong!r}",
                    lambda name=wrong: subject.config(**{name: 1}),
                )
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "hiden_size": 8}))
        require_error(
            LookupError,
            ("hiden_size", "hidden_size"),
            "the field 'hiden_size' of a file",
            lambda: AutoConfig.from_pretrained(folder),
        )
    return Measured()


def check_resized_embeddings(subject: Subject) -> Measured:
    """New tokens leave the logits of the old ones as they were, also through a file."""
    measured = Measured()
    for tied in (True, False):
        model = subject.fresh(tie_word_embeddings=tied)
        size, ids = model.config.vocab_size, subject.ids(2, 9)
        with torch.no_grad():
            before = model(ids).logits
            model.resize_token_embeddings(size + 5, mean_resizing=False)
            require(model.config.vocab_size == size + 5, "the configuration kept the old size")
            measured.same("old logits", model(ids).logits[..., :size], before)
            wider = model(ids + 5).logits
            require(wider.shape[-1] == size + 5, f"{wider.shape[-1]} logits, not {size + 5}")
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                measured.same("loaded logits", _load(folder)(ids + 5).logits, wider)
            model.resize_token_embeddings(size)
            measured.same("logits after shrinking back", model(ids).logits, before)
    return measured


def _load(folder: str, **options: Any) -> SSMForCausalLM:
    options = {"dtype": torch.float32, **options}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model, facts = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in facts.items() if names}
    require(not wrong, f"loading reports {wrong}")
    return model


def _same_tensors(measured: Measured, got: SSMForCausalLM, expected: SSMForCausalLM) -> None:
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, kind)()) for model in (got, expected))
        require(ours.keys() == theirs.keys(), f"other {kind} than before")
        for name, tensor in theirs.items():
            require(ours[name].device.type == tensor.device.type, f"{name} is on another device")
            measured.same(f"loaded {name}", ours[name], tensor)
