"""Freed memory stays in the process, where the C library is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from cdp_repro.launch.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
faults = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(40 * 2**20, dtype=torch.uint8)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[10:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_memory_that_is_used_again_costs_no_page_faults():
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True).stdout)
        for way in ("keep", "default")
    )
    assert kept < given_back / 4
