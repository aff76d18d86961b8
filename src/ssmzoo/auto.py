"""Register every installed family with transformers' Auto classes, by being imported.

A plugin that cannot be loaded is reported as a warning in the log and breaks nothing else.
"""

import logging

from ssmzoo.family import claims, load_family

for _name in claims():
    try:
        load_family(_name)
    except RuntimeError as _error:
        logging.getLogger("ssmzoo").warning("%s", _error)
