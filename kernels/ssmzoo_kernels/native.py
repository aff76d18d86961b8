"""Build the C kernels with the machine's own compiler, once, and load them.

Placeholder of the contract: ``missing() -> str`` says why C kernels cannot be built here.
"""


def missing() -> str:
    """Return why C kernels cannot be built here, or an empty string."""
    return "not built yet"
