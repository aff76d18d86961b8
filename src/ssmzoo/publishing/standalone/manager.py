"""It stands in for ``ssmzoo.modeling.batching.manager``, which does not travel."""

from typing import Any, NoReturn


class _Absent:
    @staticmethod
    def of(model: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse continuous batching.

        Raises:
            ImportError: Always.
        """
        raise ImportError("continuous batching needs the package: pip install ssmzoo")


StateManager = _Absent
