"""What all heads share: a backbone, the call's inputs, and the form of the output."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

from ssmzoo.modeling.backbone import SSMModel
from ssmzoo.modeling.compat import CACHE, OTHER_NAMES, renamed_cache
from ssmzoo.modeling.configuration import SSMConfig
from ssmzoo.modeling.inputs import DESCRIBING, take_sequences
from ssmzoo.modeling.packing import Sequences
from ssmzoo.modeling.pretrained import SSMPreTrainedModel

_Forward = TypeVar("_Forward", bound=Callable[..., Any])


class SSMHead(SSMPreTrainedModel):
    """Base of the heads: ``forward`` maps the outputs of :meth:`read` and calls :meth:`answer`.

    A family makes its own with :meth:`of`, or writes a subclass that names its ``model_class``.
    """

    model_class: type[SSMModel]
    # the loss is a batch's mean, so a Trainer that accumulates has to divide
    accepts_loss_kwargs = False

    def __init__(self, config: SSMConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)

    @classmethod
    def of(cls, model_class: type[SSMModel], **body: Any) -> type[Self]:
        """Return a family's class of this head: ``ToyForCausalLM = SSMForCausalLM.of(ToyModel)``.

        It is named after family and head, and must be an attribute of the backbone's module under
        that name. The backbone's first base, which loads and draws weights, is its first, too.

        Args:
            model_class: The family's backbone.
            **body: Further attributes of the class.
        """
        family = model_class.__name__.removesuffix("Model")
        body = {
            "__module__": model_class.__module__,
            "__doc__": f"{family}: {(cls.__doc__ or '').partition(chr(10))[0]}",
            "model_class": model_class,
            **body,
        }
        bases = (model_class.__bases__[0], cls)
        return cast(Any, type(family + cls.__name__.removeprefix("SSM"), bases, body))

    def read(self, inputs: dict[str, Any]) -> tuple[Any, Sequences | None]:
        """Run the backbone over a call's inputs.

        Args:
            inputs: Arguments of :meth:`SSMModel.forward` by name.

        Returns:
            The backbone's outputs, and where the call's sequences lie; None: each row is one.

        Raises:
            ValueError, TypeError: As :meth:`SSMModel.forward`.
        """
        if inputs.keys() & OTHER_NAMES:
            renamed_cache(inputs)  # a family that overrides the backbone's forward expects one name
        packing = take_sequences(inputs) if inputs.keys() & DESCRIBING else None
        return self.model(**inputs, packing=packing, return_dict=True), packing

    def answer(self, kind: type[Any], outputs: Any, return_dict: bool | None, **found: Any) -> Any:
        """Return a head's results and the backbone's hidden states, as an output or a tuple."""
        output = kind(**found, hidden_states=outputs.hidden_states)
        wants = self.config.return_dict if return_dict is None else return_dict
        return output if wants else output.to_tuple()


def names_inputs(forward: _Forward, *, cache: bool = True) -> _Forward:
    """Let the signature of a head's ``forward`` name the backbone's arguments for ``**inputs``.

    Without ``cache`` it does not name those of a cache: for a head that reads whole sequences.

    Trainer keeps the columns of a data set that the signature names, and ``generate`` and our own
    trainer find the model's arguments in it.
    """
    own = inspect.signature(forward)
    *first, inputs = own.parameters.values()
    backbone = inspect.signature(SSMModel.forward).parameters.values()
    left_out = {*own.parameters, "self", "packing", "kwargs"}
    if not cache:
        left_out |= {CACHE, "use_cache"}
    more = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in backbone
        if parameter.name not in left_out
    ]
    cast(Any, forward).__signature__ = own.replace(parameters=[*first, *more, inputs])
    return forward
