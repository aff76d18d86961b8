"""transformers' own recurrent models on our kernels.

``models`` has what users call; ``classes`` the subclasses that modules take on; ``functions`` what
their mixers then call, from ``ssmzoo_kernels.layers``; ``packed_calls`` finds packed sequences;
``calls`` carries them to those functions. ``cache`` can be saved and cropped, ``generation`` lets
``generate`` do so; ``dynamics`` is what ``ssmzoo inspect`` asks.
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
