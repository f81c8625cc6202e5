"""Models of one's own: the one of the documentation is right under any plan, and wrong ones are told where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import awkward_graph

from gtx.config import ModelConfig, parse_config
from gtx.equality import UnequalPlansError, check_any_plan_equals_one_rank, check_config
from gtx.models import GraphModel

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"width": 6, "heads": 3, "layers": 2, "dropout": 0.2}


@pytest.fixture
def documented(tmp_path: Path) -> Path:
    """The model of docs/own_layer.md as a file."""
    text = (ROOT / "docs/own_layer.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    path = tmp_path / "gated.py"
    path.write_text(found[1], encoding="utf-8")
    return path


def changed(documented: Path, old: str, new: str) -> str:
    """The documented model with a mistake in it, as a path."""
    text = documented.read_text(encoding="utf-8")
    assert text.count(old) == 1
    wrong = documented.with_name("wrong.py")
    wrong.write_text(text.replace(old, new), encoding="utf-8")
    return str(wrong)


def told(path: str, *worlds: int) -> str:
    """What is said of a wrong model."""
    with pytest.raises(ValueError) as caught:
        check_any_plan_equals_one_rank(
            ModelConfig(name=path, **SMALL), awkward_graph(), worlds=worlds, say=lambda line: None
        )
    assert "wrong.py" in str(caught.value)
    return str(caught.value)


def test_the_documented_layer_equals_one_rank(documented: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"num_nodes": 90, "num_edges": 500, "num_blocks": 3}
    config = parse_config({"model": {"name": str(documented), **SMALL}, "data": {"name": "sbm", "options": options}})
    check_config(config, "1,2,3")
    out = capsys.readouterr().out
    assert f"{documented} equals one rank under all 26 plans" in out
    assert f"comparing {documented} on 3 rank(s)" in out


def test_dropout_that_is_not_keyed_is_found_on_one_rank(documented: Path) -> None:
    line = told(
        changed(documented, "mixed.flatten(1), context)", "F(mixed.flatten(1)), context)\n\n\nF = nn.Dropout(0.5)")
    )
    assert "gives something else each time, on one rank" in line
    assert "forward, in layers.0" in line
    assert "draw through context.dropout" in line


def test_a_mean_over_rows_is_found_with_layer_and_node(documented: Path) -> None:
    """Micro-batches side by side in a wave, and one by one, have other means."""
    line = told(
        changed(documented, "return context.destinations(x) +", "return context.destinations(x) - x.mean(0) +"), 1
    )
    assert re.search(
        r"graph on 1 rank\(s\), 3 micro-batches, .*: forward, in layers\.0: the rows of 60 of 60 nodes", line
    )
    assert re.search(r"off, by \de-\d\d that of node \d+", line)
    assert "the full graph" not in line


def test_heads_mixed_in_edge_work_are_found_where_heads_are_split(documented: Path) -> None:
    line = told(changed(documented, "(0, to, passed)\n", "(0, to, passed - passed.mean(1, keepdim=True))\n"), 2)
    assert set(re.findall(r"^  (\w+) on", line, re.MULTILINE)) == {"model", "mixed"}


def test_a_failure_under_one_plan_is_told_with_the_plan(documented: Path) -> None:
    line = told(changed(documented, "[of, 1]\n", "[of, 1] * torch.ones(3, 1, dtype=own.dtype)\n"), 2)
    assert "fails under model on 2 rank(s), the full graph, checkpointing" in line
    assert "RuntimeError: " in line


def test_a_gradient_that_counts_rows_names_its_parameter(documented: Path) -> None:
    """The forward adds zero; the backward adds up num_src, which differs by rank."""
    extra = "w = self.ffn.contract.bias\n        x = x + (w - w.detach()) * context.num_src\n        "
    line = told(changed(documented, "x_normed = self.norm(x", f"{extra}x_normed = self.norm(x"), 2)
    assert "graph on 2 rank(s), the full graph" in line
    assert re.search(r"backward: rows are right, gradients are off: .*layers\.1\.ffn\.contract\.bias by \de", line)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, "and there is no file /"),
        ("import nothing_of_that_name", "wrong.py does not run: ModuleNotFoundError: No module named"),
        ("def f(:", "wrong.py does not run: SyntaxError"),
        ("x = 1", "wrong.py has no FAMILY; write FAMILY = gtx.models.Family(...) there"),
        ("FAMILY = 3", "wrong.py has a FAMILY that is a int; write FAMILY = "),
    ],
)
def test_a_file_without_a_model_is_one_line(text: str | None, want: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        GraphModel(ModelConfig(name=str(path)), 3, 2)
    assert want in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_reach_a_model_of_ones_own(documented: Path) -> None:
    path = changed(documented, "config.heads\n", "config.heads + config.options['more']\n")
    model = GraphModel(ModelConfig(name=path, options={"more": 2}, layers=1), 3, 2)
    assert model.layers[0].heads == 6


def test_a_graph_without_training_nodes_is_refused() -> None:
    graph = awkward_graph()
    graph.train_mask[:] = False
    with pytest.raises(ValueError, match="has no training nodes; nothing would be compared"):
        check_any_plan_equals_one_rank("GT", graph)


def test_worlds_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="--worlds is '1,two'; give numbers of ranks, such as 1,2,3"):
        check_config(parse_config({}), "1,two")


def test_unequal_plans_are_mistakes_of_the_user() -> None:
    assert issubclass(UnequalPlansError, ValueError)
