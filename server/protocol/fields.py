"""What is done with each field of a request's body, once: the endpoints, docs/api-fields.md and the tests all read this table.

A field is served, or has no effect on the answer and is taken, or would change the answer in a way that we do not serve, and is refused.
Of refused fields null, empty lists and objects, and the values that ask for nothing (`passes`) are taken. A field that is in no
row is taken, too, and told as ignored.
"""

import enum
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Use(enum.StrEnum):
    """What becomes of a field."""

    SERVED = "served"
    NO_EFFECT = "without effect"
    REFUSED = "refused"


class Field(NamedTuple):
    """One field of one body.

    Attributes:
        name: as clients write it.
        passes: values of a refused field that are taken, besides null, [] and {}.
        note: what it does, or what to do instead.
    """

    name: str
    use: Use
    note: str = ""
    passes: tuple[Any, ...] = ()

    def is_harmless(self, value: Any) -> bool:
        """Whether a value of a refused field asks for nothing. `1` is not `true`."""
        return value is None or value in ([], {}) or any(value == item and type(value) is type(item) for item in self.passes)


def _served(names: str) -> tuple[Field, ...]:
    return tuple(Field(name, Use.SERVED) for name in names.split())


def _idle(names: str, note: str = "") -> tuple[Field, ...]:
    return tuple(Field(name, Use.NO_EFFECT, note) for name in names.split())


def _refused(names: str, note: str, *passes: Any) -> tuple[Field, ...]:
    return tuple(Field(name, Use.REFUSED, note, passes) for name in names.split())


def _own(name: str, note: str) -> tuple[Field, ...]:
    return (Field(name, Use.SERVED, note),)


_ACCOUNTS: Final = _idle("user safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options service_tier metadata")

_SAMPLING: Final = (
    *_served("temperature top_p seed"),
    *_served("top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens"),
    *_served("allowed_token_ids bad_words"),
    *_own("priority", "lower goes first"),
    *_own("cache_salt", "only requests with the same salt share cached pages"),
)

_ANSWERS: Final = (
    *_served("n frequency_penalty presence_penalty logit_bias stop stream"),
    *_own("stream_options", "include_usage, continuous_usage_stats; include_obfuscation has no effect"),
    *_own("stream_interval", "tokens per event of a stream"),
    *_own("prompt_logprobs", "0 to 20; not in a stream"),
    *_own("truncate_prompt_tokens", "keep the last so many tokens of the prompt; -1: as many as fit"),
    *_own("return_token_ids", "prompt_token_ids and token_ids in the answer"),
    *_own("return_tokens_as_token_ids", "log-probabilities name tokens token_id:N"),
    *_own("use_beam_search", "the n likeliest answers; not in a stream"),
    *_own("length_penalty", "of a beam search: larger prefers longer answers"),
    *_own("timings", "ours: times and rates in the answer"),
)

_LATER: Final = (
    *_refused("response_format", "structured output is not served yet", {"type": "text"}),
    *_refused("structured_outputs", "structured output is not served yet"),
    *_refused("guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern", "not served"),
    *_refused("best_of", "ask for n answers and choose among them", 1),
    *_refused("logprob_token_ids", "not served"),
    *_refused("truncation_side", "prompts are cut at their beginning", "left"),
    *_refused("spaces_between_special_tokens", "not served", True),
    *_refused("thinking_token_budget", "reasoning is not served yet"),
    *_refused("watermarking repetition_detection", "not served", False),
    *_refused("kv_transfer_params ec_transfer_params vllm_xargs", "not served"),
    *_refused("return_prompt_text", "not served", False),
    *_refused("return_weight_versions", "not served", False),
    *_refused("return_token_offsets", "not served", False),
    *_refused("routed_experts_prompt_start", "not served"),
    *_refused("mm_payload media_io_kwargs mm_processor_kwargs", "this model takes text only"),
    *_idle("request_id session_id", "labels: the header x-request-id names a request"),
)

_NO_FURTHER_TURNS: Final = _refused("instructions previous_response_id", "a part of /v1/responses: give all messages")

