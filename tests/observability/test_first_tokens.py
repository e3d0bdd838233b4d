"""O-48, and conservation: what figures and traces say of requests adds up, on an engine with a virtual clock."""

import http.server
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxpaged import events
from jaxpaged.config import SchedulerConfig, TracingConfig
from jaxpaged.errors import ConfigError
from jaxpaged.histograms import EventHistograms
from jaxpaged.metrics import EngineMetrics
from jaxpaged.tracing import MAX_PARENTS, open_traces
from tests.observability.driven import World
from tests.observability.samples import finished, step
from tests.observability.states import STATES, Trace
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax


def mixed_run() -> Trace:
    """A step takes 0.3 s. Plain ones, three answers, a prompt in chunks, some that queue, one refused, two aborted."""
    policy = SchedulerConfig(max_num_queued_requests=4)
    world = World(byte_level(), step_s=0.3, max_num_seqs=4, max_num_batched_tokens=64, num_pages=200, policy=policy)
    world.arrive(0.0, 20, 3)
    world.arrive(0.0, 10, 4, n=3, temperature=1.0)
    world.arrive(0.5, 250, 2)
    for index in range(8):
        world.arrive(1.0 + index / 100, 10, 3)
    world.arrive(6.0, 200, 3)
    world.during_step_at(6.2, lambda: world.abort_last())
    world.arrive(8.0, 10, 30)
    world.during_step_at(9.5, lambda: world.abort_last())
    return world.run(60.0)


def test_o48_one_time_to_the_first_token_for_each_request_that_has_one() -> None:
    trace = mixed_run()
    histograms = EventHistograms()
    ends = {event.request_id: event for event in trace if isinstance(event, events.RequestFinished)}
    spread, last = histograms.by_name["jaxpaged_time_to_first_token_seconds"], 0.0
    for event in trace:
        histograms(event)
        assert spread.spread().total >= last, "the sum never falls"
        last = spread.spread().total
    with_token = [event for event in ends.values() if event.num_output_tokens]
    assert {"length", "abort"} == {event.reason for event in ends.values()}
    assert any(event.num_samples == 3 for event in with_token)
    assert any(not event.num_output_tokens for event in ends.values()), "one was aborted before its first token"
    assert any(event.reason == "abort" and event.num_output_tokens for event in ends.values()), "and one after it"
    assert spread.spread().count == len(with_token)
    assert last >= 0.3 * len(with_token)
    assert all(event.ttft_s is not None and event.ttft_s >= 0.3 for event in with_token)


@pytest.mark.parametrize("name", ["mixed", "pool_full", "overloaded", "batch_too_small"])
def test_figures_conserve(name: str) -> None:
    """Received = rejected + queued; queued = finished + in flight; tokens of steps = tokens of answers."""
    trace = mixed_run() if name == "mixed" else STATES[name][0](byte_level(), 1)
    metrics = EngineMetrics()
    for event in trace:
        metrics(event)
    figures: dict[str, float] = {}
    for metric in metrics.snapshot():
        figures[metric.name.removeprefix("jaxpaged_")] = figures.get(metric.name.removeprefix("jaxpaged_"), 0.0) + metric.value
    assert figures["requests_received_total"] == figures.get("requests_rejected_total", 0) + figures["requests_queued_total"]
    ended = {event.request_id for event in trace if isinstance(event, events.RequestFinished)}
    queued = {event.request_id for event in trace if isinstance(event, events.RequestQueued)}
    assert figures["requests_finished_total"] == len(ended)
    assert ended <= queued
    answered = sum(event.num_output_tokens for event in trace if isinstance(event, events.RequestFinished))
    if name == "mixed":
        assert ended == queued
        assert figures["generation_tokens_total"] == answered
    assert figures["generation_tokens_total"] >= answered
    assert figures["computed_tokens_total"] == figures["prefill_tokens_total"] + figures["decode_tokens_total"]
    gaps = EventHistograms()
    for event in trace:
        gaps(event)
    first = sum(event.num_samples for event in trace if isinstance(event, events.RequestFinished) if event.num_output_tokens)
    if name == "mixed":
        assert gaps.by_name["jaxpaged_token_gap_seconds"].spread().count == answered - first


def spans_of(trace: Trace) -> list[Any]:
    exporter = InMemorySpanExporter()
    sink = open_traces(TracingConfig(otlp_endpoint="http://unused"), "org/name", exporter)
    for event in trace:
        sink(event)
    sink.close()
    return list(exporter.get_finished_spans())


