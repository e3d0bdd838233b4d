"""Room 1: a prompt and its parameters become a `Request`, or an error that says what is wrong with them."""

import itertools
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.beam_search import BeamSearchParams, step_params
from jaxpaged.counts import counted
from jaxpaged.embeddings import EMBEDDING_PARAMS
from jaxpaged.errors import ChatTemplateError, CheckpointError, ContextLengthError, InvalidRequestError
from jaxpaged.request import MAX_BAD_WORDS, MAX_LOGPROBS, Pooling, Request, RequestOutputKind, SamplingParams
from jaxpaged.tokenizer import Tokenizer

type Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, a list of token ids, or an object with a "prompt" (a text), "prompt_token_ids" or both, and a "cache_salt" if wanted.

Of both the ids are what is continued. Values of None count as absent.
"""

type Continuation = str | Sequence[int]
"""A text or a list of token ids that goes on from a prompt."""

type Messages = Sequence[Mapping[str, Any]]

NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
MAX_REQUEST_ID_CHARS = 1024
ARGUMENTS_OF_TEMPLATES = ("messages", "add_generation_prompt", "continue_final_message", "tokenize")
"""What a variable of a chat template cannot be called, since it would take the place of one of ours."""

_SCORING = SamplingParams(
    temperature=0.0, max_tokens=0, prompt_logprobs=0, detokenize=False, seed=0, output_kind=RequestOutputKind.FINAL_ONLY
)


def default_params_of(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What unset sampling fields take. Raises CheckpointError for values that a model's file must not have."""
    defaults = {name: generation_config[name] for name in NEUTRAL_SAMPLING if generation_config.get(name) is not None}
    try:
        return SamplingParams(**(NEUTRAL_SAMPLING | defaults))
    except InvalidRequestError as error:
        raise CheckpointError(f"the model's generation_config.json: {error.message}; --generation-config neutral passes over it") from error