CHAT: Final = (
    *_served("model messages"),
    *_own("max_completion_tokens", "over the context: refused; none: up to the end of the context"),
    *_own("max_tokens", "the old name of max_completion_tokens"),
    *_SAMPLING,
    *_ANSWERS,
    *_served("logprobs top_logprobs add_generation_prompt continue_final_message"),
    *_own("chat_template_kwargs", "variables of the chat template"),
    *_ACCOUNTS,
    *_idle("store", "answers of /v1/chat/completions are not stored"),
    *_idle("parallel_tool_calls prediction"),
    *_refused("verbosity", "answers are as long as the model makes them", "medium"),
    *_idle("include_reasoning", "reasoning is not served yet"),
    *_refused("tools functions", "tools are not served yet"),
    *_refused("tool_choice function_call", "tools are not served yet", "none", "auto"),
    *_refused("reasoning_effort", "reasoning is not served yet", "none"),
    *_refused("modalities", "text only", ["text"]),
    *_refused("audio", "text only"),
    *_refused("web_search_options moderation", "not served"),
    *_refused("chat_template", "templates of requests are not run: start the server with --chat-template"),
    *_refused("documents", "not served"),
    *_refused("echo", "not served for conversations", False),
    *_refused("add_special_tokens", "the chat template writes them", False),
    *_refused("max_output_tokens", "it is called max_completion_tokens here"),
    *_refused("prompt input continuation", "a conversation is given as messages"),
    *_refused("include", "log-probabilities are asked for with logprobs and top_logprobs"),
    *_NO_FURTHER_TURNS,
    *_LATER,
)

COMPLETIONS: Final = (
    *_served("model prompt echo logprobs"),
    *_own("max_tokens", "16 if not given; over the context: refused; 0 with echo and logprobs: the prompt alone"),
    *_SAMPLING,
    *_ANSWERS,
    *_served("add_special_tokens"),
    *_ACCOUNTS,
    *_idle("store"),
    *_refused("suffix", "no model here fills in the middle", ""),
    *_refused("prompt_embeds", "not served"),
    *_refused("tools functions", "completions have no tools"),
    *_refused("tool_choice function_call", "completions have no tools", "none", "auto"),
    *_refused("reasoning_effort", "reasoning is not served yet", "none"),
    *_refused("verbosity", "answers are as long as the model makes them", "medium"),
    *_refused("max_completion_tokens max_output_tokens", "it is called max_tokens here"),
    *_refused("top_logprobs", "it is called logprobs here, and is a number", 0),
    *_refused("messages input continuation", "what is to be continued is given as prompt"),
    *_refused("chat_template_kwargs", "prompts are not laid out by the chat template"),
    *_refused("add_generation_prompt continue_final_message", "prompts are not laid out by the chat template", False),
    *_refused("include", "log-probabilities are asked for with logprobs"),
    *_NO_FURTHER_TURNS,
    *_LATER,
)

EMBEDDINGS: Final = (
    *_served("input model encoding_format"),
    *_own("priority", "lower goes first"),
    *_idle("user request_id"),
    *_own("cache_salt", "only requests with the same salt share cached pages"),
    *_refused("messages", "inputs are texts or token ids"),
    *_refused("truncation_side", "inputs are cut at their beginning", "left"),
    *_refused("dimensions", "vectors have the model's own width"),
    *_refused("normalize", "vectors have length 1", True),
    *_refused("add_special_tokens", "inputs are tokenized as prompts are", True),
    *_refused("embed_dtype", "numbers are float32", "float32"),
    *_refused("endianness", "numbers are little endian", "native", "little"),
    *_own("truncate_prompt_tokens", "keep the last so many tokens of the input; -1: as many as fit"),
)

