"""Help, versions, unknown commands and flags; what they import; completion scripts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged import options
from jaxpaged.cli import build_parser
from jaxpaged.commands import COMMANDS, by_name
from jaxpaged.commands.completion import SCRIPTS, bash_script, command_flags
from jaxpaged.commands.engine_start import SERVER_SECTIONS
from tests.cli.scripted_engine import run_cli

ROOT = Path(__file__).parents[2]
HEAVY = ("jax", "jaxlib", "numpy", "transformers", "tokenizers", "litestar", "rich", "huggingface_hub", "jinja2", "yaml", "asyncio")


def imported_by(*argv: str) -> tuple[int, set[str]]:
    """Exit status and top-level modules of `jaxpaged ...` in a process of its own."""
    code = (
        "import sys\nfrom jaxpaged.cli import main\nstatus = main(sys.argv[1:])\n"
        "print('\\n'.join({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\nsys.exit(status)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60, env=environment, check=False)
    return done.returncode, set(done.stderr.split("\n"))


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["--version"], ["completion", "bash"], ["config"], ["nonsense"]])
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    status, modules = imported_by(*argv)
    assert status == (2 if argv == ["nonsense"] else 0)
    assert "jaxpaged" in modules
    assert modules & set(HEAVY) == set()


@pytest.mark.parametrize("argv", [["--model", "smolm2-135"], ["--model", "/no/such/file.gguf"], ["--model", "org/name", "--offline"]])
def test_a_model_that_is_not_there_is_refused_before_jax_is_imported(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path))
    status, modules = imported_by("generate", "hello", *argv)
    assert status == 2
    assert "jaxpaged" in modules
    assert modules & {"jax", "jaxlib", "flax", "transformers"} == set()


def test_help_names_every_command() -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        result = run_cli(*argv)
        assert (result.status, result.err) == (0, "")
        assert [command.name for command in COMMANDS if f"  {command.name} " not in result.out] == []


@pytest.mark.parametrize("name", sorted(by_name()))
def test_every_command_explains_itself(name: str) -> None:
    result = run_cli(name, "--help")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("usage: jaxpaged ")
    assert max(map(len, result.out.split("\n"))) <= 140


def test_version() -> None:
    short, full = run_cli("--version"), run_cli("version")
    assert re.fullmatch(r"jaxpaged \S+\n", short.out)
    assert full.out.startswith(short.out)
    assert re.search(r"^jax \d+\.", full.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["generat"], "there is no command 'generat'; the nearest is generate"),
        (["zzzz"], "there is no command 'zzzz'; see jaxpaged --help"),
        (["serve", "--prot", "1"], "jaxpaged serve: unknown option --prot; the nearest is --port"),
        (["generate", "--temprature", "1", "hi"], "jaxpaged generate: unknown option --temprature; the nearest is --temperature"),
        (["generate", "--max-model-length=3"], "jaxpaged generate: unknown option --max-model-length; the nearest is --max-model-len"),
        (["generate", "--page-size", "3"], "jaxpaged generate: unknown option --page-size; the nearest is --cache.page-size"),
        (["chat", "--port", "3"], "jaxpaged chat: unknown option --port"),
        (["ls", "x"], "jaxpaged ls takes no argument 'x'; see jaxpaged ls --help"),
        (["generate", "--dtype"], "jaxpaged generate: argument --dtype/--model.dtype: expected one argument"),
        (["rm"], "jaxpaged rm: the following arguments are required: MODEL"),
        (["completion", "tcsh"], "jaxpaged completion: argument SHELL: invalid choice: 'tcsh'"),
    ],
)
def test_unknown_words_are_one_sentence_and_status_2(argv: list[str], sentence: str) -> None:
    result = run_cli(*argv)
    assert (result.status, result.out) == (2, "")
    assert result.sentence.startswith(sentence)


def test_every_option_has_its_flags_where_the_engine_is_used() -> None:
    for command in ("generate", "chat"):
        flags = set(build_parser(by_name()[command]).flags())
        for option in options.option_table().values():
            wanted = {option.flag, *("--" + alias.replace("_", "-") for alias in option.aliases)}
            assert (wanted <= flags) == (option.section not in SERVER_SECTIONS), (command, option.path)


@pytest.mark.parametrize("command", ["config", "serve"])
def test_config_and_serve_take_every_option(command: str) -> None:
    flags = set(build_parser(by_name()[command]).flags())
    names = {
        name for option in options.option_table().values() for name in (option.flag, *("--" + a.replace("_", "-") for a in option.aliases))
    }
    assert names <= flags


def test_no_flag_of_a_command_hides_an_options() -> None:
    for command in COMMANDS:
        flags = build_parser(command).flags()
        assert len(flags) == len(set(flags))


def complete(*words: str) -> set[str]:
    """What bash offers after these words, the last of which is unfinished."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = f'{bash_script()}\nCOMP_WORDS=(jaxpaged {quoted})\nCOMP_CWORD={len(words)}\n_jaxpaged\necho "${{COMPREPLY[@]}}"'
    bash = shutil.which("bash")
    assert bash is not None
    return set(subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=20, check=True).stdout.split())


def test_bash_completes_commands_flags_and_choices() -> None:
    assert complete("ge") == {"generate"}
    assert set(by_name()) <= complete("")
    assert complete("generate", "--enable-") == {"--enable-prefix-caching"}
    assert complete("generate", "--dtype", "float") == {"float", "float16", "float32"}
    assert "--temperature" in complete("chat", "--te")
    assert complete("completion", "") >= {"bash", "zsh", "fish"}
    assert complete("ls", "--te") == set()


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_scripts_name_every_command_and_flag(shell: str) -> None:
    result = run_cli("completion", shell)
    assert (result.status, result.err) == (0, "")
    for name, flags in command_flags().items():
        assert name in result.out
        assert [flag.name for flag in flags if (flag.name[2:] if shell == "fish" else flag.name) not in result.out] == []


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_bug(closed: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAXPAGED_HOME": str(tmp_path)}
    for arguments, status in (("ls", 0), ("nonsense", 2)):
        command = f'exec "{sys.executable}" -m jaxpaged {arguments} {closed}'
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert done.returncode == status
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
