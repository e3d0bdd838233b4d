"""The rules that keep the code readable, each as a test: who imports whom, what is host code, one glossary, files that fit in the head."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import AREAS, BUDGETS_S, file_markers

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxpaged", "pallas_kernels", "server")
MAY_IMPORT = {"jaxpaged": {"jaxpaged", "pallas_kernels"}, "pallas_kernels": {"pallas_kernels"}, "server": set(PACKAGES)}

HOST_MODULES = (
    "jaxpaged",
    "jaxpaged.async_llm",
    "jaxpaged.chat_template",
    "jaxpaged.cli",
    "jaxpaged.clocks",
    "jaxpaged.config",
    "jaxpaged.detokenizer",
    "jaxpaged.distributed.follower",
    "jaxpaged.distributed.following",
    "jaxpaged.distributed.leader",
    "jaxpaged.distributed.settings",
    "jaxpaged.engine_client",
    "jaxpaged.engine_control",
    "jaxpaged.engine_driver",
    "jaxpaged.engine_events",
    "jaxpaged.engine_thread",
    "jaxpaged.engine_turns",
    "jaxpaged.errors",
    "jaxpaged.events",
    "jaxpaged.intake",
    "jaxpaged.llm",
    "jaxpaged.loading.sources",
    "jaxpaged.mailbox",
    "jaxpaged.metrics",
    "jaxpaged.open_requests",
    "jaxpaged.options",
    "jaxpaged.output",
    "jaxpaged.page_manager",
    "jaxpaged.pool_map",
    "jaxpaged.progress_bar",
    "jaxpaged.queue_group",
    "jaxpaged.request",
    "jaxpaged.request_streams",
    "jaxpaged.scheduler",
    "jaxpaged.scoring",
    "jaxpaged.sinks",
    "jaxpaged.start",
    "jaxpaged.told_logprobs",
    "jaxpaged.tokenizer",
)
"""Plain Python: their tests run in seconds."""

DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "jaxtyping", "orbax", "pallas_kernels"}

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "torch"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}

MAX_LINES = 400
MAX_KERNEL_LINES = 500


def module_files() -> dict[str, Path]:
    """Returns module name -> file for every module of the three packages."""
    names = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = module_files()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in {getattr(test, "id", None), getattr(test, "attr", None)}


def at_import_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run when the module is imported: not those of functions, nor those for type checkers only."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and is_type_checking(node.test):
            yield from at_import_time(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from at_import_time(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from at_import_time(handler.body)


def imported_names(nodes: Iterator[ast.AST], module: str) -> set[str]:
    """Returns the dotted names that import statements among the nodes bring in; `from a import b` gives both a and a.b."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def direct_imports(module: str) -> set[str]:
    """Returns what importing the module imports, its parent packages included."""
    names = imported_names(at_import_time(tree_of(MODULES[module]).body), module)
    parts = module.split(".")
    return names | {".".join(parts[:length]) for length in range(1, len(parts))}


def import_closure(module: str) -> dict[str, str]:
    """Returns every name imported when `module` is, within the project transitively -> the module that imports it."""
    found: dict[str, str] = {}
    waiting = [module]
    seen = {module}
    while waiting:
        current = waiting.pop()
        for name in direct_imports(current):
            found.setdefault(name, current)
            prefixes = {".".join(name.split(".")[:length]) for length in range(1, name.count(".") + 2)}
            new = (prefixes & MODULES.keys()) - seen
            seen |= new
            waiting += new
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_only_downward(package: str) -> None:
    """server -> jaxpaged -> pallas_kernels, inside functions too."""
    upward = []
    for module, path in MODULES.items():
        if module.split(".")[0] == package:
            tops = {name.split(".")[0] for name in imported_names(ast.walk(tree_of(path)), module)}
            upward += [f"{module} imports {top}" for top in tops & set(PACKAGES) - MAY_IMPORT[package]]
            upward += [f"{module} imports {top}" for top in tops & {"tests", "scripts"}]
    assert upward == []


@pytest.mark.parametrize("module", HOST_MODULES)
def test_host_modules_import_no_device_library(module: str) -> None:
    assert module in MODULES
    closure = import_closure(module)
    assert {name: by for name, by in closure.items() if name.split(".")[0] in DEVICE_LIBRARIES} == {}


def test_the_import_walk_sees_what_it_should() -> None:
    """The walk behind the rules above finds a known device module's jax, and through whom."""
    assert import_closure("jaxpaged.model_runner")["jax"]
    assert "jax" not in import_closure("jaxpaged.config")


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120, env=environment)
    return set(done.stdout.split("\n"))


