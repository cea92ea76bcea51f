"""Import rules: no cycles, and few files with wide knowledge."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pytest

from payload.optimizers.registry import names
from payload.run_record.run_files import NAMES, RunPaths
from tests.support.import_graph import cycles, folder_graph, import_graph
from tests.support.import_rules import imports, tree_of

ROOT = Path(__file__).resolve().parents[1]
MOST_INVENTORY_FILES = 10
MOST_TOY_LINES = 59


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Return which modules of payload and infra import which of them."""
    found = {name: import_graph(ROOT / name, root=ROOT) for name in ("payload", "infra")}
    assert all(len(each) > 5 and any(each.values()) for each in found.values())
    return found["payload"] | found["infra"]


def test_no_module_imports_itself_through_others(graph: dict[str, set[str]]) -> None:
    assert cycles(graph) == []


def test_no_folder_imports_itself_through_others(graph: dict[str, set[str]]) -> None:
    for depth in (2, 3, 4):
        assert cycles(folder_graph(graph, depth=depth)) == []


def test_one_function_chooses_how_the_output_head_is_computed(graph: dict[str, set[str]]) -> None:
    ways = ("payload.train.models.split_head", "payload.train.models.chunked_loss")
    importers = {name for name, imported in graph.items() if imported & set(ways)}
    assert importers == {
        *("payload.train.models.head_loss", "payload.train.models.base"),
        "payload.train.families.gemma4.capped_head",
    }
    chosen = [
        call
        for path, call in calls_in(ROOT / "payload/train")
        if ast.unparse(call.func) in ("SplitHead", "FusedHead")
    ]
    functions = {
        function.name
        for path, function in nodes_in(ROOT / "payload/train", ast.FunctionDef)
        if any(call in chosen for call in ast.walk(function))
    }
    assert len(chosen) == 3 and functions == {"_head_loss"}


def strings_with(pattern: str) -> set[str]:
    """Return the files below payload with a string, or part of one, that has the pattern."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "payload").rglob("*.py"))
        for node in ast.walk(tree_of(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(pattern, node.value)
    }


def test_one_module_matches_a_checkpoint_s_name() -> None:
    # The second file runs on a node without this package; the trace's name is that of another file.
    homes = {"payload/formats/checkpoint_listing.py", "payload/orchestrate/node/look.py"}
    assert strings_with(r"step_\(?(\[0-9\]|\\d)\{8") == homes


def test_one_module_knows_the_names_in_a_run_s_folder() -> None:
    # Words that are also names of other things, and a program on nodes without this package.
    common = {"hosts", "logs", "profile", "track"}
    names = {each.name for each in vars_of(NAMES)} - common
    assert {"run.toml", "restored", "checkpoints", "samples.json"} <= names
    found = {
        (path.relative_to(ROOT).as_posix(), node.value)
        for path in sorted((ROOT / "payload").rglob("*.py"))
        for node in ast.walk(tree_of(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
        if path.parent.name != "node"
    }
    homes = {
        ("payload/formats/checkpoint_listing.py", "checkpoints"),
        ("payload/report/__main__.py", "report.html"),  # of several runs, in no run's folder
        ("payload/report/trackers/csv.py", "summary.json"),  # a tracker's own
        # An operator's record of a cluster.
        ("payload/stack/cluster_identity.py", "identity.json"),
        ("payload/orchestrate/commands/cluster_name_conflict.py", "identity.json"),
    }
    home = "payload/run_record/run_files.py"
    assert found - homes == {(home, name) for name in names - {"checkpoints"}}
    assert homes <= found


def vars_of(paths: RunPaths) -> Iterator[Path]:
    """Yield the path of each file and folder in a run's folder."""
    for name, value in vars(RunPaths).items():
        if isinstance(value, property):
            place = getattr(paths, name)
            if isinstance(place, RunPaths):
                place = place.root
            if isinstance(place, Path) and len(place.parts) == 1:
                yield place


