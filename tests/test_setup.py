"""Set-up on a fresh machine: finding a Python, lock files without addresses, and one wheel that holds everything."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASH = shutil.which("bash") or "/bin/bash"
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
CLIENTS = ROOT / "tests" / "clients"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked_files() -> list[Path]:
    """Returns the files that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def find_python(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BASH, str(ROOT / "scripts" / "find_python.sh")], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def fake_python(path: Path, version: str, *, modules: bool = True, free_threaded: bool = False) -> Path:
    """An interpreter that claims another version: the real one, with sys.version_info and what can be imported changed first."""
    setup = f"import sys, sysconfig; sys.version_info = tuple(map(int, {version!r}.split('.'))); sys.executable = {str(path)!r}; "
    setup += "sys.modules['ensurepip'] = None; " if not modules else ""
    setup += "sysconfig.get_config_var = lambda name: 1; " if free_threaded else ""
    return executable(path, f'#!{BASH}\nexec {sys.executable} -I -c "{setup}exec(sys.argv[1])" "$3"\n')


SHIM = f"#!{BASH}\necho 'pyenv: python3: command not found' >&2\nexit 127\n"


def test_find_python_passes_over_shims_and_takes_pyenvs_version(tmp_path: Path) -> None:
    for name in ("python3", "python3.12", "python3.13"):
        executable(tmp_path / "shims" / name, SHIM)
    wanted = fake_python(tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python3", "3.12.9")
    fake_python(tmp_path / "pyenv" / "versions" / "3.11.7" / "bin" / "python3", "3.11.7")
    done = find_python(PATH=str(tmp_path / "shims"), PYENV_ROOT=str(tmp_path / "pyenv"))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(wanted), "")


def test_find_python_looks_in_the_home_folder_without_pyenv_root(tmp_path: Path) -> None:
    wanted = fake_python(tmp_path / ".pyenv" / "versions" / "3.13.0" / "bin" / "python3", "3.13.0")
    assert find_python(PATH="", HOME=str(tmp_path)).stdout.strip() == str(wanted)


def test_find_python_with_an_empty_path_says_in_one_sentence_what_to_install(tmp_path: Path) -> None:
    done = find_python(PATH="", PYENV_ROOT=str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(".\n")
    assert "install python3.12" in done.stderr


@pytest.mark.parametrize(
    ("version", "modules", "free_threaded"),
    [("3.11.9", True, False), ("3.14.0", True, False), ("3.12.4", False, False), ("3.13.1", True, True)],
)
def test_find_python_refuses_other_versions_and_crippled_ones(tmp_path: Path, version: str, modules: bool, free_threaded: bool) -> None:
    unfit = fake_python(tmp_path / "bin" / "python3", version, modules=modules, free_threaded=free_threaded)
    done = find_python(PATH=str(tmp_path / "bin"), PYENV_ROOT=str(tmp_path / "none"), PYTHON=str(unfit))
    assert (done.returncode, done.stdout) == (2, "")
    fit = fake_python(tmp_path / "other", "3.13.2")
    assert find_python(PATH=str(tmp_path / "bin"), PYENV_ROOT=str(tmp_path / "none"), PYTHON=str(fit)).stdout.strip() == str(fit)


def test_find_python_lets_uv_install_one(tmp_path: Path) -> None:
    installed = fake_python(tmp_path / "installed" / "python3.12", "3.12.11")
    executable(
        tmp_path / "bin" / "uv",
        f'#!{BASH}\ncase "$1 $2 $3" in "python install 3.12") : >"{tmp_path}/asked";; "python find 3.12") echo "{installed}";; esac\n',
    )
    executable(tmp_path / "bin" / "timeout", f'#!{BASH}\nshift\nexec "$@"\n')
    done = find_python(PATH=str(tmp_path / "bin"), PYENV_ROOT=str(tmp_path / "none"))
    assert (done.returncode, done.stdout.strip()) == (0, str(installed))
    assert (tmp_path / "asked").exists()


def test_a_set_up_environment_is_left_alone_and_a_changed_lock_is_not(tmp_path: Path) -> None:
    """The stamp: unchanged means no work at all (there is no uv or pip in this folder that could do any); changed means installing."""
    project = tmp_path / "project"
    for name in (
        "scripts/setup_venv.sh",
        "pyproject.toml",
        "requirements/base.lock",
        "requirements/dev.lock",
        "requirements/installer.lock",
    ):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    calls = tmp_path / "calls"
    # Stands in for venv's python, pip and uv: writes down what it is asked.
    recorder = f'#!{BASH}\necho "${{0##*/}} $*" >>"{calls}"\n'
    executable(project / ".venv" / "bin" / "python", recorder)
    executable(project / ".venv" / "bin" / "uv", recorder)

    def set_up(*locks: str) -> list[str]:
        calls.write_text("", encoding="utf-8")
        script = str(project / "scripts" / "setup_venv.sh")
        subprocess.run([BASH, script, ".venv", *locks], check=True, timeout=60, capture_output=True)
        return [line for line in calls.read_text(encoding="utf-8").splitlines() if line.startswith("uv") or "compileall" in line]

    *first, own = set_up("base", "dev")
    assert len(first) == 2
    # Where PYTHONDONTWRITEBYTECODE is set, every start would compile jax and all of this project from source.
    assert "--compile-bytecode" in first[0].split()
    assert own.split()[-3:] == ["jaxpaged", "pallas_kernels", "server"]
    assert {"sync", "--require-hashes", "requirements/base.lock"} <= set(first[0].split())
    assert {"--offline", "--no-deps", "--no-build-isolation", "--editable"} <= set(first[1].split())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert set_up("base", "dev") == []
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1, "seconds of the processor: nothing there waits"
    assert set_up("dev")[0].endswith("requirements/dev.lock")
    assert set_up("base", "dev") == [], "what holds more will do as well"
    with (project / "requirements" / "dev.lock").open("a", encoding="utf-8") as lock:
        lock.write("# changed\n")
    assert set_up("base", "dev")[0].endswith("requirements/dev.lock"), "the lock that was installed is the one renewed"


@pytest.mark.parametrize(
    "prompt", ["Why is the sky blue?", "-5 $HOME \"quoted\" 'single' `id` \\n # $(shell id) $$", "two\nlines", "日本語"]
)
@pytest.mark.parametrize("is_argument", [True, False])
def test_make_demo_hands_the_prompt_over_as_typed(tmp_path: Path, prompt: str, is_argument: bool) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    executable(tmp_path / "scripts" / "setup_venv.sh", f"#!{BASH}\n")
    executable(tmp_path / ".venv" / "bin" / "jaxpaged", f"#!{BASH}\nprintf '%s\\0' \"$@\"\n")
    command, environment = ["make", "--silent", "demo"], {"PATH": os.environ["PATH"]}
    if is_argument:
        command.append(f"PROMPT={prompt}")
    else:
        environment["PROMPT"] = prompt
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True, timeout=60)
    command, *arguments = done.stdout.split("\0")
    assert command == "generate"
    assert "--chat" in arguments
    assert arguments[-3:] == ["--", prompt, ""]


