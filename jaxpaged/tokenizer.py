"""Text to token ids and back, for one model."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, overload

import tokenizers

from jaxpaged.chat_template import TIMEOUT_S, ChatTemplate, check_messages, plain_value, read_chat_template
from jaxpaged.control_tokens import ControlTokens
from jaxpaged.errors import ChatTemplateError, InvalidRequestError
from jaxpaged.token_bytes import TokenBytes, max_bytes_per_token
from jaxpaged.tokenizer_files import StoredTokenizer, bytes_alone, has_tokenizer, load_folder

if TYPE_CHECKING:
    from jaxpaged.loading.sources import ModelFiles


class RenderedChat(NamedTuple):
    """A conversation as the chat template wrote it.

    Attributes:
        pieces: texts, and between them the ids of control tokens that the template wrote where users spelled some as text.
        is_plain: control tokens that the texts spell are text.
    """

    pieces: Sequence[str | int]
    is_plain: bool

    @property
    def texts(self) -> list[str]:
        """The pieces that are text."""
        return [piece for piece in self.pieces if isinstance(piece, str)]


class Tokenizer:
    """The vocabulary, the chat template and the special tokens of one model. May be used from several threads.

    Attributes:
        vocab_size: every id of the vocabulary is below it; ids at or above it decode to nothing.
        bos_token_id: the begin token, None if the model has none.
        eos_token_ids: the tokenizer's own end tokens; a model's generation config may name more.
        special_ids: control tokens, which are left out of text unless asked for.
        token_bytes: id -> bytes of one token, without decoding the whole.
        chat_template: None if the model came without one.
        config: what its `tokenizer_config.json` says, but for the added tokens.
        added_tokens: id -> text of the tokens beside the vocabulary that was learnt, control tokens among them.
    """

    def __init__(self, stored: StoredTokenizer, *, chat_template: str | None = None) -> None:
        """Wraps a tokenizer that was read; `chat_template`, a template's text, replaces the model's own.

        Raises:
            UnsupportedModelError: its decoder is of an unknown kind.
            ChatTemplateError: the template's syntax is wrong.
        """
        self._backend = stored.backend
        added = self._backend.get_added_tokens_decoder()
        self.config: Final[Mapping[str, Any]] = stored.config or {}
        self.added_tokens: Final = {index: token.content for index, token in added.items()}
        self.bos_token_id: Final = stored.bos_token_id
        self.eos_token_ids: Final = stored.eos_token_ids
        named = {index for index in (stored.bos_token_id, *stored.eos_token_ids) if index is not None}
        self.special_ids: Final = frozenset(named | {index for index, token in added.items() if token.special})
        self.token_bytes: Final = TokenBytes(self._backend, self.added_tokens)
        self.vocab_size: Final = max(self._backend.get_vocab().values(), default=-1) + 1
        source = stored.chat_template if chat_template is None else chat_template
        bos, eos = self._spelling(stored.bos_token_id), self._spelling(next(iter(stored.eos_token_ids), None))
        self.chat_template: Final = None if source is None else ChatTemplate(source, bos, eos)

    @classmethod
    def from_files(
        cls,
        files: "ModelFiles",
        *,
        chat_template: str | None = None,
        template_timeout_s: float = TIMEOUT_S,
        may_be_missing: bool = False,
    ) -> "Tokenizer":
        """The tokenizer of a model that `loading.sources.resolve` found.

        Args:
            files: where they lie.
            chat_template: the option of that name: a file or a template, in place of the model's own.
            template_timeout_s: what one rendering may take.
            may_be_missing: whether a folder without a tokenizer has one of 256 tokens, one a byte.

        Raises:
            CheckpointError: a file is missing or malformed.
            UnsupportedModelError: a kind of tokenizer that we do not know.
            ChatTemplateError: the template's syntax is wrong.
            ConfigError: the option names a file that cannot be read.
        """
        source = None if chat_template is None else read_chat_template(chat_template)
        path = files.path if files.tokenizer_path is None else files.tokenizer_path
        if may_be_missing and path.is_dir() and not has_tokenizer(path):
            tokenizer = cls(bytes_alone(), chat_template=source)
        elif path.is_dir() or path.name == "tokenizer.json":
            tokenizer = cls.from_folder(path if path.is_dir() else path.parent, chat_template=source)
        else:
            tokenizer = cls.from_gguf(path, files.cache_path, chat_template=source)
        if tokenizer.chat_template is not None:
            tokenizer.chat_template.timeout_s = template_timeout_s
        return tokenizer

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: str | None = None) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder; errors as `from_files`."""
        return cls(load_folder(folder), chat_template=chat_template)

    @classmethod
    def from_gguf(cls, path: Path, cache_folder: Path, *, chat_template: str | None = None) -> "Tokenizer":
        """The tokenizer in a GGUF file, its conversion kept in `cache_folder`; errors as `from_files`."""
        from jaxpaged.gguf_tokenizer import load_gguf  # late: reading GGUF takes numpy

        return cls(load_gguf(path, cache_folder), chat_template=chat_template)

    @cached_property
    def max_bytes_per_token(self) -> int | None:
        """Bytes of text that one token stands for at most; None where nothing of the kind is certain."""
        return max_bytes_per_token(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of one text; control tokens spelled in it count as such. Other threads run meanwhile.

        Args:
            text: what to encode.
            add_special_tokens: add a begin (or end) token where the tokenizer's own rule says so.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, for several texts at once."""
        return _encode(self._backend, texts, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids as a text of its own, not as the continuation of another (see `detokenizer`); broken UTF-8 becomes U+FFFD."""
        hidden = self.special_ids if skip_special_tokens else ()
        text = self.token_bytes.join(token_ids, hidden).decode("utf-8", "replace")
        for _ in range(self.token_bytes.rule.leading_spaces):
            text = text.removeprefix(" ")
        return text

    def with_ends(self, token_ids: Sequence[int]) -> list[int]:
        """Ids of a text, with the begin and end tokens that `encode` adds to one."""
        plain, whole = (self.encode("a", add_special_tokens) for add_special_tokens in (False, True))
        num_before = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
        return [*whole[:num_before], *token_ids, *whole[num_before + len(plain) :]]

    def spelling(self, token_id: int) -> str:
        """A token as the vocabulary writes it; its text, for an id that the vocabulary does not have."""
        return self._spelling(token_id) or self.token_text(token_id)

    def token_text(self, token_id: int) -> str:
        """One token alone, control tokens shown; a part of a character shows as U+FFFD."""
        return self.token_bytes[token_id].decode("utf-8", "replace")

    @overload
    def apply_chat_template(
        self,
        /,
        messages: Any,
        *,
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        /,
        messages: Any,
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        /,  # a variable may have any name
        messages: Any,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int] | str:
        """Ids of a conversation, or without `tokenize` its text; see `ChatTemplate.render` for the other arguments.

        The template alone decides about the begin token, since it writes it where the model was trained with one. Control tokens
        that the messages or variables spell are text; in the text alone they look like those of the template.

        Raises:
            ChatTemplateError: there is no template, or as `ChatTemplate.render`.
        """
        rendered = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, **variables
        )
        if tokenize:
            return self.encode_chat(rendered)
        return "".join(piece if isinstance(piece, str) else self.token_text(piece) for piece in rendered.pieces)

    def render_chat(
        self,
        /,  # a variable may have any name
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> RenderedChat:
        """A conversation, laid out and not yet in ids; arguments and errors as `apply_chat_template`."""
        if self.chat_template is None:
            raise ChatTemplateError("the model has no chat template: use plain prompts, or pass --chat-template FILE", param="messages")
        given = {"messages": check_messages(messages), "variables": plain_value(variables)}
        marked = self._control_tokens.mark(given)
        said = given if marked is None else marked.said
        rendered = self.chat_template.render(
            said["messages"],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **said["variables"],
        )
        if marked is None:
            return RenderedChat([rendered], is_plain=False)
        return RenderedChat(self._control_tokens.cut(rendered, marked.mark), is_plain=True)

    def encode_chat(self, rendered: RenderedChat) -> list[int]:
        """Ids of what `render_chat` made. Raises InvalidRequestError for half of a surrogate pair."""
        backend = self._plain_backend if rendered.is_plain else self._backend
        encoded = iter(_encode(backend, rendered.texts, False))
        return [index for piece in rendered.pieces for index in (next(encoded) if isinstance(piece, str) else [piece])]

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        added = self._backend.get_added_tokens_decoder()
        return ControlTokens({token.content: index for index, token in added.items() if index in self.special_ids})

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A copy, because the switch is a property of the whole tokenizer; made when a message first spells a control token.
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _spelling(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._backend.id_to_token(token_id)


def _encode(backend: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    try:
        # Never `encode`: it holds the interpreter lock, 2-5 s for 4 MB, and `encode_batch` does not.
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]
    except (TypeError, UnicodeEncodeError) as error:
        if not all(isinstance(text, str) for text in texts):
            raise
        raise InvalidRequestError("the text is not valid Unicode: it holds half of a surrogate pair", param="prompt") from error
