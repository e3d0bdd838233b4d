"""`jaxpaged chat`: history, slash commands, Ctrl-C and end of input, through pipes and on a terminal."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged.commands.chat_session import SETTINGS, ChatSession
from jaxpaged.errors import ContextLengthError, EngineDeadError
from jaxpaged.request import SamplingParams
from tests.cli.scripted_engine import ScriptedEngine, Stream, run_cli

PROGRAM = Path(__file__).with_name("scripted_program.py")


class Talk:
    """A session in memory."""

    def __init__(self, engine: ScriptedEngine | None = None, *, system: str | None = None, shows_stats: bool = False) -> None:
        self.engine = engine or ScriptedEngine()
        self._out, self._err = Stream(), Stream()
        self.session = ChatSession(
            self.engine, SamplingParams(max_tokens=None), system=system, out=self._out, err=self._err, shows_stats=shows_stats
        )

    def say(self, *lines: str) -> bool:
        return [self.session.take(line) for line in lines][-1]

    @property
    def out(self) -> str:
        return self._out.text()

    @property
    def notes(self) -> list[str]:
        return self._err.text().splitlines()


def test_the_history_goes_to_the_template_with_every_message() -> None:
    talk = Talk(system="be kind")
    assert talk.say("ab", "cd")
    first = "<system>be kind<user>ab"
    assert talk.engine.prompts == [first, f"{first}<assistant>{first[::-1]}<user>cd"]
    assert [message["role"] for message in talk.session.messages] == ["user", "assistant", "user", "assistant"]
    assert talk.out == "".join(prompt[::-1] + "\n" for prompt in talk.engine.prompts)
    assert talk.notes == []


def test_clear_forgets_the_conversation_and_keeps_the_system_message() -> None:
    talk = Talk(system="s")
    talk.say("ab", "/clear", "cd")
    assert talk.engine.prompts[-1] == "<system>s<user>cd"


def test_exit_and_end_of_input_leave() -> None:
    assert not Talk().say("/exit")
    for stdin, num_answers in (("ab\n/exit\ncd\n", 1), ("ab\ncd\n", 2), ("ab", 1), ("", 0)):
        engine = ScriptedEngine()
        result = run_cli("chat", engine=engine, stdin=stdin)
        assert (result.status, len(engine.prompts), engine.num_closed) == (0, num_answers, 1)
        assert result.out == "".join(prompt[::-1] + "\n" for prompt in engine.prompts)
        assert result.err == ""


def test_run_is_chat_and_takes_the_model_as_word() -> None:
    for name in ("run", "chat"):
        engine = ScriptedEngine()
        assert run_cli(name, "org/name", "--temperature", "0", engine=engine).status == 0
        assert engine.config is not None
        assert engine.config.model.model == "org/name"
    assert "twice" in run_cli("run", "a", "--model", "b", engine=ScriptedEngine()).sentence


def test_chat_has_no_limit_of_tokens_of_its_own() -> None:
    engine = ScriptedEngine()
    run_cli("chat", "--seed", "3", engine=engine, stdin="x\n")
    assert engine.params == [SamplingParams(max_tokens=None, seed=3)]


def test_set_changes_one_setting() -> None:
    talk = Talk()
    talk.say("/set temperature 0.5", "/set top-k 40", "/set max_tokens 7", "/set stop END", "/set system be brief", "x")
    assert talk.engine.params == [SamplingParams(temperature=0.5, top_k=40, max_tokens=7, stop="END")]
    assert talk.engine.prompts == ["<system>be brief<user>x"]
    talk.say("/set temperature none", "/set system none", "/clear", "y")
    assert talk.engine.params[-1].temperature is None
    assert talk.engine.prompts[-1] == "<user>y"
    assert talk.notes[0] == "temperature is 0.5"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/set temperature -1", "temperature must be between"),
        ("/set temperature nan", "temperature"),
        ("/set temperature hot", "temperature must be a number, got hot"),
        ("/set top_k 0.5", "top_k must be an integer"),
        ("/set max_tokens 0", "max_tokens must be between"),
        ("/set temprature 1", "there is no setting temprature; the nearest is temperature"),
        ("/set temperature", "/set temperature needs a value"),
        ("/sett", "there is no command /sett; the nearest is /set"),
        ("/zzzz", "there is no command /zzzz; /help lists them"),
        ("/save", "/save needs a file name"),
        ("/save /no/such/folder/x", "cannot save to /no/such/folder/x: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_the_conversation_goes_on(line: str, part: str) -> None:
    talk = Talk()
    assert talk.say(line)
    assert len(talk.notes) == 1
    assert part in talk.notes[0]
    assert talk.say("x")
    assert talk.engine.params == [SamplingParams(max_tokens=None)]


def test_help_and_set_list_what_there_is() -> None:
    talk = Talk()
    talk.say("/help", "/set")
    text = "\n".join(talk.notes)
    assert [name for name in ("/help", "/set", "/clear", "/save", "/exit", *SETTINGS) if name not in text] == []
    assert talk.engine.prompts == []


def test_two_slashes_say_one_and_empty_lines_say_nothing() -> None:
    talk = Talk()
    talk.say("//etc", "", "   ")
    assert talk.engine.prompts == ["<user>/etc"]


def test_save_writes_the_conversation_and_nothing_half(tmp_path: Path) -> None:
    talk = Talk(system="s")
    path = tmp_path / "talk.json"
    talk.say("ab", f"/save {path}")
    assert json.loads(path.read_text()) == {"messages": [{"role": "system", "content": "s"}, *talk.session.messages]}
    assert list(tmp_path.iterdir()) == [path]
    assert talk.notes == [f"2 messages are in {path}"]
    talk.say(f"/save {tmp_path}")
    assert list(tmp_path.iterdir()) == [path]


def test_a_refused_message_leaves_the_history_as_it_was() -> None:
    talk = Talk(ScriptedEngine(error={"<user>long": ContextLengthError("9000 tokens, the context holds 8192")}))
    talk.say("long", "\ud800", "short")
    assert talk.notes == ["9000 tokens, the context holds 8192", "that line is not UTF-8 text"]
    assert talk.engine.prompts[-1] == "<user>short"


def test_a_dead_engine_ends_the_program() -> None:
    engine = ScriptedEngine(error={"<user>x": EngineDeadError("the engine stopped")})
    result = run_cli("chat", engine=engine, stdin="x\ny\n")
    assert (result.status, result.sentence, len(engine.prompts)) == (1, "the engine stopped", 1)


def test_stats_are_a_line_after_each_answer() -> None:
    talk = Talk(shows_stats=True)
    talk.say("ab")
    assert talk.notes[0].endswith("first token after 0.250 s, 2 of 8 prompt tokens cached (stop)")


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    engine = ScriptedEngine(on_piece=lambda i: os.kill(os.getpid(), signal.SIGINT) if i == 0 else None)
    talk = Talk(engine)
    talk.say("abcdef")
    assert engine.aborted == ["<user>abcdef"]
    assert talk.session.messages == [{"role": "user", "content": "abcdef"}, {"role": "assistant", "content": "fedcba"}]
    assert talk.notes == ["(stopped)"]
    engine.on_piece = None
    talk.say("x")
    assert engine.prompts[-1] == "<user>abcdef<assistant>fedcba<user>x"


def environment(delay_s: float, home: Path) -> dict[str, str]:
    return {**os.environ, "SCRIPTED_DELAY_S": str(delay_s), "TERM": "xterm", "JAXPAGED_HOME": str(home)}


class Terminal:
    """The program on a terminal of its own."""

    def __init__(self, *argv: str, delay_s: float, home: Path) -> None:
        self._fd, program_fd = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *argv],
            stdin=program_fd,
            stdout=program_fd,
            stderr=program_fd,
            env=environment(delay_s, home),
            start_new_session=True,
        )
        os.close(program_fd)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        """Reads until `text` comes after what was waited for before."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self._fd], [], [], left_s)[0]:
                try:
                    self.seen += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:  # Linux: the program has ended
                    assert text in self.seen, f"ended without {text!r}: {self.seen!r}"
        self.seen = self.seen.partition(text)[2]

    def press_ctrl_c_until(self, text: str) -> None:
        """One may be lost: readline looks for signals while it waits for a key, not in the moment before."""
        for _ in range(10):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.wait_for(text, 3.0)
                return
        raise AssertionError(f"Ctrl-C does nothing: {self.seen!r}")

    def status(self) -> int:
        """Exit status; reads to the end."""
        with contextlib.suppress(OSError):  # Linux: the program has ended
            while data := os.read(self._fd, 65536):
                self.seen += data.decode(errors="replace")
        return self._process.wait(30)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal("chat", delay_s=0.1, home=tmp_path)
    yield opened
    opened.close()