def test_the_locks_are_the_promised_ones() -> None:
    assert {path.stem for path in LOCKS} == {"base", "dev", "cuda12", "cuda13", "compile-gpu", "compile-gpu12", "min-jax", "installer"}
    pins = {path.stem: dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)) for path in LOCKS}
    assert pins["min-jax"]["jax"] == pins["min-jax"]["jaxlib"] == "0.11.2"
    assert "jax-cuda12-plugin" in pins["cuda12"]
    assert "jax-cuda13-plugin" in pins["cuda13"]
    for name in ("dev", "cuda12", "cuda13", "compile-gpu"):
        assert pins["base"].items() <= pins[name].items(), "tests run on what users run"
    # Only what compiling takes, in the versions that the others have.
    assert "jax-cuda12-plugin" in pins["compile-gpu12"]
    assert all(pins["compile-gpu"].get(name, version) == version for name, version in pins["compile-gpu12"].items())


@pytest.mark.parametrize("path", [*LOCKS, *sorted(CLIENTS.glob("*.lock"))], ids=lambda path: path.stem)
def test_a_lock_has_hashes_and_no_address_path_or_torch(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"^\s*-", re.sub(r"^ +--hash=sha256:[0-9a-f]{64}( \\)?$", "", text, flags=re.MULTILINE), re.MULTILINE), "an option"
    assert not re.search(r"(?<![\w.-])/[a-z]", text), "an absolute path"
    entries = re.findall(r"^([a-z0-9._-]+)==\S+.*\\\n((?: +--hash=\S+.*\n)+)", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[a-z0-9]", text, re.MULTILINE)) > 0
    names = {name for name, _ in entries}
    assert not {name for name in names if name.startswith(("torch", "triton", "tensorflow"))}


def test_every_dependency_is_locked() -> None:
    locked = set(re.findall(r"^([a-z0-9._-]+)==", (ROOT / "requirements" / "base.lock").read_text(encoding="utf-8"), re.MULTILINE))
    assert {re.split(r"[<>=\[ ]", requirement)[0] for requirement in PROJECT["dependencies"]} <= locked


def test_no_tracked_file_names_a_package_index() -> None:
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("registry", "npmjs", "org"), ("crates", "io"))]
    hosts += [".".join(parts) for parts in (("deb", "debian", "org"), ("download", "pytorch", "org"), ("conda", "anaconda", "org"))]
    named = re.compile("|".join(re.escape(host) for host in hosts).encode())
    assert [str(path.relative_to(ROOT)) for path in tracked_files() if named.search(path.read_bytes())] == []
    assert not [path for path in tracked_files() if path.name in {"uv.lock", "poetry.lock"}]


