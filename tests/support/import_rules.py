"""The import table of CONTRIBUTING.md, checked over the syntax tree."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

LOWER = (
    *("core", "optimizers", "machines", "formats", "models", "config", "run_record", "pricing"),
    *("stack", "estimates", "weights"),
)
"""Packages without side effects by tier; each can import the tiers before it."""
UPPER = (
    *(
        "kernels",
        "launch",
        "orchestrate",
        "supervise",
        "data",
        "train",
        "generate",
        "evaluate",
        "export",
    ),
    *("cli", "finetune", "first_run", "report", "storage", "monitor"),
)
PACKAGES = frozenset({*LOWER, *UPPER})
SMALL_LIBRARIES = frozenset({"tomli_w"})
"""Libraries that the packages below may import next to the standard library: `dependencies` of
pyproject.toml. Programs in payload/orchestrate/node and bootstrap may not."""
ROOT = "root"
"""`payload/__init__.py`, which only has the version."""
PULUMI = frozenset({"pulumi", "pulumi_gcp", "pulumi_command", "pulumi_random", "pulumi_tls"})

# A module may compute constants at import, but have no side effects.
_WORLDLY_MODULES = frozenset(
    {"datetime", "logging", "os", "random", "secrets", "shutil", "signal", "socket"}
    | {"subprocess", "sys", "tempfile", "threading", "time", "torch"}
)
_WORLDLY_CALLS = frozenset(
    {"basicConfig", "eval", "exec", "exists", "glob", "input", "iterdir", "main", "mkdir"}
    | {"open", "parse_args", "print", "read_bytes", "read_text", "unlink", "write_text"}
)
_HARMLESS_CALLS = frozenset({"logging.getLogger"})


@dataclass(frozen=True, slots=True)
class Rule:
    """The imports that an area of the code may have."""

    own: frozenset[str]
    """Allowed packages of `payload`, and its root."""
    never: frozenset[str] = frozenset()
    """Allowed modules outside `payload`."""
    stdlib_only: bool = False


RULES = {
    ROOT: Rule(frozenset(), stdlib_only=True),
    **{
        name: Rule(frozenset({ROOT, *LOWER[: tier + 1]}), stdlib_only=True)
        for tier, name in enumerate(LOWER)
    },
    "infra": Rule(
        frozenset({"core", "machines", "pricing", "stack"}), frozenset({"paramiko", "torch"})
    ),
    "launch": Rule(
        frozenset({ROOT, *LOWER, "launch"}),
        frozenset({"paramiko", "torch", "subprocess"}) | PULUMI,
    ),
    "orchestrate": Rule(
        frozenset({ROOT, *LOWER, "launch", "storage", "monitor", "orchestrate"}),
        frozenset({"torch", "infra"}) | PULUMI,
    ),
    "supervise": Rule(
        frozenset({ROOT, *LOWER, "launch", "monitor", "supervise"}),
        frozenset({"torch", "paramiko", "infra"}) | PULUMI,
    ),
    "monitor": Rule(
        frozenset({ROOT, *LOWER, "launch", "monitor"}),
        frozenset({"torch", "numpy", "paramiko", "infra"}) | PULUMI,
    ),
    "storage": Rule(
        frozenset({ROOT, *LOWER, "storage"}),
        frozenset({"torch", "numpy", "paramiko", "infra"}) | PULUMI,
    ),
    # It loads the command lines and programs of other packages by name.
    "cli": Rule(
        frozenset({ROOT, *LOWER, "cli"}), frozenset({"torch", "numpy", "paramiko"}) | PULUMI
    ),
    "data": Rule(frozenset({ROOT, *LOWER, "data"}), frozenset({"paramiko", "infra"}) | PULUMI),
    # It starts the programs of other packages as processes.
    "finetune": Rule(
        frozenset({ROOT, *LOWER, "data", "finetune"}),
        frozenset({"paramiko", "infra", "torch"}) | PULUMI,
    ),
    "first_run": Rule(
        frozenset({ROOT, *LOWER, "first_run"}),
        frozenset({"paramiko", "infra", "torch", "numpy"}) | PULUMI,
    ),
    "report": Rule(
        frozenset({ROOT, *LOWER, "report"}),
        frozenset({"paramiko", "infra", "torch", "numpy"}) | PULUMI,
    ),
    "kernels": Rule(
        frozenset({ROOT, *LOWER, "kernels"}), frozenset({"paramiko", "infra"}) | PULUMI
    ),
    "train": Rule(
        frozenset({ROOT, *LOWER, "kernels", "data", "train"}),
        frozenset({"paramiko", "infra"}) | PULUMI,
    ),
    "generate": Rule(
        frozenset({ROOT, *LOWER, "data", "train", "generate", "evaluate", "export"}),
        frozenset({"paramiko", "infra"}) | PULUMI,
    ),
    "evaluate": Rule(
        frozenset({ROOT, *LOWER, "data", "train", "generate", "evaluate"}),
        frozenset({"paramiko", "infra"}) | PULUMI,
    ),
    "export": Rule(
        frozenset({ROOT, *LOWER, "data", "train", "generate", "export"}),
        frozenset({"paramiko", "infra"}) | PULUMI,
    ),
}
GOOGLE_MODULES = (
    PurePosixPath("payload/orchestrate/clouds/gcp/client.py"),
    PurePosixPath("payload/storage/bucket.py"),
    PurePosixPath("payload/storage/credentials.py"),
)
KEY_MODULE = PurePosixPath("payload/stack/operator_key_file.py")
HUB_MODULES = (PurePosixPath("payload/weights/hub.py"),)
REGISTRIES = frozenset(
    PurePosixPath(folder, "registry.py")
    for folder in (
        "payload/models",
        "payload/optimizers",
        "payload/train/losses",
        "payload/launch/launchers",
        "payload/report/trackers",
    )
) | {
    PurePosixPath("payload/cli/completion.py"),
    PurePosixPath("payload/orchestrate/commands/registry.py"),
    PurePosixPath("payload/orchestrate/sites/registry.py"),
    PurePosixPath("payload/train/models/loading.py"),
}
"""Modules that import the files of their package by listing it, or parsers by a table."""
OPTIMIZERS = PurePosixPath("payload/optimizers")
"""Package whose files import torch to construct an optimizer, and for type checkers."""
OPTIMIZER_PACKAGES = frozenset({"torch", "bitsandbytes"})
EXPORTER_MODULE = PurePosixPath("payload/monitor/exporter.py")
SSH_MODULES = tuple(
    PurePosixPath("payload/orchestrate/ssh", name)
    for name in ("paramiko_transport.py", "connection.py", "authentication.py")
)


@cache
def tree_of(source: str) -> ast.Module:
    """Return the syntax tree of a file's text, parsed once for all rules."""
    return ast.parse(source)


