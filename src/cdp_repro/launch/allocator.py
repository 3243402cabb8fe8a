"""The C library's allocator, told to keep what a training step frees for the next one."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in the process; do nothing with another C library.

    Each step frees and allocates the same tens of megabytes. By default glibc returns large blocks to the system at
    once. Every page of the next step is then a page fault that zeroes it: some 9,000 per step for a ResNet-18 on four
    micro-batches, about 4 % of its time. The setting applies to the whole process.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _LARGEST)
