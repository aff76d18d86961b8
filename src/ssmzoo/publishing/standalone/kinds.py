"""It stands in for ``ssmzoo.modeling.kinds``, which finds families: these do not travel."""

from typing import Any, NoReturn

Kind = Any


def kind_of(where: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse mixers of other families.

    Raises:
        ImportError: Always.
    """
    raise ImportError(f"mixers of other families, as {where} has, need: pip install ssmzoo")