def test_one_function_picks_the_checkpoint_with_the_lowest_loss_and_one_puts_a_copy_in_place() -> (
    None
):
    def callers(*names: str, of: str = "") -> set[str]:
        return {
            path.relative_to(ROOT).as_posix()
            for path, call in calls_in(ROOT / "payload")
            if isinstance(call.func, ast.Name) and call.func.id in names and of in ast.unparse(call)
        }

    # The two others compare evaluations, whatever was saved.
    homes = {"formats/checkpoint_listing", "run_record/run_statistics", "report/series"}
    assert callers("min", "sorted", of="val_loss") == {f"payload/{name}.py" for name in homes}
    fetching = {"payload/storage/checkpoints.py", "payload/orchestrate/ssh/files.py"}
    assert callers("load_foreign_manifest") == callers("complete_copy") == fetching


def test_one_module_hashes_files_and_so_reads_each_once() -> None:
    # Nodes do not have this package.
    homes = {"payload/core/file_hash.py", "payload/orchestrate/node/look.py"}
    found = {
        path for path, call in calls_in(ROOT / "payload") if "file_digest" in ast.unparse(call)
    }
    assert {path.relative_to(ROOT).as_posix() for path in found} <= homes


def test_one_module_formats_durations_and_one_sums_a_cluster_s_prices() -> None:
    names = {
        (path.relative_to(ROOT).as_posix(), node.name)
        for top in ("payload", "infra")
        for path in sorted((ROOT / top).rglob("*.py"))
        for node in ast.walk(tree_of(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and re.search(r"duration|as_clock|^in_words$|cluster_cost$", node.name)
    }
    assert names == {
        ("payload/core/durations.py", "as_clock"),
        ("payload/core/durations.py", "in_words"),
        ("payload/pricing/cluster_cost.py", "cluster_cost"),
    }
    prices = {
        path
        for top in ("payload", "infra")
        for path, call in calls_in(ROOT / top)
        if ast.unparse(call.func).rpartition(".")[2] in ("machine_price", "nat_price")
    }
    homes = ("payload/pricing/cluster_cost.py",)
    assert {path.relative_to(ROOT).as_posix() for path in prices} == {*homes}


_GOOGLE_HOMES = (
    *("payload/orchestrate/clouds/gcp/", "payload/orchestrate/clouds/pulumi/", "infra/gcp/"),
    # The store's client and its login.
    *(
        f"payload/storage/{name}.py"
        for name in ("bucket", "credentials", "google_environment_login")
    ),
)
_GOOGLE_NAMES = re.compile(
    r"googleapis\.com|\bgcp:[a-z]+/|\bprojects/[^ ]+/(zones|regions|global|locations)/"
)
# Settings of a stack whose values have Google's form: an image, and a key.
_GOOGLE_SETTINGS = {
    *(
        f"payload/stack/{name}.py"
        for name in ("google_name_patterns", "cloud_requirements", "stack_settings")
    ),
    "infra/config_checks.py",
}


def googles_names_in(path: Path) -> Iterator[str]:
    """Yield imports of Google's libraries in a file, and its strings with Google's names."""
    tree = tree_of(path.read_text(encoding="utf-8"))
    for _, module in imports(tree, path=PurePosixPath(path.relative_to(ROOT).as_posix())):
        if module.split(".")[0] in ("google", "pulumi_gcp"):
            yield module
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (is_text or isinstance(node, ast.JoinedStr)) and id(node) not in prose:
            text = str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
            if _GOOGLE_NAMES.search(text):
                yield text


def test_only_google_s_own_folders_know_its_libraries_and_its_names() -> None:
    files = [
        ROOT / "__main__.py",
        *(ROOT / "payload").rglob("*.py"),
        *(ROOT / "infra").rglob("*.py"),
    ]
    found = {
        name: names
        for path in [ROOT / "__main__.py", *sorted(files)]
        if not (name := path.relative_to(ROOT).as_posix()).startswith(_GOOGLE_HOMES)
        if re.search("google|gcp|projects/", path.read_text(encoding="utf-8"))
        if (names := list(googles_names_in(path)))
    }
    assert found.keys() == _GOOGLE_SETTINGS, found
    assert all(re.search("images|keyRings", text) for names in found.values() for text in names), (
        found
    )


def test_google_s_own_side_knows_nothing_of_pulumi(graph: dict[str, set[str]]) -> None:
    gcp, pulumi = (f"payload.orchestrate.clouds.{name}" for name in ("gcp", "pulumi"))
    found = {name: graph[name] for name in graph if name.startswith(gcp)}
    assert len(found) > 10
    assert not [each for names in found.values() for each in names if each.startswith(pulumi)]


def test_one_module_makes_and_reads_the_operator_s_key() -> None:
    makers, starters = set(), set()
    for path in [each for top in ("payload", "infra") for each in (ROOT / top).rglob("*.py")]:
        for node in ast.walk(tree_of(path.read_text(encoding="utf-8"))):
            name = path.relative_to(ROOT).as_posix()
            if isinstance(node, ast.Attribute) and node.attr in (
                "generate",
                "load_ssh_private_key",
            ):
                makers.add(name)
            first = node.elts[0] if isinstance(node, ast.List) and node.elts else None
            if isinstance(first, ast.Constant) and first.value == "ssh-keygen":
                starters.add(name)
    assert makers == {"payload/stack/operator_key_file.py"}
    # A run's own key, which never leaves the head.
    assert starters == {"payload/orchestrate/node/run_key.py"}


def test_a_regular_expression_is_written_once() -> None:
    places: dict[str, set[str]] = {}
    for top in ("payload", "infra"):
        for path, call in calls_in(ROOT / top):
            if path.is_relative_to(ROOT / "payload/orchestrate/node"):
                continue  # It runs without this package.
            first = call.args[0] if call.args else None
            if ast.unparse(call.func).startswith("re.") and isinstance(first, ast.Constant):
                places.setdefault(str(first.value), set()).add(path.relative_to(ROOT).as_posix())
    assert len(places) > 100
    twice = {text: files for text, files in places.items() if len(text) > 12 and len(files) > 1}
    assert twice == {}


def test_one_folder_reads_what_fields_declare() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for top in ("payload", "infra")
        for path, call in calls_in(ROOT / top)
        if ast.unparse(call.func).rpartition(".")[2] == "get_type_hints"
    }
    # Of files and messages, and of command lines.
    assert readers == {"payload/core/command_line.py", "payload/core/validation/readers.py"}


def test_one_module_makes_one_line_of_a_text_and_one_finds_a_network_interface() -> None:
    calls = {
        path.relative_to(ROOT).as_posix()
        for top in ("payload", "infra")
        for path, call in calls_in(ROOT / top)
        if makes_one_line(call)
    }
    # Quoted values and names, below the other.
    assert calls == {"payload/core/one_line.py", "payload/core/printable_text.py"}
    found = {
        path.relative_to(ROOT).as_posix()
        for path, call in calls_in(ROOT / "payload")
        if isinstance(call.func, ast.Attribute) and call.func.attr == "if_nameindex"
    }
    assert found == {"payload/machines/network_interface.py"}


def test_one_module_makes_the_terminal_s_tables() -> None:
    made = {
        path.relative_to(ROOT).as_posix()
        for path, call in calls_in(ROOT / "payload")
        if ast.unparse(call.func) in ("Table", "rich.table.Table")
    }
    assert made == {"payload/orchestrate/terminal/tables.py"}


def makes_one_line(call: ast.Call) -> bool:
    """Return True if it joins a text's words, or replaces the line breaks of a printable text."""
    if not isinstance(call.func, ast.Attribute):
        return False
    inner = call.args[0] if call.func.attr == "join" and call.args else call.func.value
    name = ast.unparse(inner.func) if isinstance(inner, ast.Call) else ""
    if call.func.attr == "join":
        is_plain = isinstance(inner, ast.Call) and not inner.args
        return ast.unparse(call.func.value) == "' '" and is_plain and name.endswith(".split")
    return call.func.attr == "replace" and name == "printable"


_RATE = re.compile(r"(^|_)(flops_per_s|peak|mfu)$")
_SECONDS = re.compile(r"(_s|seconds)$")


def test_one_package_turns_flops_into_time_and_one_module_knows_mfu() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), ast.unparse(division))
        for path, division in nodes_in(ROOT / "payload", ast.BinOp)
        if makes_time_of_flops(division) and path.parent != ROOT / "payload/estimates"
    }
    # The share of a peak to expect, and how much faster one dtype is than another.
    assert found == {
        ("payload/machines/core_speed.py", "rate / (rate + core_flops_per_s)"),
        (
            "payload/orchestrate/findings/trial.py",
            "self.bf16_flops_per_s / self.fp32_flops_per_s",
        ),
    }
    homes = {
        (path.relative_to(ROOT).as_posix(), function.name)
        for path, function in nodes_in(ROOT / "payload", ast.FunctionDef)
        if function.name in ("compute_time", "mfu")
    }
    home = "payload/estimates/compute_time.py"
    assert homes == {(home, "compute_time"), (home, "mfu")}


@pytest.mark.parametrize(
    ("text", "is_time"),
    [
        ("flops / (peak_flops_per_s * mfu) * 2", True),
        ("flops / (cores * core * mfu)", True),
        ("tokens * spec.flops_per_token() / speed.flops_per_s", True),
        ("numbers.flops_per_step / step_s", True),
        ("numbers.flops_per_step / numbers.tokens_per_step", False),
        ("speed.flops_per_s / 1e12", False),
    ],
)
def test_divisions_that_turn_flops_into_time_are_found(text: str, is_time: bool) -> None:
    divisions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.BinOp)]
    assert any(map(makes_time_of_flops, divisions)) is is_time


def makes_time_of_flops(division: ast.BinOp) -> bool:
    """Return True if it divides by a number of FLOP/s, or FLOPs by seconds."""
    above, below = ([*names_in(side)] for side in (division.left, division.right))
    if not isinstance(division.op, ast.Div | ast.FloorDiv):
        return False
    if any(_RATE.search(each) for each in below):
        return True
    return any("flops" in each for each in above) and any(_SECONDS.search(each) for each in below)


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names and the attributes' names below `node`."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute):
            yield each.id if isinstance(each, ast.Name) else each.attr


_Node = TypeVar("_Node", bound=ast.AST)


def nodes_in(folder: Path, kind: type[_Node]) -> Iterator[tuple[Path, _Node]]:
    """Yield every node of the `kind` in the modules below `folder`."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(tree_of(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path, node


def test_no_module_outside_their_package_names_an_optimizer() -> None:
    found = strings_with(rf"^({'|'.join(names())})$")
    others = {path for path in found if not path.startswith("payload/optimizers/")}
    # `adamw` is a function of the kernels, too.
    assert others == {"payload/kernels/library.py"}


_SPLITS = {"partition", "rpartition", "split", "rsplit"}


def test_no_code_splits_a_message_into_sentences() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, node in calls_in(ROOT / "payload")
        if isinstance(node.func, ast.Attribute) and node.func.attr in _SPLITS
        if any(isinstance(each, ast.Constant) and each.value == ". " for each in node.args)
    ]
    assert found == []


def calls_in(folder: Path) -> Iterator[tuple[Path, ast.Call]]:
    """Return every call in the modules below `folder`."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(tree_of(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path, node


