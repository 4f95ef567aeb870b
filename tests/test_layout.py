"""The shape of the project: which package may import which, what `inference` needs, what lies at the top level."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# Each package may import itself and those before it.
ORDER = ("inference", "datamodules", "callbacks", "lightning_modules")
TRAINING_ONLY = {
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "vllm",
    "jsonargparse",
    "tensorboard",
    "torchmetrics",
}
TOP_LEVEL = {
    *ORDER, "tests", "docs", ".ci", "Makefile", "pyproject.toml", "constraints.txt",
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", ".gitignore", ".pre-commit-config.yaml",
}  # fmt: skip


def imported_roots(source: str) -> dict[str, int]:
    """Top-level package -> line, of every import in `source`, those inside functions included."""
    roots: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else []
        else:
            continue
        for name in names:
            roots.setdefault(name.split(".")[0], node.lineno)
    return roots


def forbidden_imports(package: str, root: Path) -> list[str]:
    """`file:line imports name` for each import in `package` that points the wrong way."""
    position = ORDER.index(package)
    banned = {*ORDER[position + 1 :], "tests"} | (TRAINING_ONLY if package == "inference" else {"vllm"})
    return [
        f"{path.relative_to(root)}:{line} imports {name}"
        for path in sorted((root / package).rglob("*.py"))
        for name, line in imported_roots(path.read_text(encoding="utf-8")).items()
        if name in banned
    ]


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package: str, repository: Path) -> None:
    assert forbidden_imports(package, repository) == []


def test_wrong_imports_are_found(tmp_path: Path) -> None:
    """The walk sees what it must: in functions, aliased, `from` and dotted; relative imports are nobody's business."""
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "bad.py").write_text(
        "import os, lightning.pytorch as pl\n"
        "from . import callbacks\n"
        "def f():\n"
        "    from datamodules.world import build_world\n"
    )
    assert forbidden_imports("inference", tmp_path) == [
        "inference/bad.py:1 imports lightning",
        "inference/bad.py:4 imports datamodules",
    ]


IMPORT_WITHOUT = """
import importlib, sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {hidden!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
for module in {modules!r}:
    importlib.import_module(module)
print("imported")
"""


def import_without(
    modules: list[str], hidden: set[str], repository: Path
) -> subprocess.CompletedProcess[str]:
    """Import `modules` in a fresh interpreter to which the packages `hidden` look not installed."""
    code = IMPORT_WITHOUT.format(hidden=sorted(hidden), modules=modules)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=300
    )


def test_every_module_of_inference_imports_without_the_training_stack(repository: Path) -> None:
    paths = sorted((repository / "inference").rglob("*.py"))
    names = [".".join(path.relative_to(repository).with_suffix("").parts) for path in paths]
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    assert {"inference", "inference.model"} <= set(modules)
    done = import_without(modules, TRAINING_ONLY | set(ORDER[1:]), repository)
    assert done.stdout == "imported\n", done.stderr


def test_hidden_packages_do_not_import(repository: Path) -> None:
    done = import_without(["lightning"], TRAINING_ONLY, repository)
    assert done.returncode == 1 and "No module named 'lightning'" in done.stderr


def test_nothing_else_at_the_top_level(repository: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {path.split("/")[0] for path in listed.stdout.split("\0") if path}
    assert tracked <= TOP_LEVEL
    assert {"Makefile", "pyproject.toml", "constraints.txt", ".ci", "tests"} <= tracked


def test_everything_that_set_up_installs_is_pinned(repository: Path) -> None:
    """Exact versions only, no build suffix and no index; each direct requirement of `make setup` is among them."""
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"\d+(\.\d+)*(\.?(post|rc|a|b)\d+)?", version) for version in pins.values())
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["local"], *extras["train"], *extras["dev"]]
    names = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in wanted}
    assert {normal(name) for name in names} <= {normal(name) for name in pins}


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
