"""Weights from a checkpoint onto the device, tensor by tensor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import msgspec
import numpy as np

from jaxpaged.config import ModelConfig
from jaxpaged.errors import ConfigError, UnsupportedModelError
from jaxpaged.loading.checkpoint import Checkpoint, NativeDtype
from jaxpaged.loading.dummy import DummyCheckpoint, draw
from jaxpaged.loading.fill import fill
from jaxpaged.loading.model_config import eos_token_ids
from jaxpaged.loading.orbax_checkpoint import OrbaxCheckpoint
from jaxpaged.loading.quantize_weights import quantize_weights
from jaxpaged.model_structure import ModelFacts, ModelStructure, facts_of, make_structure
from jaxpaged.models import Architecture, Family, find_architecture, load_family, make_config
from jaxpaged.parallel.cuts import ReplicaShape, cut_parameters
from jaxpaged.parallel.replica import Replica
from jaxpaged.parameter_sizes import ParameterSize, parameter_sizes
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
"""Parameters that a model need not have although its tensors are there: tied embeddings and a head, and what another task needed."""


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says besides its weights, as JSON if need be.

    Attributes:
        hf_config: the settled config that the family's `Config` is read from.
        max_model_len: the longest text that the engine takes, where the options say so.
        sizes: of the parameters.
        is_encoder: see `models.Architecture`.
    """

    facts: ModelFacts
    hf_config: dict[str, Any]
    max_model_len: int | None
    generation_config: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    sizes: tuple[ParameterSize, ...] = ()
    is_encoder: bool = False


class DescribedModel(NamedTuple):
    """A description, and the structure that follows from it, made when it is first asked for."""

    description: ModelDescription
    structure: Callable[[], ModelStructure]

    @property
    def facts(self) -> ModelFacts:
        """Sizes of the model."""
        return self.description.facts


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
        UnsupportedModelError: an architecture or variant that we do not run, or not with this quantization.
        ConfigError: a quantization that this device does not run.
    """
    architecture = find_architecture(checkpoint.hf_config)
    _refuse_quantization(config.quantization, architecture, is_gpu=is_gpu)
    hf_config = _hf_config(checkpoint, load_family(architecture))
    max_model_len = config.max_model_len if isinstance(config.max_model_len, int) else None
    dtype = choose_dtype(config.dtype, checkpoint.native_dtype, is_gpu=is_gpu)
    family_config = make_config(architecture, hf_config, dtype, max_model_len)
    eight_bit: tuple[str, ...] = ()
    if config.quantization == "int4":
        from jaxpaged.loading.quantize_groups import eight_bit_parameters  # late: other models need none of it

        eight_bit = eight_bit_parameters(checkpoint, load_family(architecture).WEIGHTS, family_config.axis_sizes["layers"])
    description = ModelDescription(
        facts=facts_of(family_config, config.quantization, eight_bit),
        hf_config=hf_config,
        max_model_len=max_model_len,
        generation_config=checkpoint.generation_config,
        eos_token_ids=eos_token_ids(checkpoint.hf_config, checkpoint.generation_config),
        is_encoder=architecture.is_encoder,
    )
    structure = with_structure(description).structure
    sizes = parameter_sizes(structure().expected, structure().family.WEIGHTS)
    return DescribedModel(msgspec.structs.replace(description, sizes=sizes), structure)


def with_structure(description: ModelDescription) -> DescribedModel:
    """The model of a description, found just now or at an earlier start."""

    @functools.cache
    def structure() -> ModelStructure:
        architecture = find_architecture(description.hf_config)
        config = make_config(architecture, description.hf_config, description.facts.dtype, description.max_model_len)
        return make_structure(load_family(architecture), config, description.facts.quantization, description.facts.eight_bit)

    return DescribedModel(description, structure)


def load_model(
    checkpoint: Checkpoint, described: DescribedModel, *, num_threads: int = 1, seed: int = 0, replica: Replica | None = None
) -> LoadedModel:
    """Puts the checkpoint's weights on the device, or on those of `replica`; arguments and errors as for `convert_weights`."""
    if isinstance(checkpoint, OrbaxCheckpoint) and replica is not None:
        return restore_parts(checkpoint, described, replica)
    return to_device(described, convert_weights(checkpoint, described, num_threads=num_threads, seed=seed), replica)


