"""Private names of PyTorch stand in `compat/` alone, and each is there in the installed version."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.compat import frames
from tests.conftest import REPOSITORY

SOURCE = REPOSITORY / "src" / "shardwise"
COMPAT = sorted((SOURCE / "compat").glob("*.py"))

OF_OTHERS = {
    "_SubParsersAction": "argparse",
    "_actions": "argparse",
    "_run_exitfuncs": "atexit",
    "_exit": "os",
    "_fields": "named tuples",
    "_fingerprint": "datasets",
    "_is_stateful": "transformers",
    "_supports_attention_backend": "transformers",
    "_supports_sdpa": "transformers",
}
"""Private names, or what looks like them, of other packages."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a file uses of anybody's private names: imports from torch, `x._name`, `getattr(x, "_name")`, "torch._name"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.strip(".")
            names = [text] if re.fullmatch(r"torch(\.\w+)+", text) else []
            if is_private(text) and text.isidentifier():
                yield text, node
        else:
            continue
        for name in names:
            if name.startswith("torch.") and any(is_private(part) for part in name.split(".")):
                yield name, node


def names_of_our_own(trees: list[ast.AST]) -> set[str]:
    """Private names that these files define: functions, methods, classes, and what is assigned to."""
    names: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
                names.add(node.attr)
    return {name for name in names if is_private(name)}


def of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def outside(tree: ast.AST, ours: set[str], wrapped: set[str]) -> set[str]:
    """Private names of PyTorch in a file outside `compat/`. A string counts where it is a name that `compat/` has, or what
    `getattr` and its kin are asked for. What a class sets on itself is its own: whether its base of PyTorch has the same
    name is another test's question."""
    set_here = names_of_our_own([tree])
    asked = {
        id(node.args[1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "setattr", "hasattr")
        and len(node.args) > 1
    }
    found = set()
    for name, node in private_names(tree):
        if of_self(node) and name in set_here:
            continue
        if name in wrapped or name.startswith("torch."):
            found.add(name)
        elif (isinstance(node, ast.Attribute) and not of_self(node)) or id(node) in asked:
            found |= {name} - ours - OF_OTHERS.keys()
    return found


def parsed(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


TREES = {file: parsed(file) for file in sorted(SOURCE.rglob("*.py")) if file not in COMPAT}
OURS = names_of_our_own([tree for file, tree in TREES.items() if file not in COMPAT])
WRAPPED = {name for file in COMPAT for name, _ in private_names(parsed(file)) if "." not in name}


def test_private_names_of_pytorch_stand_in_compat_alone() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in TREES.items():
        found[file.relative_to(SOURCE).parts[0]] |= outside(tree, OURS, WRAPPED)
    assert {room: names for room, names in found.items() if names} == {}, "wrap them in src/shardwise/compat/"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch._foreach_norm(grads)", "_foreach_norm"),
        ("torch._brand_new(1)", "_brand_new"),
        ("for x in module._parameters.values(): pass", "_parameters"),
        ("module._parameters[name] = tensor", "_parameters"),
        ("self._pcontext.wait(0)", "_pcontext"),
        ("super()._start_workers(group)", "_start_workers"),
        ("getattr(optimizer, '_brand_new', None)", "_brand_new"),
        ("for kind in ('_parameters', '_buffers'): pass", "_buffers"),
        ("name.replace('_checkpoint_wrapped_module.', '')", "_checkpoint_wrapped_module"),
        ("importlib.import_module('torch._dynamo')", "torch._dynamo"),
        ("import torch._dynamo as compiler", "torch._dynamo"),
        ("from torch import _dynamo", "torch._dynamo"),
        ("def f():\n    from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.nn.modules.batchnorm import _BatchNorm as Norm", "torch.nn.modules.batchnorm._BatchNorm"),
    ],
)
def test_one_that_comes_back_is_found_however_it_is_written(line: str, name: str) -> None:
    assert name in outside(ast.parse(line), OURS, WRAPPED)


def test_names_of_our_own_and_of_other_packages_are_let_through() -> None:
    source = (
        "os._exit(1)\nself._mine = other._mine\nfrom shardwise.a import _mine\ntorch.__version__\nx = {'_index': 1}"
    )
    assert outside(ast.parse(source), {"_mine"}, WRAPPED) == set()