def violations(path: PurePosixPath, source: str) -> list[str]:
    """Return the violations in `source`, the text of the file at `path`."""
    area = _area(path)
    if area is None:
        return []
    tree = tree_of(source)
    deferred = _deferred(tree) if path.parent == OPTIMIZERS else set()
    found = [
        f"{path}:{line}: {area} may not import {module}"
        for line, module in imports(tree, path=path)
        if not _allowed(module, area=area, path=path)
        if not (module.split(".")[0] in OPTIMIZER_PACKAGES and line in deferred)
    ]
    return found + [f"{path}:{line}: {what} at import" for line, what in work_at_import(tree)]


def _deferred(tree: ast.Module) -> set[int]:
    """Return the lines that only run in function calls, or that only type checkers read."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    }


def imports(tree: ast.Module, *, path: PurePosixPath) -> Iterator[tuple[int, str]]:
    """Yield line and full module name of every import in the file, including those in functions.

    `from a import b` counts as `a.b`, as b can be a module. An import by a computed name counts as
    a module called `?`.
    """
    package = path.parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func) in {
            "__import__",
            "import_module",
        }:
            name = node.args[0] if node.args else None
            value = name.value if isinstance(name, ast.Constant) else None
            yield node.lineno, value if isinstance(value, str) else "?"


# Unpickling runs code that the input names: a constructor can be any function.
_UNPICKLING_MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "pickletools", "shelve", "marshal", "dbm"}
    | {"dill", "cloudpickle", "joblib", "jsonpickle", "multiprocessing"}
)
_UNPICKLING_NAMES = frozenset(
    {"ProcessPoolExecutor", "read_pickle", "to_pickle"}
    | {f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}
    | {"all_gather_object", "gather_object", "broadcast_object", "gather_object_list"}
)
# A file without these texts has no finding and is not parsed.
_UNPICKLING_TRACES = re.compile(
    "|".join([*sorted(_UNPICKLING_MODULES | _UNPICKLING_NAMES), "__import__", "import_module"])
    + r"|allow_pickle|torch\W*load\b"
)


def unpickling(path: PurePosixPath, source: str) -> list[str]:
    """Return a line per use of pickle, or of a function that uses it, in `source`."""
    # Python normalises letters beyond ASCII, so that a name can contain them.
    if source.isascii() and not _UNPICKLING_TRACES.search(source):
        return []
    tree = ast.parse(source, filename=str(path))
    found = [
        (line, module)
        for line, module in imports(tree, path=path)
        if module.split(".")[0] in _UNPICKLING_MODULES
        or "torch.multiprocessing" in module
        or module.rpartition(".")[2] in _UNPICKLING_NAMES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _UNPICKLING_NAMES:
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.multiprocessing":
            found.append((node.lineno, "torch.multiprocessing"))
        elif isinstance(node, ast.Call):
            found += [(node.lineno, what) for what in _unpickling_call(node)]
    return [f"{path}:{line}: {what}" for line, what in sorted(set(found))]


def _unpickling_call(call: ast.Call) -> Iterator[str]:
    keywords = {each.arg: each.value for each in call.keywords}

    def is_on(name: str) -> bool:
        value = keywords.get(name)
        return isinstance(value, ast.Constant) and value.value is True

    if ast.unparse(call.func) == "torch.load" and not is_on("weights_only"):
        yield "torch.load"
    if "allow_pickle" in keywords and not (
        isinstance(keywords["allow_pickle"], ast.Constant)
        and keywords["allow_pickle"].value is False
    ):
        yield "allow_pickle"


def work_at_import(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and kind of every statement that does more than define and compute names."""
    yield from _work(tree.body)


