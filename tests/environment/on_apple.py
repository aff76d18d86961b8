"""A GPU of Apple, played on a CPU: a device of torch without float64, with memory of its own.

Tensors there hold a CPU's. Torch's and our ops run on those, op by op, and fail as Apple's do: they
make no float64, and take no tensor of the CPU. As a program it prints, by family, how far outputs
on the device are from the CPU's:

    python -m tests.environment.on_apple
"""

import json
import sys

import torch
from tests.zoo import OURS, language_model
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from ssmzoo.modeling import SSMMixer
from ssmzoo_kernels import precision, use_backend
from ssmzoo_s5.configuration_s5 import S5Config
from ssmzoo_s5.modeling_s5 import S5ForSequenceClassification
from ssmzoo_spacetime.configuration_spacetime import SpaceTimeConfig
from ssmzoo_spacetime.modeling_spacetime import SpaceTimeForForecasting

DOUBLE = (torch.float64, torch.complex128)
# by family, what its tiny configuration leaves out
MORE = {
    "dss": [{"kernel_variant": "exp", "lambda_init": "skew_hippo"}],
    "linear_attention": [
        {"decay": "fixed", "decay_rank": None, "rotary": True, "delta_rule": False, "beta": "none"}
    ],
    "rtf": [
        {"filter": "modal", "denominator_constraint": "none"},
        {"filter": "implicit", "trunc_len": 64, "denominator_constraint": "none"},
    ],
    "s5": [{"variant": "lru", "blocks": 1, "clip_eigs": False}],
}


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend("apple", backend_module=_Module())
DEVICE = torch.device("apple:0")


class OnApple(torch.Tensor):
    """A tensor of the device; ``inner`` is the CPU's that it holds."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=requires_grad,
        )

    def __init__(self, inner, requires_grad=False):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _run(op, args, kwargs or {})

    # what torch makes of Python's numbers itself, past all modes
    def tolist(self):
        return self.inner.tolist()

    def new_tensor(self, data, dtype=None):
        return OnApple(torch.tensor(data, dtype=dtype or self.dtype))

    def __getitem__(self, index):
        return super().__getitem__(
            OnApple(torch.tensor(index)) if isinstance(index, list) else index
        )


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return _run(op, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") == DEVICE:
            return OnApple(torch.tensor(*args, **{**kwargs, "device": "cpu"}))
        return function(*args, **kwargs)


def _run(op, args, kwargs):
    aten, name = torch.ops.aten, op._schema.name
    if op is torch.ops.prim.device.default:
        return DEVICE
    if op.namespace == "ssmzoo":  # its own torch ops are looked at, too
        with _Functions(), _Ops():
            return OPDEFS[name]._init_fn(*args, **kwargs)
    if name == "aten::to":
        names = [x.name for x in op._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        x, like = given["self"], given.get("other", given["self"])
        kind = {k: given.get(k) or getattr(like, k) for k in ("device", "dtype")}
        if all(getattr(x, k) == v for k, v in kind.items()) and not given.get("copy"):
            return x
        op, args, kwargs = aten._to_copy.default, (x,), kind
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, OnApple)]
    foreign = [x for x in tensors if not isinstance(x, OnApple) and x.dim()]
    free = op in (aten._to_copy.default, aten.copy_.default)
    if name.startswith(("aten::index.", "aten::index_put")):  # by a CPU's numbers
        free = isinstance(args[0], OnApple)
    if ours and foreign and not free:
        raise RuntimeError(f"{op}: tensors on {DEVICE} and cpu")
    device = kwargs.get("device")
    lands = bool(ours) if device is None else torch.device(device) == DEVICE
    if device is not None:
        kwargs = {**kwargs, "device": "cpu"}
    inner = tree_map(lambda x: x.inner if isinstance(x, OnApple) else x, (args, kwargs))
    made = op(*inner[0], **inner[1])
    if op._schema.is_mutable and "out" not in kwargs:
        return args[0]

    def landed(x):
        if not isinstance(x, torch.Tensor) or not lands:
            return x
        if x.dtype in DOUBLE:
            raise TypeError("the MPS framework doesn't support float64")
        return OnApple(x)

    return kwargs["out"] if "out" in kwargs else tree_map(landed, made)


def move(model):
    """Put a model's parameters and buffers onto the device."""
    moved = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, x in held.items():
                if isinstance(x, torch.nn.Parameter):
                    on_device = OnApple(x.detach())
                    held[name] = moved.setdefault(id(x), torch.nn.Parameter(on_device))
                elif x is not None:
                    held[name] = OnApple(x)
    return model


