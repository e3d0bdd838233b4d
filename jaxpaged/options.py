"""Reads and merges options: defaults < YAML file < environment < flags, or Python keyword arguments.

Every source is turned into a flat table path -> value first (`cache.page_size` -> 32), so that names, limits and unknown keys
are handled in one place. The tree itself is in `config.py`.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from jaxpaged.config import QUANTIZATIONS, Config
from jaxpaged.counts import counted
from jaxpaged.errors import ConfigError
from jaxpaged.option_aliases import ALIASES
from jaxpaged.option_values import OptionType, read_type, read_value, shorten, to_yaml_value

ENV_PREFIX = "JAXPAGED_"
ENV_NOT_OPTIONS = frozenset({"JAXPAGED_HOME", "JAXPAGED_CONFIG"})
"""Variables of ours that are places and not options: the cache folder, and the file that `--config` names."""

_SERVICE_LINK = re.compile(ENV_PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""What Kubernetes and Docker's links set in every container beside a service called jaxpaged; so is JAXPAGED_PORT, to a URL."""

MAX_CONFIG_BYTES = 2**20


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the tree with its names. `path` is `section.name`."""

    path: str
    section: str
    name: str
    type: OptionType
    doc: str
    default: Any
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The dotted flag."""
        return "--" + self.path.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable."""
        return f"{ENV_PREFIX}{self.section}__{self.name}".upper()


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A merged tree and, for each path that is not at its default, where the value came from."""

    config: Config
    origins: dict[str, str]


@functools.cache
def option_table() -> Mapping[str, Option]:
    """Every option by path, in the order of `config.py`."""
    table: dict[str, Option] = {}
    for section in msgspec.structs.fields(Config):
        hints = get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            path = f"{section.name}.{field.name}"
            option_type = read_type(hints[field.name])
            table[path] = Option(
                path=path,
                section=section.name,
                name=field.name,
                type=option_type,
                doc=option_type.limits.description or "",
                default=field.default,
                aliases=tuple(alias for alias, target in ALIASES.items() if target == path),
            )
    return table


