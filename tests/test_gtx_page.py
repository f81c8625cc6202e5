"""The HTML page of a run: whole, safe, small, and the same to a parser and to a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_runs import PLANS, make_run, make_trace
from made_runs import given as given_plan

import launch
from gtx.page import SECTIONS, write_page

VOID = {"meta", "br", "hr", "img", "input", "link"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT_BYTES = 3_000_000


class Page(HTMLParser):
    """A page taken apart. Raises AssertionError where tags do not balance."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.headings: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "style" not in self.open:
            self.text += f"{data} "

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(folder: Path) -> Page:
    return Page(write_page(folder).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adaptive run with everything in it."""
    return make_run(tmp_path_factory.mktemp("page") / "adaptive")


def test_it_has_every_section_and_stands_alone(adaptive: Path) -> None:
    page = page_of(adaptive)
    assert page.headings == list(SECTIONS)
    assert "empty" not in {attributes.get("class") for _, attributes in page.tags}
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "image", "base", "foreignobject"}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "srcset", "action"), (tag, name)
            assert "//" not in value, (tag, name, value)
            if name.endswith("href"):
                assert value.startswith("#"), (tag, value)
            assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", value)), (tag, value)
    text = (adaptive / "strategy-report.html").read_text(encoding="utf-8")
    assert "http" not in text and "@import" not in text


def test_ids_are_unique_and_what_is_referred_to_is_there(adaptive: Path) -> None:
    page = page_of(adaptive)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for _, attributes in page.tags:
        wanted = [attributes["href"][1:]] if "href" in attributes else []
        wanted += attributes.get("aria-labelledby", "").split()
        wanted += [target for value in attributes.values() for target in re.findall(r"url\(#([^)]*)\)", value)]
        assert set(wanted) <= set(ids)


def test_figures_have_titles_and_tables_have_headers(adaptive: Path) -> None:
    page = page_of(adaptive)
    figures = page.all("svg")
    assert len(figures) == 9  # two traces, plans, predictions, steps, phases, memory, pairs, losses
    assert all(figure["role"] == "img" and len(figure["aria-labelledby"].split()) == 2 for figure in figures)
    assert len([tag for tag, _ in page.tags if tag == "desc"]) == len(figures)
    assert {header.get("scope") for header in page.all("th")} == {"col", "row"}
    assert len(page.all("caption")) == len(page.all("table")) > 8


def test_it_says_what_the_run_decided(adaptive: Path) -> None:
    text = " ".join(page_of(adaptive).text.split())
    for part in (
        "mixed eeee5555, asked for adaptive",
        "2 changes of plan in 100 steps, which took 560 ms together",
        "switch for straggler: gain 0.0121 s a step (33.1%) over 400 steps against 0.35 s",
        "tried in the first steps",
        "pipeline cccc3333 → mixed eeee5555",
        "24.8 ms, kept",
        "37.3 GiB on rank 0, 23.5 GiB are there",
        "tried plan 6.1 % of 2",  # of 6.0 and 6.1
        "promise of a switch mixed eeee5555 49 23.2 ms 24.8 ms -6.5 %",
        "its last window is +2.0 % off its best",
        "4.00 % of the seconds of all steps",
        "The search at the start took 1.40 s besides",
        "Slowest is rank 2",
        "637 MiB",
    ):
        assert part in text, part


@pytest.mark.parametrize("keep", [(), ("records",), ("traces",)], ids=["nothing", "records", "traces"])
def test_what_is_missing_is_said(tmp_path: Path, keep: tuple[str, ...]) -> None:
    page = page_of(make_run(tmp_path / "run", keep=keep))
    assert page.headings == list(SECTIONS)
    assert ("the run folder holds no records.jsonl" in page.text) == ("records" not in keep)
    assert ("No step was traced" in page.text) == ("traces" not in keep)


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        (None, "the report has no block scheduler"),
        (given_plan("graph"), "plan.mode is graph"),
        (given_plan("file"), "plan.file is given"),
    ],
    ids=["none", "graph", "file"],
)
def test_a_run_without_a_search_says_so(tmp_path: Path, scheduler: dict[str, object] | None, reason: str) -> None:
    page = page_of(make_run(tmp_path / "run", scheduler=scheduler, evaluations=[]))
    assert page.headings == list(SECTIONS)
    for done in ("predicted", "searched", "decided", "compared in hindsight"):
        assert f"Nothing was {done}: {reason}." in page.text
    assert "windows of the records" in page.text  # made from them, as the controller kept none
    assert "Nothing was evaluated." in page.text


def test_every_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'<b>&amp;$x$"
    folder = make_run(
        tmp_path / "run",
        name=evil,
        metric=evil,
        exactness=f"exact: {evil}",
        graph={evil: evil},
        model={"name": evil},
        devices=[{"rank": r, "kind": "cpu", "name": evil, "host": evil, "memory_bytes": None} for r in range(4)],
    )
    report = json.loads((folder / "strategy-report.json").read_text(encoding="utf-8"))
    for decision in report["scheduler"]["decisions"]:
        decision["rule"], decision["plan_fingerprint"], decision["triggers"] = evil, evil, [evil]
    report["scheduler"]["setting"] = report["scheduler"]["candidates"][0]["reason"] = evil
    for plan in (*report["scheduler"]["plans"], report["plan"]):
        plan["fingerprint"] = evil
    for probe in report["scheduler"]["probes"]:
        probe["plan"] = probe["family"] = evil
    (folder / "strategy-report.json").write_text(json.dumps(report), encoding="utf-8")
    for path in folder.glob("trace-*.json"):
        trace = json.loads(path.read_text(encoding="utf-8"))
        trace["otherData"]["plan"] = trace["traceEvents"][0]["name"] = evil
        path.write_text(json.dumps(trace), encoding="utf-8")
    page = page_of(folder)
    assert page.headings == list(SECTIONS)
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script>") > 20


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", keep=("records",))
    with (folder / "records.jsonl").open("a", encoding="utf-8") as records:
        records.write('{"step": "one"}\n')
    (folder / "trace-1.json").write_text("{", encoding="utf-8")
    (folder / "trace-2.json").write_text('{"traceEvents": [], "otherData": {"step": 2, "plan": "a"}}', encoding="utf-8")
    (folder / "trace-3.json").write_text('{"traceEvents": 3}', encoding="utf-8")
    text = page_of(folder).text
    assert "line 401: the step record lacks" in text
    for part in ("trace-1.json cannot be read", "trace-2.json holds no spans", "trace-3.json cannot be read"):
        assert part in text


@pytest.mark.parametrize("num_ranks", [1, 40])
def test_one_rank_and_many_have_a_page(tmp_path: Path, num_ranks: int) -> None:
    folder = make_run(tmp_path / "run", 20, num_ranks=num_ranks)
    page = page_of(folder)
    assert page.headings == list(SECTIONS)
    assert ("One rank has nobody to send to" in page.text) == (num_ranks == 1)
    assert ("highest" in page.text) == (num_ranks == 40)  # lines of forty ranks would not be legible


def test_values_that_are_no_numbers_have_a_page(tmp_path: Path) -> None:
    scores = [{"step": 3, "val_score": float("nan"), "test_score": None}]
    page = page_of(make_run(tmp_path / "run", 10, losses=[2.0, float("inf")] + [float("nan")] * 8, evaluations=scores))
    assert "no finite number in 9 steps" in page.text


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1000)
    for step in range(100, 1000, 100):
        make_trace(folder, step, PLANS["mixed"], layers=20, pieces=50)  # 3,000 spans a rank
    page = write_page(folder)
    assert page.stat().st_size < LIMIT_BYTES
    text = Page(page.read_text(encoding="utf-8")).text
    assert "11 steps were traced, the last 8 are shown" in text
    assert "Lines have 500 points" in text


def test_it_is_written_whole_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", 10, keep=())
    assert launch.main(["report", str(folder), "--html"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "strategy-report.html")
    assert {path.name for path in folder.iterdir()} == {"strategy-report.json", "strategy-report.html"}
    assert write_page(folder, tmp_path / "other.html").read_bytes() == (folder / "strategy-report.html").read_bytes()
    with pytest.raises(ValueError, match="cannot write .*nowhere"):
        write_page(folder, tmp_path / "nowhere" / "page.html")
    with pytest.raises(ValueError, match="holds no strategy-report.json"):
        write_page(tmp_path / "nowhere")
    with pytest.raises(SystemExit):
        launch.main(["report", str(folder), str(folder), "--html"])
    assert "--html makes the page of one run" in capsys.readouterr().err


def test_a_browser_shows_it(adaptive: Path, tmp_path: Path) -> None:
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    import matplotlib.image

    address = write_page(adaptive).resolve().as_uri()

    def browse(*options: str) -> str:
        command = [found[0], "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", *options]
        return subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=True).stdout

    shown = Page(re.sub(r"<!DOCTYPE[^>]*>", "", browse("--dump-dom")))
    assert shown.headings == list(SECTIONS)
    assert len(shown.all("svg")) == 9
    picture = tmp_path / "page.png"
    browse(f"--screenshot={picture}", "--window-size=1000,4000", "--hide-scrollbars")
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[:2] == (4000, 1000)
    colours = np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)
    assert len(colours) > 50