class Intake:
    """Checks and completes requests; needs no engine, so any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        generation_config: Mapping[str, Any],
        eos_token_ids: frozenset[int],
        vocab: int,
        seed: int,
        max_logprobs: int = MAX_LOGPROBS,
        max_model_len: int | None = None,
        is_encoder: bool = False,
    ) -> None:
        """Prepares for one model.

        Args:
            tokenizer: the model's.
            generation_config: sampling values that unset fields take; empty for neutral ones.
            eos_token_ids: every id that ends an answer.
            vocab: ids of a prompt lie below it.
            seed: seeds the requests that bring none.
            max_logprobs: likeliest ids that a request may ask log-probabilities of.
            max_model_len: tokens of the context; a text that is too long for it in any case is refused before it is tokenized.
            is_encoder: whether the model makes embeddings and nothing else.
        """
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self._vocab = vocab
        self._seed = seed
        self._max_model_len, self._max_logprobs, self._is_encoder = max_model_len, max_logprobs, is_encoder
        # Drawn, so that only who has seen it can give an id that looks like an automatic one.
        self._id_prefix = f"req-{secrets.token_hex(2)}-"
        # Counting is atomic, so threads can share these.
        self._seed_indices = itertools.count()
        self._ids = itertools.count()
        self.default_params = default_params_of(generation_config)

    def new_id(self) -> str:
        """A request id that no other request of this engine has or may be given."""
        return f"{self._id_prefix}{next(self._ids)}"

    def usable_id(self, request_id: object) -> str:
        """What to call a request that was refused: the id that it came with, or a new one if that is at fault."""
        return self.new_id() if request_id is None or not _is_id(request_id) else str(request_id)

    def request(
        self, prompt: Prompt, params: SamplingParams | None, *, arrival_s: float, request_id: str | None = None, priority: int = 0
    ) -> Request:
        """The request for one prompt.

        Args:
            prompt: what to continue.
            params: how; None takes the model's defaults. Unset sampling fields take the model's defaults as well.
            arrival_s: monotonic time at which it arrived.
            request_id: a label, unique among unfinished requests; None makes one.
            priority: lower goes first.

        Raises:
            InvalidRequestError: a malformed prompt or salt, or ids, parameters or priority out of range. (Lengths are checked by
                `Scheduler.check_fits`.)
        """
        if params is not EMBEDDING_PARAMS:
            self._check_generates()
        if request_id is not None:
            if not _is_id(request_id):
                raise InvalidRequestError(f"request_id must be a text of 1 to {MAX_REQUEST_ID_CHARS} characters", param="request_id")
            if request_id.startswith(self._id_prefix):
                raise InvalidRequestError(
                    f"A request_id that begins with {self._id_prefix!r} is given by this engine alone: choose another", param="request_id"
                )
        prompt, cache_salt = _without_salt(prompt)
        text, token_ids = self._token_ids(prompt)
        params = self._complete(params)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(params, name) or ():
                if token_id >= self._vocab:
                    raise InvalidRequestError(f"{name} holds {token_id}, and the model has ids 0 to {self._vocab - 1}", param=name)
        for name, num_logprobs in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if num_logprobs is not None and num_logprobs > self._max_logprobs:
                raise InvalidRequestError(
                    f"{name} {num_logprobs} is over the limit of this engine, {self._max_logprobs} (sampling.max_logprobs)", param=name
                )
        bad_words_ids = tuple(self._spellings(params.bad_words)) if params.bad_words else ()
        # A seeded request depends on its seed alone, and must not shift the stream of the others.
        seed = _mix(self._seed, next(self._seed_indices)) if params.seed is None or params.seed == -1 else params.seed
        return Request(
            request_id=self.new_id() if request_id is None else request_id,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            arrival_s=arrival_s,
            prompt=text,
            eos_token_ids=self.eos_token_ids,
            bad_words_ids=bad_words_ids,
            priority=priority,
            cache_salt=cache_salt,
        )

    def prompt_ids(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, as `request` makes them; without `add_special_tokens` a text gets no begin token.

        Raises:
            InvalidRequestError: a malformed prompt, or ids out of range.
        """
        return self._token_ids(_without_salt(prompt)[0], add_special_tokens=add_special_tokens)[1]

    def scoring_request(
        self, prompt: Prompt, continuation: Continuation, *, arrival_s: float, request_id: str | None = None, priority: int = 0
    ) -> Request:
        """The request that tells how likely a continuation is (`scoring.score_of`); its prompt is both together.

        Two texts are tokenized as one, spaces at the end of the prompt counted to the continuation, as evaluation harnesses do: what
        begins behind the prompt's own tokens is the continuation.

        Raises:
            InvalidRequestError: as `request`; or prompt or continuation has no token.
        """
        prompt, cache_salt = _without_salt(prompt)
        text, token_ids = self._token_ids(prompt)
        if not isinstance(continuation, str):
            token_ids, num_prompt = token_ids + self._checked_ids(continuation), len(token_ids)
        elif text is None:
            token_ids, num_prompt = token_ids + self.tokenizer.encode(continuation, add_special_tokens=False), len(token_ids)
        else:
            token_ids, num_prompt = self._encode(text + continuation), len(self._encode(text.rstrip()) if text.strip() else token_ids)
        if num_prompt == 0:
            raise InvalidRequestError("The prompt has no token, and nothing is likely after nothing: give one at least", param="prompt")
        if num_prompt >= len(token_ids):
            raise InvalidRequestError("The continuation has no token of its own", param="continuations")
        request = self.request(
            {"prompt_token_ids": token_ids} if cache_salt is None else {"prompt_token_ids": token_ids, "cache_salt": cache_salt},
            _SCORING,
            arrival_s=arrival_s,
            request_id=request_id,
            priority=priority,
        )
        return msgspec.structs.replace(request, score_from=num_prompt)

    def embedding_request(
        self, prompt: Prompt, pooling: Pooling, *, arrival_s: float, request_id: str | None = None, priority: int = 0
    ) -> Request:
        """The request for the embedding of a prompt (`embeddings.embedding_of`). Raises as `request`."""
        request = self.request(prompt, EMBEDDING_PARAMS, arrival_s=arrival_s, request_id=request_id, priority=priority)
        return msgspec.structs.replace(request, pooling=pooling)

    def beam_request(
        self, prompt: Prompt, params: BeamSearchParams, *, arrival_s: float, request_id: str | None = None, priority: int = 0
    ) -> Request:
        """The request that each step of each beam is made from (`beam_requests`).

        Raises:
            InvalidRequestError: as `request`; or the width needs more log-probabilities than the engine tells.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(f"params must be BeamSearchParams, got {type(params).__name__}", param="params")
        asked = step_params(params, self.eos_token_ids)
        if asked.logprobs is not None and asked.logprobs > self._max_logprobs:
            raise InvalidRequestError(
                f"beam_width {params.beam_width} needs the {asked.logprobs} likeliest ids at each step, and the limit of this engine is "
                f"{self._max_logprobs} (sampling.max_logprobs)",
                param="beam_width",
            )
        return self.request(prompt, asked, arrival_s=arrival_s, request_id=request_id, priority=priority)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template, which sees `variables` as well.

        Raises:
            ChatTemplateError: no template, malformed messages, or the template refuses them.
            ContextLengthError: too long for the context in any case; it is not tokenized then.
            InvalidRequestError: half of a surrogate pair, or a model that generates no text.
        """
        self._check_generates()
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise ChatTemplateError(
                f"messages must be a list of objects with role and content, got {type(messages).__name__}", param="messages"
            )
        for name in ARGUMENTS_OF_TEMPLATES:
            if variables and name in variables:
                raise ChatTemplateError(f"{name} cannot be set as a variable of the chat template", param="chat_template_kwargs")
        rendered = self.tokenizer.render_chat(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(variables or {}),
        )
        texts = rendered.texts
        self._check_length(texts, "messages", num_ids=len(rendered.pieces) - len(texts))
        return self.tokenizer.encode_chat(rendered)

    def _check_generates(self) -> None:
        if self._is_encoder:
            raise InvalidRequestError(
                "The model is an encoder: it makes embeddings (LLM.embed, /v1/embeddings) and generates no text", param="model"
            )

    def _token_ids(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            given = {key: value for key, value in prompt.items() if value is not None}
            text, ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
            is_text, is_ids = isinstance(text, str), ids is not None and not isinstance(ids, str | Mapping)
            if given or not (is_ids or is_text and ids is None) or not (is_text or text is None):
                raise InvalidRequestError(
                    "A prompt object holds 'prompt' (a text) or 'prompt_token_ids' (a list; the text beside it is only shown), and "
                    f"'cache_salt' if wanted, got {sorted(map(str, prompt))}",
                    param="prompt",
                )
            if is_ids:
                return text, self._checked_ids(ids)
            prompt = text
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, add_special_tokens)
        return None, self._checked_ids(prompt)

    def _checked_ids(self, prompt: Any) -> list[int]:
        """Token ids as plain integers in range; the device would clamp or fill what is not, in silence."""
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy and jax arrays
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidRequestError(f"A prompt is a text or a list of token ids, got {type(prompt).__name__}", param="prompt")
        ids = []
        for item in prompt:
            try:
                token_id = -1 if isinstance(item, bool) else operator.index(item)
            except TypeError:
                token_id = -1
            if not 0 <= token_id < self._vocab:
                raise InvalidRequestError(
                    f"A prompt's token ids are integers from 0 to {self._vocab - 1}, got {str(item)[:40]}", param="prompt"
                )
            ids.append(token_id)
        return ids

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._check_length([text], "prompt")
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_length(self, texts: Sequence[str], param: str, num_ids: int = 0) -> None:
        """Tokenizing takes a second for every few megabytes, which texts that cannot fit, with the ids beside them, are not worth."""
        try:
            num_bytes = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise InvalidRequestError("The prompt holds an unpaired surrogate, which is no character", param=param) from error
        max_model_len = self._max_model_len
        if max_model_len is None or num_bytes + num_ids < max_model_len:
            return
        longest = self.tokenizer.max_bytes_per_token
        if longest is None or (least := -(-num_bytes // longest) + num_ids) < max_model_len:
            return
        raise ContextLengthError(
            f"The prompt has {num_bytes} bytes, which are at least {least} tokens since none is longer than {counted(longest, 'byte')}, "
            f"and the context has {max_model_len}: shorten the prompt to at most {counted(max_model_len - 1, 'token')}",
            param=param,
        )

    def _spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Each word in tokens, as it is written at the beginning of a text, and after a space where that is another first token."""
        spellings: list[tuple[int, ...]] = []
        for word in words:
            plain, spaced = (tuple(self.tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
            spellings += [ids for ids in (plain, spaced if spaced[:1] != plain[:1] and len(spaced) == len(plain) else ()) if ids]
        if len(spellings) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words takes at most {MAX_BAD_WORDS} spellings (with and without a space), got {len(spellings)}", param="bad_words"
            )
        return spellings

    def _complete(self, params: SamplingParams | None) -> SamplingParams:
        if params is None:
            return self.default_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}", param="sampling_params")
        unset = {name: getattr(self.default_params, name) for name in NEUTRAL_SAMPLING if getattr(params, name) is None}
        return msgspec.structs.replace(params, **unset) if unset else params


def _is_id(request_id: object) -> bool:
    return isinstance(request_id, str) and 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS


def _without_salt(prompt: Prompt) -> tuple[Prompt, Any]:
    """The prompt, and the salt that came in its object; None without one."""
    if not isinstance(prompt, Mapping) or "cache_salt" not in prompt:
        return prompt, None
    return {key: value for key, value in prompt.items() if key != "cache_salt"}, prompt["cache_salt"]


def _mix(seed: int, index: int) -> int:
    """A 63-bit number that differs in every bit from those of neighbouring indices (SplitMix64, Steele et al. 2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1
