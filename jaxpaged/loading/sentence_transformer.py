"""What a folder of sentence-transformers says of its model's embedding: `1_Pooling/config.json`."""

from pathlib import Path

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.loading.model_config import read_json

_MEAN = "pooling_mode_mean_tokens"
_MODES = "pooling_mode_"


def refuse_other_pooling(folder: Path) -> None:
    """Checks that the embedding is the mean of the hidden states, where the folder says anything of it.

    Raises:
        UnsupportedModelError: it is another, by name.
        CheckpointError: the file is no JSON object.
    """
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return
    config = read_json(path)
    named = config.get("pooling_mode")
    modes = [key for key, value in config.items() if key.startswith(_MODES) and value is True] or (
        [named] if isinstance(named, str) else []
    )
    if others := [mode for mode in modes if mode not in (_MEAN, "mean")]:
        raise UnsupportedModelError(
            f"{path}: {others[0]!s:.60} is not supported; the embedding of an encoder is the mean of its hidden states"
        )