def _work(statements: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for statement in statements:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case ast.ClassDef():
                yield from _work(statement.body)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Assert():
                yield from _calls(statement)
            case ast.If() if _is_main_guard(statement.test):
                continue
            case ast.If():
                yield from _work([*statement.body, *statement.orelse])
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                continue
            case _:
                yield statement.lineno, type(statement).__name__.lower()


def _calls(statement: ast.stmt) -> Iterator[tuple[int, str]]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            first, last = name.split(".")[0], _last_name(node.func)
            worldly = first in _WORLDLY_MODULES or last in _WORLDLY_CALLS
            if worldly and name not in _HARMLESS_CALLS:
                yield node.lineno, f"call of {name}"


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else "?"


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and _last_name(test.left) == "__name__"


def _area(path: PurePosixPath) -> str | None:
    match path.parts:
        case ("payload", "__main__.py"):
            return "cli"
        case ("payload", _):
            return ROOT
        case ("payload", package, *_):
            return package
        case ("infra", *_):
            return "infra"
        case _:
            return None


def _allowed(module: str, *, area: str, path: PurePosixPath) -> bool:
    rule = RULES[area]
    top, *rest = module.split(".")
    if top == "payload":
        part = rest[0] if rest and rest[0] in PACKAGES else ROOT
        return part in rule.own
    if top == "infra":
        return area == "infra"
    if module == "?":
        return path in REGISTRIES
    if top == "paramiko":
        return path in SSH_MODULES
    if top == "prometheus_client":
        return path == EXPORTER_MODULE
    if top == "cryptography":
        return path == KEY_MODULE
    if top == "google":
        return path in GOOGLE_MODULES
    if top == "huggingface_hub" and area in (*LOWER, "orchestrate"):
        return path in HUB_MODULES
    if rule.stdlib_only:
        return top in sys.stdlib_module_names or top in SMALL_LIBRARIES
    return top not in rule.never
