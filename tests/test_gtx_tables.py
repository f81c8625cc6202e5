"""Tables that are wrong: one line each, with the place and what to change, before anything starts and nothing left.

Not here: what right tables mean (`test_gtx_frames.py`).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import launch
from gtx.datasets import load_graph
from gtx.frames import Columns, from_frames

NODES = """id,label,split,age,height
a,x,train,1,1.5
b,y,valid,2,2.5
c,x,test,3,3.5
d,y,train,4,4.5
"""
EDGES = """src,dst,weight
a,b,1
b,c,2
c,d,3
"""
Case = tuple[dict[str, Any], str]


def nodes(old: str, new: str, start: str, count: int = 1, **more: Any) -> Case:
    """The good tables with one change to the nodes, and what the line says, a regular expression; `@` is the file."""
    assert NODES.count(old) >= 1
    return {"nodes.csv": NODES.replace(old, new, count), **more}, start.replace("@", r"nodes\.csv")


def edges(old: str, new: str, start: str, count: int = 1, **more: Any) -> Case:
    assert EDGES.count(old) >= 1
    return {"edges.csv": EDGES.replace(old, new, count), **more}, start.replace("@", r"edges\.csv")


def parquet(frame: pd.DataFrame) -> bytes:
    stream = io.BytesIO()
    frame.to_parquet(stream)
    return stream.getvalue()


def wide(**changes: Any) -> Case:
    """Good Parquet nodes with some columns changed."""
    columns = {"id": list("abcd"), "label": list("xyxy"), "split": ["train"] * 4, "age": [1.0, 2.0, 3.0, 4.0]}
    return {"nodes.parquet": parquet(pd.DataFrame(columns | changes))}, ""


# Cells, generated: each of these in a number's place -----------------------------------------------------------------

NOT_FINITE = ("inf", "-inf", "Infinity", "1e39", "-1e39", "1e400")
NO_NUMBER = (
    "abc",
    '"1,5"',
    "0x10",
    "1_000",
    "--3",
    "1.2.3",
    "NULL",
    "None",
    "12 kg",
    "٣",
    "2020-01-01",
    "4x",
    "#N/A",
    "1e",
)
MISSING = ("", "nan", "NaN")

CASES: dict[str, Case] = {}
for column, old, new in (("age", ",2,", ",{},"), ("height", ",2.5\n", ",{}\n")):
    for values, say in (
        (NOT_FINITE, ".* is no finite float32"),
        (NO_NUMBER, "'.*' is no number"),
        (MISSING, "the value is missing"),
    ):
        for value in values:
            place = rf"@, line 3, column '{column}': {say}; repair it, or name the column in data\.options\.ignore"
            CASES[f"{column} is {value!r}"] = nodes(old, new.format(value), place)
for value, say in (("inf", "inf is no finite float32"), ("x", "'x' is no number"), ("", "the value is missing")):
    CASES[f"weight is {value!r}"] = edges("c,2", f"c,{value}", f"@, line 3, column 'weight': {say}; repair it")
for value in (" a", "a ", "A", "1", "é", "e"):
    hint = r" \(it has 'a', which is not the same\)" if value.strip() == "a" else ""
    unknown = (
        rf": there is no node ('{value}'|1) in .*nodes\.csv{hint}; add its row there or drop the edge \(such edges: 1\)"
    )
    CASES[f"src is {value!r}"] = edges("b,c,", f"{value},c,", rf"@, line 3, column 'src'{unknown}")
    CASES[f"dst is {value!r}"] = edges("c,d,", f"c,{value},", rf"@, line 4, column 'dst'{unknown}")
for value in ("-2", "0.5", "inf", "-1.5", "1e-3"):
    numbers = NODES.replace("x,", "0,").replace("y,", "1,").replace("b,1", f"b,{value}")
    CASES[f"label is {value!r}"] = (
        {"nodes.csv": numbers},
        rf"nodes\.csv, line 3, column 'label': the label {value} is no class",
    )
for value in ("training", "train;test", "0", "trian", "none"):
    CASES[f"split is {value!r}"] = nodes(
        "valid", value, rf"@, line 3, column 'split': '{value}' is no split; write train, valid or"
    )

# Cells and rows, by hand ---------------------------------------------------------------------------------------------

CASES |= {
    "no id": nodes("b,y", ",y", "@, line 3, column 'id': the id is missing; fill it in or drop the row"),
    "no src": edges("b,c", ",c", "@, line 3, column 'src': the id is missing"),
    "no dst": edges("b,c", "b,", "@, line 3, column 'dst': the id is missing"),
    "id twice": nodes(
        "c,x", "a,x", r"@, line 4, column 'id': node 'a' is already .*nodes\.csv, line 2; a node has one row"
    ),
    "number twice": (
        {"nodes.csv": NODES.replace("a,x", "7,x").replace("d,y", "7,y"), "edges.csv": "src,dst\n"},
        r"nodes\.csv, line 5, column 'id': node 7 is already .*nodes\.csv, line 2; .*\(rows too many: 1\)",
    ),
    "node in two splits": nodes("d,y,train", "c,x,valid", r"@, line 5, column 'id': node 'c' .* is in one split"),
    "07 is not 7": (
        {"nodes.csv": NODES.replace("a,x", "7,x"), "edges.csv": EDGES.replace("a,b", "07,b")},
        r"edges\.csv, line 2, column 'src': there is no node '07'",
    ),
    "7.0 is not 7": (
        {"nodes.csv": NODES.replace("a,x", "7,x"), "edges.csv": EDGES.replace("a,b", "7.0,b")},
        r"edges\.csv, line 2, column 'src': there is no node '7\.0'",
    ),
    "a word among numbers": (
        {"nodes.csv": NODES.replace("a,x", "a,0").replace("b,y", "b,1").replace("c,x", "c,0")},
        r"nodes\.csv, line 5, column 'label': the label 'y' stands among numbers; labels are all whole numbers or all",
    ),
    "a number among words": nodes("c,x", "c,3", "@, line 4, column 'label': the label '3' stands among words"),
    "no label in training": nodes(
        "d,y", "d,", r"@, line 5, column 'label': a node of the training split has no label; label it .*such nodes: 1"
    ),
    "label -1 in training": (
        {"nodes.csv": NODES.replace("x,", "0,").replace("y,", "-1,")},
        r"nodes\.csv, line 5, column 'label': a node of the training split has no label",
    ),
    "no labels": (
        {"nodes.csv": NODES.replace(",x,", ",,").replace(",y,", ",NaN,")},
        r"nodes\.csv, column 'label': no node has a label; label the nodes to train on",
    ),
    "nobody trains": nodes("train", "test", "@, column 'split': no node is in train; mark the nodes", count=2),
    "no split word": (
        {"nodes.csv": re.sub("train|valid|test", "", NODES)},
        r"nodes\.csv, column 'split': no node is in train",
    ),
    "a column without values": (
        {"nodes.csv": re.sub(r",\d,", ",,", NODES)},
        r"nodes\.csv, line 2, column 'age': the value is missing",
    ),
    "roc_auc of three classes": nodes(
        "c,x", "c,z", r"roc_auc is defined for 2 classes, the labels have 3", options={"metric": "roc_auc"}
    ),
    # Form
    "short row": nodes(
        "b,y,valid,2,2.5", "b,y,valid,2", r"@, line 3: 4 values for 5 columns; a value with ',' in it needs"
    ),
    "short last row": nodes("d,y,train,4,4.5\n", "d,y", "@, line 5: 2 values for 5 columns"),
    "short first row": nodes("a,x,train,1,1.5", "a", "@, line 2: 1 values for 5 columns"),
    "short row before a column of text": (
        {"nodes.csv": "id,f,label\na,1,x\nb,2\nc,3,y\n"},
        r"nodes\.csv, line 3: 2 values for 3 columns",
    ),
    "long row": nodes("c,x,test,3,3.5", "c,x,test,3,3,5", "@, line 4: 6 values for 5 columns"),
    "long first row": nodes("a,x,train,1,1.5", "a,x,train,1,1.5,9", "@, line 2: 6 values for 5 columns"),
    "all rows long": ({"nodes.csv": re.sub(r"(\d)\n", r"\1,\n", NODES)}, r"nodes\.csv, line 2: 6 values for 5 columns"),
    "short edge": edges("b,c,2", "b", "@, line 3: 1 values for 3 columns"),
    "long edge": edges("b,c,2", "b,c,2,2", "@, line 3: 4 values for 3 columns"),
    "line after empty lines": nodes("c,x,test,3,3.5", "\n\nc,x,test,3,3,5", "@, line 6: 6 values for 5 columns"),
    "line after a cell of two lines": (
        {"nodes.csv": NODES.replace("a,x", '"a\n1",x').replace(",2,", ",z,"), "edges.csv": "src,dst\n"},
        r"nodes\.csv, line 4, column 'age': 'z' is no number",
    ),
    "quote never closed": nodes("b,y", '"b,y', "@, after line 2: unexpected end of data; check the quotes there"),
    "quote never closed in edges": edges("b,c", 'b,"c', "@, after line 2: unexpected end of data"),
    "empty file": ({"nodes.csv": ""}, r"nodes\.csv is empty; its first line names the columns"),
    "empty edge file": ({"edges.csv": ""}, r"edges\.csv is empty; its first line names the columns"),
    "only empty lines": ({"nodes.csv": "\n \n\n"}, r"nodes\.csv is empty; its first line names the columns"),
    "only a byte order mark": ({"nodes.csv": b"\xef\xbb\xbf"}, r"nodes\.csv is empty"),
    "no nodes": ({"nodes.csv": NODES.split("\n")[0]}, r"nodes\.csv has no nodes; give it a row for each node"),
    "no first line": (
        {"nodes.csv": NODES.split("\n", 1)[1]},
        r"nodes\.csv has no column 'id', its columns are 'a', 'x', 'train'",
    ),
    "latin-1": (
        {"nodes.csv": NODES.replace("c,x", "caf\xe9,x").encode("latin-1")},
        r"nodes\.csv, line 4: byte 0xe9 is not UTF-8",
    ),
    "utf-16": (
        {"nodes.csv": NODES.encode("utf-16")},
        r"nodes\.csv, line 1: byte 0xff is not UTF-8; save the file as UTF-8",
    ),
    "latin-1 edges": (
        {"edges.csv": EDGES.replace("c,d,", "\xe9,d,").encode("latin-1")},
        r"edges\.csv, line 4: byte 0xe9",
    ),
    "bytes": ({"nodes.csv": bytes(range(256)) * 4}, r"nodes\.csv"),
    "zeros": ({"nodes.csv": bytes(1000)}, r"nodes\.csv has no column 'id'"),
    # Columns
    "column twice": nodes("height", "age", "@: column 'age' comes twice; rename or remove one of them"),
    "id twice among columns": nodes("height", "id", "@: column 'id' comes twice"),
    "column without a name": nodes("id,", "id,,", "@: column 2 has no name; name it, or remove it"),
    "index of pandas": (
        {"nodes.csv": pd.read_csv(io.StringIO(NODES)).to_csv()},
        r"nodes\.csv: column 1 has no name; name it, .*to_csv\(index=False\)",
    ),
    "separator at each end": ({"nodes.csv": NODES.replace("\n", ",\n")}, r"nodes\.csv: column 6 has no name"),
    "no column id": nodes(
        "id,", "name,", "@ has no column 'id', its columns are 'name', 'label', 'split', 'age', 'height'; re"
    ),
    "no column label": nodes("label", "class", "@ has no column 'label', its columns are 'id', 'class'"),
    "no column src": edges(
        "src", "from", "@ has no column 'src', its columns are 'from', 'dst', 'weight'; rename one, or"
    ),
    "no column dst": edges("dst", "to", "@ has no column 'dst'"),
    "case of a column": nodes("id", "ID", "@ has no column 'id', its columns are 'ID'"),
    "semicolons": (
        {"nodes.csv": NODES.replace(",", ";")},
        r"nodes\.csv has no column 'id', its columns are 'id;label;split;",
    ),
    "tabs in a csv": (
        {"edges.csv": EDGES.replace(",", "\t")},
        r"edges\.csv has no column 'src', .*say in data\.options",
    ),
    "no features": (
        {"nodes.csv": re.sub(r",[^,\n]*,[^,\n]*\n", "\n", NODES)},
        r"nodes\.csv has no features: no column besides 'id', 'label' and 'split' holds numbers; add one",
    ),
    "features of text only": (
        {"nodes.csv": "id,label,title\na,0,A\nb,1,B\n", "edges.csv": "src,dst\n"},
        r"nodes\.csv has no features",
    ),
    # Files
    "no node file": (
        {"nodes.csv": None},
        r"cannot read the table .*nodes\.csv: No such file or directory; change data\.nodes",
    ),
    "no edge file": (
        {"edges.csv": None},
        r"cannot read the table .*edges\.csv: No such file or directory; change data\.",
    ),
    "folder": ({"nodes.csv": Path.mkdir}, r"cannot read the table .*nodes\.csv: Is a directory"),
    "workbook": (
        {"nodes.xlsx": "PK"},
        r"nodes\.xlsx is not called \.csv, \.tsv, \.parquet; export the table as one of these",
    ),
    "no ending": ({"nodes": NODES}, r"nodes is not called \.csv"),
    "text in a Parquet file": (
        {"nodes.parquet": NODES},
        r"nodes\.parquet is no Parquet file that can be read \(.*magic bytes",
    ),
    "empty Parquet file": ({"nodes.parquet": ""}, r"nodes\.parquet is no Parquet file .*0 bytes\); write it again"),
    "half a Parquet file": ({"nodes.parquet": wide()[0]["nodes.parquet"][:700]}, r"nodes\.parquet is no Parquet file"),
    "Parquet with a hole": (
        {"nodes.parquet": wide()[0]["nodes.parquet"][:40] + wide()[0]["nodes.parquet"][60:]},
        r"nodes\.parquet is no Parquet file",
    ),
    "Parquet called csv": ({"nodes.csv": wide()[0]["nodes.parquet"]}, r"nodes\.csv, line .*: byte 0x.. is not UTF-8"),
    "index that is a column too": (
        {"nodes.parquet": parquet(pd.DataFrame({"id": [1, 2], "label": [0, 1]}).set_index("id", drop=False))},
        r"nodes\.parquet: column 'id' comes twice",
    ),
    # Parquet's types
    "Parquet without an id": (
        wide(id=["a", None, "c", "d"])[0],
        r"parquet, row 1 \(counted from 0\), column 'id': the id is",
    ),
    "lists as ids": (
        wide(id=[["a"], ["b"], ["c"], ["d"]])[0],
        r"row 0 .*, column 'id': .* cannot be an id; use a number or",
    ),
    "numbers that are text elsewhere": (
        wide(id=[1, 2, 3, 4])[0] | {"edges.parquet": parquet(pd.DataFrame({"src": ["1"], "dst": ["2"]}))},
        r"edges\.parquet, row 0 .*, column 'src': there is no node '1' in .*\(it has 1, which is not the same\); add",
    ),
    "Parquet missing a value": (
        wide(age=[1, None, 3, 4])[0],
        r"parquet, row 1 .*, column 'age': the value is missing",
    ),
    "Parquet with infinity": (
        wide(age=[1, 2, float("-inf"), 4])[0],
        r"row 2 .*, column 'age': -inf is no finite float32",
    ),
    "Parquet text among text": (wide(age=["1", "2", "3", "x"])[0], r"row 3 .*, column 'age': 'x' is no number"),
    "vectors of unequal length": (
        wide(age=[[1.0, 2.0], [1.0], [3.0, 4.0], [5.0, 6.0]])[0],
        r"row 1 .*, column 'age': .* is no vector of 2 numbers; repair it",
    ),
    "a vector with infinity": (
        wide(age=[[1.0, 2.0], [1.0, float("inf")], [3.0, 4.0], [5.0, 6.0]])[0],
        r"row 1 .*, column 'age': value 1 is inf; repair it",
    ),
    "a vector is missing": (
        wide(age=[[1.0, 2.0], None, [3.0, 4.0], [5.0, 6.0]])[0],
        r"row 1 .*, column 'age': None is no vector",
    ),
    "several labels": (
        wide(label=[[0, 1], [1], [0], [1]])[0],
        r"row 0 .*, column 'label': .* is no label; give one word or",
    ),
    "label 0.5": (wide(label=[0, 1, 0.5, 1])[0], r"row 2 .*, column 'label': the label 0\.5 is no class"),
    "split numbers": (
        wide(split=[0, 0, 1, 2])[0],
        r"row 0 .*, column 'split': .*0.* is no split; write train, valid or test",
    ),
    # Options
    "unknown option": (
        {"options": {"ids": "id"}},
        r"data\.options\.ids is no option of 'table'; it has dst, features, id",
    ),
    "column of another name": ({"options": {"id": "name"}}, r"nodes\.csv has no column 'name'"),
    "no name of a column": ({"options": {"src": ""}}, r"data\.options\.src is ''; expected a text"),
    "feature that is not there": ({"options": {"features": ["age", "size"]}}, r"nodes\.csv has no column 'size'"),
    "feature of text": ({"options": {"features": ["label"]}}, r"nodes\.csv, line 2, column 'label': 'x' is no number"),
    "features no list": (
        {"options": {"features": "age"}},
        r"data\.options\.features is 'age'; expected a list of names",
    ),
    "nothing to ignore": (
        {"options": {"ignore": ["size"]}},
        r"data\.options\.ignore names 'size', a column of neither table",
    ),
    "used and ignored": (
        {"options": {"ignore": ["label"]}},
        r"column 'label' is both used and ignored; take it out of data",
    ),
    "long separator": ({"options": {"separator": "::"}}, r"data\.options\.separator is '::'; expected one character"),
    "unknown metric": (
        {"options": {"metric": "f1"}},
        r"data\.options\.metric is 'f1'; choose one of accuracy, roc_auc",
    ),
    "second split of one": (
        {"split": 1},
        r"data\.split is 1, but .*nodes\.csv has a column 'split', which is split 0; leave",
    ),
}


def written(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Write the files of a case beside the good ones; the settings of `data` that go with it."""
    data: dict[str, Any] = {"name": "table"}
    for kind, good in (("nodes", NODES), ("edges", EDGES)):
        name, content = next((item for item in case.items() if item[0].startswith(kind)), (f"{kind}.csv", good))
        path = folder / name
        if isinstance(content, Callable):  # type: ignore[arg-type]
            content(path)
        elif content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        data[kind] = str(path)
    return data | {key: case[key] for key in ("options", "split") if key in case}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_table_is_one_line_and_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case, say = CASES[name]
    config = {
        "data": written(tmp_path, case),
        "partition": {"cache": str(tmp_path / "cache")},
        "engine": {"name": "torch", "threads": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    before = set(tmp_path.rglob("*"))
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    launch.main(["train", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    assert ended == [2], err
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert re.search(say, lines[0]), lines[0]
    assert re.match(rf"gtx: (({re.escape(str(tmp_path))}|cannot read the table|graph) ?|data\.|column )", lines[0]), (
        lines[0]
    )
    assert set(tmp_path.rglob("*")) == before


BITS = st.sampled_from(
    [*map(str.encode, (",", '"', '""', "\n", "\r", "\t", "\0", "é", " ", "0", "-", "nan", "1e", "#"))] + [b"\xff"]
)
CHANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), st.booleans(), BITS), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(CHANGES)
def test_whatever_the_bytes_a_table_is_a_graph_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, bool, bytes]]
) -> None:
    files = {True: NODES.encode(), False: EDGES.encode()}
    for at, taken, which, bits in changes:
        at %= len(files[which]) + 1
        files[which] = files[which][:at] + bits + files[which][at + taken :]
    data = written(tmp_path_factory.getbasetemp(), {"nodes.csv": files[True], "edges.csv": files[False]})
    line = ""
    try:
        load_graph(
            "table", root=None, seed=0, undirected=True, self_loops="add", options={}, standardize=True,
            nodes=data["nodes"], edges=data["edges"],
        )  # fmt: skip
    except ValueError as error:
        line = str(error)
    assert "\n" not in line


