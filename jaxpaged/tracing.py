"""Traces for OpenTelemetry, an optional extra (`pip install 'jaxpaged[otel]'`): one span for each request, with queue, prefill and decode.

They are made of the event of a request's end, which has all its times, on a thread of their own: a step never waits for a collector.
Names follow the `gen_ai.*` conventions.
"""

import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged import events
from jaxpaged.config import TracingConfig
from jaxpaged.errors import ConfigError
from jaxpaged.log_format import MAX_ID_CHARS, MAX_MESSAGE_CHARS, clean
from jaxpaged.sinks import QueueSink

NANOSECONDS = 1_000_000_000
MAX_PARENTS = 4096


class NoTarget:
    """Where nothing is written: spans go to their exporter.

    Args:
        close: gives the exporter back.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def write(self, lines: Sequence[bytes]) -> int:
        """Takes all."""
        return len(lines)

    def stop_waiting(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Sends what is left."""
        self._close()


class RequestSpans:
    """Makes the spans of requests that end. One is the child of its client's span, where the client has said which that is.

    Args:
        tracer: OpenTelemetry's.
        trace: the module `opentelemetry.trace`.
        propagator: reads a `traceparent`.
        model: the name that clients know.
    """

    def __init__(self, tracer: Any, trace: Any, propagator: Any, model: str) -> None:
        self._tracer, self._trace, self._propagator, self._model = tracer, trace, propagator, model
        self._parents: OrderedDict[str, str] = OrderedDict()
        """Of answers that are being made."""

    def __call__(self, event: events.Event) -> bytes:
        """Spans of an event, and no line."""
        match event:
            case events.RequestTraced():
                self._parents[event.answer_id] = event.parent
                if len(self._parents) > MAX_PARENTS:
                    self._parents.popitem(last=False)
            case events.RequestFinished():
                self._finished(event)
            case events.HttpAnswered():
                self._parents.pop(event.answer_id, None)
        return b""

    def _finished(self, event: events.RequestFinished) -> None:
        end_ns = round(event.time_s * NANOSECONDS)
        begin_ns = end_ns - round(event.e2e_s * NANOSECONDS)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "jaxpaged",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": clean(event.request_id, MAX_ID_CHARS),
            "gen_ai.response.finish_reasons": (event.reason,),
            "gen_ai.usage.input_tokens": event.num_prompt_tokens,
            "gen_ai.usage.output_tokens": event.num_output_tokens,
            "jaxpaged.cached_tokens": event.num_cached_tokens,
            "jaxpaged.preemptions": event.num_preemptions,
            "jaxpaged.answers": event.num_samples,
        }
        kind = self._trace.SpanKind.SERVER
        # The engine's requests behind an answer are called the same, with their index behind.
        parent = self._parents.get(event.request_id.rpartition("-")[0])
        around = None if parent is None else self._propagator.extract({"traceparent": parent}, context={})
        name = f"text_completion {self._model}"
        span = self._tracer.start_span(name, context=around, start_time=begin_ns, attributes=attributes, kind=kind)
        if event.reason == "error":
            message = clean(event.message or "", MAX_MESSAGE_CHARS)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, message))
        inside = self._trace.set_span_in_context(span)
        # Each begins where the one before it ends, so that together they are the request.
        queued_ns = min(end_ns, begin_ns + round(event.queue_s * NANOSECONDS))
        first_ns = end_ns if event.ttft_s is None else min(end_ns, max(queued_ns, begin_ns + round(event.ttft_s * NANOSECONDS)))
        for name, from_ns, to_ns in (("queue", begin_ns, queued_ns), ("prefill", queued_ns, first_ns), ("decode", first_ns, end_ns)):
            if to_ns > from_ns or name == "queue":
                self._tracer.start_span(name, context=inside, start_time=from_ns).end(to_ns)
        span.end(end_ns)


def open_traces(config: TracingConfig, model: str, exporter: Any = None) -> QueueSink:
    """A sink that sends spans.

    Args:
        config: the `tracing` section, with an endpoint.
        model: the name that clients know.
        exporter: instead of the one to the endpoint, for tests.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        trace = importlib.import_module("opentelemetry.trace")
        context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        if exporter is None:
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            exporter = otlp.OTLPSpanExporter(endpoint=config.otlp_endpoint)
    except ImportError as error:
        message = f"tracing.otlp_endpoint needs OpenTelemetry ({error}): pip install 'jaxpaged[otel]'"
        raise ConfigError(message, param="tracing.otlp_endpoint") from error
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": config.service_name}), shutdown_on_exit=False)
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    spans = RequestSpans(provider.get_tracer("jaxpaged"), trace, context.TraceContextTextMapPropagator(), model)
    return QueueSink("traces", NoTarget(provider.shutdown), spans)