RESPONSES: Final = (
    *_served("model input instructions max_output_tokens store stream previous_response_id top_p top_logprobs include"),
    *_own("temperature", "0 to 2: the answer tells it, and OpenAI's schema of an answer allows no more"),
    *_served("metadata top_k min_p priority cache_salt"),
    *_idle("user safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options service_tier"),
    *_idle("parallel_tool_calls stream_options max_tool_calls"),
    *_idle("request_id session_id client_metadata"),
    *_refused("background", "ask again without it, or stream", False),
    *_refused("tools", "tools are not served yet"),
    *_refused("tool_choice", "tools are not served yet", "none", "auto"),
    *_refused(
        "text",
        "structured output is not served yet",
        {"format": {"type": "text"}},
        {"format": {"type": "text"}, "verbosity": "medium"},
        {"verbosity": "medium"},
    ),
    *_refused("response_format", "structured output is not served yet", {"type": "text"}),
    *_refused("structured_outputs", "structured output is not served yet"),
    *_refused("guided_json guided_regex guided_choice guided_grammar", "not served"),
    *_refused("reasoning", "reasoning is not served yet", {"effort": "none"}, {"effort": None, "summary": None}),
    *_refused("reasoning_effort", "reasoning is not served yet", "none"),
    *_refused("thinking_token_budget", "reasoning is not served yet"),
    *_refused("stop seed logit_bias", "not a field of responses: /v1/chat/completions takes it"),
    *_refused("presence_penalty frequency_penalty", "not a field of responses: /v1/chat/completions takes it", 0, 0.0),
    *_refused("repetition_penalty", "not a field of responses: /v1/chat/completions takes it", 1, 1.0),
    *_refused(
        "chat_template_kwargs stop_token_ids allowed_token_ids bad_words prompt_logprobs stream_interval truncate_prompt_tokens",
        "not a field of responses: /v1/chat/completions takes it",
    ),
    *_refused("n best_of length_penalty", "not a field of responses: /v1/chat/completions takes it", 1, 1.0),
    *_refused("min_tokens", "not a field of responses: /v1/chat/completions takes it", 0),
    *_refused(
        "ignore_eos include_stop_str_in_output use_beam_search echo continue_final_message timings return_token_ids "
        "return_tokens_as_token_ids add_special_tokens",
        "not a field of responses: /v1/chat/completions takes it",
        False,
    ),
    *_refused("skip_special_tokens add_generation_prompt", "not a field of responses: /v1/chat/completions takes it", True),
    *_refused("max_tokens max_completion_tokens", "it is called max_output_tokens here"),
    *_refused("messages continuation", "what is to be answered is given as input"),
    *_refused("logprobs", "log-probabilities are asked for with include and top_logprobs", False, 0),
    *_refused("verbosity", "answers are as long as the model makes them", "medium"),
    *_refused("truncation", "what does not fit is refused", "disabled"),
    *_refused("prompt conversation context_management moderation", "not served"),
)

TOKENIZE: Final = (
    *_served(
        "model prompt messages add_special_tokens add_generation_prompt continue_final_message chat_template_kwargs return_token_strs"
    ),
    *_refused("tools", "tools are not served yet"),
    *_refused("chat_template", "templates of requests are not run: start the server with --chat-template"),
    *_refused("media_io_kwargs mm_processor_kwargs", "this model takes text only"),
)

DETOKENIZE: Final = _served("model tokens")

SCORE: Final = (
    *_served("model"),
    *_refused(
        "text_1 text_2 queries documents items data_1 data_2",
        "no similarities and no rerankers here; how likely continuations of a prompt are is asked with prompt and continuation, and "
        "vectors to compare are those of /v1/embeddings",
    ),
    *_refused("truncate_prompt_tokens", "what does not fit is refused"),
    *_refused("truncation_side", "what does not fit is refused", "left"),
    *_refused("activation use_activation softmax", "scores are natural logarithms"),
    *_refused("mm_processor_kwargs", "this model takes text only"),
    *_refused("add_special_tokens", "prompts are tokenized as in /v1/completions", True),
    *_idle("user request_id"),
    *_own("prompt", "ours: a text or token ids"),
    *_own("continuation", "ours: a text or token ids, or a list of them"),
    *_own("priority", "lower goes first"),
    *_own("cache_salt", "only requests with the same salt share cached pages"),
)

TABLES: Final[Mapping[str, tuple[Field, ...]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/v1/score": SCORE,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
"""Path -> the fields of its body."""


def document() -> str:
    """docs/api-fields.md."""
    lines = [
        "# Fields of requests",
        "",
        "Made from `server/protocol/fields.py` by `python -m server.protocol.fields`. Served fields do what OpenAI or vLLM say. A field",
        "without effect on the answer is taken. A refused field is answered with 400 and its name, except for null, `[]`, `{}` and the",
        "values named. A field that is in no row is taken, and named in the log once and in the header `x-jaxpaged-ignored`.",
    ]
    for path, fields in TABLES.items():
        lines += ["", f"## POST {path}", "", "| field | | |", "| --- | --- | --- |"]
        for field in sorted(fields):
            passes = ", ".join(f"`{_as_json(value)}`" for value in field.passes)
            note = "; ".join(filter(None, [field.note, f"taken: {passes}" if passes else ""]))
            lines.append(f"| `{field.name}` | {field.use.value} | {note} |")
    return "\n".join(lines) + "\n"


def _as_json(value: Any) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    from pathlib import Path

    (Path(__file__).parents[2] / "docs" / "api-fields.md").write_text(document(), encoding="utf-8")
