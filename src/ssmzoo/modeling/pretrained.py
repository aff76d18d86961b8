"""The base of all models, as transformers loads, initialises and distributes them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ssmzoo.checkpoints.trust import stored_numbers, trusted
from ssmzoo.environment.messages import suggestion
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.images import ImageEmbedding
from ssmzoo.modeling.layers import CausalConv1d, Linear
from ssmzoo.modeling.module_parts import stock_class


class SSMPreTrainedModel(PreTrainedModel):
    """Base of all models: loading, initialisation, optimizer groups.

    A family's subclass sets ``config`` and extends :meth:`_init_weights`. Mixers keep their own
    parameters in float32, see :class:`~ssmzoo.modeling.SSMMixer`.
    """

    config: SSMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SSMBlock"]
    _is_stateful = False  # transformers' word for a cache that cannot be cropped; ours can
    _can_compile_fullgraph = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a checkpoint as every transformers model does; name a damaged file.

        Pickles are not loaded, unless ``use_safetensors=False`` asks for them.

        Raises:
            ValueError: A file of weights is cut off, of another format, a pickle, or outside the
                checkpoint's folder.
            OSError: A file is missing.
        """
        source = pretrained_model_name_or_path
        if kwargs.get("use_safetensors") is None:  # transformers' own default, which wrappers give
            kwargs["use_safetensors"] = True
        try:
            if not kwargs["use_safetensors"]:
                return super().from_pretrained(source, *args, **kwargs)
            with trusted(source, kwargs.get("subfolder", "")):
                return super().from_pretrained(source, *args, **kwargs)
        except SafetensorError as error:
            damaged = next((p for p in Path(source).glob("*.safetensors") if not _whole(p)), source)
            raise ValueError(f"{damaged} is not a whole safetensors file: {error}") from error

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Load weights as transformers does, after a comparison with the sizes in their headers.

        transformers would allocate every weight that a file lacks at the configuration's size. At
        this point the model is still empty.

        Raises:
            ValueError: The model is far larger than its files.
        """
        files = [str(file) for file in checkpoint_files or ()]
        if state_dict is None and files and all(x.endswith(".safetensors") for x in files):
            held = sum(stored_numbers(files))
            needed = sum(x.numel() for x in model.state_dict().values())
            if needed > _MOST_GROWTH * held + _SMALL:
                raise ValueError(
                    f"the weights hold {held:,} numbers, and the model of this configuration "
                    f"{needed:,}; they do not belong together: correct config.json"
                )
        return super(SSMPreTrainedModel, SSMPreTrainedModel)._load_pretrained_model(
            model, state_dict, checkpoint_files, *args, **kwargs
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Give the embedding another number of rows, as transformers does.

        Raises:
            ValueError: The model reads continuous values or images, and has no embedding.
        """
        if self.get_input_embeddings() is None:
            fields = ("input_channels", "image_size")
            name = next(name for name in fields if getattr(self.config, name) is not None)
            raise ValueError(
                f"resize_token_embeddings needs an embedding of tokens, and this "
                f"{type(self).__name__} has none: its {name} is {getattr(self.config, name)}"
            )
        before: Any = self.get_output_embeddings()
        resized = super().resize_token_embeddings(*args, **kwargs)
        head: Any = self.get_output_embeddings()
        if type(before) is Linear and type(head) is nn.Linear:  # transformers makes a new one
            head.__class__ = Linear
            cast(Linear, head).role = before.role
        return resized

    @classmethod
    def maybe_distribute_model(
        cls, model: nn.Module, distributed_config: Any, device_mesh: Any
    ) -> nn.Module:
        """Split a model over processes as transformers does, if it can be split so.

        Raises:
            ValueError: Pipeline stages are asked for, or an embedding or head that is no table of
                rows would be split.
        """
        if device_mesh is not None:
            kind = cls.__name__
            if (stages := getattr(distributed_config, "pp_size", None) or 1) > 1:
                raise ValueError(
                    f"pp_size must be 1 for {kind}, got {stages}: transformers' pipeline stages "
                    "pass on hidden states alone, and our blocks share more; use tp_size, fsdp_size"
                )
            if (distributed_config.tp_size or 1) > 1:
                for name, part in model.named_modules():
                    tables = name.rpartition(".")[2] in ("embed_tokens", "lm_head")
                    if tables and stock_class(part) not in (nn.Embedding, nn.Linear):
                        raise ValueError(
                            f"tp_size must be 1 for this {kind}, got {distributed_config.tp_size}: "
                            f"its {name} is a {type(part).__name__}, which needs the whole "
                            "vocabulary in every process"
                        )
        return super().maybe_distribute_model(model, distributed_config, device_mesh)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Build the model of ``AutoModel.from_config`` in float32, then cast it.

        Built in a lower precision, the parameters that stay float32 would lose digits.
        """
        dtype = kwargs.get("dtype") or kwargs.get("torch_dtype") or config.dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return super()._from_config(config, **kwargs)
        kwargs = {key: kwargs[key] for key in kwargs if key != "torch_dtype"}
        model = super()._from_config(config, **{**kwargs, "dtype": torch.float32})
        model.config.dtype = dtype
        return model.to(dtype)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a module's own parameters.

        Embedding, language-model head, class token and positions of images:
        N(0, initializer_range^2). Norms: 1. Linear layers of a mixer, of patches and of
        classifiers: uniform within ``1 / sqrt(inputs)``, biases 0. Convolutions: uniform within
        ``1 / sqrt(taps)``, bias too. A family draws its mixer's own parameters. transformers
        asks module by module, and only those that lack a tensor: a module must never count on its
        parent to draw its entries.
        """
        if isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            init.normal_(cast(Tensor, module.weight), std=self.config.initializer_range)
        elif "RMSNorm" in type(module).__name__ or isinstance(module, nn.LayerNorm):
            init.ones_(cast(Tensor, module.weight))
            if isinstance(module, nn.LayerNorm):
                init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm1d):
            init.ones_(module.weight)
            init.zeros_(module.bias)
            init.zeros_(cast(Tensor, module.running_mean))
            init.ones_(cast(Tensor, module.running_var))
            init.zeros_(cast(Tensor, module.num_batches_tracked))
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            bound = (module.weight.numel() / module.out_channels) ** -0.5
            init.uniform_(module.weight, -bound, bound)
            init.zeros_(cast(Tensor, module.bias))
        elif isinstance(module, ImageEmbedding):
            for name in ("class_token", "positions"):
                init.normal_(getattr(module, name), std=self.config.initializer_range)
        elif isinstance(module, CausalConv1d):
            bound = module.weight.shape[-1] ** -0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -bound, bound)

    @torch.no_grad()
    def project_parameters(self) -> None:
        """Project parameters into their allowed range; call it after every optimizer step.

        ``ssmzoo train`` does; for ``Trainer`` there is
        ``ssmzoo.training.callbacks.ProjectParameters``. Most families have nothing to project.
        """
        for module in self.modules():
            if not isinstance(module, PreTrainedModel):
                project = getattr(module, "project_parameters", None)
                if project is not None:
                    project()

    def param_groups(
        self,
        *,
        lr: float,
        weight_decay: float,
        groups: Mapping[str, Mapping[str, float]] | None = None,
    ) -> list[dict[str, Any]]:
        """Return optimizer groups.

        Matrices decay, vectors (norms, biases, SSM scalars) do not, and neither do parameters that
        their mixer names in ``param_group_names``; those can have a rate of their own, and so can
        all of a mixer's that names a ``param_branch``.

        Args:
            lr: Learning rate.
            weight_decay: Decay of the matrices.
            groups: By group name the settings that differ, e.g. ``{"ssm": {"lr": 1e-3}}``; keys
                ``lr`` and ``weight_decay``. A parameter of a module with ``param_group_names`` may
                be named itself, e.g. ``{"B": {"weight_decay": 0.1}}``; the rest is as in its group.

        Returns:
            Groups for ``torch.optim`` optimizers, each with ``params``, ``lr``, ``weight_decay``
            and, of a named group, ``name``; a frozen parameter is in none.

        Raises:
            LookupError: A group or a key that does not exist.
        """
        groups = groups or {}
        named: dict[nn.Parameter, str] = {}
        alone: dict[nn.Parameter, str] = {}  # by their own names in ``groups``
        spared: set[nn.Parameter] = set()
        for module in self.modules():
            branch: str | None = getattr(module, "param_branch", None)
            if branch is not None:
                named |= dict.fromkeys(module.parameters(), branch)
        for module in self.modules():
            declared: Mapping[str, str] = getattr(module, "param_group_names", {})
            for name, parameter in module._parameters.items() if declared else ():
                if parameter is None:
                    continue
                if name in declared:
                    named[parameter] = declared[name]
                    spared.add(parameter)
                if name in groups:
                    alone[parameter] = name
        known = sorted(set(named.values()))
        alone = {parameter: name for parameter, name in alone.items() if name not in known}
        self._check_groups(groups, known, set(alone.values()))
        found: dict[tuple[str, str, bool], dict[str, Any]] = {}
        pairs = {(named.get(parameter, ""), name) for parameter, name in alone.items()}
        for group, name in [(x, "") for x in ("", *known)] + sorted(pairs):
            for decays in (True, False):
                usual = {"lr": lr, "weight_decay": weight_decay if decays else 0.0}
                own = {**groups.get(group, {}), **groups.get(name, {})}
                own |= {"name": name or group} if name or group else {}
                found[group, name, decays] = {"params": [], **usual, **own}
        for parameter in self.parameters():
            if parameter.requires_grad:
                decays = parameter.dim() >= 2 and parameter not in spared
                key = named.get(parameter, ""), alone.get(parameter, ""), decays
                found[key]["params"].append(parameter)
        # leave out empty groups of families; the two usual ones are always there
        return [g for (group, name, _), g in found.items() if g["params"] or not (group or name)]

    def _check_groups(
        self, groups: Mapping[str, Mapping[str, float]], known: list[str], alone: set[str]
    ) -> None:
        for name, changes in groups.items():
            if name not in known and name not in alone:
                raise LookupError(
                    f"{type(self).__name__} has no parameter group {name!r}"
                    f"{suggestion(name, known)}; groups: {', '.join(known) or 'none'}"
                )
            for key in changes.keys() - {"lr", "weight_decay"}:
                raise LookupError(
                    f"a parameter group has no setting {key!r}{suggestion(key, _SETTINGS)}; "
                    f"settings: {', '.join(_SETTINGS)}"
                )


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Let ``torch.empty`` fill its tensors with NaN."""
    before = torch.get_deterministic_debug_mode()
    # in which torch.utils.deterministic.fill_uninitialized_memory acts
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# fields that only our backbone has, with the values that official models have of them
_ELSEWHERE = {"residual": (True,), "directions": ("forward",), "pooling": ("last", "mean")}


def require_fields(config: SSMConfig, wanted: Mapping[str, Any]) -> None:
    """Fail unless these fields, and those that only our backbone has, are as in an official model.

    Raises:
        ValueError: A field has another value.
    """
    for field, values in (_ELSEWHERE | {name: (value,) for name, value in wanted.items()}).items():
        if (got := getattr(config, field)) not in values:
            named = " or ".join(map(repr, values))
            raise ValueError(f"the official model has {field}={named} only, got {got!r}")


def check_weights(
    source: str,
    weights: dict[str, Tensor],
    kind: type[PreTrainedModel],
    config: SSMConfig,
    to_official: Callable[[dict[str, Tensor], Any], dict[str, Tensor]] | None = None,
) -> None:
    """Check that converted weights have the names and shapes of a model's weights.

    Args:
        source: The kind of checkpoint, for the error: ``"a Longhorn checkpoint"``.
        weights: The weights under our names; with ``to_official`` under the other code's.
        kind: The model they are for.
        config: Its configuration.
        to_official: The converter's, which translates the model's names.

    Raises:
        LookupError: One is missing, or unknown.
        ValueError: One has another shape.
    """
    with torch.device("meta"):
        expected = kind(config).state_dict()
    if to_official is not None:
        expected = to_official(expected, config)
    missing = sorted(expected.keys() - weights.keys())
    unknown = sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise LookupError(
            f"state_dict must be {source} of this configuration, got missing {missing[:3]}, "
            f"unknown {unknown[:3]}"
        )
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{name} must have shape {list(expected[name].shape)}, got {list(tensor.shape)}"
            )


_SETTINGS = ("lr", "weight_decay")
# a model may have so many times the numbers of its files, and so many more, in a new head say
_MOST_GROWTH, _SMALL = 4, 2**24


def _whole(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except SafetensorError:
        return False