def test_spans_of_a_request_sum_to_its_latency() -> None:
    trace = mixed_run()
    ends = {event.request_id: event for event in trace if isinstance(event, events.RequestFinished)}
    spans = spans_of(trace)
    parents = [span for span in spans if span.parent is None]
    assert len(parents) == len(ends)
    for parent in parents:
        end = ends[parent.attributes["gen_ai.response.id"]]
        children = [span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id]
        assert children[0].name == "queue"
        seconds = {span.name: (span.end_time - span.start_time) / 1e9 for span in children}
        assert sum(seconds.values()) == pytest.approx(end.e2e_s, abs=1e-3)
        assert (parent.end_time - parent.start_time) / 1e9 == pytest.approx(end.e2e_s, abs=1e-3)
        assert seconds["queue"] == pytest.approx(end.queue_s, abs=1e-3)
        if end.ttft_s is not None:
            assert seconds["queue"] + seconds["prefill"] == pytest.approx(end.ttft_s, abs=1e-3)
        assert parent.attributes["gen_ai.usage.output_tokens"] == end.num_output_tokens
        assert parent.attributes["gen_ai.response.finish_reasons"] == (end.reason,)
        assert parent.attributes["gen_ai.request.model"] == "org/name"


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def traced(answer_id: str, flags: str = "01") -> events.RequestTraced:
    return events.RequestTraced(time_s=0.0, answer_id=answer_id, parent=f"00-{TRACE}-{SPAN}-{flags}")


def answered(answer_id: str) -> events.HttpAnswered:
    fields: dict[str, Any] = {"num_prompt_tokens": 1, "num_output_tokens": 1, "first_token_s": None, "seconds": 1.0, "code": ""}
    return events.HttpAnswered(time_s=0.0, request_id="r", method="POST", path="/x", status=200, end="stop", answer_id=answer_id, **fields)


def test_a_clients_trace_goes_on_in_ours() -> None:
    trace = [traced("chatcmpl-a"), traced("chatcmpl-b"), finished("chatcmpl-a-0"), finished("chatcmpl-a-1"), finished("chatcmpl-c-0")]
    spans = spans_of([*trace, answered("chatcmpl-a"), finished("chatcmpl-a-2")])
    roots = {span.attributes["gen_ai.response.id"]: span for span in spans if span.attributes}
    for name in ("chatcmpl-a-0", "chatcmpl-a-1"):
        parent = roots[name].parent
        assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}", parent.is_remote) == (TRACE, SPAN, True)
        assert f"{roots[name].context.trace_id:032x}" == TRACE
        children = [span for span in spans if span.parent is not None and span.parent.span_id == roots[name].context.span_id]
        assert {span.name for span in children} == {"queue", "prefill", "decode"}
    for name in ("chatcmpl-c-0", "chatcmpl-a-2"):
        assert roots[name].parent is None, "another answer, or one that is over"
        assert f"{roots[name].context.trace_id:032x}" != TRACE


def test_a_client_that_does_not_sample_its_trace_has_none_of_ours() -> None:
    assert spans_of([traced("chatcmpl-a", "00"), finished("chatcmpl-a-0")]) == []


def test_parents_of_answers_that_never_end_are_forgotten() -> None:
    spans = spans_of([*(traced(f"x{number}") for number in range(MAX_PARENTS + 1)), finished("x0-0"), finished("x1-0")])
    roots = {span.attributes["gen_ai.response.id"]: span for span in spans if span.attributes}
    assert (roots["x0-0"].parent, roots["x1-0"].parent is None) == (None, False)


def test_an_error_is_a_status_and_hostile_ids_are_escaped() -> None:
    (_, parent) = spans_of([step(0.0), finished("a\nb" + "x" * 500, reason="error", message="NaN", ttft_s=None, queue_s=2.0, e2e_s=1.0)])
    assert parent.status.status_code.name == "ERROR"
    assert parent.status.description == "NaN"
    assert "\n" not in parent.attributes["gen_ai.response.id"]
    assert len(parent.attributes["gen_ai.response.id"]) <= 128


def test_spans_reach_a_collector() -> None:
    """OTLP over HTTP, to the loopback."""
    bodies: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        sink = open_traces(TracingConfig(otlp_endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces", service_name="ours"), "m")
        sink(finished("req-1"))
        sink.close(10.0)
        server.shutdown()
        thread.join()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    assert b"req-1" in body or body[:2] == b"\x1f\x8b"


def test_without_opentelemetry_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"jaxpaged\[otel\]"):
        open_traces(TracingConfig(otlp_endpoint="http://x"), "m")
