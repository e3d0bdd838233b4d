"""How a byte-level vocabulary in a GGUF file wants its text cut before merging: `tokenizer.ggml.pre` -> the cuts.

A GGUF file names its pre-tokenizer instead of describing it. The expressions are those of the models' own `tokenizer.json` files
(llama.cpp's `llama-vocab.cpp` quotes most of them); a name that is not here is refused rather than guessed, because a wrong cut
changes the ids of every number and contraction and shows only as a duller model.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from tokenizers import Regex, pre_tokenizers

from jaxpaged.errors import UnsupportedModelError

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")
# The file lists the letters that have a case one by one, as of Unicode 11 and without some blocks; here the property, less the rest.
_CASED_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab6f"
    r"\x{10570}-\x{105bf}\x{10d50}-\x{10d8f}\x{16e40}-\x{16e7f}\x{1d400}-\x{1dfff}]]"
)
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{_CASED_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _ASIAN, r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
# What llama.cpp does with a file that says "default" or nothing at all, since such files were made and tried with it.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


class PreTokenizer(NamedTuple):
    """The cuts, in order: each expression cuts the pieces left by the one before into its matches and what lies between them.

    `is_normalized`: the text is brought to Unicode's composed form (NFC) first, which the GGUF file does not say.
    `ignores_merges`: a piece that is a token as a whole is not merged up from bytes.
    `adds_bos`: a begin token is put first unless the file says otherwise.
    """

    cuts: tuple[str, ...]
    is_normalized: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_DIGIT_WISE = PreTokenizer((r"\p{N}", _GPT2))
_FAMILIES: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (PreTokenizer((_GPT2,)), ("gpt-2", "phi-2", "olmo", "jais", "gigachat", "exaone4", "trillion", "granite-docling", "mellum")),
    (PreTokenizer((_GPT2,), is_normalized=True), ("mpt",)),
    (_DIGIT_WISE, ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (_DIGIT_WISE._replace(is_normalized=True), ("command-r",)),
    (
        PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True),
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (PreTokenizer((_LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (PreTokenizer((_QWEN2,), is_normalized=True), ("qwen2", "megrez")),
    (PreTokenizer((_QWEN2,)), ("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2")),
    (PreTokenizer((_QWEN35,), is_normalized=True), ("qwen35",)),
    (PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True), ("tekken",)),
    (PreTokenizer((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (PreTokenizer(_DEEPSEEK_V3), ("deepseek-v3", "joyai-llm", "hunyuan-dense")),
    (PreTokenizer(_DEEPSEEK_CODER), ("deepseek-coder",)),
    (PreTokenizer(_DEEPSEEK_LLM), ("deepseek-llm",)),
    (PreTokenizer(_FALCON), ("falcon",)),
    (PreTokenizer(_DEFAULT), ("default", "")),
)
PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = MappingProxyType({name: pre for pre, names in _FAMILIES for name in names})
"""`tokenizer.ggml.pre` -> cuts; the empty name stands for a file without the key."""


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The cuts that go by `name`. Raises UnsupportedModelError naming it when unknown."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(filter(None, PRE_TOKENIZERS)))
        raise UnsupportedModelError(f"the GGUF file's pre-tokenizer {name!r} is unknown (known: {known}); pass --tokenizer FOLDER instead")
    return PRE_TOKENIZERS[name]


def build_pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The cuts and then the spelling of every byte as one visible character."""
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in pre.cuts]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
