"""A model's weights from what an earlier start kept of them, or else from its files."""

import concurrent.futures
from collections.abc import Callable

import msgspec
import numpy as np

from jaxpaged.config import ModelConfig
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.kept_model import KeptModel
from jaxpaged.loading.orbax_checkpoint import OrbaxCheckpoint
from jaxpaged.loading.sources import ModelFiles
from jaxpaged.model_loader import (
    DescribedModel,
    ModelDescription,
    convert_weights,
    describe_model,
    restore_parts,
    to_device,
    with_structure,
)
from jaxpaged.parallel.replica import Replica
from jaxpaged.step_program import LoadedModel


class ModelSource:
    """Where one engine has its model from.

    Attributes:
        described: all but the weights.
    """

    described: DescribedModel

    def __init__(self, files: ModelFiles, config: ModelConfig, *, is_gpu: bool, num_threads: int) -> None:
        """Finds out what the model is; no weight is read.

        Raises:
            CheckpointError: a file is missing, cut or malformed.
            UnsupportedModelError: an architecture or variant that we do not run.
        """
        self._files, self._num_threads = files, num_threads
        self._load_format, self._seed = config.load_format, config.seed or 0
        self._ahead: concurrent.futures.Future[dict[str, np.ndarray] | None] | None = None
        self._shared: dict[str, np.ndarray] | None = None
        self._kept = KeptModel(files, max_weight_bytes=0 if config.load_format == "dummy" else config.max_kept_weights)
        options = (config.dtype, config.quantization, config.max_model_len, is_gpu)
        description = self._kept.read_description(ModelDescription, options)
        if description is None:
            with open_checkpoint(files, load_format=config.load_format) as checkpoint:
                self.described = describe_model(config, checkpoint, is_gpu=is_gpu)
            self._kept.keep_description(self.described.description, options)
        else:
            self.described = with_structure(description)

    def read_ahead(self) -> None:
        """Begins with what an earlier load kept, on a thread of its own; `load` goes on from there."""
        pool = concurrent.futures.ThreadPoolExecutor(1, "jaxpaged-ahead")
        self._ahead = pool.submit(self._map_kept)
        pool.shutdown(wait=False)

    def load(
        self, replica: Replica | None = None, *, on_bytes: Callable[[int], None] = lambda _: None, is_last: bool = True
    ) -> LoadedModel:
        """Puts the weights on the device: mapped from the file of an earlier load, or converted, and kept for the next one.

        What `jaxpaged convert` wrote goes part by part to the devices of a replica, and is not kept a second time.

        Args:
            replica: the devices to put them on; None: one.
            on_bytes: told the size of each part that is converted.
            is_last: whether no other copy of the model is loaded right after this one; until the last, converted weights stay on the host.

        Raises:
            CheckpointError: tensors that are missing, cut, malformed or of the wrong shape; all of them at once.
        """
        ahead, self._ahead = self._ahead, None
        arrays, self._shared = self._shared, None
        if arrays is None:
            arrays = self._map_kept() if ahead is None else ahead.result()
        if arrays is None:
            with open_checkpoint(self._files, load_format=self._load_format) as checkpoint:
                if isinstance(checkpoint, OrbaxCheckpoint) and replica is not None:
                    return restore_parts(checkpoint, self.described, replica, on_bytes=on_bytes)
                arrays = convert_weights(checkpoint, self.described, num_threads=self._num_threads, seed=self._seed, on_bytes=on_bytes)
            self._kept.keep_weights(arrays, self._weight_options)
        if not is_last:
            self._shared = dict(arrays)
        return to_device(self.described, arrays, replica)

    def _map_kept(self) -> dict[str, np.ndarray] | None:
        return self._kept.map_weights(self._weight_options, num_threads=self._num_threads)

    @property
    def _weight_options(self) -> object:
        # Without the longest text: weights do not depend on it, although rotary positions may.
        facts = self.described.facts
        return (facts.dtype_name, facts.quantization, facts.eight_bit, msgspec.json.encode(self.described.description.hf_config))
