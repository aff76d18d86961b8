"""Let transformers load this model with ``trust_remote_code=True``, by the installed ssmzoo.

A program that says ``import ssmzoo.auto`` first needs neither this file nor that argument.
"""

try:
    from ssmzoo.auto import SavedConfig  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this model needs ssmzoo 0.2 or later ({error}); no package index has it: run "
        "`pip install .` in a clone of its repository"
    ) from error
