"""The Triton kernels on Triton's interpreter, which needs no GPU: values, every gradient, and what is launched on what.

The interpreter is chosen when kernels are defined, so one process of its own runs all cases and leaves its results.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sparse_engine_attention import (
    EMPTY_CASES,
    bias_of,
    full_pattern,
    gather_scatter,
    hub_pattern,
    inputs,
    on,
    random_pattern,
    with_gradients,
)
from torch import Tensor

from sparse_engine import SparsePattern, resolve_backend, sparse_attention, triton_backend
from sparse_engine.triton_backend import PIECE, TILES, Tile, make_schedule

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton has wheels for Linux only")

HERE = Path(__file__).resolve().parent
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def hubs_both_ways() -> SparsePattern:
    """Row 0 and column 0 have edges for more than one piece, beside rows of few and row 30 of none."""
    long = 2 * PIECE + 77
    dst = torch.cat([torch.zeros(long, dtype=torch.int64), torch.arange(long) % 30, torch.arange(29)])
    src = torch.cat([torch.arange(long) % 23, torch.zeros(long, dtype=torch.int64), torch.arange(29) % 23])
    return SparsePattern.from_edges(dst, src, 31, 23)


def of_degrees(*degrees: int, num_cols: int = 19) -> SparsePattern:
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    return SparsePattern(indptr, torch.arange(int(indptr[-1])) * 7 % num_cols, num_cols)


Case = tuple[SparsePattern, int, int, torch.dtype, str]
CASES: dict[str, Case] = {  # pattern, heads, head dim, dtype, bias
    "width 1": (random_pattern(9, 11, 40), 1, 1, F32, "none"),
    "width 1, 5 heads": (random_pattern(12, 7, 50), 5, 1, F32, "per head"),
    "width 3": (random_pattern(13, 13, 70), 2, 3, F32, "shared"),
    "width 17": (random_pattern(10, 9, 40), 1, 17, F32, "per head"),
    "width 17, 5 heads": (random_pattern(10, 9, 60), 5, 17, F32, "none"),
    "width 64": (random_pattern(8, 9, 40), 4, 64, F32, "per head"),
    "empty rows": (random_pattern(50, 50, 60), 2, 8, F32, "none"),
    "fewer queries than keys": (random_pattern(5, 41, 70), 4, 8, F32, "per head"),
    "more queries than keys": (random_pattern(41, 5, 70), 4, 8, F32, "none"),
    "hub in pieces": (hubs_both_ways(), 2, 8, F32, "per head"),
    "hub in pieces, bf16": (hubs_both_ways(), 3, 5, BF16, "shared"),
    "hub and isolated node": (hub_pattern(), 2, 8, F32, "shared"),
    "every group of degrees": (of_degrees(0, 1, 8, 9, 0, 32, 33, 200, 7), 2, 4, F32, "per head"),
    "self loops only": (SparsePattern(torch.arange(8), torch.arange(7), 7), 2, 4, F32, "none"),
    "full": (full_pattern(11, 9), 3, 5, F32, "none"),
    "duplicates": (random_pattern(4, 3, 90), 2, 4, F32, "per head"),
    "int32": (SparsePattern(torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1], dtype=torch.int32), 2), 2, 4, F32, "none"),
    "bf16": (random_pattern(13, 31, 120), 4, 8, BF16, "none"),
    "bf16, bias": (random_pattern(31, 29, 150), 3, 7, BF16, "per head"),
    "fp16": (random_pattern(13, 31, 120), 4, 8, F16, "per head"),
}


def tensors_of(case: Case) -> tuple[list[Tensor], Tensor]:
    pattern, heads, dim, dtype, bias = case
    *tensors, grad = inputs(pattern, heads, dim, dtype)
    if bias != "none":
        tensors.append(bias_of(pattern, heads if bias == "per head" else None, dtype))
    return tensors, grad


def masked() -> tuple[SparsePattern, list[Tensor], Tensor]:
    """Row 0 is empty, all edges of row 1 are masked, some of row 2, the hub's first two pieces and one edge more."""
    pattern = of_degrees(0, 2, 4, 2 * PIECE + 5)
    *tensors, grad = inputs(pattern, 2, 4, F32)
    bias = bias_of(pattern, 2, F32)
    bias[:3] = bias[6 : 6 + 2 * PIECE + 1] = -torch.inf
    return pattern, [*tensors, bias], grad


