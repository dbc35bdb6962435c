"""Keeps the C library from handing freed memory back to the system between two local steps.

Pure functions make new tensors in every step. By default glibc returns a freed block at the top
of the heap at once, and the next step pays for every page of it again, which can cost more than
the arithmetic. The setting is the whole process's, which then keeps what it had at its peak.
"""

import ctypes
import platform
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 32 * 2**20  # the largest mmap threshold that glibc takes


@cache
def keep_freed_memory() -> None:
    """Called once per process; does nothing where the C library is not glibc."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
