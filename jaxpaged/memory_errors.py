"""What the device has no memory for, as a sentence."""

import contextlib
from collections.abc import Iterator

import jax

from jaxpaged.errors import MemoryBudgetError


@contextlib.contextmanager
def memory_budget() -> Iterator[None]:
    """Raises MemoryBudgetError for a device, or a host, that is out of memory; other errors pass."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise MemoryBudgetError(
            f"the device has not enough memory for weights, page pool and step programs ({first_line}): "
            "lower cache.memory, scheduler.max_num_batched_tokens or model.max_model_len, or take a smaller model"
        ) from error
