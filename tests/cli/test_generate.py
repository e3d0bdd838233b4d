"""`jaxpaged generate`: prompts from everywhere, answers as text or JSON, figures, flags that reach the engine."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxpaged.config import CacheConfig, Config
from jaxpaged.errors import EngineDeadError, InvalidRequestError, MemoryBudgetError, RequestFailedError
from jaxpaged.events import Event, RequestReceived, Sink
from jaxpaged.request import FinishReason, SamplingParams
from jaxpaged.sinks import FanOut
from tests.cli.scripted_engine import Result, ScriptedEngine, run_cli
from tests.observability.samples import finished, scheduled


def refused(*argv: str, stdin: str | bytes = b"", is_terminal: bool = False) -> str:
    """The sentence of a command line that must not get as far as an engine."""
    engine = ScriptedEngine()
    result = run_cli("generate", *argv, engine=engine, stdin=stdin, is_terminal=is_terminal)
    assert (result.status, result.out) == (2, "")
    assert engine.config is None
    return result.sentence


def test_one_prompt_is_streamed_and_summed_up() -> None:
    engine = ScriptedEngine()
    result = run_cli("generate", "hello", engine=engine)
    assert (result.status, result.out) == (0, "olleh\n")
    # Pieces of 3: first token 0.25 s after the arrival.
    assert result.err.startswith("5 tokens, ")
    assert result.err.endswith(" tokens/s, first token after 0.250 s, 2 of 5 prompt tokens cached (stop)\n")
    assert (engine.num_closed, engine.aborted) == (1, [])


def test_quiet_leaves_the_figures_out() -> None:
    assert run_cli("generate", "-q", "hello", engine=ScriptedEngine()).err == ""


def test_an_answer_that_ends_a_line_gets_no_second_line_end() -> None:
    assert run_cli("generate", "\nab", engine=ScriptedEngine()).out == "ba\n"


def test_many_prompts_keep_their_order() -> None:
    engine = ScriptedEngine()
    result = run_cli("generate", "abc", "de", engine=engine)
    assert result.out == "==> abc\ncba\n\n==> de\ned\n\n"
    assert result.err.startswith("2 answers, 5 tokens in ")
    assert "first token after 0.250 s (median), 4 of 5 prompt tokens cached" in result.err
    assert engine.used_tqdm == [False]


def test_json_is_one_object_a_line() -> None:
    result = run_cli("generate", "--json", "abc", "dé", engine=ScriptedEngine())
    records = [json.loads(line) for line in result.out.splitlines()]
    assert records == [
        {
            "index": index,
            "prompt": prompt,
            "text": prompt[::-1],
            "token_ids": [ord(c) for c in prompt[::-1]],
            "finish_reason": "stop",
            "stop_reason": None,
            "num_prompt_tokens": len(prompt),
            "num_cached_tokens": 2,
            "first_token_s": 0.25,
            "seconds": 1.25,
            "tokens_per_s": (len(prompt) - 1) / 1.0,
        }
        for index, prompt in enumerate(["abc", "dé"])
    ]


def prompts_of(result: Result, engine: ScriptedEngine) -> list[str]:
    assert result.status == 0, result.err
    return engine.prompts


@pytest.mark.parametrize(
    ("argv", "stdin", "prompts"),
    [
        ([], "one\ntwo\n", ["one\ntwo"]),
        (["--file", "-"], "one\n", ["one"]),
        (["--lines"], "one\n\n  \ntwo", ["one", "two"]),
        (["--lines"], "one\u2028still\fone\r\ntwo\x85still", ["one\u2028still\fone", "two\x85still"]),
        ([], "\ufeffone", ["one"]),
        ([], "no end", ["no end"]),
        ([], "crlf\r\n", ["crlf"]),
        ([], "two ends\n\n", ["two ends\n"]),
        (["-f", "-", "--chat"], "hi", ["<user>hi"]),
        (["--", "--temperature"], "", ["--temperature"]),
    ],
)
def test_prompts_from_standard_input(argv: list[str], stdin: str, prompts: list[str]) -> None:
    engine = ScriptedEngine()
    assert prompts_of(run_cli("generate", *argv, engine=engine, stdin=stdin), engine) == prompts


def test_prompts_from_files(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("one\ntwo\n", encoding="utf-8")
    records = tmp_path / "prompts.jsonl"
    lines = ['"a"', '{"prompt": "b"}', "[99, 100]", "", '{"prompt_token_ids": [101]}', '{"messages": [{"role": "user", "content": "f"}]}']
    records.write_text("\n".join(lines), encoding="utf-8")
    for argv, prompts in (
        ([str(text)], ["one\ntwo"]),
        ([str(text), "--lines"], ["one", "two"]),
        ([str(records)], ["a", "b", "cd", "e", "<user>f"]),
        ([str(records), "--system", "be kind"], ["<system>be kind<user>a", "<system>be kind<user>b", "cd", "e", "<system>be kind<user>f"]),
    ):
        engine = ScriptedEngine()
        assert prompts_of(run_cli("generate", "--file", *argv, engine=engine), engine) == prompts


def test_chat_and_system_use_the_template() -> None:
    for argv, prompt in (
        (["--chat", "hi"], "<user>hi"),
        (["--system", "be kind", "hi"], "<system>be kind<user>hi"),
        (["--chat", ""], "<user>"),
        (["--raw", "hi"], "hi"),
        (["hi"], "hi"),
    ):
        engine = ScriptedEngine()
        assert prompts_of(run_cli("generate", *argv, engine=engine), engine) == [prompt]


@pytest.mark.parametrize(
    ("argv", "stdin", "parts"),
    [
        ([], "", ["no prompt", "standard input is empty"]),
        ([], "\n", ["no prompt"]),
        ([], b"\xff\xfe", ["standard input is not UTF-8", "0xff"]),
        (["--file", "/no/such/file"], "", ["/no/such/file"]),
        (["--file", "x", "prompt"], "", ["choose one"]),
        (["--chat", "--raw", "x"], "", ["--raw", "--chat"]),
        (["\udcff"], "", ["prompt 0", "UTF-8"]),
        (["x", ""], "", ["prompt 1 is empty"]),
        (["--temperature", "-1", "x"], "", ["temperature", "-1"]),
        (["--temperature", "nan", "x"], "", ["temperature", "nan"]),
        (["--temperature", "hot", "x"], "", ["--temperature", "'hot'"]),
        (["--top-p", "0", "x"], "", ["top_p", "0"]),
        (["--top-k", "-2", "x"], "", ["top_k", "-2"]),
        (["--top-k", "0.5", "x"], "", ["--top-k", "'0.5'"]),
        (["--min-p", "1.5", "x"], "", ["min_p", "1.5"]),
        (["--max-tokens", "0", "x"], "", ["max_tokens", "0"]),
        (["--json", "--logprobs", "21", "x"], "", ["logprobs", "0 and 20", "21"]),
        (["--json", "--prompt-logprobs", "-1", "x"], "", ["prompt_logprobs", "0 and 20", "-1"]),
        (["--min-tokens", "9", "--max-tokens", "8", "x"], "", ["min_tokens 9", "max_tokens 8"]),
        (["--stop", "", "x"], "", ["stop"]),
        (["--stop-token-ids", "1,-2", "x"], "", ["stop_token_ids", "-2"]),
        (["--seed", "-1", "x"], "", ["model.seed", "-1"]),
        (["--max-model-len", "0", "x"], "", ["model.max_model_len", "0"]),
        (["--max-num-seqs", "0", "x"], "", ["max_num_seqs", "0"]),
        (["--max-num-seqs", "65", "--max-num-batched-tokens", "64", "x"], "", ["max_num_seqs 65", "max_num_batched_tokens 64"]),
        (["--max-num-batched-tokens", "15", "x"], "", ["max_num_batched_tokens 15", "one page of 16 tokens"]),
        (["--block-size", "64", "--max-num-batched-tokens", "63", "x"], "", ["max_num_batched_tokens 63", "one page of 64 tokens"]),
        (["--scheduler.reserve-pages", "-1", "x"], "", ["scheduler.reserve_pages", "-1"]),
        (["--scheduler.target-itl-s", "0", "x"], "", ["scheduler.target_itl_s", "0"]),
        (["--scheduler.queue-timeout-s", "-1", "x"], "", ["scheduler.queue_timeout_s", "-1"]),
        (["--quantization", "awq", "x"], "", ["quantization 'awq'"]),
        (["--tensor-parallel-size", "0", "x"], "", ["parallel.tensor_parallel_size", "0"]),
        (["--config", "/no/such.yaml", "x"], "", ["/no/such.yaml"]),
        (["--log.file", "/no/such/folder/x.log", "x"], "", ["/no/such/folder/x.log"]),
        (["--trust-remote-code", "x"], "", ["trust_remote_code"]),
    ],
)
def test_bad_input_is_one_sentence_before_any_engine_starts(argv: list[str], stdin: str | bytes, parts: list[str]) -> None:
    sentence = refused(*argv, stdin=stdin)
    assert [part for part in parts if part not in sentence] == []


def test_a_terminal_without_prompt_is_not_waited_for() -> None:
    assert refused(is_terminal=True).startswith("no prompt: give it as an argument")


@pytest.mark.parametrize(
    "line",
    ["{", "3", '{"prompt": "a", "messages": []}', "{}", '{"prmpt": "a"}', '["a"]', '{"messages": [{"role": 1}]}', '{"messages": []}'],
)
def test_bad_lines_of_prompts_are_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n{line}\n', encoding="utf-8")
    assert "prompts.jsonl, line 2: " in refused("-f", str(file))


def test_flags_reach_the_engine() -> None:
    engine = ScriptedEngine()
    argv = "--temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 7 --stop a --stop b --stop-token-ids 1,2 --max-tokens 9"
    run_cli("generate", "x", *argv.split(), "--min-tokens", "3", "--ignore-eos", "--block-size", "32", engine=engine)
    assert engine.params == [
        SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            seed=7,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            max_tokens=9,
            min_tokens=3,
            ignore_eos=True,
        )
    ]
    assert engine.config is not None
    assert (engine.config.cache.page_size, engine.config.model.seed) == (32, 7)


def test_what_is_not_given_is_the_models_default() -> None:
    engine = ScriptedEngine()
    run_cli("generate", "x", engine=engine)
    assert engine.params == [SamplingParams(max_tokens=256)]


def test_options_come_from_yaml_and_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: org/name\ncache:\n  page_size: 8\n", encoding="utf-8")
    monkeypatch.setenv("JAXPAGED_CACHE__MEMORY", "64MiB")
    monkeypatch.setenv("JAXPAGED_CONFIG", str(file))
    engine = ScriptedEngine()
    run_cli("generate", "x", "--no_enable_prefix_caching", engine=engine)
    assert engine.config is not None
    assert engine.config.cache == CacheConfig(page_size=8, memory=2**26, enable_prefix_caching=False)
    assert engine.config.model.model == "org/name"


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--enable-prefix-caching=false"], False),
        (["--enable-prefix-caching=true"], True),
        (["--no-enable-prefix-caching"], False),
        (["--no-enable-prefix-caching", "--enable-prefix-caching"], True),
        (["--cache.enable-prefix-caching", "--no-cache.enable_prefix_caching"], False),
        ([], True),
    ],
)
def test_tri_state_flags(argv: list[str], value: bool) -> None:
    engine = ScriptedEngine()
    assert prompts_of(run_cli("generate", *argv, "x", engine=engine), engine) == ["x"]
    assert engine.config is not None
    assert engine.config.cache.enable_prefix_caching is value


@pytest.mark.parametrize(
    ("argv", "level"),
    [([], "warning"), (["--verbose"], "info"), (["--log.level", "debug"], "debug"), (["--log.file", "LOG"], "info")],
)
def test_the_terminal_shows_warnings_only_unless_asked(argv: list[str], level: str, tmp_path: Path) -> None:
    engine = ScriptedEngine()
    run_cli("generate", "x", *(word.replace("LOG", str(tmp_path / "log")) for word in argv), engine=engine)
    assert engine.config is not None
    assert engine.config.log.level == level


class LoggingEngine(ScriptedEngine):
    """Also says what it does."""

    def make(self, config: Config, sinks: Sequence[Sink], /) -> ScriptedEngine:
        emit = FanOut(sinks)
        for event in self.said():
            emit(event)
        return super().make(config, sinks)

    @staticmethod
    def said() -> list[Event]:
        return [RequestReceived(time_s=1.0, request_id="a", num_prompt_tokens=1), scheduled("a"), finished("a")]


def test_the_log_goes_to_the_file_and_is_whole_when_the_command_ends(tmp_path: Path) -> None:
    text, lines = tmp_path / "text.log", tmp_path / "json.log"
    run_cli("generate", "x", "--log.file", str(text), engine=LoggingEngine())
    run_cli("generate", "x", "--log.file", str(lines), "--log.format", "json", engine=LoggingEngine())
    assert [line.split()[1:5] for line in text.read_text().splitlines()] == [
        ["INFO", "request", "a", "added:"],
        ["INFO", "request", "a", "finished"],
    ]
    assert [json.loads(line)["event"] for line in lines.read_text().splitlines()] == [
        "RequestReceived",
        "RequestScheduled",
        "RequestFinished",
    ]


class FailingEngine(ScriptedEngine):
    """Does not start."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def make(self, config: Config, sinks: Sequence[Sink], /) -> ScriptedEngine:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (MemoryBudgetError("512 MiB do not fit"), 2, "512 MiB do not fit"),
        (InvalidRequestError("two\nlines"), 2, "two lines"),
        (EngineDeadError("the engine stopped"), 1, "the engine stopped"),
        (RequestFailedError("NaN"), 1, "NaN"),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), 2, "/x/y: No such file or directory"),
        (OSError("odd"), 1, "odd"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_every_failure_has_its_status_and_one_sentence(error: BaseException, status: int, sentence: str | None) -> None:
    result = run_cli("generate", "x", engine=FailingEngine(error))  # type: ignore[arg-type]
    assert (result.status, result.out) == (status, "")
    assert (result.sentence if sentence else result.err) == (sentence or "")


def test_a_bug_is_one_sentence_and_a_file_with_the_traceback(tmp_path: Path) -> None:
    result = run_cli("generate", "x", engine=FailingEngine(ZeroDivisionError("division by zero")))
    path = tmp_path / "home" / "last-error.log"
    assert (result.status, result.sentence) == (1, f"unexpected ZeroDivisionError: division by zero; the traceback is in {path}")
    assert path.read_text().startswith("Traceback")
    assert "ZeroDivisionError" in path.read_text()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("argv", [["--log.level", "debug"], ["--log.level=debug"]])
def test_debug_shows_the_traceback(argv: list[str]) -> None:
    result = run_cli("generate", "x", *argv, engine=FailingEngine(ZeroDivisionError("division by zero")))
    assert result.status == 1
    assert "Traceback" in result.err


def test_a_bug_without_a_place_for_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGED_HOME", "/dev/null/home")
    result = run_cli("generate", "x", engine=FailingEngine(ZeroDivisionError("division by zero")))
    assert (result.status, result.sentence) == (1, "unexpected ZeroDivisionError: division by zero; --log.level debug shows the traceback")


def test_a_refused_prompt_closes_the_engine_and_the_log() -> None:
    engine = ScriptedEngine(error={"long": InvalidRequestError("9000 tokens, the context holds 8192")})
    for argv in (["long"], ["short", "long"], ["--json", "long"]):
        result = run_cli("generate", *argv, engine=engine)
        assert (result.status, result.sentence) == (2, "9000 tokens, the context holds 8192")
    assert engine.num_closed == 3


def test_a_request_that_fails_in_the_engine_is_status_1() -> None:
    class Failing(ScriptedEngine):
        def _output(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            output = ScriptedEngine._output(*args, **kwargs)  # type: ignore[arg-type]
            output.error, output.outputs[0].finish_reason = "the model gave NaN", FinishReason.ERROR
            return output

    for argv in (["x"], ["x", "y"], ["--json", "x"]):
        result = run_cli("generate", *argv, engine=Failing())
        assert (result.status, result.err.rstrip("\n")) == (1, "jaxpaged: the model gave NaN")


def test_ctrl_c_ends_the_answer_aborts_the_request_and_leaves_with_130() -> None:
    engine = ScriptedEngine(on_piece=lambda i: os.kill(os.getpid(), signal.SIGINT) if i == 1 else None)
    before = signal.getsignal(signal.SIGINT)
    result = run_cli("generate", "abcdefghijkl", engine=engine)
    # The signal comes after the second piece; the third is the last that is written.
    assert (result.status, result.out) == (130, "lkjihgfed\n")
    assert (engine.aborted, engine.num_closed) == (["abcdefghijkl"], 1)
    assert result.err.endswith("(abort)\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait() -> None:
    def press_twice(i: int) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    engine = ScriptedEngine(on_piece=press_twice)
    result = run_cli("generate", "abcdef", engine=engine)
    assert (result.status, result.out) == (130, "fed")
    assert (engine.aborted, engine.num_closed) == (["abcdef"], 1)


def test_a_terminal_is_not_commanded_by_an_answer() -> None:
    engine = ScriptedEngine()
    result = run_cli("generate", "\x1b]0;title\x07\x9b31m\r\tok\n", engine=engine, is_terminal=True)
    assert result.out == "\nko\tm13eltit;0]\n"
    piped = run_cli("generate", "\x1b[31m", engine=ScriptedEngine())
    assert piped.out == "m13[\x1b\n"