def test_the_good_tables_are_good(tmp_path: Path) -> None:
    for case in ({}, wide()[0]):
        data = written(tmp_path, case)
        graph = load_graph(
            "table", root=None, seed=0, undirected=False, self_loops="keep", options={},
            nodes=data["nodes"], edges=data["edges"],
        )  # fmt: skip
        assert (graph.num_nodes, graph.num_edges) == (4, 3)
    assert len(CASES) >= 100


def test_wrong_frames_are_called_by_their_rows() -> None:
    good = pd.read_csv(io.StringIO(NODES)).set_index("height", drop=False)  # its index says nothing
    links = pd.read_csv(io.StringIO(EDGES))
    assert from_frames(good, links).num_edges == 3
    for change, say in (
        (
            {"age": [1, 2, None, 4]},
            r"^the node table, row 2 \(counted from 0\), column 'age': the value is missing",
        ),
        (
            {"id": ["a", "b", "c", "a"]},
            r"^the node table, row 3 .*, column 'id': node 'a' is already the node table, row 0 ",
        ),
    ):
        with pytest.raises(ValueError, match=say):
            from_frames(good.assign(**change), links)
    with pytest.raises(
        ValueError, match=r"^the edge table, row 1 .*, column 'dst': there is no node 'z' in the node table; add"
    ):
        from_frames(good, links.assign(dst=["b", "z", "d"]))
    with pytest.raises(ValueError, match="^the node table: column 'age' comes twice"):
        from_frames(pd.concat([good, good[["age"]]], axis=1), links)
    with pytest.raises(ValueError, match="^the node table: two features are called 'x.0'"):
        from_frames(good.assign(**{"x": [[1.0]] * 4, "x.0": 1.0}), links)
    with pytest.raises(ValueError, match="^the edge table has no column 'a', its columns are 'src'"):
        from_frames(good, links, columns=Columns(src="a"))