def _is_cpp(cls: type) -> bool:
    """Of those, other modules of PyTorch may give themselves out for the home."""
    return cls.__module__ == "torch._C" or type(cls).__name__ == "pybind11_type"


def classes_of_torch_extended_in(module: Any) -> Iterator[tuple[type, set[str]]]:
    """A module's classes that extend PyTorch's, each with the private names that PyTorch's own code of their bases has."""
    for cls in vars(module).values():
        if inspect.isclass(cls) and cls.__module__ == module.__name__:
            bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "torch"]
            sources = [inspect.getsource(base) for base in bases if not _is_cpp(base)]
            names = {name for source in sources for name, _ in private_names(ast.parse(source))}
            names |= {name for base in bases for name in vars(base) if is_private(name)}
            if names:
                yield cls, names


EXTENDING = [
    file
    for file, tree in TREES.items()
    if any(isinstance(node, ast.ClassDef) and node.bases for node in ast.walk(tree))
]


def test_no_class_of_ours_overrides_or_hides_what_is_private_in_its_base_of_pytorch() -> None:
    clashes = []
    for file in EXTENDING:
        module = importlib.import_module(".".join(["shardwise", *file.relative_to(SOURCE).with_suffix("").parts]))
        for cls, names in classes_of_torch_extended_in(module):
            tree = ast.parse(inspect.getsource(cls))
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and of_self(node)}
            used |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            clashes += [f"{cls.__qualname__}.{name}" for name in sorted(used & names)]
    assert clashes == [], "wrap the hook in src/shardwise/compat/, or take another name"


def exists(dotted: str) -> bool:
    parts = dotted.split(".")
    thing: Any = torch
    for end, part in enumerate(parts[1:], 2):
        if not hasattr(thing, part):
            try:
                importlib.import_module(".".join(parts[:end]))
            except ImportError:
                return False
        thing = getattr(thing, part)
    return True


def test_every_name_that_compat_promises_is_there() -> None:
    """What it re-exports, and what its functions reach for only when they are called."""
    for file in COMPAT:
        module = importlib.import_module(f"shardwise.compat.{file.stem}".removesuffix(".__init__"))
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name)
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", ast.unparse(node)):
                assert exists(ast.unparse(node)), ast.unparse(node)


@pytest.mark.parametrize("name", [name for name in sorted(vars(frames)) if name.isupper()])
def test_the_files_and_functions_that_stacks_are_read_by_are_there(name: str) -> None:
    root = Path(torch.__file__).parents[1]
    if name == "BACKWARD":
        assert callable(getattr(importlib.import_module("torch.autograd.graph"), frames.BACKWARD))
    else:
        assert all((root / part.strip("/")).exists() for part in getattr(frames, name))


def undated(source: str) -> list[str]:
    """Statements with a private name of PyTorch and without the versions that it was seen on: in the docstring of a function
    or class, in the string below an assignment, in a comment for imports."""
    statements = ast.parse(source).body
    found = []
    for statement, below in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            said = ast.get_docstring(statement) or ""
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            said = source if re.search(r"^#.*(\n#.*)*Seen on 2", source, re.MULTILINE) else ""
        else:
            said = ast.unparse(below) if isinstance(below, ast.Expr) else ""
        if list(private_names(statement)) and not re.search(r"Seen\s+on\s+2\.\d", said):
            found.append(ast.unparse(statement).splitlines()[0])
    return found


@pytest.mark.parametrize("file", COMPAT, ids=lambda file: file.name)
def test_each_name_says_on_which_versions_it_was_seen(file: Path) -> None:
    assert undated(file.read_text()) == []


def test_a_name_without_versions_is_found() -> None:
    source = "add = torch._foreach_add_\n'Sums. Seen on 2.13.'\nmul = torch._foreach_mul_\n'Products.'\n"
    assert undated(source) == ["mul = torch._foreach_mul_"]
    assert undated("def f():\n    torch._foreach_mul_()\n") == ["def f():"]
    assert undated("from torch._C import x\n") == ["from torch._C import x"]
    assert undated("from torch._C import x\n# x: for\n# y. Seen on 2.13.\n") == []
