"""The shape of the code: imports point down, importing is cheap, files and functions stay short."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxtp
from jaxtp.mesh.axes import Axis

PACKAGE = Path(__file__).parent.parent / "jaxtp"
FILES = {
    ".".join(("jaxtp", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Lowest first. A module imports from lower rows and from its own package, never from its own row.
LAYERS = """
errors
mesh
hardware
processes
plan
config rules
cost placement
activations
layers
compile
inspect models
io
train generation
cli
"""
RANK = {f"jaxtp.{name}": i for i, row in enumerate(LAYERS.split("\n")) for name in row.split()}
RANK["jaxtp"] = len(RANK)  # the front door

# Imports inside functions are for packages that are heavy and not always needed.
DEFERRED = {
    "flax",
    "optax",
    "orbax",
    "pydantic",
    "qwix",
    "rich",
    "safetensors",
    "tokenizers",
    "jinja2",
}
HEAVY = (*sorted(DEFERRED), "tyro", "grain", "tensorstore")

every_file = pytest.mark.parametrize("module", FILES)


def imports(tree):
    """Modules that a syntax tree imports, deferred ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in FILES else node.module


def parse(module):
    return ast.parse(FILES[module].read_text())


def layer(module):
    return ".".join(module.split(".")[:2])


@every_file
def test_imports_point_down(module):
    here = layer(module)
    assert here in RANK, f"{here} has no row in LAYERS"
    for target in imports(parse(module)):
        there = layer(target)
        if there.split(".")[0] == "jaxtp" and there != here:
            assert RANK[there] < RANK[here], f"{module} must not import {target}"


def test_no_module_imports_itself_through_others():
    graph = {module: {t for t in imports(parse(module)) if t in FILES} for module in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@every_file
def test_only_heavy_packages_are_imported_inside_functions(module):
    functions = (n for n in ast.walk(parse(module)) if isinstance(n, ast.FunctionDef))
    deferred = {name.split(".")[0] for function in functions for name in imports(function)}
    assert deferred <= DEFERRED


@every_file
def test_only_the_axis_table_lists_mesh_axes(module):
    if module == "jaxtp.mesh.axes":
        return
    for node in ast.walk(parse(module)):
        listed = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        names = [n.value for n in listed if isinstance(n, ast.Constant) and n.value in set(Axis)]
        assert len(names) < 2, f"line {node.lineno} lists {names}: ask the rows of Axis instead"


@every_file
def test_only_public_jax_is_imported(module):
    private = [name for name in imports(parse(module)) if name.startswith(("jax._", "jaxlib"))]
    assert not private


@pytest.mark.parametrize("module", [m for m in FILES if layer(m) == "jaxtp.models"])
def test_models_know_no_mesh(module):
    targets = set(imports(parse(module)))
    assert not {
        t for t in targets if t.startswith(("jax.sharding", "jaxtp.mesh", "jaxtp.plan.decisions"))
    }


@every_file
def test_files_and_functions_stay_short(module):
    text = FILES[module].read_text()
    assert len(text.splitlines()) <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            length = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
            assert length <= 60, f"{node.name} has {length} lines"


@every_file
def test_every_module_says_what_it_holds(module):
    assert ast.get_docstring(parse(module))


@pytest.mark.parametrize("room", sorted({layer(m) for m in FILES} - {"jaxtp"}))
def test_every_room_says_what_comes_in_what_goes_out_and_what_it_never_knows(room):
    assert FILES[room].name == "__init__.py", "at the root of the package only the front door"
    docstring = ast.get_docstring(parse(room)) or ""
    assert all(f"{word}:" in docstring for word in ("In", "Out", "Never knows"))


def test_import_starts_no_backend_and_loads_nothing_heavy():
    # The setting is refused once a backend exists.
    code = (
        "import sys, jaxtp, jax; jax.config.update('jax_num_cpu_devices', 8); "
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_planning_a_file_loads_no_training_and_no_checkpoints(tmp_path):
    tree = tmp_path / "tree.json"
    jaxtp.dump_tree({"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}, tree)
    code = (
        "import sys; from jaxtp.cli.commands import main; "
        f"main(['plan', {str(tree)!r}, '--tp', '2']); "
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in ('optax', 'orbax', 'grain') "
        "or m.startswith(('jaxtp.train', 'jaxtp.models', 'jaxtp.compile'))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == ""
