"""CPU kernels in C++ behind the ops, as custom calls of XLA; without a compiler they are absent, and XLA does their work.

A `.cc` beside an op is its glue to XLA; the work is in a header beside it that knows nothing of XLA, so that a test driver can run it
under sanitizers. Vector instructions are chosen when a kernel runs.
"""

import ctypes
import functools

import jax

from pallas_kernels.native.build import Library, find_or_build

TARGETS = (
    "jaxpaged_int8_matmul",
    "jaxpaged_paged_attention",
    "jaxpaged_dense_matmul",
    "jaxpaged_grouped_matmul",
    "jaxpaged_q4_matmul",
    "jaxpaged_q8_matmul",
    "jaxpaged_kv_write",
    "jaxpaged_rms_norm",
    "jaxpaged_gated_product",
)
"""Symbols of the library, and names of the custom calls."""


@functools.cache
def library() -> Library:
    """Finds or compiles the library, and makes its kernels known to XLA; once a process."""
    found = find_or_build()
    if found.path is None:
        return found
    try:
        loaded = ctypes.CDLL(str(found.path))
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    except (OSError, AttributeError) as error:
        return Library(None, f"the library cannot be loaded: {error}")
    return found
