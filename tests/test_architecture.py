"""Who may import whom (design, section 6), read from the sources without running them.

`Snakefile -> workflow/scripts -> evals -> instruments -> decision`: nothing points back. The instruments are the
emulator, the simulator and the engine that moves weights (offload); they share the decision and the residency, the
policies, the hook, the log and `trace`, which holds what a router chose and replays policies over it: an instrument may
import the trace, the trace imports no instrument.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTRUMENTS = {"emulator", "offload_engine", "simulator"}  # modules of engine
COMPILED = {Path("engine/kernels.py"), Path("engine/scheduler.py")}  # products of experts; what is prefetched
ENGINE = sorted(path.relative_to(ROOT) for path in (ROOT / "engine").rglob("*.py"))
EVALS = sorted(path.relative_to(ROOT) for path in (ROOT / "evals").rglob("*.py"))
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "workflow").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module a source imports, anywhere in it, with the names taken from packages of ours: `engine.log.count`."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def engine_modules(path: Path) -> set[str]:
    """Modules of engine that a source imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("engine.")}


def compiled(path: Path) -> list[str]:
    """Functions that numba compiles in a source."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
    ]


def test_there_is_something_to_walk():
    assert len(ENGINE) >= 9 and len(EVALS) >= 5


@pytest.mark.parametrize("path", ENGINE, ids=str)
def test_engine_points_at_nothing_above_it(path):
    assert not packages(path) & {"evals", "lm_eval", "snakemake", "tests", "workflow"}


@pytest.mark.parametrize("path", EVALS, ids=str)
def test_evals_point_at_nothing_above_them(path):
    assert not packages(path) & {"snakemake", "tests", "workflow"}


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_scripts_run_without_snakemake(path):
    assert not packages(path) & {"snakemake", "tests"}


def test_the_decision_imports_numpy_and_numba_alone():
    assert packages(Path("engine/decision.py")) <= {"__future__", "numba", "numpy", "typing"}


def reached(module: str) -> set[str]:
    """The modules of engine that one of them needs, directly or through others."""
    found, new = set(), {module}
    while new:
        found |= new
        new = set().union(*(engine_modules(Path(f"engine/{name}.py")) for name in new)) - found
    return found - {module}


@pytest.mark.parametrize("module", sorted(INSTRUMENTS | {"trace"}))
def test_instruments_do_not_import_one_another(module):
    """Nor through a third: a helper built on one instrument (generate on the emulator's phases) is no other's."""
    if not (ROOT / "engine" / f"{module}.py").exists():
        pytest.skip(f"engine/{module}.py is not written yet")
    assert not reached(module) & INSTRUMENTS


def test_engine_has_no_circle():
    graph = {path.stem: engine_modules(path) for path in ENGINE}
    while graph:
        leaves = [name for name, needs in graph.items() if not needs & set(graph)]
        assert leaves, f"a circle among {sorted(graph)}"
        for name in leaves:
            del graph[name]


@pytest.mark.parametrize("path", [*ENGINE, *EVALS, *SCRIPTS], ids=str)
def test_the_decision_is_compiled_in_one_place(path):
    """Elsewhere numba may serve other ends (training kernels), but no compiled code reads the decision's state.

    The clock interleaves layers and so loops over events itself; it may call the decision, and imports of it nothing
    that writes a slot but `decide_event` and `complete_load`.
    """
    if path == Path("engine/decision.py"):
        assert {"scan", "decide_event"} <= set(compiled(path))
        return
    if path == Path("engine/clock.py"):
        taken = {name.removeprefix("engine.decision.") for name in imports(path) if name.startswith("engine.decision.")}
        functions = {name for name in taken if name.islower()}
        assert functions == {"complete_load", "decide_event", "make_work", "ready", "refresh_keys"}
        return
    if path.parts[0] == "engine" and path not in COMPILED:
        assert "numba" not in packages(path)
    if compiled(path) or "numba" in packages(path):
        assert not engine_modules(path) & {"decision", "residency"}


@pytest.mark.parametrize("path", [*ENGINE, *EVALS, *SCRIPTS], ids=str)
def test_no_source_is_written_for_one_model_family(path):
    """Families are recognised by their routers; none has a file, and none of its modelling code is imported."""
    assert not any(name.startswith("transformers.models.") for name in imports(path))
