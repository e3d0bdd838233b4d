"""Hub models, through the real huggingface_hub and a hub on the loopback."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError, DownloadError, ModelNotFoundError, UnsupportedModelError
from jaxpaged.loading import hub as hub_module
from jaxpaged.loading.progress import SilentProgress
from jaxpaged.loading.sources import ModelFiles, list_models, pull, remove, resolve
from tests.loading.loopback_hub import Hub

WEIGHTS = bytes(range(256)) * 2000
FOLDER = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" + b" " * 2000,
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled" * 1000,
    "modeling_evil.py": b"raise SystemExit\n",
    "README.md": b"# hello\n",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub(
        {
            "org/name": {"main": FOLDER, "v1": {**FOLDER, "model.safetensors": WEIGHTS[::-1]}},
            "org/many-GGUF": {"main": {"m-Q4_0.gguf": b"GGUF" + WEIGHTS, "m-Q8_0.gguf": b"GGUF" + WEIGHTS * 2}},
            "org/pickled": {"main": {"config.json": b"{}", "pytorch_model.bin": b"x" * 2000}},
        }
    )
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    for name, value in {"ENDPOINT": served.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield served
    served.close()


def find(text: str, **options: object) -> ModelFiles:
    return resolve(ModelConfig(model=text, **options), progress=SilentProgress())


def test_hub_model_is_fetched_once_without_pickles_and_code(hub: Hub) -> None:
    files = find("org/name")
    assert (files.name, files.kind) == ("org/name", "folder")
    assert sorted(path.name for path in files.path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS
    assert files.cache_path.is_dir()
    [listed] = list_models()
    assert (listed.name, listed.source) == ("org/name", f"hub:org/name@{hub.commit('org/name', 'main')}")
    sent = len(hub.requests)
    hub.close()
    assert find("org/name") == files
    assert len(hub.requests) == sent


def test_revisions_lie_side_by_side(hub: Hub) -> None:
    main, tagged = find("org/name"), find("org/name", revision="v1")
    assert (main.path / "model.safetensors").read_bytes() == WEIGHTS
    assert (tagged.path / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert find("org/name@v1") == tagged
    assert [model.name for model in list_models()] == ["org/name", "org/name@v1"]
    remove("org/name@v1")
    assert find("org/name") == main


def test_pull_takes_what_the_branch_is_now(hub: Hub) -> None:
    assert (find("org/name").path / "config.json").read_bytes() == FOLDER["config.json"]
    sent = len(hub.bodies_sent("model.safetensors"))
    pull("org/name", progress=SilentProgress())
    assert len(hub.bodies_sent("model.safetensors")) == sent
    hub.repositories["org/name"]["main"] = {**FOLDER, "config.json": b'{"model_type": "new"}'}
    assert b"new" not in (find("org/name").path / "config.json").read_bytes()
    assert b"new" in (pull("org/name", progress=SilentProgress()).path / "config.json").read_bytes()


def test_one_of_several_gguf_files(hub: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files \(m-Q4_0.gguf, m-Q8_0.gguf\); name one of them \(hub: org/name:PART"):
        find("org/many-GGUF")
    files = find("org/many-GGUF:Q8_0")
    assert (files.kind, files.path.name, files.path.stat().st_size) == ("gguf", "m-Q8_0.gguf", 4 + 2 * len(WEIGHTS))
    assert hub.bodies_sent("m-Q4_0.gguf") == []


def test_tokenizer_alone(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "my.gguf").write_bytes(b"GGUF")
    path = find("./my.gguf", tokenizer="org/name").tokenizer_path
    assert path is not None
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "tokenizer.json"]
    sent = len(hub.requests)
    assert find("./my.gguf", tokenizer="org/name").tokenizer_path == path
    assert len(hub.requests) == sent
    assert hub.bodies_sent("model.safetensors") == []


def test_dummy_weights_fetch_none(hub: Hub) -> None:
    assert not (find("org/name", load_format="dummy").path / "model.safetensors").exists()
    assert (find("org/name").path / "model.safetensors").exists()


def test_broken_connection_is_told_and_the_next_try_goes_on(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.breaks_at = len(WEIGHTS) // 2
    with pytest.raises(DownloadError) as caught:
        find("org/name")
    assert "org/name" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list_models() == []
    [kept] = (tmp_path / "home" / "staging").rglob("tokenizer.json")
    (kept.parent / ".cache" / "huggingface" / "download" / "x.1234.incomplete").write_bytes(b"half")
    hub.breaks_at = None
    hub.requests.clear()
    assert (find("org/name").path / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.bodies_sent("model.safetensors")) == 1
    assert hub.bodies_sent("tokenizer.json") == []
    assert [path for path in (tmp_path / "home").rglob("*") if path.name in (".cache", "staging") and list(path.iterdir())] == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_file_that_is_not_what_the_hub_described(hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = hub._answer_file

    def lie(request, repo: str, revision: str, asked: str, *, has_body: bool) -> None:
        files = hub.repositories[repo]["main"]
        if has_body and asked == name:
            body = bytes(len(files[name]))
            hub._send(request, 200, body, {"ETag": '"x"', "X-Repo-Commit": revision})
        else:
            real(request, repo, revision, asked, has_body=has_body)

    monkeypatch.setattr(hub, "_answer_file", lie)
    with pytest.raises(DownloadError, match=f"{name} of org/name is not what the hub described"):
        find("org/name")
    assert list_models() == []
    monkeypatch.undo()


def test_snapshot_of_the_hubs_own_cache_is_used_in_place(hub: Hub, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_bytes(b"{}")
    (snapshot / "model-1.safetensors").write_bytes(b"x")
    (snapshot / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    assert hub_module.find_in_hub_cache("org/name", None) is None, "half of the weights is no model"
    (snapshot / "model-2.safetensors").write_bytes(b"x")
    before = sorted(repository.rglob("*"))
    assert find("org/name").path == snapshot
    assert hub.requests == []
    assert sorted(repository.rglob("*")) == before
    assert list_models() == []
    with pytest.raises(ModelNotFoundError):
        remove("org/name")


def test_snapshot_without_the_file_that_is_wanted_is_passed_over(hub: Hub, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--many-GGUF" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "m-Q4_0.gguf").write_bytes(b"GGUF")
    assert find("org/many-GGUF:Q4_0").path == snapshot / "m-Q4_0.gguf"
    assert hub.requests == []
    assert find("org/many-GGUF:Q8_0").path.is_relative_to(tmp_path / "home")


def test_token_is_sent_and_never_shown(hub: Hub) -> None:
    hub.refused["org/name"] = (403, "GatedRepo")
    with pytest.raises(DownloadError, match="org/name is gated: accept its terms") as caught:
        find("org/name", hf_token="hf_secret")
    assert "Bearer hf_secret" in hub.tokens
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "error", "told"),
    [
        ("org/none", {}, ModelNotFoundError, "the hub has no model org/none, and no folder here is called so"),
        ("org/name", {"revision": "v9"}, ModelNotFoundError, "no revision 'v9'"),
        ("org/name:Q4", {}, CheckpointError, "no GGUF file"),
        ("org/pickled", {}, UnsupportedModelError, "only pickled weights"),
    ],
)
def test_what_the_hub_does_not_have(hub: Hub, text: str, options: dict[str, str], error: type[Exception], told: str) -> None:
    with pytest.raises(error) as caught:
        find(text, **options)
    assert told in str(caught.value)
    assert list_models() == []


def test_hub_that_is_down_or_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.refused["org/name"] = (400, "")
    with pytest.raises(DownloadError, match="HTTP 400"):
        find("org/name")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    with pytest.raises(DownloadError, match="no network: org/name is neither a folder here nor pulled yet"):
        find("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="offline mode is on"):
        find("org/name")