def make_replica(described: DescribedModel, shape: ReplicaShape, devices: Sequence[jax.Device]) -> Replica:
    """The devices of one copy of a model, and what of it each of them gets."""
    structure = described.structure()
    return Replica.over(devices, shape, cut_parameters(structure.family.WEIGHTS, structure.config.axis_sizes, shape))


def convert_weights(
    checkpoint: Checkpoint,
    described: DescribedModel,
    *,
    num_threads: int = 1,
    seed: int = 0,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """The checkpoint's weights as the model takes them: parameter path -> aligned array, in the order of the leaves.

    Args:
        num_threads: tensors that are converted at the same time.
        seed: of random weights, where the checkpoint is a config alone.
        on_bytes: told the size of each part as it is there; from several threads, one at a time.

    Raises:
        CheckpointError: tensors that are missing, cut, malformed or of the wrong shape; all of them at once.
    """
    structure = described.structure()
    family, config = structure.family, structure.config
    expected = structure.expected if structure.quantization is None else make_structure(family, config).expected
    groups = None
    if structure.quantization == "int4":
        from jaxpaged.loading.quantize_groups import Groups

        groups = Groups(structure.expected)
    if isinstance(checkpoint, DummyCheckpoint):
        arrays = draw(expected, seed)
    elif isinstance(checkpoint, OrbaxCheckpoint):
        arrays = checkpoint.read_parameters(expected, on_bytes=on_bytes)
    else:
        arrays = fill(
            checkpoint,
            family.WEIGHTS,
            expected,
            config.axis_sizes,
            may_be_unread=_UNREAD,
            taken={} if groups is None else groups.from_checkpoint(checkpoint),
            num_threads=num_threads,
            on_bytes=on_bytes,
        )
    if groups is None:
        return arrays if structure.quantization is None else quantize_weights(arrays, structure.expected)
    groups.from_arrays(arrays)
    arrays |= groups.arrays
    return {path: arrays[path] for path in structure.expected}


def restore_parts(
    checkpoint: OrbaxCheckpoint, described: DescribedModel, replica: Replica, *, on_bytes: Callable[[int], None] = lambda _: None
) -> LoadedModel:
    """Puts onto each device of a replica its own part of what `jaxpaged convert` wrote; no parameter is ever whole on the host.

    Args:
        on_bytes: told the size of each parameter as its parts are there.

    Raises:
        CheckpointError: parameters that are missing, cut, or of the wrong shape.
    """
    parts = []
    for path, parameter in checkpoint.stored_parameters(described.structure().expected).items():
        parts.append(jax.block_until_ready(replica.put(path, parameter)))
        on_bytes(parameter.nbytes)
    return LoadedModel(described.facts, described.structure, tuple(parts), replica)


def to_device(described: DescribedModel, arrays: dict[str, np.ndarray], replica: Replica | None = None) -> LoadedModel:
    """Puts converted weights on the device, or their parts on those of a replica, and takes them out of `arrays`.

    On CPU aligned arrays become the device's buffers as they are; elsewhere each host copy goes as soon as it is sent.
    """
    if replica is not None:
        parts = tuple(jax.block_until_ready(replica.put(path, arrays.pop(path))) for path in list(arrays))
        return LoadedModel(described.facts, described.structure, parts, replica)
    params = tuple(jax.device_put(arrays.pop(path), may_alias=True) for path in list(arrays))
    return LoadedModel(described.facts, described.structure, params)


def _refuse_quantization(quantization: str | None, architecture: Architecture, *, is_gpu: bool) -> None:
    if quantization is None:
        return
    if is_gpu:
        raise ConfigError(f"quantization {quantization!r} is served on CPU alone so far; leave it out", param="model.quantization")
    if quantization not in architecture.quantizations:
        raise UnsupportedModelError(f"quantization {quantization!r} is not served for {architecture.models} yet; leave it out")


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
