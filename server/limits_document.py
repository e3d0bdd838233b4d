"""docs/limits.md: what one request or client may take, and what is answered to one more. Made from the options."""

from typing import Final, NamedTuple

from jaxpaged.config import Config
from jaxpaged.option_values import to_yaml_value
from jaxpaged.options import option_table


class Limit(NamedTuple):
    """An option that bounds what clients do, and what happens beyond it."""

    path: str
    answer: str


LIMITS: Final = (
    Limit("server.max_body", "413"),
    Limit("server.max_headers", "431"),
    Limit("server.max_header_size", "431"),
    Limit("server.max_connections", "503, then closed"),
    Limit("server.header_timeout_s", "408, then closed"),
    Limit("server.body_timeout_s", "408, then closed"),
    Limit("server.max_unsent", "tokens are merged"),
    Limit("server.max_unsent_events", "tokens are merged"),
    Limit("server.slow_client_timeout_s", "cut off"),
    Limit("limits.max_body_parts", "400, before the body is parsed"),
    Limit("limits.max_n", "400, `n`"),
    Limit("limits.max_prompts", "400, `prompt` or `continuation`"),
    Limit("limits.max_inputs", "400, `input`"),
    Limit("limits.max_answers", "400, `n`"),
    Limit("limits.max_messages", "400, `messages`"),
    Limit("limits.max_stop", "400, `stop`"),
    Limit("limits.max_stop_chars", "400, `stop`"),
    Limit("limits.max_stop_token_ids", "400, `stop_token_ids`"),
    Limit("limits.max_logit_bias", "400, `logit_bias`"),
    Limit("limits.min_priority", "400, `priority`"),
    Limit("sampling.max_logprobs", "400, `logprobs` or `top_logprobs`"),
    Limit("limits.max_request_id_chars", "replaced by an id of ours"),
    Limit("limits.max_stored_responses", "the oldest is forgotten"),
    Limit("limits.max_stored_size", "the oldest is forgotten"),
    Limit("model.max_model_len", "400, `max_tokens` or `prompt`"),
    Limit("model.template_timeout_s", "400, `messages`"),
    Limit("scheduler.max_num_queued_requests", "429"),
    Limit("scheduler.max_num_queued_tokens", "429"),
    Limit("scheduler.queue_timeout_s", "503"),
    Limit("scheduler.request_timeout_s", "504"),
)


def document() -> str:
    """The page."""
    table, default = option_table(), Config()
    lines = [
        "# Limits",
        "",
        "Made from the options by `python -m server.limits_document`. Every limit is an option; an answer that refuses something names the",
        "field, what was given and the limit.",
        "",
        "| option | default | what it bounds | beyond it |",
        "| --- | --- | --- | --- |",
    ]
    for limit in LIMITS:
        option = table[limit.path]
        value = getattr(getattr(default, option.section), option.name)
        lines.append(f"| `{limit.path}` | {to_yaml_value(value, option.type, redact=True)} | {option.doc} | {limit.answer} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    (Path(__file__).parents[1] / "docs" / "limits.md").write_text(document(), encoding="utf-8")
