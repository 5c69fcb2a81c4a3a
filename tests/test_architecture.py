"""The rules of the house that a reader can break without noticing: who may import whom, and what is never used."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("train", "data", "recipes", "checkpoints", "eval", "launch")
# Prefixes of module names; a package may always import itself.
MAY_IMPORT = {
    "launch": ("recipes", "train"),
    "recipes": ("train", "data", "checkpoints", "eval"),
    "train": ("data", "checkpoints"),
    "eval": ("data", "checkpoints", "train.drafters"),
    "data": (),
    "checkpoints": (),
}
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported, also inside functions: `from a.b import c` may mean the module a.b.c."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(package: str, source: str) -> list[str]:
    allowed = (package, *MAY_IMPORT[package])
    ours = (name for name in imported_modules(ast.parse(source)) if name.split(".")[0] in PACKAGES)
    return [name for name in ours if not any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)]


def test_the_import_rule_itself_is_tested():
    assert forbidden_imports("data", "from train.losses import x") == ["train.losses.x"]
    assert forbidden_imports("checkpoints", "def f():\n    import data.batch") == ["data.batch"]
    assert forbidden_imports("eval", "from train.drafters.base import Drafter\nimport torch") == []
    assert forbidden_imports("eval", "from train.engine import x") == ["train.engine.x"]
    assert forbidden_imports("launch", "from eval import serve") == ["eval.serve"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_packages_import_only_what_lies_below_them(path):
    assert forbidden_imports(path.relative_to(ROOT).parts[0], path.read_text()) == []


def test_the_engines_worker_imports_nothing_of_ours():
    """It runs in the engine's environment, where headstart and its dependencies are not installed."""
    names = {name.split(".")[0] for name in imported_modules(ast.parse((ROOT / "eval" / "vllm_worker.py").read_text()))}
    assert names <= {"json", "sys", "time", "typing", "vllm"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_code_from_files(path):
    """No pickle, no torch.load that unpickles, no code from a model repository."""
    tree = ast.parse(path.read_text())
    assert not {"pickle", "cloudpickle", "dill", "joblib"} & {name.split(".")[0] for name in imported_modules(tree)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        called = ast.unparse(node.func)
        if called == "torch.load":
            assert ast.unparse(keywords["weights_only"]) == "True", f"line {node.lineno}: torch.load without weights_only=True"
        if "trust_remote_code" in keywords:
            assert ast.unparse(keywords["trust_remote_code"]) == "False", f"line {node.lineno}: trust_remote_code"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_config_fields_are_read_and_arguments_named(path):
    """`getattr(config, name, default)` hides a misspelt field and a second default; `**kwargs` hides what a function takes.

    A callback that drops what a foreign caller adds says so by the name `_`, one that passes it on to foreign code by `named`.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            assert len(node.args) < 3, f"line {node.lineno}: getattr with a default"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            keywords = node.args.kwarg.arg if node.args.kwarg else "_"
            assert keywords.strip("_") in ("", "named"), f"line {node.lineno}: {node.name} takes **{keywords}"


def test_no_module_is_a_drawer_for_everything():
    assert not {path.stem for path in SOURCES} & {"utils", "util", "common", "helpers", "misc"}


def test_every_script_works_from_a_bare_checkout():
    """Launchers put a script's own folder on sys.path, not the root: scripts put the root there first."""
    scripts = [path for package in ("recipes", "launch") for path in (ROOT / package).glob("*.py") if path.stem != "__init__"]
    for path in scripts:
        assert "sys.path.insert(0, " in path.read_text(), path
        classes = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        assert classes == [], f"{path} defines classes, which become two when it is also imported"
