"""The header `traceparent`: what of it is taken, and that it reaches the span of its request."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxpaged import events
from jaxpaged.config import Config, LogConfig, TracingConfig
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.tracing import open_traces
from server.trace_parents import trace_parent
from tests.server.live import live_server

pytestmark = pytest.mark.jax

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("given", "is_one"),
    [
        ([f"00-{TRACE}-{SPAN}-01"], True),
        ([f" 00-{TRACE}-{SPAN}-00\t"], True),
        ([f"cc-{TRACE}-{SPAN}-01-what-will-be"], True),
        ([f"cc-{TRACE}-{SPAN}-01"], True),
        ([], False),
        ([f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"], False),
        ([f"00-{TRACE}-{SPAN}-01-more"], False),
        ([f"cc-{TRACE}-{SPAN}-01.more"], False),
        ([f"ff-{TRACE}-{SPAN}-01"], False),
        ([f"00-{'0' * 32}-{SPAN}-01"], False),
        ([f"00-{TRACE}-{'0' * 16}-01"], False),
        ([f"00-{TRACE.upper()}-{SPAN}-01"], False),
        ([f"00-{TRACE}-{SPAN}"], False),
        ([f"00-{TRACE}-{SPAN}-0\n"], False),
        (["<img onerror>"], False),
    ],
)
def test_the_header_is_taken_as_w3c_says(given: list[str], is_one: bool) -> None:
    assert trace_parent(given) == (f"00{given[0].strip()[2:55]}" if is_one else None)


@pytest.mark.parametrize("endpoint", ["http://unused", None])
def test_the_header_reaches_the_span_of_the_request(chat_tokenizer: Tokenizer, endpoint: str | None) -> None:
    """Over HTTP, for each prompt of it; where no traces are sent nobody looks at it."""
    config = Config(log=LogConfig(level="error"), tracing=TracingConfig(otlp_endpoint=endpoint))
    with live_server(chat_tokenizer, config=config) as server:
        body = {"prompt": ["a", "b"], "max_tokens": 2}
        assert server.post("/v1/completions", body, traceparent=f"00-{TRACE}-{SPAN}-01").status == 200
        assert server.post("/v1/completions", {"prompt": "c", "max_tokens": 2}, traceparent="none").status == 200
        server.after_check()
        trace = list(server.log)
    assert sum(isinstance(event, events.RequestTraced) for event in trace) == (endpoint is not None)
    exporter = InMemorySpanExporter()
    sink = open_traces(TracingConfig(otlp_endpoint="http://unused"), "m", exporter)
    for event in trace:
        sink(event)
    sink.close()
    parents = [span.parent for span in exporter.get_finished_spans() if span.attributes]
    found = ["" if parent is None else f"{parent.span_id:016x}" for parent in parents]
    assert found == ([SPAN, SPAN, ""] if endpoint else ["", "", ""])
