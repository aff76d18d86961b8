"""transformers' own recurrent models on our kernels.

An accelerated model has the functions of ``models``. ``classes`` makes the subclasses that its
modules take on: ``known`` tells by the functions that a class calls whether it is served,
``model_calls`` and ``mixers`` have the calls of models and mixers, ``functions`` the kernels'
functions that mixers call, ``calls`` the state of the running call. ``cache`` can be saved and
cropped; ``generation`` makes ``generate`` use it. ``steps`` writes a token of mixers and of blocks
as programs of C, which ``mixers`` and ``blocks`` run.
"""

from ssmzoo.modeling.stock.cache import states_of
from ssmzoo.modeling.stock.models import (
    accelerate,
    accelerated,
    choose_kernels,
    mixers_of,
    restore,
)

__all__ = ["accelerate", "accelerated", "choose_kernels", "mixers_of", "restore", "states_of"]
