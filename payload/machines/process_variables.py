"""Environment variables for the memory and the threads of a process that trains."""

from __future__ import annotations

# A training step repeatedly allocates and frees hundreds of megabytes. By default, glibc returns
# each block of 32 MiB or more to the kernel, and gets fresh, zeroed pages for the next block.
# Measured on GPT-2's shape, 4 layers, 2 cores: 5.6 million page faults in 9 steps by default, 0.96
# million with the thresholds raised, 0.04 million with huge pages as well; step 2.61 s, 1.70 s,
# 1.68 s; peak memory 2.5, 3.8, 3.6 GB. top_pad and arena_max changed nothing.
_KEEP_BYTES = 4 * 2**30
_TUNED = ":".join(
    (
        f"glibc.malloc.mmap_threshold={_KEEP_BYTES}",
        f"glibc.malloc.trim_threshold={_KEEP_BYTES}",
        # Calls madvise(MADV_HUGEPAGE) for the heap; versions before glibc 2.35 ignore it.
        "glibc.malloc.hugetlb=1",
    )
)

# At the end of a parallel region libgomp's threads spin before they sleep, 300,000 times by
# default. For these milliseconds, no other program can use the core. A step of `tiny` with
# two threads on two AVX-512 cores, alone and beside two endless loops (2026-11-22): 0.17 s and
# 0.55 to 1.36 s by default, 0.17 s and 0.42 s with 3,000, 0.20 to 0.23 s and 0.43 s with none.
_SPIN_COUNT = 3000


PLAIN_MALLOC = frozenset({"tuned", "lean"})
"""The values of `launch.malloc` with which a rank's tensors have the allocator of
payload.kernels.cpu_allocator."""


def tuned_malloc() -> dict[str, str]:
    """Return the variables with which glibc keeps freed memory (`launch.malloc = "tuned"`)."""
    return {"GLIBC_TUNABLES": _TUNED}


def spin_environment() -> dict[str, str]:
    """Return the variables that limit how long waiting OpenMP threads spin.

    The variables are for ranks that do not share cores.
    """
    return {"GOMP_SPINCOUNT": str(_SPIN_COUNT)}