def run(case: Case) -> list[Tensor]:
    tensors, grad = tensors_of(case)
    return with_gradients(on(case[0], "triton"), tensors, grad)


def make_results(path: str) -> None:
    """What the interpreting process does: all cases, and the same cases under other circumstances."""
    made: dict[str, Any] = {name: run(case) for name, case in CASES.items()}
    made["again"] = {name: run(CASES[name]) for name in ("every group of degrees", "bf16, bias")}
    for name, pattern in EMPTY_CASES.items():
        made[name] = run((pattern, 2, 4, F32, "none")), run((pattern, 2, 4, F32, "per head"))
    pattern, tensors, grad = masked()
    made["masked"] = with_gradients(on(pattern, "triton"), tensors, grad)

    case = CASES["width 17, 5 heads"][:4] + ("per head",)
    tensors, grad = tensors_of(case)
    made["every gradient"] = with_gradients(on(case[0], "triton"), tensors, grad)
    for wanted in ((0,), (1,), (2,), (3,), (0, 2), (1, 3)):
        leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        out = on(case[0], "triton")(*leaves)
        made[f"wanted {wanted}"] = torch.autograd.grad(out, [leaves[i] for i in wanted], grad)

    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        buffer = new_empty(self, *args, **kwargs)
        return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", poisoned)
        made["poisoned"] = {name: run(CASES[name]) for name in ("hub in pieces, bf16", "every group of degrees")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "TILES", (Tile(64, 1),))
        made["small tile"] = {name: run(CASES[name]) for name in ("width 64", "width 1, 5 heads", "duplicates")}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "PIECE", 4)
        patch.setattr(triton_backend, "_schedules", {})
        made["small pieces"] = {name: run(CASES[name]) for name in ("hub and isolated node", "duplicates")}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(2 * q, k, v, case[0], backend="triton").relu()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    made["compiled"] = [with_gradients(f, tensors[:3], grad) for f in (attend, compiled)]
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    arguments = (q, k, v, case[0].indptr, case[0].indices, None, 0.25)
    torch.library.opcheck(triton_backend._forward, arguments)
    try:
        resolve_backend("triton", "cpu", torch.float64)
    except ValueError as error:
        made["float64"] = str(error)
    made["auto"] = resolve_backend("auto", "cpu", F32)
    torch.save(made, path)