def test_importing_jaxpaged_imports_nothing_heavy() -> None:
    heavy = {"jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "litestar", "rich", "gguf", "huggingface_hub", "jinja2"}
    assert modules_after("import jaxpaged") & heavy == set()
    assert modules_after("import jaxpaged.cli") & heavy == set()


def test_host_modules_load_without_jax() -> None:
    """The rule as Python sees it: all host modules in one process, third-party imports included."""
    loaded = modules_after("import " + ", ".join(HOST_MODULES))
    assert loaded & {"jax", "jaxlib", "flax", "torch", "transformers"} == set()


def test_nothing_runs_code_from_data() -> None:
    found = []
    for module, path in MODULES.items():
        tree = tree_of(path)
        found += [f"{module} imports {name}" for name in imported_names(ast.walk(tree), module) if name.split(".")[0] in FORBIDDEN_IMPORTS]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                found.append(f"{module}:{node.lineno} calls {node.func.id}")
            if (
                isinstance(node, ast.keyword)
                and node.arg == "allow_pickle"
                and not (isinstance(node.value, ast.Constant) and node.value.value is False)
            ):
                found.append(f"{module}:{node.lineno} allows pickle")
    assert found == []


def is_mutable_literal(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray"} and not value.args
    return (
        isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        and not getattr(value, "elts", None)
        and (not isinstance(value, ast.Dict) or not value.keys)
    )


def test_no_module_level_registers_that_start_empty() -> None:
    """Nothing global: an empty list, dict or set at module level is there to be filled later."""
    found = []
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable_literal(node.value):
                found.append(f"{module}:{node.lineno}")
    assert found == []


def test_no_names_that_mean_nothing() -> None:
    empty_words = {"utils", "util", "helpers", "helper", "common", "misc", "base", "data", "info", "process", "handle"}
    assert [module for module in MODULES if module.split(".")[-1] in empty_words] == []


def glossary() -> set[str]:
    """Returns the axis words: in the docstring of jaxpaged/batch.py, the first words of lines like `word: meaning` or `word   meaning`."""
    docstring = ast.get_docstring(tree_of(MODULES["jaxpaged.batch"])) or ""
    return set(re.findall(r"^\s*[-*|]?\s*`{0,2}([a-z][a-z0-9_]*)`{0,2}(?::[ ]| {2,}| *\|)\s*\S", docstring, re.MULTILINE))


def jaxtyping_names() -> set[str]:
    kinds = {"Array", "Bool", "Key", "Num", "Real", "Shaped", "Inexact", "Integer", "Scalar", "Complex", "Complex64", "Complex128"}
    kinds |= {f"{kind}{bits}" for kind in ("Int", "UInt") for bits in ("", 2, 4, 8, 16, 32, 64)}
    return kinds | {"Float", "Float16", "Float32", "Float64", "BFloat16", "Float8e4m3fn", "Float8e5m2"}


def shape_strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, axes) of each annotation like Float[Array, "tokens heads head_dim"]."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 2:
            kind = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            axes = node.slice.elts[1]
            if kind in jaxtyping_names() and isinstance(axes, ast.Constant) and isinstance(axes.value, str):
                yield node.lineno, axes.value


def test_axis_words_come_from_the_glossary() -> None:
    words = glossary()
    assert {
        "tokens",
        "seqs",
        "pages",
        "page_size",
        "max_pages",
        "heads",
        "kv_heads",
        "head_dim",
        "embed",
        "ffw",
        "vocab",
        "layers",
    } <= words
    unknown, seen = [], 0
    for module, path in MODULES.items():
        for line, axes in shape_strings(tree_of(path)):
            seen += 1
            unknown += [f"{module}:{line} {word}" for word in re.findall(r"[A-Za-z_]\w*", axes) if word.lstrip("_") not in words | {""}]
    assert unknown == []
    assert seen > 0


def test_every_module_with_axis_words_is_checked_while_tests_run(pytestconfig: pytest.Config) -> None:
    """The list leaves host modules out: the check would import jax for them, and cost them thirty times their own time."""
    packages = pytestconfig.getoption("--jaxtyping-packages").split(",")[:-1]
    annotated = [module for module, path in MODULES.items() if any(shape_strings(tree_of(path)))]
    assert [module for module in annotated if not any(f"{module}.".startswith(f"{package}.") for package in packages)] == []


def text_files(*suffixes: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for name in listed if name.endswith(suffixes) and (path := ROOT / name).is_file()]


def test_files_fit_in_the_head() -> None:
    long = []
    for path in text_files(".py", ".sh"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > (MAX_KERNEL_LINES if path.is_relative_to(ROOT / "pallas_kernels") else MAX_LINES):
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
    assert long == []


def test_the_life_of_a_request_names_files_that_exist() -> None:
    """docs/request.md: seven numbered steps, each with the files it happens in."""
    text = (ROOT / "docs" / "request.md").read_text(encoding="utf-8")
    steps = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)
    assert steps[1::2] == [str(number) for number in range(1, 8)]
    for number, step in zip(steps[1::2], steps[2::2], strict=True):
        named = re.findall(r"`([\w./-]+\.py|[\w.-]+/[\w./-]*)`", step)
        assert named, f"step {number} names no file"
        assert [name for name in named if not (ROOT / name).exists()] == [], f"step {number}"


def test_documents_link_to_files_that_exist() -> None:
    missing = []
    for path in text_files(".md"):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if not (path.parent / target).exists():
                missing.append(f"{path.relative_to(ROOT)} -> {target}")
    assert missing == []


def test_every_folder_of_tests_has_a_budget() -> None:
    assert sum(BUDGETS_S.values()) == 720
    assert set(AREAS.values()) == set(BUDGETS_S)
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert {name for name in folders if not name.endswith(".py")} <= set(AREAS)


def test_test_files_that_import_jax_say_so() -> None:
    """Only then can `make test-fast` leave them out without importing them."""
    wrong = []
    for path in text_files(".py"):
        if path.is_relative_to(ROOT / "tests") and path.name.startswith("test_"):
            tops = {name.split(".")[0] for name in imported_names(at_import_time(tree_of(path).body), "jaxpaged")}
            if tops & {"jax", "flax", "pallas_kernels"} and "jax" not in file_markers(path.read_text(encoding="utf-8")):
                wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []
