"""Figures: each is defined once, counted from events alone, never falls, and has a name that vLLM's tools find."""

import threading
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged import events
from jaxpaged.gpu_readings import GpuReading, NvmlSource
from jaxpaged.metric_table import DEFINITIONS, ENGINE_COUNTERS, ENGINE_GAUGES, MACHINE_GAUGES, definitions
from jaxpaged.metrics import EngineMetrics
from jaxpaged.sinks import FanOut, MemorySink
from server.machine_metrics import MachineMetrics
from server.prometheus_sink import PrometheusSink
from tests.observability.samples import START_S, finished, scheduled, short_run, started, step
from tests.observability.vllm_reads import AIPERF, INFERENCE_PERF, ISSUE


def whole_run() -> list[events.Event]:
    """One event of every kind that any figure is made of."""
    return [
        started(),
        *short_run()[:-1],
        step(20.0, 121, decision="admitted 0 of 3: pages", token_gaps=(1,) * 29, token_gaps_s=9.0, num_output_tokens=12),
        events.RequestRejected(time_s=START_S + 20, request_id="x", code="queue_full", message=""),
        events.RequestPreempted(time_s=START_S + 20, request_id="y", num_pages_freed=3, num_computed_tokens=40),
        events.ProgramCompiled(time_s=START_S + 21, bucket_tokens=8, seconds=2.5, from_cache=False, after_ready=True),
        events.SinkDropped(time_s=START_S + 21, sink="terminal", count=3, message="slow"),
        events.HealthChanged(time_s=START_S + 22, state="sleeping"),
        finished("z", 23.0, num_longest_tokens=41),
        events.HttpAnswered(
            time_s=START_S + 23,
            request_id="z",
            method="POST",
            path="/v1/completions",
            status=503,
            end="refused",
            code="queue_full",
            num_prompt_tokens=0,
            num_output_tokens=0,
            first_token_s=None,
            seconds=0.1,
        ),
    ]


def told(sink: PrometheusSink) -> dict[str, Any]:
    """Family name -> family, as a reader of the text sees it."""
    return {family.name: family for family in text_string_to_metric_families(generate_latest(sink.registry).decode())}


def filled(model_name: str | None = "m") -> PrometheusSink:
    sink = PrometheusSink(model_name)
    for event in whole_run():
        sink(event)
    return sink


def test_every_figure_is_in_the_table_with_its_help_and_labels_and_every_row_is_told() -> None:
    found = told(filled(None))
    rows = {row.name.removesuffix("_total") if row.kind == "counter" else row.name: row for row in DEFINITIONS if row not in MACHINE_GAUGES}
    assert set(found) == set(rows)
    for name, family in found.items():
        row = rows[name]
        assert (family.type, family.documentation) == (row.kind, row.doc)
        assert {tuple(sorted(sample.labels)) for sample in family.samples if "le" not in sample.labels} == {tuple(sorted(row.labels))}


def test_rows_of_the_table_are_complete() -> None:
    assert len(definitions()) == len(DEFINITIONS)
    for row in DEFINITIONS:
        assert row.doc
        assert row.good
        assert (row.kind == "counter") == row.name.endswith("_total")


def test_what_steps_and_requests_add_up_to() -> None:
    metrics = EngineMetrics()
    for event in whole_run():
        metrics(event)
    values = {(metric.name.removeprefix("jaxpaged_"), *metric.labels.values()): metric.value for metric in metrics.snapshot()}
    assert values["steps_total",] == 121
    assert values["computed_tokens_total",] == 121 * 12
    assert values["padding_tokens_total",] == 121 * 4
    assert values["padding_ratio",] == 0.25
    assert values["batch_sequences",] == values["batch_tokens",] == 12
    assert values["step_seconds_total", "device"] == pytest.approx(121 * 0.006)
    assert values["step_seconds_total", "pack"] == pytest.approx(121 * 0.001)
    assert values["admission_decisions_total", "pages"] == 1
    assert values["generation_tokens_total",] == 12
    assert values["preempted_tokens_total",] == 40
    assert values["programs_compiled_total", "after_ready"] == 1
    assert values["compile_after_ready_seconds_total",] == 2.5
    assert values["events_lost_total", "terminal"] == 3
    assert values["requests_rejected_total", "queue_full"] == 1
    assert values["kv_pages", "free"] == 1000 - 452 - 20
    assert values["max_num_seqs",] == 32
    assert values["engine_info", "smollm2-135m", "float32", "cpu", "", ""] == 1