def compile_all() -> None:
    """Every kernel for an NVIDIA GPU of capability 8.0, down to its machine code: what the interpreter cannot see."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sparse_engine import triton_kernels

    kernels = ("forward", "merge_forward", "backward_rows", "merge_rows", "backward_cols", "merge_cols")
    stored = {"q", "k", "v", "grad", "out", "grad_q", "grad_k", "grad_v", "made"}
    whole = {"indices", "order", "segments", "split"}
    for name, dtype in [(name, dtype) for name in kernels for dtype in ("fp32", "bf16")]:
        kernel = getattr(triton_kernels, name)
        sizes = triton_backend._Shape(5, 17, F32, torch.device("cuda")).sizes(TILES[0], PIECE)
        constants = {
            argument: sizes.get(argument, argument != "SPLIT") for argument in kernel.arg_names if argument.isupper()
        }
        signature = {}
        for argument in kernel.arg_names:
            if argument in constants:
                signature[argument] = "constexpr"
            elif argument in ("count", "num_heads") or argument.startswith("stride"):
                signature[argument] = "i32"
            elif argument == "scale":
                signature[argument] = "fp32"
            else:
                signature[argument] = "*" + ("i64" if argument in whole else dtype if argument in stored else "fp32")
        places = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": TILES[0].warps})
        assert made.asm["cubin"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("triton") / "made.pt"
    body = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        f"from test_sparse_engine_triton_backend import make_results\nmake_results({str(file)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", body],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = torch.load(file)
    return made


@pytest.mark.parametrize("name", CASES)
def test_error_budget_of_the_output_and_every_gradient(name: str, results: dict[str, Any]) -> None:
    pattern, _, _, dtype, _ = CASES[name]
    tensors, grad = tensors_of(CASES[name])
    plain = with_gradients(lambda q, k, v, b=None: gather_scatter(q, k, v, pattern, b), tensors, grad)
    right = with_gradients(on(pattern, "torch"), [t.double() for t in tensors], grad.double())
    assert len(results[name]) == len(right) == len(tensors) + 1
    for what, our, usual, true in zip(("out", "q", "k", "v", "bias"), results[name], plain, right, strict=False):
        assert our.dtype == dtype
        assert our.shape == true.shape
        floor = torch.finfo(dtype).eps * float(true.norm())  # where the yardstick happens to be exact
        error, usual_error = float((our.double() - true).norm()), float((usual.double() - true).norm())
        assert error <= 2 * usual_error + floor, f"{what}: {error} against {usual_error} of plain torch"


@pytest.mark.parametrize("name", EMPTY_CASES)
def test_without_rows_or_edges_everything_is_zero(name: str, results: dict[str, Any]) -> None:
    plain, biased = results[name]
    assert len(plain) == 4
    assert len(biased) == 5
    assert not any(result.any() for result in [*plain, *biased])


def test_masked_edges_and_rows_that_nothing_reaches(results: dict[str, Any]) -> None:
    pattern, tensors, grad = masked()
    right = with_gradients(on(pattern, "reference"), [t.double() for t in tensors], grad.double())
    out, grad_q, _, _, grad_bias = results["masked"]
    assert not out[:2].any()
    assert not grad_q[:2].any()
    assert not grad_bias[tensors[3] == -torch.inf].any()
    for our, true in zip(results["masked"], right, strict=True):
        torch.testing.assert_close(our.double(), true, rtol=1e-5, atol=1e-6)


def test_the_bits_are_the_same_each_time_and_depend_on_no_new_memory(results: dict[str, Any]) -> None:
    for again in (results["again"], results["poisoned"]):
        for name, made in again.items():
            assert all(torch.equal(left, right) for left, right in zip(made, results[name], strict=True)), name


def test_nothing_is_added_by_atomics() -> None:
    assert "tl.atomic" not in Path(triton_backend.__file__).with_name("triton_kernels.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("other", ["small tile", "small pieces"])
def test_other_tiles_and_pieces_give_the_same_numbers(other: str, results: dict[str, Any]) -> None:
    for name, made in results[other].items():
        for left, right in zip(made, results[name], strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3] != F32])
def test_half_types_lose_no_more_than_one_rounding(name: str, results: dict[str, Any]) -> None:
    """Uniform rounding errors of half a unit in the last place are 0.2 eps of a norm; what is added is float32's."""
    tensors, grad = tensors_of(CASES[name])
    right = with_gradients(on(CASES[name][0], "torch"), [t.double() for t in tensors], grad.double())
    for our, true in zip(results[name], right, strict=True):
        assert float((our.double() - true).norm()) < 0.25 * torch.finfo(our.dtype).eps * float(true.norm())


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_only_the_asked_gradients_are_computed_and_they_are_the_same(
    wanted: tuple[int, ...], results: dict[str, Any]
) -> None:
    _, *every = results["every gradient"]
    for index, gradient in zip(wanted, results[f"wanted {wanted}"], strict=True):
        assert torch.equal(gradient, every[index])


def test_it_compiles_without_a_graph_break(results: dict[str, Any]) -> None:
    eager, compiled = results["compiled"]
    for left, right in zip(eager, compiled, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="triton's wheel with NVIDIA's assembler is for x86-64")
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    body = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from test_sparse_engine_triton_backend import compile_all\ncompile_all()\n"
    )
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", body], env=env, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Without a kernel -----------------------------------------------------------------------------------------------------