def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_the_program(terminal: Terminal) -> None:
    terminal.wait_for("/help lists the commands")
    terminal.wait_for(">>> ")
    terminal.type("x" * 300 + "\n")
    terminal.wait_for("xxxxxx\r\n")
    terminal.wait_for("xxx")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for(">>> ")
    terminal.type("half a line")
    # Ctrl-C empties the line buffer of the terminal: readline would wait in read() for a key that it was told of.
    terminal.wait_for("half a line")
    terminal.press_ctrl_c_until("(/exit or Ctrl-D leaves)")
    terminal.wait_for(">>> ")
    terminal.type("/set temperature 0\n")
    terminal.wait_for("temperature is 0")
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    terminal.wait_for("aborted 1")
    assert terminal.status() == 0


def test_on_a_terminal_exit_leaves(terminal: Terminal) -> None:
    terminal.wait_for(">>> ")
    terminal.type("/exit\n")
    assert terminal.status() == 0
    assert "Traceback" not in terminal.seen


def test_ctrl_c_through_pipes_stops_the_answer_and_the_program_reads_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(0.1, tmp_path),
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"a" * 600 + b"\n")
        process.stdin.flush()
        assert process.stdout.read(3) == b"aaa"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"/clear\nxy\n", timeout=30)
    assert process.returncode == 0
    assert out.endswith(b"\nyx>resu<\n")
    assert len(out) < 400
    assert err == b"(stopped)\nthe conversation is forgotten\naborted 1\n"


def test_a_reader_that_leaves_ends_the_program_quietly(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "generate", "a" * 600],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(0.01, tmp_path),
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == b"aaa"
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(30) == 141
    assert err == b"aborted 1\n"