@pytest.mark.parametrize("client", ["clients/openai_node", "clients/ai_sdk", "browser/dashboard"])
def test_a_lock_of_npm_has_hashes_and_no_addresses(client: str) -> None:
    path = ROOT / "tests" / client / "package-lock.json"
    assert path in tracked_files()
    own, *packages = json.loads(path.read_text(encoding="utf-8"))["packages"].values()
    assert own["dependencies"] == json.loads(path.with_name("package.json").read_text(encoding="utf-8"))["dependencies"]
    assert packages
    for package in packages:
        assert package["integrity"].startswith("sha512-")
        assert "resolved" not in package
        assert "hasInstallScript" not in package


def test_the_docs_name_the_clients_that_are_tried() -> None:
    tried = set()
    for path in {*CLIENTS.glob("*.in")} - {CLIENTS / "node.in"}:
        name = re.split(r"[^a-z0-9-]", path.read_text(encoding="utf-8"))[0]
        (version,) = re.findall(rf"^{name}==(\S+)", path.with_suffix(".lock").read_text(encoding="utf-8"), re.MULTILINE)
        tried.add(f"{name} {version}")
    for path in CLIENTS.glob("*/package-lock.json"):
        packages = json.loads(path.read_text(encoding="utf-8"))["packages"]
        tried |= {f"{name} {packages[f'node_modules/{name}']['version']}" for name in packages[""]["dependencies"]}
    named_in_docs = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert {client for client in tried if f"| {client} |" not in named_in_docs} == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=280)
    (built,) = folder.glob("*.whl")
    return built


def test_one_wheel_holds_the_three_packages_and_the_configs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
        licenses = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    packages = ("jaxpaged", "pallas_kernels", "server")
    wanted = {str(path.relative_to(ROOT)) for path in tracked_files() if path.relative_to(ROOT).parts[0] in packages}
    wanted |= {"jaxpaged/" + str(path.relative_to(ROOT)) for path in tracked_files() if path.relative_to(ROOT).parts[0] == "configs"}
    assert {f"{package}/py.typed" for package in packages} <= wanted
    assert "jaxpaged/configs/models/smollm2-135m.yaml" in wanted
    assert wanted <= held
    # And the library of CPU kernels, where there was a compiler.
    libraries = {name for name in held if name.endswith(".so")}
    assert len(libraries) == (0 if wheel.name.endswith("-none-any.whl") else 1)
    assert {name.rpartition("/")[0] for name in libraries} <= {"pallas_kernels/native/built"}
    assert {name.split("/")[0] for name in held} == set(packages)
    assert entry_points.split("\n")[:2] == ["[console_scripts]", f"jaxpaged = {PROJECT['scripts']['jaxpaged']}"]
    assert len(licenses) == 1


def test_the_wheel_asks_for_what_pyproject_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    assert set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE)) == set(PROJECT["optional-dependencies"])
    required = [line for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE) if "extra ==" not in line]
    assert len(required) == len(PROJECT["dependencies"])
    assert "jax<0.13,>=0.11.2" in required


@pytest.mark.tier("system")
def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    for path in tracked_files():
        copy = tmp_path / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = {**os.environ, "CXX": "/no/such/compiler", "JAXPAGED_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path / "source", env=environment, check=True, capture_output=True, text=True, timeout=120)
    assert "no CPU kernels: no C++ compiler was found" in done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")


@pytest.mark.tier("system")
def test_the_installed_wheel_runs_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    """A new environment with the wheel alone (the locked packages are lent by path): the command, the configs and the library are there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    uv = Path(sys.executable).parent / "uv"
    command = [str(uv), "pip", "install", "--python", str(python), "--offline", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (site,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    (lent,) = (Path(sys.prefix) / "lib").glob("python3.*/site-packages")
    (site / "lent.pth").write_text(str(lent), encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}

    def run(*words: str) -> str:
        return subprocess.run(words, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120).stdout

    assert "generate" in run(str(tmp_path / "venv" / "bin" / "jaxpaged"), "--help")
    # It brings its CPU kernels, and they are loaded without a compiler.
    environment["CXX"] = "/no/such/compiler"
    path, missing = run(str(python), "-c", "from pallas_kernels import native; print(*native.library(), sep='\\n')").splitlines()
    assert missing == "None"
    assert Path(path).parent == site / "pallas_kernels" / "native" / "built"
    assert "smollm2-135m" in run(str(tmp_path / "venv" / "bin" / "jaxpaged"), "ls")
    assert run(str(python), "-c", "import jaxpaged; print(jaxpaged.__file__)").strip() == str(site / "jaxpaged" / "__init__.py")


def test_the_python_of_the_readme_can_be_run() -> None:
    """Whole programs: no `await` outside of a function, and every name is made or imported in the block itself."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F704,PLE1142", "-"],
            input=block,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.tier("system")
def test_the_quick_tests_import_no_jax() -> None:
    """Not while they are collected either: what a folder's tests share may import it."""
    command = [sys.executable, "-m", "pytest", "--fast", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "test_options.py" in done.stdout
    assert "tests/engine" not in done.stdout