def takers_of(*kinds: str, within: str) -> set[tuple[str, str]]:
    """Return file and name of every function below `within` that has a parameter of such a type."""
    return {
        (path.relative_to(ROOT).as_posix(), node.name)
        for path in sorted((ROOT / within).rglob("*.py"))
        for node in ast.walk(tree_of(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for each in [*node.args.args, *node.args.kwonlyargs]
        if each.annotation is not None
        and set(kinds) & set(re.findall(r"\w+", ast.unparse(each.annotation)))
    }


def test_only_a_command_line_s_own_files_take_what_argparse_has_parsed() -> None:
    """All code below accepts the command's typed options."""
    found = {path for path, _ in takers_of("Namespace", within="payload/orchestrate")}
    assert found == {"payload/orchestrate/__main__.py"}


def test_an_inventory_passes_few_files_on_its_way_to_the_launcher() -> None:
    """Files that need less accept nodes, ranks or routes. Those of clouds/ make the inventory."""
    found = {
        path
        for within in ("payload/orchestrate", "payload/launch")
        for path, _ in takers_of(
            "ClusterInventory", "ResolvedInventory", "PlanTarget", within=within
        )
        if "/clouds/" not in path
    }
    assert len(found) <= MOST_INVENTORY_FILES, sorted(found)
    assert not {path for path in found if path.startswith("payload/launch/launchers/")}


_DECISIONS = {"candidates", "choose_launcher", "place", "place_ranks", "settle_batch", "time_limit"}


def test_planning_alone_makes_a_launcher_s_job_and_decides_what_a_site_carries_out() -> None:
    names = {
        (path.relative_to(ROOT).as_posix(), ast.unparse(call.func).rpartition(".")[2])
        for path, call in calls_in(ROOT / "payload" / "orchestrate")
    }
    makers = {path for path, name in names if name == "common_environment"}
    assert makers == {"payload/orchestrate/runs/launcher_command.py"}
    sites = {(path, name) for path, name in names if path.startswith("payload/orchestrate/sites/")}
    assert sites and not {each for each in sites if each[1] in _DECISIONS}
    rewritten = {
        (path.name, ast.unparse(call))
        for path, call in calls_in(ROOT / "payload" / "orchestrate" / "sites")
        if ast.unparse(call.func) == "replace" and "config" in ast.unparse(call)
    }
    assert rewritten == set()


def test_only_the_inventory_and_the_route_know_what_an_access_kind_means() -> None:
    homes = {"payload/machines/inventory.py", "payload/orchestrate/ssh/remote_calls.py"}
    found = {
        path.relative_to(ROOT).as_posix()
        for top in ("payload", "infra")
        for path in sorted((ROOT / top).rglob("*.py"))
        for node in ast.walk(tree_of(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and each.attr == "kind"
        if "access" in ast.unparse(each.value) or path.name == "inventory.py"
    }
    assert found == homes


@pytest.mark.parametrize("toy", ["launch/toy_launcher.py", "orchestrate/toy_site.py"])
def test_a_new_launcher_and_a_new_site_are_one_short_file(toy: str) -> None:
    lines = (ROOT / "tests" / toy).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_TOY_LINES


_FRAGMENTS = ("What ", "How ", "Whether ", "Of ", "That ", "Anew")
_CODE = ("benchmarks", "bootstrap", "infra", "payload", "tests")


@pytest.mark.parametrize("folder", _CODE)
def test_a_docstring_begins_with_a_noun_phrase_or_a_verb(folder: str) -> None:
    # Most files have no string with this start, and are not parsed.
    begins = re.compile(rf"[\"'\\]\s*({'|'.join(_FRAGMENTS)})")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if begins.search(path.read_text(encoding="utf-8"))
        for line, text in docstrings_in(path)
        if text.startswith(_FRAGMENTS)
    ]
    assert found == []


def docstrings_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, including strings below fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield node.lineno, text


def test_tests_have_their_helpers_in_folders() -> None:
    loose = {path.name for path in (ROOT / "tests").glob("*.py") if "test_" not in path.name}
    assert loose == {"__init__.py", "conftest.py"}


def test_a_circle_is_found_in_functions_and_for_type_checkers(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    files = {
        "__init__": "",
        "one": "from package.two import name\n",
        "two": "def f():\n    from package import three\n",
        "three": "if TYPE_CHECKING:\n    from .one import name\n",
        "four": "import package.one\n",
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    found = cycles(import_graph(package, root=tmp_path))
    assert found == [{"package.one", "package.two", "package.three"}]


def test_a_circle_of_folders_is_found_where_no_file_is_in_one() -> None:
    graph = {
        "p": set[str](),
        "p.a": set[str](),
        "p.b": set[str](),
        "p.a.one": {"p.b.one"},
        "p.b.one": set[str](),
        "p.b.two": {"p.a.two"},
        "p.a.two": set[str](),
    }
    assert cycles(graph) == []
    assert cycles(folder_graph(graph, depth=2)) == [{"p.a", "p.b"}]
    graph["p.b.two"] = set()
    assert cycles(folder_graph(graph, depth=2)) == []
