"""What keeps timings steady."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Let this process keep what it frees: no call then pays for pages that another gave back.

    Without it the GNU C library returns large tensors to the kernel or not, depending on what else
    lies above them, and a transform takes half as long or twice.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Give what was kept back to the system, for another process to have."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
