"""What only the fused code can get wrong: vector widths, head dims, threads, hubs, compilers, tracing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_engine import SparsePattern, native, resolve_backend, sparse_attention

HERE = Path(__file__).resolve().parent


def pattern_of(num_rows: int, num_cols: int, num_edges: int, seed: int = 0) -> SparsePattern:
    generator = torch.Generator().manual_seed(seed)
    dst = torch.randint(0, num_rows, (num_edges,), generator=generator)
    src = torch.randint(0, num_cols, (num_edges,), generator=generator)
    return SparsePattern.from_edges(dst, src, num_rows, num_cols)


def hub_pattern() -> SparsePattern:
    """A row and column 0 have some thousand edges, which are added up in several segments."""
    dst = torch.cat([torch.zeros(7001, dtype=torch.int64), torch.arange(9000) % 90])
    src = torch.cat([torch.arange(7001) % 80, torch.arange(9000) // 90 * (torch.arange(9000) % 3) % 80])
    return SparsePattern.from_edges(dst, src, 90, 80)


def results(
    pattern: SparsePattern, heads: int, dim: int, dtype: torch.dtype, backend: str, *, bias: bool = False
) -> list[Tensor]:
    """The output and the gradients of one loss, from seeded inputs."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(pattern.num_rows, heads, dim), *[(pattern.num_cols, heads, dim)] * 2]
    shapes += [(pattern.num_edges, heads)] * bias
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator, dtype=torch.float64).to(dtype)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = sparse_attention(*leaves[:3], pattern, edge_bias=leaves[3] if bias else None, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@settings(deadline=None, max_examples=60)
@given(heads=st.integers(1, 9), dim=st.integers(1, 40), seed=st.integers(0, 99), bias=st.booleans())
def test_any_number_of_heads_of_any_width(heads: int, dim: int, seed: int, bias: bool) -> None:
    pattern = pattern_of(11, 13, 60, seed)
    ours = results(pattern, heads, dim, torch.float32, "cpu", bias=bias)
    for left, right in zip(ours, results(pattern, heads, dim, torch.float64, "reference", bias=bias), strict=True):
        torch.testing.assert_close(left.double(), right, rtol=1e-4, atol=2e-5)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [hub_pattern(), pattern_of(5000, 4000, 60_000)], ids=["hub", "plain"])
def test_any_number_of_threads_gives_the_same_bits(pattern: SparsePattern, dtype: torch.dtype) -> None:
    made = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        made.append(results(pattern, 4, 8, dtype, "cpu", bias=True))
    for others in made[1:]:
        assert all(torch.equal(left, right) for left, right in zip(made[0], others, strict=True))


def test_a_hub_in_segments_is_within_the_error_of_the_definition() -> None:
    ours = results(hub_pattern(), 2, 16, torch.float32, "cpu", bias=True)
    for left, right in zip(ours, results(hub_pattern(), 2, 16, torch.float64, "reference", bias=True), strict=True):
        assert float((left.double() - right).norm()) < 1e-6 * float(right.norm())


def test_a_segment_that_nothing_reaches_changes_nothing() -> None:
    """All edges of the hub's first segments are masked by a bias of minus infinity."""
    pattern = SparsePattern(torch.tensor([0, 6000]), torch.arange(6000) % 50, 50)
    q, k, v = (torch.randn(n, 2, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 50, 50))
    bias = torch.zeros(6000)
    bias[:4500] = -torch.inf
    ours = sparse_attention(q, k, v, pattern, edge_bias=bias, backend="cpu")
    rest = SparsePattern(torch.tensor([0, 1500]), pattern.indices[4500:], 50)
    torch.testing.assert_close(ours, sparse_attention(q, k, v, rest, backend="torch"))


