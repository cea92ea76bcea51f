"""The import graph of one folder, and its cycles."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from tests.support.import_rules import imports, tree_of


def import_graph(folder: Path, *, root: Path) -> dict[str, set[str]]:
    """Return the modules of a folder, each with the modules of the folder that it imports.

    Imports in functions and for type checkers count, too.
    """
    files = {_module(path.relative_to(root)): path for path in folder.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        relative = PurePosixPath(path.relative_to(root).as_posix())
        tree = tree_of(path.read_text(encoding="utf-8"))
        # `from a import b` is listed as a.b; b can be a module or a name in a.
        named = {module for _, module in imports(tree, path=relative)}
        named |= {module.rpartition(".")[0] for module in named - files.keys()}
        graph[name] = (named & files.keys()) - {name}
    return graph


def folder_graph(graph: dict[str, set[str]], *, depth: int) -> dict[str, set[str]]:
    """Return the graph between folders at most `depth` names below the root.

    A file belongs to its parent folder, so a folder with files and subfolders is a node itself.
    """
    packages = {module.rpartition(".")[0] for module in graph}

    def folder_of(module: str) -> str:
        parts = (module if module in packages else module.rpartition(".")[0]).split(".")
        return ".".join(parts[:depth])

    found: dict[str, set[str]] = {folder_of(module): set() for module in graph}
    for module, imported in graph.items():
        found[folder_of(module)] |= {folder_of(each) for each in imported} - {folder_of(module)}
    return found


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups: list[set[str]] = []
    for name in sorted(graph):
        group = {other for other in reached[name] if name in reached[other]}
        if group and group not in groups:
            groups.append(group)
    return groups


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
