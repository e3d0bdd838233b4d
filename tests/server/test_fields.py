"""The table of fields: complete, in the document, and true to what the server does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxpaged.errors import InvalidRequestError
from server.protocol import fields
from server.protocol.bodies import BodyReader
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest, ScoreRequest
from server.protocol.fields import TABLES, Use
from server.protocol.models import DetokenizeRequest, TokenizeRequest
from server.protocol.responses import ResponsesRequest

ROOT = Path(__file__).parents[2]
SCHEMAS: dict[str, Any] = json.loads((ROOT / "tests" / "openai" / "inference-openapi.json").read_text())["components"]["schemas"]

OPENAI = {
    "/v1/chat/completions": "CreateChatCompletionRequest",
    "/v1/completions": "CreateCompletionRequest",
    "/v1/embeddings": "CreateEmbeddingRequest",
    "/v1/responses": "CreateResponse",
}

VLLM_SAMPLING = """use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
allowed_token_ids bad_words thinking_token_budget watermarking"""
VLLM_EXTRA = """add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
return_prompt_text return_weight_versions cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
routed_experts_prompt_start mm_payload return_token_offsets guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern media_io_kwargs mm_processor_kwargs"""
VLLM = {
    "/v1/chat/completions": f"""{VLLM_SAMPLING} {VLLM_EXTRA} include_reasoning echo add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs""",
    "/v1/completions": f"{VLLM_SAMPLING} {VLLM_EXTRA} echo logprobs suffix prompt_embeds",
    "/v1/responses": "background include top_k min_p priority cache_salt session_id truncation",
    "/v1/score": """text_1 text_2 queries documents items data_1 data_2 model user request_id priority truncate_prompt_tokens
    truncation_side use_activation mm_processor_kwargs add_special_tokens cache_salt""",
    "/tokenize": """model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
    "/detokenize": "model tokens",
}

STRUCTS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def properties(schema: dict[str, Any]) -> Iterator[str]:
    """Names of an object's properties, those of its parts included."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    yield from schema.get("properties", {})
    for part in schema.get("allOf", ()):
        yield from properties(part)


@pytest.mark.parametrize("path", OPENAI)
def test_every_property_of_openai_has_a_row(path: str) -> None:
    names = set(properties(SCHEMAS[OPENAI[path]]))
    assert len(names) >= 5
    assert names - {field.name for field in TABLES[path]} == set()


@pytest.mark.parametrize("path", VLLM)
def test_every_field_of_vllm_has_a_row(path: str) -> None:
    assert set(VLLM[path].split()) - {field.name for field in TABLES[path]} == set()


TEXTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.mark.parametrize("path", TEXTS)
def test_what_another_endpoint_serves_is_not_ignored(path: str) -> None:
    """Who mistakes the name of a field, or the path, gets another answer than he asked for; `encoding_format` changes no text."""
    others = {field.name for other, table in TABLES.items() for field in table if field.use is Use.SERVED and not other.startswith("/tok")}
    assert others - {field.name for field in TABLES[path]} - {"encoding_format", "tokens"} == set()


@pytest.mark.parametrize("path", TABLES)
def test_a_field_has_one_row(path: str) -> None:
    names = [field.name for field in TABLES[path]]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", STRUCTS)
def test_served_fields_are_those_that_are_read(path: str) -> None:
    served = {field.name for field in TABLES[path] if field.use is Use.SERVED}
    assert served == set(STRUCTS[path].__struct_fields__)


def test_the_document_is_made_from_the_table() -> None:
    assert (ROOT / "docs" / "api-fields.md").read_text(encoding="utf-8") == fields.document()


REFUSED = [(path, field) for path in STRUCTS for field in TABLES[path] if field.use is Use.REFUSED]


@pytest.mark.parametrize(("path", "field"), REFUSED, ids=lambda value: value if isinstance(value, str) else value.name)
def test_refused_fields_pass_only_when_they_ask_for_nothing(path: str, field: fields.Field) -> None:
    required = {
        "/v1/chat/completions": {"messages": []},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/embeddings": {"input": "a"},
        "/v1/score": {"prompt": "a", "continuation": "b"},
    }.get(path, {})
    reader: BodyReader[Any] = BodyReader(STRUCTS[path], TABLES[path])
    for value in (None, [], {}, *field.passes):
        assert reader.read(msgspec.json.encode({**required, field.name: value}), 100).ignored == ()
    for value in ("x", 7, [1], {"a": 1}, -1):
        with pytest.raises(InvalidRequestError, match=f"^{field.name} cannot be given: ") as caught:
            reader.read(msgspec.json.encode({**required, field.name: value}), 100)
        assert caught.value.param == field.name


def test_one_is_not_true() -> None:
    reader = BodyReader(CompletionRequest, TABLES["/v1/completions"])
    with pytest.raises(InvalidRequestError, match="best_of"):
        reader.read(b'{"prompt":"a","best_of":true}', 100)
    assert reader.read(b'{"prompt":"a","best_of":1}', 100).content.prompt == "a"
