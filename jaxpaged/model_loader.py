"""Weights from a checkpoint onto the device, tensor by tensor."""

from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from jaxpaged.config import ModelConfig
from jaxpaged.loading.checkpoint import Checkpoint, NativeDtype
from jaxpaged.loading.dummy import DummyCheckpoint, draw
from jaxpaged.loading.fill import fill
from jaxpaged.loading.model_config import eos_token_ids
from jaxpaged.models import Family, find_architecture, load_family, make_config
from jaxpaged.step_program import LoadedModel

DTYPES = {
    "float32": np.dtype(np.float32),
    "float": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "half": np.dtype(np.float16),
}

_COMPARED_ROWS = 1024
_HEAD = "head.weight"
_UNREAD = (_HEAD, "pooler.weight", "pooler.bias")
"""Parameters that a model need not have although its tensors are there."""


class DescribedModel(NamedTuple):
    """What a checkpoint says besides its weights. `is_encoder`: see `models.Architecture`."""

    family: Family
    config: Any
    generation_config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    is_encoder: bool = False


def choose_dtype(wanted: str, native: NativeDtype, *, is_gpu: bool) -> np.dtype:
    """The type of weights and activations.

    Args:
        wanted: `model.dtype`.
        native: the checkpoint's; "gguf" is a mixture.
        is_gpu: on GPU "auto" follows the checkpoint (bfloat16 for GGUF); on CPU it is bfloat16 for bfloat16 files, else float32.
    """
    if wanted != "auto":
        return DTYPES[wanted]
    if is_gpu:
        return DTYPES["bfloat16" if native == "gguf" else native]
    return DTYPES["bfloat16" if native == "bfloat16" else "float32"]


def describe_model(config: ModelConfig, checkpoint: Checkpoint, *, is_gpu: bool) -> DescribedModel:
    """What the checkpoint says of the model, before any weight is read.

    Raises:
        CheckpointError: its config is malformed.
        UnsupportedModelError: an architecture or variant that we do not run.
    """
    architecture = find_architecture(checkpoint.hf_config)
    family = load_family(architecture)
    max_model_len = config.max_model_len if isinstance(config.max_model_len, int) else None
    dtype = choose_dtype(config.dtype, checkpoint.native_dtype, is_gpu=is_gpu)
    return DescribedModel(
        family=family,
        config=make_config(architecture, _hf_config(checkpoint, family), dtype, max_model_len),
        generation_config=checkpoint.generation_config,
        eos_token_ids=eos_token_ids(checkpoint.hf_config, checkpoint.generation_config),
        is_encoder=architecture.is_encoder,
    )


def load_model(checkpoint: Checkpoint, described: DescribedModel, *, num_threads: int = 1, seed: int = 0) -> LoadedModel:
    """Puts the checkpoint's weights on the device; of a config alone, random ones, the same for one seed.

    Raises:
        CheckpointError: tensors that are missing, cut, malformed or of the wrong shape; all of them at once.
    """
    return _load(checkpoint, described.family, described.config, num_threads, seed)


def _hf_config(checkpoint: Checkpoint, family: Family) -> dict[str, Any]:
    """The checkpoint's config. As in transformers, a head that differs from the embedding wins over `tie_word_embeddings`."""
    names = {path: name for name, (path, _) in family.WEIGHTS.items()}
    head, embedding = names.get(_HEAD), names["embedding.weight"]
    found = checkpoint.names()
    if head is None or head not in found or embedding not in found or not checkpoint.hf_config["tie_word_embeddings"]:
        return checkpoint.hf_config
    return checkpoint.hf_config | {"tie_word_embeddings": _are_equal(checkpoint, head, embedding)}


def _are_equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    if checkpoint.shape(one) != checkpoint.shape(other):
        return False
    num_rows = checkpoint.shape(one)[0]
    try:
        for start in range(0, num_rows, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, num_rows)
            if not np.array_equal(checkpoint.read_rows(one, start, stop), checkpoint.read_rows(other, start, stop)):
                return False
        return True
    finally:
        checkpoint.release(one)
        checkpoint.release(other)


def _load(checkpoint: Checkpoint, family: Any, model_config: Any, num_threads: int, seed: int) -> LoadedModel:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family.Model(model_config)))
    leaves, treedef = jax.tree.flatten(state)
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    expected = dict(zip(paths, leaves, strict=True))
    if isinstance(checkpoint, DummyCheckpoint):
        filled = draw(expected, seed)
    else:
        # A model with tied embeddings may have its head in the file all the same.
        filled = fill(checkpoint, family.WEIGHTS, expected, model_config.axis_sizes, may_be_unread=_UNREAD, num_threads=num_threads)
    # On CPU the aligned arrays become the device's buffers as they are; elsewhere each host copy goes as soon as it is sent.
    params = tuple(jax.device_put(filled.pop(path), may_alias=True) for path in paths)
    return LoadedModel(family, model_config, graphdef, treedef, params)