def test_a_backend_that_cannot_run_is_refused_in_one_line(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="^attention backend 'triton' runs on a GPU, not on cpu; use 'cpu' or 'torch'"):
        resolve_backend("triton", "cpu", F32)
    pattern, tensors, _ = masked()
    with pytest.raises(ValueError, match="runs on a GPU, not on cpu"):
        on(pattern, "triton")(*tensors)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'triton' cannot run on cuda: no CUDA device was found"):
            resolve_backend("triton", "cuda", F32)
    with pytest.raises(ValueError, match="'triton' runs on CUDA devices, not on mps"):
        resolve_backend("triton", "mps", F32)
    assert results["float64"] == (
        "attention backend 'triton' runs torch.float32, torch.bfloat16, torch.float16, not torch.float64; use 'torch'"
    )
    monkeypatch.setattr(triton_backend, "_installed", lambda: False)
    with pytest.raises(ValueError, match="needs the package triton, which is not installed; run pip install"):
        resolve_backend("triton", "cpu", F32)


def test_auto_never_takes_the_interpreter(results: dict[str, Any]) -> None:
    assert results["auto"] == resolve_backend("auto", "cpu", F32)


def test_all_else_runs_where_triton_is_not_installed() -> None:
    body = (
        "import sys; sys.modules['triton'] = None\n"
        "from sparse_engine import resolve_backend; import torch\n"
        "assert resolve_backend('torch', 'cpu', torch.float32) == 'torch'\n"
        "try: resolve_backend('triton', 'cpu', torch.float32)\n"
        "except ValueError as error: sys.exit('not installed; run pip install' not in str(error))\n"
        "sys.exit(1)"
    )
    subprocess.run([sys.executable, "-c", body], check=True, cwd=HERE.parent)


@settings(deadline=None, max_examples=50)
@given(degrees=st.lists(st.integers(0, 70), max_size=12), piece=st.integers(1, 40))
def test_a_schedule_holds_every_edge_once(degrees: list[int], piece: int) -> None:
    pattern = of_degrees(*degrees)
    made = make_schedule(pattern, piece)
    rows: list[int] = []
    edges: list[int] = []
    for longest, segments in made.groups:
        for row, first, end in segments.t().tolist():
            assert (first, end) == (int(pattern.indptr[row]), int(pattern.indptr[row + 1]))
            assert end - first <= longest <= piece
            rows.append(row)
            edges += range(first, end)
    for row, first, end in made.pieces.t().tolist():
        assert 0 < end - first <= piece
        assert pattern.row_index[first] == pattern.row_index[end - 1] == row
        edges += range(first, end)
    for row, first, end in made.split.t().tolist():
        assert end - first > 1
        assert (made.pieces[0, first:end] == row).all()
        rows.append(row)
    assert sorted(rows) == list(range(pattern.num_rows))
    assert sorted(edges) == list(range(pattern.num_edges))


@settings(deadline=None, max_examples=100)
@given(heads=st.integers(1, 40), dim=st.integers(1, 300), longest=st.sampled_from([8, 32, PIECE]))
def test_programs_hold_whole_lanes_and_no_more_than_a_tile(heads: int, dim: int, longest: int) -> None:
    shape = triton_backend._Shape(heads, dim, F32, torch.device("cpu"))
    for tile in TILES:
        sizes = shape.sizes(tile, longest)
        assert dim <= sizes["WIDE"] < 2 * dim
        assert all(sizes[name] & (sizes[name] - 1) == 0 for name in ("ROWS", "HEADS", "SLOTS", "WIDE"))
        assert sizes["ROWS"] * sizes["HEADS"] * sizes["SLOTS"] * sizes["WIDE"] <= max(tile.elements, sizes["WIDE"])


def test_the_tile_that_took_least_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    ran: list[Tile] = []
    seconds = dict(zip(TILES, (3.0, 2.0, 1.0, 4.0), strict=True))

    def launch(tile: Tile) -> None:
        now[0] += seconds[tile] + (100.0 if tile not in ran else 0.0)  # the first launch compiles
        ran.append(tile)

    monkeypatch.setattr(triton_backend, "perf_counter", lambda: now[0])
    assert triton_backend.fastest(TILES, launch, lambda: None) == TILES[2]
    assert set(ran) == set(TILES)
