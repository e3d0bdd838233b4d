"""What must be the same in all processes, so that they compile the same programs: code, versions and options."""

import importlib.metadata
from collections.abc import Mapping

from jaxpaged.config import Config
from jaxpaged.options import value_at
from jaxpaged.parallel.mesh_config import read_mesh
from jaxpaged.source_digest import source_digest

OPTIONS = (
    "model.model",
    "model.tokenizer",
    "model.revision",
    "model.dtype",
    "model.max_model_len",
    "model.load_format",
    "model.quantization",
    "model.seed",
    "cache.page_size",
    "cache.memory",
    "cache.dtype",
    "cache.gpu_memory_utilization",
    "scheduler.max_num_seqs",
    "scheduler.max_num_batched_tokens",
    "compilation.token_buckets",
    "kernels.paged_attention",
    "kernels.kv_write",
    "kernels.grouped_matmul",
    "sampling.logprobs_mode",
)
_VERSIONS = ("jax", "jaxlib", "flax")
_SOURCE = "the source of jaxpaged"
_SHOWN_CHARS = 60


def terms_of(config: Config) -> dict[str, str]:
    """By name, in words. Raises ConfigError when the mesh file cannot be read."""
    mesh = read_mesh(config.parallel)
    return {
        _SOURCE: source_digest(),
        **{f"the version of {name}": importlib.metadata.version(name) for name in _VERSIONS},
        **{path: repr(value_at(config, path)) for path in OPTIONS},
        "the mesh": repr((mesh.data, mesh.tensor, mesh.expert, sorted(mesh.table.items()))),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str], index: int) -> str | None:
    """A sentence about the first thing that process `index` has otherwise; None: nothing."""
    for name in (*ours, *(name for name in theirs if name not in ours)):
        our, their = ours.get(name, "nothing"), theirs.get(name, "nothing")
        if our != their:
            return (
                f"{name[:_SHOWN_CHARS]} is {their[:_SHOWN_CHARS]} in process {index} and {our[:_SHOWN_CHARS]} in process 0; "
                "start all processes with the same code and options"
            )
    return None
