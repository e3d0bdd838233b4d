"""Reads the tokenizer of Qwen 1: a file in tiktoken's format, whose rules stand in repository code that is never run, and so stand here.

A line of the file holds a token in base64 and its rank, which is its id. tiktoken joins the two neighbours whose joint token has the
lowest rank; `tokenizers` does the same when every way of cutting a token in two is a merge, in the order of ranks.
"""

import base64
import binascii
import itertools
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxpaged.errors import CheckpointError

QWEN_TIKTOKEN = "qwen.tiktoken"

_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
"""Their ids follow the ranks."""

END_TOKENS = ("<|im_end|>", "<|endoftext|>")

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What the model's own code lays conversations out as."""

_MAX_BYTES = 2**25
_MAX_TOKEN_BYTES = 1024


def read_tiktoken(path: Path) -> Tokenizer:
    """A tokenizer from the ranks in a file. Raises CheckpointError when it is missing, too large or malformed."""
    ranks = _read_ranks(path)
    letters = _letters()

    def spelled(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    merges: list[tuple[str, str]] = []
    for token in ranks:
        cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
        known = sorted((cut for cut in cuts if cut[0] in ranks and cut[1] in ranks), key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
        merges += [(spelled(left), spelled(right)) for left, right in known]
    tokenizer = Tokenizer(models.BPE(vocab={spelled(token): rank for token, rank in ranks.items()}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_CUT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _CONTROL])
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank, in the order of ranks, which are 0, 1, 2, ..."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_BYTES} bytes")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            spelled, place = base64.b64decode(token, validate=True), int(rank)
        except (binascii.Error, ValueError):
            raise CheckpointError(f"{path}, line {number}: a token in base64 and its rank are due, not {line[:60]!r}") from None
        if not 0 < len(spelled) <= _MAX_TOKEN_BYTES or spelled in ranks or place != len(ranks):
            raise CheckpointError(f"{path}, line {number}: token {len(ranks)} is due, new and of 1 to {_MAX_TOKEN_BYTES} bytes")
        ranks[spelled] = place
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{path} has no token for {len(lacking)} of the 256 bytes")
    return ranks


def _letters() -> list[str]:
    """By byte, the letter that stands for it in byte-level vocabularies: itself if it can be seen, else one from U+0100 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
