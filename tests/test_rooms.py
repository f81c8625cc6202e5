"""The rooms: who may import whom, read from the syntax trees, so that no import has to run."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"gtx", "scheduler", "monitor", "sparse_engine", "launch", "tests"}
STDLIB = set(sys.stdlib_module_names)
ENGINE = Path("gtx/engine.py")

COLLECTIVES = {
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp", "broadcast", "reduce", "all_reduce", "scatter"),
    *("gather", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "all_gather_object"),
    *("gather_object", "scatter_object_list", "broadcast_object_list", "new_group", "send_object_list"),
}


def files(*rooms: str) -> list[Path]:
    """Files of rooms, relative to the repository. A name ending in .py is a file."""
    found = [ROOT / room for room in rooms if room.endswith(".py") and (ROOT / room).exists()]
    for room in rooms:
        found += sorted((ROOT / room).rglob("*.py")) if not room.endswith(".py") else []
    return [path.relative_to(ROOT) for path in found]


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import and the dotted name it asks for, `from a import b` as `a.b`; relative ones as `.`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." if node.level else node.module or ""
            yield from ((node, f"{module}.{alias.name}") for alias in node.names)


def at_module_level(tree: ast.Module) -> set[ast.stmt]:
    """Import statements that run when the module is imported: not in a function, not under TYPE_CHECKING."""
    found: set[ast.stmt] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.add(node)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def collectives(tree: ast.AST) -> list[str]:
    """Uses of torch.distributed that talk to other ranks, under whatever name it was imported."""
    names = {"torch.distributed"}
    used = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            used += [f"{node.module}.{a.name}" for a in node.names if a.name in COLLECTIVES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and ast.unparse(node.value) in names:
            used.append(ast.unparse(node))
    return used


def allowed(room: str, name: str) -> bool:
    """Whether a file of `room` may import the dotted `name`."""
    top = name.split(".")[0]
    if room == "scheduler":
        return top in STDLIB | {"numpy", "scheduler"} or name.rpartition(".")[0] in (
            "monitor.records",
            "monitor.windows",
        )
    if room == "monitor":
        return top not in OURS - {"monitor"}
    if room == "sparse_engine":
        return top not in OURS - {"sparse_engine"}
    if room == "launch.py":
        return top in STDLIB | {"gtx"}
    return top not in {"launch", "tests"}  # gtx


@pytest.mark.parametrize("room", ["gtx", "scheduler", "monitor", "sparse_engine", "launch.py"])
def test_imports_go_down_only(room):
    wrong = [
        f"{path}:{node.lineno} imports {name}"
        for path in files(room)
        for node, name in imports(parse(path))
        if name.startswith(".") or not allowed(room, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_deepspeed_is_imported_at_one_border():
    wrong = [
        f"{path}:{node.lineno}"
        for path in files("gtx", "scheduler", "monitor", "sparse_engine", "launch.py")
        for node, name in imports(parse(path))
        if name.split(".")[0] == "deepspeed" and path != ENGINE
    ]
    assert not wrong, f"deepspeed is imported outside {ENGINE}: {', '.join(wrong)}"


def test_collectives_live_in_gtx_parallel_and_the_engine():
    wrong = [
        f"{path}: {use}"
        for path in files("gtx", "scheduler", "monitor", "sparse_engine", "launch.py")
        if path != ENGINE and path.parts[:2] != ("gtx", "parallel")
        for use in collectives(parse(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_dgl_is_imported_only_inside_functions():
    wrong = []
    for path in files("gtx", "scheduler", "monitor", "sparse_engine", "launch.py", "tests"):
        tree = parse(path)
        top = at_module_level(tree)
        wrong += [
            f"{path}:{node.lineno}" for node, name in imports(tree) if name.split(".")[0] == "dgl" and node in top
        ]
    assert not wrong, f"dgl is imported at module level: {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("room", "code"),
    [
        ("scheduler", "import torch"),
        ("scheduler", "from monitor.timers import PhaseTimer"),
        ("scheduler", "def f():\n    from gtx import config"),
        ("monitor", "import sparse_engine.pattern"),
        ("sparse_engine", "from monitor import PhaseTimer"),
        ("launch.py", "import torch"),
        ("gtx", "import launch"),
    ],
)
def test_the_test_sees_a_wrong_import(room, code):
    assert not all(allowed(room, name) for _, name in imports(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.send(x, 1)",
        "from torch import distributed\ndistributed.barrier()",
        "from torch.distributed import isend",
        "from torch.distributed.nn import all_reduce",
    ],
)
def test_the_test_sees_a_collective(code):
    assert collectives(ast.parse(code))
    assert not collectives(ast.parse("import torch.distributed as dist\ndist.get_rank()\nitems.gather(0)"))
    tree = ast.parse("import dgl\ndef f():\n    import dgl")
    assert len(at_module_level(tree)) == 1
