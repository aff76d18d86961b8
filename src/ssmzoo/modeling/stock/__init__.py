"""transformers' own recurrent models on our kernels.

``models`` has what users call; ``classes`` the subclasses that modules take on; ``functions`` what
their mixers then call, from ``ssmzoo_kernels.layers``; ``packed_calls`` finds packed sequences;
``calls`` carries them to those functions.
"""

from ssmzoo.modeling.stock.models import accelerate, accelerated, choose_kernels, restore

__all__ = ["accelerate", "accelerated", "choose_kernels", "restore"]