def sections() -> dict[str, str]:
    """Section name -> its first docstring line, in order."""
    return {field.name: (field.type.__doc__ or "").partition("\n")[0] for field in msgspec.structs.fields(Config)}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, None if none is near."""
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not matches:
        # `pagesize` or `len` against `cache.page_size`: compare with the last part too.
        tails = {k.rpartition(".")[2]: k for k in known}
        matches = [tails[t] for t in difflib.get_close_matches(name.rpartition(".")[2], list(tails), n=1, cutoff=0.6)]
    return matches[0] if matches else None


def from_kwargs(**kwargs: Any) -> Config:
    """The tree from vLLM-style keyword arguments, as `LLM(...)` takes them.

    Args:
        kwargs: vLLM's flat names (`option_aliases.ALIASES`), or a section name with a mapping or a struct (`cache={"page_size": 32}`).

    Raises:
        ConfigError: unknown name (the nearest is offered), wrong type, out of range, or refused.
    """
    values = _flatten(kwargs, source="argument")
    config = _build({path: (value, f"argument {name}") for path, (value, name) in values.items()})
    validate(config)
    return config


def load(
    overrides: Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Config:
    """The tree merged from defaults, a YAML file, the environment and flags, each winning over the one before.

    Args:
        overrides: path in the tree (or alias) -> value or text, from the command line.
        config_path: YAML file.
        env: environment variables; only `JAXPAGED_*` are read. None: none.

    Raises:
        ConfigError: unknown or malformed in any source; the message names the source.
    """
    return load_with_origins(overrides, config_path, env).config


def load_with_origins(
    overrides: Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Loaded:
    """Like `load`, and says where each value that was set came from."""
    merged: dict[str, tuple[Any, str]] = {}
    if config_path is not None:
        for path, (value, key) in _flatten(read_yaml(Path(config_path)), source=f"key in {config_path}").items():
            merged[path] = (value, f"{config_path}: {key}")
    merged |= _read_env(env or {})
    for path, (value, key) in _flatten(overrides or {}, source="option").items():
        merged[path] = (value, option_table()[path].flag if key == path else "--" + key.replace("_", "-"))
    config = _build(merged)
    validate(config)
    return Loaded(config=config, origins={path: origin for path, (_, origin) in merged.items()})


def validate(config: Config) -> None:
    """Checks a tree made by hand (`Config(...)` checks nothing) and refuses what is not served yet, by name.

    Raises:
        ConfigError: a value is out of range, or asks for what is not served.
    """
    for path, option in option_table().items():
        read_value(value_at(config, path), option.type, path=path, source=path)
    refusals = [
        (
            config.model.quantization not in (None, *QUANTIZATIONS),
            "model.quantization",
            f"quantization {config.model.quantization!r} is not served yet, only {', '.join(QUANTIZATIONS)} are; leave it out (GGUF files "
            "are dequantized while loading, and int4 keeps what is in them)",
        ),
        (
            config.model.trust_remote_code,
            "model.trust_remote_code",
            "trust_remote_code is refused: code from model repositories is never run; leave it out",
        ),
        (
            config.compilation.enforce_eager,
            "compilation.enforce_eager",
            "enforce_eager is refused: every step is a compiled program; leave it out, and use compilation.token_buckets to compile fewer",
        ),
    ]
    for is_refused, path, message in refusals:
        if is_refused:
            raise ConfigError(message, param=path)
    scheduler, page_size = config.scheduler, config.cache.page_size
    buckets, budget = config.compilation.token_buckets, scheduler.max_num_batched_tokens
    if budget is not None and budget < page_size:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {budget} is under one page of {counted(page_size, 'token')}; "
            "raise it, or lower cache.page_size",
            param="scheduler.max_num_batched_tokens",
        )
    if budget is not None and scheduler.max_num_seqs is not None and scheduler.max_num_seqs > budget:
        raise ConfigError(
            f"scheduler.max_num_seqs {scheduler.max_num_seqs} is over scheduler.max_num_batched_tokens {budget}, and every sequence of a "
            "step takes a token at least; lower it, or raise the budget",
            param="scheduler.max_num_seqs",
        )
    if buckets is not None and not buckets:
        raise ConfigError("compilation.token_buckets must hold at least one token count, or be none", param="compilation.token_buckets")
    if buckets and budget is not None and max(buckets) < budget:
        raise ConfigError(
            f"compilation.token_buckets ends at {max(buckets)}, under scheduler.max_num_batched_tokens {budget}; "
            "add a bucket that large or lower the budget",
            param="compilation.token_buckets",
        )


def value_at(config: Config, path: str) -> Any:
    """The value at `section.name`."""
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def to_yaml(config: Config, redact: bool = True, origins: Mapping[str, str] | None = None) -> str:
    """The whole tree as YAML that `load` reads back.

    Args:
        redact: secrets that are set are written as `***`.
        origins: path -> where the value came from, written as a comment.
    """
    lines: list[str] = []
    section = None
    for path, option in option_table().items():
        if option.section != section:
            section = option.section
            lines.append(f"{section}:")
        line = f"  {option.name}: {to_yaml_value(value_at(config, path), option.type, redact=redact)}"
        lines.append(line + (f"  # {origins[path]}" if origins and path in origins else ""))
    return "\n".join(lines) + "\n"


def _build(values: Mapping[str, tuple[Any, str]]) -> Config:
    """The tree from path -> (raw value, source)."""
    table = option_table()
    changes: dict[str, dict[str, Any]] = {}
    for path, (value, source) in values.items():
        option = table[path]
        changes.setdefault(option.section, {})[option.name] = read_value(value, option.type, path=path, source=source)
    default = Config()
    return msgspec.structs.replace(
        default, **{section: msgspec.structs.replace(getattr(default, section), **fields) for section, fields in changes.items()}
    )


def _flatten(values: Mapping[str, Any], *, source: str) -> dict[str, tuple[Any, str]]:
    """Nested and flat spellings -> path -> (value, the key as given). Dashes count as underscores."""
    flat: dict[str, tuple[Any, str]] = {}
    section_types = {field.name: field.type for field in msgspec.structs.fields(Config)}

    def put(path: str, value: Any, key: str) -> None:
        if path in flat:
            raise ConfigError(f"{path} is given twice, as {flat[path][1]} and as {key}", param=path)
        flat[path] = (value, key)

    for raw_key, value in values.items():
        key = str(raw_key)
        name = key.replace("-", "_")
        if name in section_types and isinstance(value, section_types[name]):
            value = msgspec.structs.asdict(value)
        if name in section_types and (isinstance(value, Mapping) or (value is None and name not in ALIASES)):
            for sub_key, sub_value in (value or {}).items():
                path = f"{name}.{str(sub_key).replace('-', '_')}"
                if path not in option_table():
                    raise _unknown(f"{key}.{sub_key}", source)
                put(path, sub_value, f"{key}.{sub_key}")
        elif name in ALIASES:
            put(ALIASES[name], value, key)
        elif name in option_table():
            put(name, value, key)
        elif name in section_types:
            raise ConfigError(f"{key} is a section and takes a mapping of its options; got {shorten(repr(value))}", param=name)
        else:
            raise _unknown(key, source)
    return flat


def _unknown(key: str, source: str) -> ConfigError:
    key_path = key.replace("-", "_")
    section, dot, _ = key_path.partition(".")
    # A word alone may be meant for a section as a whole, and a dotted one belongs into its section.
    known = [*option_table(), *ALIASES, *sections()]
    near = nearest(key_path, [path for path in option_table() if path.startswith(f"{section}.")]) if dot and section in sections() else None
    near = near or next(iter(difflib.get_close_matches(key_path, sections(), n=1, cutoff=0.8)), None) or nearest(key_path, known)
    return ConfigError(f"unknown {source}: {shorten(key)}" + (f"; the nearest is {near}" if near else ""), param=shorten(key))


def _read_env(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """`JAXPAGED_CACHE__PAGE_SIZE` and `JAXPAGED_MAX_MODEL_LEN`, dotted winning nothing over flat: twice is an error."""
    by_path: dict[str, str] = {}
    found: dict[str, tuple[Any, str]] = {}
    for name, text in sorted(env.items()):
        if not name.startswith(ENV_PREFIX) or name in ENV_NOT_OPTIONS or _SERVICE_LINK.fullmatch(name):
            continue
        if name == ENV_PREFIX + "PORT" and "://" in text:
            continue
        key = name[len(ENV_PREFIX) :].lower()
        path = key.replace("__", ".", 1) if "__" in key else ALIASES.get(key, "")
        if path not in option_table():
            variables = [option.env for option in option_table().values()] + [ENV_PREFIX + alias.upper() for alias in ALIASES]
            near = nearest(name, variables)
            raise ConfigError(
                f"unknown environment variable {shorten(name)}" + (f"; the nearest is {near}" if near else ""), param=shorten(name)
            )
        if path in by_path:
            raise ConfigError(f"{path} is given twice, as {by_path[path]} and as {name}", param=path)
        by_path[path] = name
        found[path] = (text, name)
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's mapping.

    Raises:
        ConfigError: missing, unreadable, not YAML, not a mapping, or a key is given twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses what plain YAML loaders pass over in silence: the same key twice."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise ConfigError(f"{path}: the key {twice} is given twice (line {node.start_mark.line + 1} and on)", param=str(twice))
            return super().construct_mapping(node, deep)

    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"cannot read the config file {path}: {e.strerror or e}") from e
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"the config file {path} is over {MAX_CONFIG_BYTES} bytes")
    try:
        tree = yaml.load(text, Loader)
    except yaml.YAMLError as e:
        mark = e.problem_mark if isinstance(e, yaml.MarkedYAMLError) else None
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = e.problem if isinstance(e, yaml.MarkedYAMLError) and e.problem else str(e).partition("\n")[0]
        raise ConfigError(f"{path} is not YAML{where}: {problem}") from e
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of options; got {shorten(json.dumps(tree, default=str))}")
    return {str(key): value for key, value in tree.items()}
