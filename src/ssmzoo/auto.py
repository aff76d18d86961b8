"""Let transformers' Auto classes know every installed family, by being imported.

A family of ours is imported when the first of its models is asked for; until then a stand-in has
its ``model_type``. Families of other packages may have any ``model_type``, so these are imported at
once; one that cannot be is reported as a warning in the log and breaks nothing else.
"""

import logging
import sys
from typing import Any

# first processing_utils: it makes the module `transformers` anew, and a family's models must be
# found on the one that a program which is imported later has
import transformers.processing_utils  # noqa: F401
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from ssmzoo.family import claims, family_of, load_family, owner


def _stand_in(family: str) -> type[PreTrainedConfig]:
    """Return a configuration class that makes configurations of a family not imported yet."""

    class StandIn(PreTrainedConfig):
        model_type = f"ssmzoo_{family}"
        stands_for = family

        def __new__(cls, *args: Any, **fields: Any) -> Any:
            return load_family(family).config_class(*args, **fields)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            return load_family(family).config_class.from_dict(config_dict, **kwargs)

    return StandIn


class SavedConfig(PreTrainedConfig):
    """What the file of :mod:`ssmzoo.checkpoints.loader` hands to transformers."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Return the configuration of the family that a ``config.json`` names.

        Raises:
            ValueError: Its family is not installed.
        """
        fields, kwargs = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        family = family_of(fields)
        if family is None:
            raise ValueError(
                f"{pretrained_model_name_or_path} has model_type {fields.get('model_type')!r}, "
                f"which no installed family has; installed: {', '.join(claims()) or 'none'}"
            )
        return family.config_class.from_dict(fields, **kwargs)


for _name, _points in claims().items():
    _ours = [owner(_point) for _point in _points] == ["ssmzoo"]
    if _ours and _points[0].module not in sys.modules:
        if f"ssmzoo_{_name}" not in CONFIG_MAPPING:
            AutoConfig.register(f"ssmzoo_{_name}", _stand_in(_name))
        continue
    try:
        load_family(_name)
    except RuntimeError as _error:
        logging.getLogger("ssmzoo").warning("%s", _error)
