"""What `/tokenizer_info` tells: the model's `tokenizer_config.json`, as vLLM tells it, with what the server knows better in its place."""

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET

from jaxpaged.tokenizer import Tokenizer
from server.protocol.models import TokenizerInfo

MAX_SIZE: Final = 2**20
"""Of what the configuration adds, in bytes of JSON."""
PATH_ENDINGS: Final = ("_file", "_files", "_path", "_dir", "_folder")
"""Names end so that hold places on somebody's disk."""


def tokenizer_info(tokenizer: Tokenizer, max_model_len: int) -> bytes:
    """The body. A token that the file spells with its properties is told as its text, as in vLLM; values that are places on a disk, and
    those that would make it larger than `MAX_SIZE`, are left out.

    Args:
        tokenizer: of the model.
        max_model_len: tokens of prompt and answer at most.
    """
    first_end = next(iter(tokenizer.eos_token_ids), None)
    kind = tokenizer.config.get("tokenizer_class")
    own = TokenizerInfo(
        tokenizer_class=kind if isinstance(kind, str) else type(tokenizer).__name__,
        vocab_size=tokenizer.vocab_size,
        model_max_length=max_model_len,
        bos_token=None if tokenizer.bos_token_id is None else tokenizer.token_text(tokenizer.bos_token_id),
        eos_token=None if first_end is None else tokenizer.token_text(first_end),
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        chat_template=UNSET if tokenizer.chat_template is None else tokenizer.chat_template.source,
    )
    told = {name: value for name, value in tokenizer.config.items() if not name.endswith(PATH_ENDINGS) and name != "chat_template"}
    told["added_tokens_decoder"] = {str(index): text for index, text in sorted(tokenizer.added_tokens.items())}
    entries, left = dict[str, Any](), MAX_SIZE
    for name, value in told.items():
        plain = as_text(value)
        size = len(json.dumps({name: plain}))
        if size <= left:
            entries[name], left = plain, left - size
    # Numbers of any size: the limit of a tokenizer without one is written as 10 to the power of 30.
    return json.dumps(entries | msgspec.to_builtins(own)).encode()


def as_text(value: Any) -> Any:
    """A value of the file, with tokens as texts."""
    if isinstance(value, Mapping):
        content = value.get("content")
        if isinstance(content, str) and ("__type" in value or "lstrip" in value or "special" in value):
            return content
        return {str(name): as_text(item) for name, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value