def test_it_compiles_without_a_graph_break() -> None:
    pattern = pattern_of(20, 20, 90)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return sparse_attention(2 * q, k, v, pattern, edge_bias=bias, backend="cpu").relu()

    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(20, 2, 16, generator=generator) for _ in range(3)] + [torch.randn(90, 2, generator=generator)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for make in (attend, compiled):
        out = make(*leaves)
        gradients = torch.autograd.grad(out.sum(), leaves)
        if make is attend:
            expected = [out, *gradients]
    for left, right in zip([out, *gradients], expected, strict=True):
        torch.testing.assert_close(left, right)


def test_the_operators_keep_the_rules_of_the_library() -> None:
    from sparse_engine.cpu_backend import _forward

    pattern = pattern_of(6, 7, 20)
    q, k, v = (torch.randn(n, 2, 16, dtype=torch.float64, requires_grad=True) for n in (6, 7, 7))
    torch.library.opcheck(_forward, (q, k, v, pattern.indptr, pattern.indices, None, 0.25))


@pytest.mark.parametrize(("cpu", "width"), [("avx2", 32), ("default", 16)])
def test_narrower_vectors_give_the_same(cpu: str, width: int, tmp_path: Path) -> None:
    """In a process of its own, as a process loads the code for one kind of CPU."""
    file = tmp_path / "made.pt"
    body = (
        f"import sys, torch; sys.path.insert(0, {str(HERE)!r})\n"
        "from test_sparse_engine_cpu_backend import hub_pattern, results\n"
        "from sparse_engine.native import library\n"
        f"assert library().gtx_vector_bytes() == {width}\n"
        "made = [results(hub_pattern(), *shape, dtype, 'cpu', bias=True)\n"
        "        for shape in ((2, 8), (4, 4), (3, 24)) for dtype in (torch.float32, torch.float64)]\n"
        f"torch.save(made, {str(file)!r})\n"
    )
    subprocess.run([sys.executable, "-c", body], check=True, env=os.environ | {"GTX_CPU": cpu}, cwd=HERE.parent)
    made = iter(torch.load(file))
    for heads, dim in ((2, 8), (4, 4), (3, 24)):
        right = results(hub_pattern(), heads, dim, torch.float64, "reference", bias=True)
        for tolerance in (1e-6, 1e-13):
            for ours, true in zip(next(made), right, strict=True):
                assert float((ours.double() - true).norm()) < tolerance * float(true.norm())


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GTX_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="'cpu': there is no C.. compiler 'no-such-compiler'; install"):
        resolve_backend("cpu", "cpu", torch.float32)
    pattern = pattern_of(5, 6, 20)
    with pytest.warns(UserWarning, match="no C.. compiler") as told:
        made = results(pattern, 2, 8, torch.float32, "auto")
    assert resolve_backend("auto", "cpu", torch.float32) == "torch"
    for left, right in zip(made, results(pattern, 2, 8, torch.float32, "torch"), strict=True):
        assert torch.equal(left, right)
    assert [str(warning.message) for warning in told] == [
        "there is no C++ compiler 'no-such-compiler'; install g++ or set CXX; attention runs by torch operators, "
        "several times slower"
    ]


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such instruction' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("GTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ValueError, match="cannot compile the sparse engine: x.cpp:1: error: no such instruction"):
        resolve_backend("cpu", "cpu", torch.float32)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GTX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="cannot keep the compiled sparse engine as .*; set GTX_CACHE") as caught:
        resolve_backend("cpu", "cpu", torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changed", ["rows.h", "attention.cpp"])
def test_a_changed_source_or_header_is_compiled_anew(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(native._SOURCES, tmp_path / "csrc")
    before = native._fingerprint("AVX2", "g++")
    monkeypatch.setattr(native, "_SOURCES", tmp_path / "csrc")
    assert native._fingerprint("AVX2", "g++") == before
    with (tmp_path / "csrc" / changed).open("a") as file:
        file.write("// changed")
    assert native._fingerprint("AVX2", "g++") != before


def test_an_unknown_kind_of_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GTX_CPU", "sse9")
    with pytest.raises(ValueError, match="GTX_CPU is 'sse9'; use avx512, avx2, default"):
        resolve_backend("cpu", "cpu", torch.float32)