def test_who_waited_and_came_in_is_counted_as_none() -> None:
    metrics = EngineMetrics()
    for decision in ("", "admitted 2 of 2", "admitted 0 of 1: a token on its way"):
        metrics(step(1.0, decision=decision))
    found = {metric.labels["reason"]: metric.value for metric in metrics.snapshot() if "admission" in metric.name}
    assert found == {"none": 1, "a token on its way": 1}


def test_counters_without_labels_are_there_from_the_beginning() -> None:
    names = {metric.name for metric in EngineMetrics().snapshot()}
    assert names >= {row.name for row in ENGINE_COUNTERS if not row.labels} | {"jaxpaged_requests_finished_total"}
    assert not names & {row.name for row in ENGINE_GAUGES}, "a gauge that nobody has said is absent, not 0"


def test_a_counter_never_falls_and_the_wrong_number_is_said_once_and_counted() -> None:
    """O-46."""
    memory, sink = MemorySink(), PrometheusSink("m")
    emit = FanOut([sink, memory])
    emit(step(0.0, num_output_tokens=5))
    for second in range(1, 5):
        emit(step(2.0 * second, second, num_output_tokens=-3, prefix_hits_tokens=-1))
    found = told(sink)
    assert found["jaxpaged_generation_tokens"].samples[0].value == 5
    assert found["jaxpaged_prefix_cache_hits"].samples[0].value == 0
    assert found["jaxpaged_metric_faults"].samples[0].value == 8
    assert found["jaxpaged_steps"].samples[0].value == 5, "the rest of a wrong event counts"
    said = [event for event in memory.events if isinstance(event, events.SinkDropped)]
    assert len(said) == sum(event.count for event in said) <= 2
    assert "would have fallen by" in said[0].message


@pytest.mark.parametrize("names", [INFERENCE_PERF, AIPERF, ISSUE], ids=["inference-perf", "aiperf", "issue"])
def test_every_name_that_tools_read_is_there(names: list[str]) -> None:
    found = told(filled("org/name"))
    assert [name for name in names if f"vllm:{name.removesuffix('_total')}" not in found and f"vllm:{name}" not in found] == []
    for name, family in found.items():
        if name.startswith("vllm:"):
            for sample in family.samples:
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("org/name", "0")


def test_both_views_tell_the_same() -> None:
    found = told(filled())
    for row in DEFINITIONS:
        if not row.vllm:
            continue
        name = row.name.removesuffix("_total") if row.kind == "counter" else row.name
        ours = [(sample.labels.get("le"), sample.labels.get("reason"), sample.value) for sample in found[name].samples]
        theirs = found[f"vllm:{row.vllm}"]
        assert theirs.type == row.kind
        assert [(s.labels.get("le"), s.labels.get("finished_reason"), s.value) for s in theirs.samples] == ours


def test_vllms_names_can_be_turned_off() -> None:
    assert not any(name.startswith("vllm:") for name in told(filled(None)))


