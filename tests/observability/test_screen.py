"""`jaxpaged top`: what is drawn of a server, ours or vLLM's, and the command against a live one."""

from pathlib import Path
from typing import Any

import pytest

from jaxpaged.cli import main
from jaxpaged.config import DiagnoseConfig
from jaxpaged.diagnose.read_prometheus import parse
from jaxpaged.diagnose.screen import draw
from server.app import create_app
from server.service import Service
from tests.observability.sources import as_scrapes, of_vllm
from tests.observability.states import STATES, healthy
from tests.server.door_server import door_server
from tests.server.scripted_llm import scripted_llm
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax

LIMITS = DiagnoseConfig()


def screen(texts: list[str], width: int = 100) -> dict[str, str]:
    drawn = draw([parse(text, 0.0) for text in texts], "http://x/metrics", LIMITS, width)
    assert all(len(line) <= width for line in drawn.splitlines())
    return {line[:12].strip(): line[13:] for line in drawn.splitlines() if line}


def test_a_server_on_one_screen() -> None:
    texts = as_scrapes(STATES["row_limit"][0](byte_level(), 1), model_name="m")
    shown = screen(texts)
    assert shown["running"].partition(" ")[0] in shown["running"]
    assert " of " in shown["running"]
    assert "####" in shown["running"]
    assert float(shown["answers"].split()[0]) > 10
    assert shown["first token"].startswith("P50 ")
    assert "of it the device's" in shown["step"]
    assert "row_limit" in shown["verdict"]
    screen(texts, 40)


def test_what_vllm_does_not_tell_is_unknown() -> None:
    shown = screen(of_vllm(as_scrapes(healthy(byte_level(), 1), model_name="m")))
    assert shown["step"] == "-"
    assert shown["verdict"] == "healthy"
    assert float(shown["answers"].split()[0]) > 10


def test_the_first_looks_say_little() -> None:
    texts = as_scrapes(healthy(byte_level(), 1))
    assert any("second look" in line for line in screen(texts[:1]).values())
    assert screen(texts[:3])["verdict"] == "too early to say"


def test_names_from_outside_stay_on_their_line() -> None:
    text = 'jaxpaged_engine_info{model="a\\nb\x1b[2J",dtype="x"} 1\n'
    drawn = draw([parse(text, 0.0), parse(text, 1.0)], "http://x", LIMITS)
    assert "\x1b" not in drawn


def engine(service: Service) -> Any:
    return scripted_llm(service.config, [service.emit])


def test_the_command_watches_a_live_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with door_server(engine=engine, create_app=create_app, keys=("k",)) as server:  # type: ignore[arg-type]
        url = f"http://127.0.0.1:{server.port}"
        assert main(["top", url, "--count", "2", "--interval", "0.7", "--api-key", "k"]) == 0
        assert "page pool" in capsys.readouterr().out
        assert main(["top", url, "--count", "1"]) == 2
        assert "--api-key" in capsys.readouterr().err
        assert main(["top", url, "--interval", "0"]) == 2
        # The same server, diagnosed: nobody asks it for anything.
        assert main(["diagnose", url, "--seconds", "2.4", "--api-key", "k"]) == 0
        assert "healthy" in capsys.readouterr().out
