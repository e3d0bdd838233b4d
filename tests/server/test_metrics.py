"""Figures: exact, the same when a log is replayed, bounded in number whatever clients send, and cheap to ask for."""

import re
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import Config
from jaxpaged.histograms import Histogram
from jaxpaged.sinks import json_line
from server import metrics
from server.app import create_app
from server.prometheus_families import histogram_family
from server.prometheus_sink import PrometheusSink
from server.service import Service
from tests.event_log import EventLog
from tests.observability.samples import finished, short_run, step
from tests.server.door_server import DoorServer, door_server, wait_until
from tests.server.scripted_llm import scripted_llm
from tests.server.served_process import completion

pytestmark = pytest.mark.jax


def engine(service: Service) -> Any:
    return scripted_llm(service.config, [service.emit])


def figures(text: str) -> dict[str, float]:
    """Series -> value."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def scrape(server: DoorServer) -> dict[str, float]:
    """As a client sees them, made anew."""
    made = server.service.clocks.monotonic() + metrics.RENDER_INTERVAL_S
    wait_until(lambda: server.service.clocks.monotonic() > made)
    answer = server.ask("GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return figures(answer.body.decode())


def test_they_add_up() -> None:
    with door_server(engine=engine) as server:
        for _ in range(3):
            assert server.ask("POST", "/v1/completions", completion(5)).status == 200
        assert server.ask("POST", "/v1/completions", completion(0)).status == 400
        assert server.ask("POST", "/v1/completions", b"x" * 5_000_000).status == 413
        found = scrape(server)
    assert found['jaxpaged_requests_finished_total{reason="length"}'] == 3
    assert found["jaxpaged_generation_tokens_total"] == 15
    assert found["jaxpaged_prompt_tokens_total"] == 3
    assert found["jaxpaged_time_to_first_token_seconds_count"] == 3
    assert found["jaxpaged_token_gap_seconds_count"] == 12, "four gaps between five tokens"
    assert found["jaxpaged_request_seconds_count"] == 3
    assert found['jaxpaged_http_ends_total{end="length"}'] == 3
    assert found['jaxpaged_http_ends_total{end="rejected"}'] == 2
    assert found['jaxpaged_http_errors_total{code="body_too_large"}'] == 1
    assert found['jaxpaged_http_answers_total{path="/v1/completions",status="200"}'] == 3
    assert found["jaxpaged_num_requests_running"] == found["jaxpaged_num_requests_waiting"] == found["jaxpaged_kv_cache_usage_ratio"] == 0


def test_first_tokens_come_once_and_their_sum_is_no_less_than_it_took() -> None:
    sink = PrometheusSink()
    for event in short_run():
        sink(event)
    text = rendered(sink)
    assert "jaxpaged_time_to_first_token_seconds_count 1.0" in text
    assert "jaxpaged_time_to_first_token_seconds_sum 0.2" in text


def rendered(sink: PrometheusSink) -> str:
    return metrics.generate_latest(sink.registry).decode()


def test_replaying_the_log_gives_what_was_there_live() -> None:
    log = EventLog()
    with door_server(engine=engine, log=log) as server:
        for tokens in (1, 7, 3):
            server.ask("POST", "/v1/completions", completion(tokens))
        server.ask("POST", "/nowhere", b"{}")
        wait_until(lambda: server.service.ledger.num_open == 0)
        live = rendered(server.service.metrics)
        again = PrometheusSink(server.service.model_name)
        for line in map(json_line, list(log)):
            again(events.from_line(line.rstrip(b"\n")))
        assert rendered(again) == live
    assert len(figures(live)) > 60


def test_clients_cannot_make_series() -> None:
    with door_server() as server:
        names = set(figures(rendered(server.service.metrics)))
        connection = server.connect()
        for number in range(300):
            connection.request("POST", f"/v1/completions/{number}", b"{}", x_request_id=f"id-{number}")
            connection.request("GET", f"/none-{number}?x={number}")
        wait_until(lambda: server.service.ledger.num_open == 0)
        new = set(figures(rendered(server.service.metrics))) - names
    assert len(new) <= 4
    assert all('path="none"' in name for name in new if "path=" in name), new


def test_a_name_in_a_path_is_no_label() -> None:
    with door_server(create_app=create_app) as server:  # type: ignore[arg-type]
        connection = server.connect()
        for number in range(20):
            connection.request("GET", f"/v1/models/org/name-{number}")
        wait_until(lambda: server.service.ledger.num_open == 0)
        assert "name-" not in rendered(server.service.metrics)
        assert 'path="/v1/models/' in rendered(server.service.metrics)


def test_they_are_made_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    real = metrics.generate_latest
    monkeypatch.setattr(metrics, "generate_latest", lambda registry: made.append(True) or real(registry))
    with door_server() as server:
        connection = server.connect()
        for _ in range(100):
            assert connection.request("GET", "/metrics").status == 200
        assert 2 <= len(made) <= 6, "of events, and of the machine"
        head = connection.request("HEAD", "/metrics")
        assert (head.status, head.headers["content-type"]) == (200, f"{metrics.MEDIA_TYPE}; charset=utf-8")


def test_two_services_have_nothing_in_common() -> None:
    one, other = Service(Config()), Service(Config())
    one.emit(step(1.0))
    assert "jaxpaged_steps_total 1.0" in rendered(one.metrics)
    assert "jaxpaged_steps_total 0.0" in rendered(other.metrics)


def test_a_histogram_puts_a_bound_into_its_own_class() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.add((1, 0, 2), 10.0)
    samples = {sample.labels.get("le", sample.name): sample.value for sample in histogram_family(histogram, "x", "y").samples}
    assert samples == {"1.0": 3, "2.0": 5, "+Inf": 8, "x_count": 8, "x_sum": 18.0}


def test_names_are_prometheus_names() -> None:
    sink = PrometheusSink()
    for event in [*short_run(), finished("x"), step(3.0, token_gaps=(1,) * 29, token_gaps_s=20.0)]:
        sink(event)
    for line in rendered(sink).splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split(" ")
            assert re.fullmatch(r"jaxpaged_[a-z_]+", name)
            assert (kind == "counter") == name.endswith("_total")