def test_the_pool_is_described_as_vllm_does() -> None:
    (sample,) = told(filled())["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels == {"model_name": "m", "engine": "0", "block_size": "16", "num_gpu_blocks": "1000", "cache_dtype": "float32"}


def test_classes_are_fine_enough_to_see_a_millisecond_and_hold_vllms_bounds() -> None:
    found = told(filled(None))
    for name in ("time_to_first_token_seconds", "token_gap_seconds", "queue_seconds", "request_seconds", "step_duration_seconds"):
        bounds = [float(s.labels["le"]) for s in found[f"jaxpaged_{name}"].samples if s.name.endswith("_bucket")]
        assert bounds[:3] == [0.001, 0.002, 0.003]
    gaps = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
    assert gaps <= set(events.TOKEN_GAP_BOUNDS_S)


def test_10000_hostile_names_make_no_series() -> None:
    sink, answered = filled(), whole_run()[-1]
    before = {(s.name, *sorted(s.labels.items())) for family in told(sink).values() for s in family.samples}
    for number in range(10_000):
        name = f'x{number}"}}\n# HELP evil {{id="{number}"}} \\ \x1b[31m' + "y" * (number % 7)
        sink(events.RequestReceived(time_s=START_S, request_id=name, num_prompt_tokens=1))
        sink(scheduled(name))
        sink(events.RequestFirstToken(time_s=START_S, request_id=name, ttft_s=0.1))
        sink(finished(name, message=name))
        sink(msgspec.structs.replace(answered, request_id=name, answer_id=name, body=name))
    after = {(s.name, *sorted(s.labels.items())) for family in told(sink).values() for s in family.samples}
    assert after == before
    assert len(after) < 1500


class FakeGpus:
    """Two GPUs, one of which is a slice that has no utilisation."""

    def read(self) -> list[GpuReading]:
        return [GpuReading(0, "GPU A", 0.83, 30 * 2**30, 140 * 2**30), GpuReading(1, "GPU B", None, 2**30, 2**31)]


class NoGpus:
    def read(self) -> list[GpuReading]:
        return []


def test_gpus_are_told_where_there_are_some_and_absent_otherwise() -> None:
    registry = MachineMetrics(FakeGpus()).registry
    assert registry.get_sample_value("jaxpaged_gpu_utilization_ratio", {"gpu": "0"}) == 0.83
    assert registry.get_sample_value("jaxpaged_gpu_utilization_ratio", {"gpu": "1"}) is None
    assert registry.get_sample_value("jaxpaged_gpu_memory_used_bytes", {"gpu": "1"}) == 2**30
    assert registry.get_sample_value("jaxpaged_gpu_memory_total_bytes", {"gpu": "0"}) == 140 * 2**30
    alone = MachineMetrics(NoGpus()).registry
    names = {family.name for family in alone.collect()}
    assert not any("gpu" in name for name in names)
    memory, peak = (alone.get_sample_value(f"jaxpaged_process_{name}memory_bytes") for name in ("", "peak_"))
    assert memory is not None
    assert peak is not None
    assert 2**20 < memory <= peak
    assert alone.get_sample_value("process_start_time_seconds")


def test_a_machine_without_nvidias_library_or_driver_has_no_readings() -> None:
    class Broken:
        def nvmlInit(self) -> None:
            raise OSError("no driver")

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    assert NvmlSource(missing).read() == []
    assert NvmlSource(lambda name: Broken()).read() == []


def test_the_drivers_library_is_read_and_its_failures_are_survived() -> None:
    class Fields:
        used, total, gpu = 5, 10, 40

    class Nvml:
        count = 1

        def nvmlInit(self) -> None:
            return None

        def nvmlDeviceGetCount(self) -> int:
            return self.count

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index:
                raise OSError("fell off the bus")
            return index

        def nvmlDeviceGetMemoryInfo(self, handle: int) -> Fields:
            return Fields()

        nvmlDeviceGetUtilizationRates = nvmlDeviceGetMemoryInfo

        def nvmlDeviceGetName(self, handle: int) -> bytes:
            return b"GPU"

    nvml = Nvml()
    source = NvmlSource(lambda name: nvml)
    assert source.read() == [GpuReading(0, "GPU", 0.4, 5, 10)]
    nvml.count = 2
    assert len(source.read()) == 1
    nvml.nvmlDeviceGetUtilizationRates = None  # type: ignore[assignment]
    assert source.read()[0].utilization is None


def test_reading_while_events_come_is_safe_and_sums_never_fall() -> None:
    sink, is_over = PrometheusSink("m"), threading.Event()

    def feed() -> None:
        for number in range(2_000):
            sink(step(number / 10, number, token_gaps=(1,) * 29, token_gaps_s=1.0))
        is_over.set()

    thread, counts = threading.Thread(target=feed), [0.0]
    thread.start()
    while not is_over.is_set():
        family = told(sink)["jaxpaged_token_gap_seconds"]
        values = {s.name + s.labels.get("le", ""): s.value for s in family.samples}
        assert values["jaxpaged_token_gap_seconds_count"] == values["jaxpaged_token_gap_seconds_bucket+Inf"]
        counts.append(values["jaxpaged_token_gap_seconds_count"])
    thread.join()
    assert counts == sorted(counts)