def run(model, tokens, mask, bounds):
    """Return logits of padded and packed tokens, beams, and a packed loss' gradients."""
    with torch.no_grad():
        padded = model(tokens, attention_mask=mask).logits
        packed = model(tokens[:1], cu_seqlens=bounds).logits
        beams = model.generate(
            tokens, attention_mask=mask, max_new_tokens=4, num_beams=2, do_sample=False
        )
    model(tokens[:1], labels=tokens[:1], cu_seqlens=bounds).loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    found = {"padded": padded, "packed": packed, "beams": beams, **gradients}
    return {k: x.detach() for k, x in found.items()}


def difference(name, fields):
    """Return how far outputs and gradients on the device are from the CPU's, in 2-norms."""
    tokens = torch.randint(1, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    given = (tokens, mask, torch.tensor([0, 7, 20]))
    with use_backend("eager"):
        wanted = run(language_model(name, **fields), *given)
    model = move(language_model(name, **fields))
    with _Functions(), _Ops():
        got = run(model, *(OnApple(x) for x in given))
        with torch.no_grad():  # what else is found in float64
            for module in model.modules():
                if isinstance(module, SSMMixer):
                    module.dynamics(OnApple(torch.ones(1, 4, module.config.hidden_size)))
                model._init_weights(module)
        assert all(x.inner.isfinite().all() for x in model.parameters())
    got = {k: x.inner for k, x in got.items()}
    same = torch.equal(got.pop("beams"), wanted.pop("beams"))
    assert {*got} == {*wanted}
    outputs = ("padded", "packed")
    parts = {"outputs": outputs, "gradients": [k for k in wanted if k not in outputs]}
    found = {"beams": 0.0 if same else 1.0}
    for part, keys in parts.items():
        far = sum((got[k] - wanted[k]).double().square().sum() for k in keys)
        found[part] = float((far / sum(wanted[k].double().square().sum() for k in keys)).sqrt())
    return found


def heads():
    """Return how far forecasts, and classes of what is read both ways, are from the CPU's."""
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "d_state": 4}
    forecaster = SpaceTimeConfig(input_channels=3, horizon=4, n_kernels=8, **sizes)
    classifier = S5Config(vocab_size=96, bidirectional=True, num_labels=3, **sizes)
    cases = {
        "spacetime forecasts": (SpaceTimeForForecasting(forecaster), torch.randn(2, 20, 3)),
        "s5 classes": (S5ForSequenceClassification(classifier), torch.arange(40).view(2, 20)),
    }
    found = {}
    for name, (model, values) in cases.items():
        with torch.no_grad():
            with use_backend("eager"):
                wanted = model.eval()(values, mask).logits
            with _Functions(), _Ops():
                got = move(model)(OnApple(values), OnApple(mask)).logits.inner
        found[name] = {"outputs": float((got - wanted).norm() / wanted.norm())}
    return found


if __name__ == "__main__":
    precision.LACKING = ("apple",)
    found = heads()
    for name in sys.argv[1:] or OURS:
        for fields in [{}, *MORE.get(name, [])]:
            found[" ".join([name, *map(str, fields.values())])] = difference(name, fields)
    json.dump(found, sys.stdout)
