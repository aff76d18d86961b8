"""It stands in for ``ssmzoo.modeling.batching.manager``, which does not travel."""

from typing import Any, NoReturn


def manager_of(model: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse continuous batching.

    Raises:
        ImportError: Always.
    """
    raise ImportError("continuous batching needs the package: pip install ssmzoo")
