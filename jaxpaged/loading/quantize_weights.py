"""Converted weights as a quantized model takes them."""

from collections.abc import Mapping

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.fill import ShapeDtype, aligned_empty

_WEIGHT, _SCALES = ".weight", ".scales"


def quantize_weights(arrays: dict[str, np.ndarray], expected: Mapping[str, ShapeDtype]) -> dict[str, np.ndarray]:
    """Replaces each weight that has scales by int8 and its scales, and takes it out of `arrays`.

    Args:
        arrays: parameter path -> array, before quantization.
        expected: parameter path -> shape and type, after it.

    Returns:
        Parameter path -> array of 64-byte aligned memory, in the order of `expected`.

    Raises:
        CheckpointError: a weight is NaN or infinite.
    """
    from pallas_kernels.quantized_matmul.quantize import quantize_int8  # late: it imports JAX

    made: dict[str, np.ndarray] = {}
    for path in expected:
        if path in made:
            continue
        name = path.removesuffix(_WEIGHT).removesuffix(_SCALES)
        if f"{name}{_SCALES}" not in expected:
            made[path] = arrays.pop(path)
            continue
        try:
            values, scales = quantize_int8(arrays.pop(f"{name}{_WEIGHT}"))
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}, so it cannot be quantized") from None
        made[f"{name}{_WEIGHT}"], made[f"{name}{_SCALES}"] = _aligned(np.asarray(values)), _aligned(np.asarray(scales))
    return {path: made[path] for path in expected}


def _aligned(array: np.ndarray) -> np.ndarray:
    aligned = aligned_empty(array.shape, array.dtype)
    aligned[...] = array
    return aligned
