"""The conversation behind `jaxpaged chat`: history, settings and the commands that begin with a slash."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec

from jaxpaged.commands.answers import stream_answer, summary
from jaxpaged.commands.engine_api import Message, TextEngine
from jaxpaged.errors import EngineDeadError, JaxpagedError
from jaxpaged.interrupts import noted_interrupts
from jaxpaged.options import nearest
from jaxpaged.request import SamplingParams

HELP = """\
/help               this list
/set                show the settings
/set NAME VALUE     change one: temperature, top_p, top_k, min_p, seed, max_tokens, stop, system (VALUE none: the model's default)
/clear              forget the conversation
/save FILE          write the conversation as JSON
/exit               leave (also Ctrl-D)
//text              say something that begins with a slash"""

INTEGERS = ("top_k", "seed", "max_tokens")
NUMBERS = ("temperature", "top_p", "min_p")
SETTINGS = (*NUMBERS, *INTEGERS, "stop", "system")


class ChatSession:
    """One conversation.

    Args:
        llm: the engine.
        params: sampling parameters to begin with.
        system: system message, None for none.
        out: where answers go.
        err: where everything else goes.
        shows_stats: a line of figures after each answer.
    """

    def __init__(
        self, llm: TextEngine, params: SamplingParams, *, system: str | None, out: TextIO, err: TextIO, shows_stats: bool = False
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._out = out
        self._err = err
        self._shows_stats = shows_stats
        self.messages: list[Message] = []
        self._commands: dict[str, Callable[[str], bool]] = {
            "/help": self._help,
            "/set": self._set,
            "/clear": self._clear,
            "/save": self._save,
            "/exit": self._exit,
        }

    def take(self, line: str) -> bool:
        """Does what one line asks for. False when the conversation is over."""
        line = line.strip()
        if not line:
            return True
        if line.startswith("/") and not line.startswith("//"):
            name, _, rest = line.partition(" ")
            command = self._commands.get(name)
            if command is not None:
                return command(rest.strip())
            near = nearest(name, self._commands)
            self.note(f"there is no command {name[:40]}" + (f"; the nearest is {near}" if near else "; /help lists them"))
            return True
        self._say(line.removeprefix("/") if line.startswith("//") else line)
        return True

    def note(self, text: str) -> None:
        """Says something that is no answer."""
        self._out.flush()
        self._err.write(text + "\n")
        self._err.flush()

    def _say(self, text: str) -> None:
        """One exchange. A refused or failed one leaves the history as it was; what Ctrl-C cut short stays in it."""
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        system: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        try:
            text.encode()
            # Ctrl-C at any moment of the exchange ends the exchange only.
            with noted_interrupts():
                prompt = self._llm.get_tokenizer().apply_chat_template([*system, *asked])
                answer = stream_answer(self._llm, prompt, self._params, self._out)
        except EngineDeadError:
            raise
        except (JaxpagedError, UnicodeEncodeError) as e:
            self.note(e.message if isinstance(e, JaxpagedError) else "that line is not UTF-8 text")
            return
        self._out.write("\n")
        self._out.flush()
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        if answer.finish_reason == "abort":
            self.note("(stopped)")
        if self._shows_stats:
            self.note(summary([answer], answer.seconds))

    def _help(self, rest: str) -> bool:
        self.note(HELP)
        return True

    def _exit(self, rest: str) -> bool:
        return False

    def _clear(self, rest: str) -> bool:
        self.messages = []
        self.note("the conversation is forgotten")
        return True

    def _save(self, rest: str) -> bool:
        if not rest:
            self.note("/save needs a file name")
            return True
        system: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        data = msgspec.json.format(msgspec.json.encode({"messages": [*system, *self.messages]})) + b"\n"
        path = Path(rest).expanduser()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            try:
                temporary.write_bytes(data)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as e:
            self.note(f"cannot save to {path}: {e.strerror or e}")
            return True
        self.note(f"{len(self.messages)} messages are in {path}")
        return True

    def _set(self, rest: str) -> bool:
        if not rest:
            values = {name: self._system if name == "system" else getattr(self._params, name) for name in SETTINGS}
            self.note("\n".join(f"{name:<12}{'the default' if value is None else value}" for name, value in values.items()))
            return True
        name, _, text = rest.partition(" ")
        name, text = name.replace("-", "_"), text.strip()
        if name not in SETTINGS:
            near = nearest(name, SETTINGS)
            self.note(f"there is no setting {name[:40]}" + (f"; the nearest is {near}" if near else "; /set lists them"))
            return True
        if not text:
            self.note(f"/set {name} needs a value")
            return True
        value = None if text.lower() == "none" else text
        if name == "system":
            self._system = value
        else:
            try:
                self._params = msgspec.structs.replace(self._params, **{name: _setting(name, value)})
            except (JaxpagedError, ValueError) as e:
                self.note(e.message if isinstance(e, JaxpagedError) else f"{name} must be {_kind(name)}, got {text[:40]}")
                return True
        self.note(f"{name} is {'the default' if value is None else value}")
        return True


def _kind(name: str) -> str:
    return "an integer" if name in INTEGERS else "a number"


def _setting(name: str, value: str | None) -> str | int | float | None:
    """Raises ValueError for what is no number."""
    if value is None or name == "stop":
        return value
    return int(value) if name in INTEGERS else float(value)
