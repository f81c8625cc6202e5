"""The config: what it refuses and in which words, how YAML and overrides become one frozen object.

Not here: what the settings do. Every refusal is one line that names the key and the value.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from gtx.config import Config, SamplingConfig, load_config, parse_config
from sparse_engine import METHODS

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    assert caught.type is ValueError, "pydantic's own errors have many lines"
    line = str(caught.value)
    assert "\n" not in line
    return line


def file_with(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# What is taken --------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    config = parse_config({})
    assert (config.name, config.seed) == ("run", 0)
    assert (config.data.name, config.data.self_loops, config.partition.parts) == ("digits", "add", 16)
    assert (config.model.name, config.model.width, config.model.heads, config.model.layers) == ("GT", 64, 4, 3)
    assert (config.batch.kind, config.plan.mode, config.plan.checkpointing) == ("full", "graph", "none")
    assert (config.engine.name, config.engine.precision, config.engine.zero_stage) == ("deepspeed", "float32", 0)
    assert (config.train.steps, config.train.epochs) == (100, None)
    assert config.sampling.per_layer(3) == (None, None, None)


@pytest.mark.parametrize("text", ["", "\n", "# nothing but a comment\n", "---\n", "{}\n"])
def test_an_empty_file_gives_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(file_with(tmp_path, text)) == Config()


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_the_configs_that_come_with_gtx_are_right(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert parse_config(config.as_dict()) == config


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize(
    ("override", "find", "value"),
    [
        ("seed=7", lambda c: c.seed, 7),
        ("name=a=b", lambda c: c.name, "a=b"),
        ("model.width=128", lambda c: c.model.width, 128),
        ("engine.lr=1e-3", lambda c: c.engine.lr, 1e-3),
        ("engine.lr=2E-4", lambda c: c.engine.lr, 2e-4),
        ("engine.lr=.5e-1", lambda c: c.engine.lr, 0.05),
        ("engine.lr=1.5e1", lambda c: c.engine.lr, 15.0),
        ("engine.lr=1", lambda c: c.engine.lr, 1.0),
        ("engine.betas=[0.8, 0.95]", lambda c: c.engine.betas, (0.8, 0.95)),
        ("data.root=some/folder", lambda c: c.data.root, Path("some/folder")),
        ("data.root=", lambda c: c.data.root, None),
        ("sampling.fanout=8", lambda c: c.sampling.fanout, 8),
        ("sampling.fanout=[8, null, 2]", lambda c: c.sampling.fanout, (8, None, 2)),
        ("sampling.fanout=null", lambda c: c.sampling.fanout, None),
        ("monitor.progress=no", lambda c: c.monitor.progress, False),
        ("model={width: 8, heads: 2}", lambda c: (c.model.width, c.model.heads, c.model.layers), (8, 2, 3)),
        # What is passed through is YAML as well.
        ("data.options.homophily=9e-1", lambda c: c.data.options, {"homophily": 0.9}),
        (
            "engine.deepspeed.zero_optimization.reduce_bucket_size=5e8",
            lambda c: c.engine.deepspeed,
            {"zero_optimization": {"reduce_bucket_size": 5e8}},
        ),
    ],
)
def test_an_override_sets_its_key(override: str, find: Callable[[Config], object], value: object) -> None:
    found = find(parse_config({}, [override]))
    assert found == value
    assert type(found) is type(value)


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = file_with(tmp_path, "model: {width: 32, layers: 2}\ntrain: {steps: 9}\n")
    config = load_config(path, ["model.width=16", "model.width=8", "train.steps=null", "train.epochs=2"])
    assert (config.model.width, config.model.layers) == (8, 2)
    assert (config.train.steps, config.train.epochs) == (None, 2)


def test_the_callers_dict_is_left_alone() -> None:
    given: dict[str, Any] = {"model": {"width": 32}, "data": {"options": {"normalize": "row"}}}
    before = copy.deepcopy(given)
    config = parse_config(given, ["model.width=64", "data.options.x=1", "engine.lr=0.1"])
    assert given == before
    given["data"]["options"]["normalize"] = "none"
    assert config.data.options == {"normalize": "row", "x": 1}


def test_a_config_is_frozen() -> None:
    config = parse_config({})
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.model.width = 3


# Fan-outs -------------------------------------------------------------------------------------------------------------


def test_settings_without_effect_are_told() -> None:
    data = {"plan": {"mode": "data", "file": "p.json"}, "batch": {"kind": "cluster", "parts": 2, "seeds": 3}}
    told = parse_config(data).without_effect()
    assert [line.split()[0] for line in told] == ["plan.mode", "batch.seeds"]
    assert parse_config({}).without_effect() == []
    (line,) = parse_config({"model": {"name": "SGFormer", "global_layers": 2}}).without_effect()
    assert line == "model.global_layers has no effect: model.name is SGFormer, only Polynormer reads it"
    for name in ("Polynormer", "own.py"):
        assert parse_config({"model": {"name": name, "global_layers": 2}}).without_effect() == []


def test_fanouts_are_one_a_layer() -> None:
    assert SamplingConfig(fanout=5).per_layer(2) == (5, 5)
    assert SamplingConfig(fanout=(5, None, 1)).per_layer(3) == (5, None, 1)
    assert SamplingConfig().per_layer(4) == (None,) * 4
    assert parse_config({"sampling": {"fanout": [5, None]}, "model": {"layers": 2}}).sampling.per_layer(2) == (5, None)
    line = refusal(lambda: SamplingConfig(fanout=(5, 3)).per_layer(3))
    assert line == "sampling.fanout has 2 entries, model.layers is 3; give one a layer"


# The hash -------------------------------------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_resolved_config() -> None:
    plain = parse_config({})
    assert len(plain.hash) == 16
    assert int(plain.hash, 16) >= 0
    same = [
        parse_config({"model": {"heads": 4, "width": 64}}),
        parse_config({"model": {"width": 64}, "seed": 0}),
        parse_config({}, ["engine.lr=0.001", "engine.betas=[0.9, 0.999]"]),
        parse_config(plain.as_dict()),
    ]
    assert {config.hash for config in same} == {plain.hash}


def test_other_settings_give_another_hash() -> None:
    overrides = [
        ["seed=1"],
        ["name=other"],
        ["data.root=a"],
        ["data.options.x=1"],
        ["partition.method=bfs"],
        ["model.ffn_width=128"],
        ["model.dropout=0.1"],
        ["batch.kind=cluster"],
        ["batch.kind=neighbor"],
        ["sampling.fanout=4"],
        ["sampling.fanout=[4, 4, 4]"],
        ["plan.mode=model"],
        ["plan.waves_per_round=1"],
        ["engine.lr=0.002"],
        ["engine.zero_stage=1"],
        ["train.steps=99"],
        ["monitor.records=false"],
    ]
    hashes = [parse_config({}, override).hash for override in [[], *overrides]]
    assert len(set(hashes)) == len(hashes)


# What is refused, and in which words ----------------------------------------------------------------------------------

REFUSED: list[tuple[dict[Any, Any], str]] = [
    # Unknown keys, with those that are known there.
    ({"modle": {}}, "unknown key 'modle'; known here: batch, data, engine, model, monitor, name, partition, plan, "),
    ({1: 2}, "unknown key '1'; known here: batch, data, "),
    (
        {"data": {"rot": "x"}},
        "unknown key 'data.rot'; known here: dedupe, edges, name, nodes, options, order, root, self_loops, split, "
        "standardize, undirected",
    ),
    ({"partition": {"part": 4}}, "unknown key 'partition.part'; known here: cache, method, parts"),
    ({"model": {"depth": 4}}, "unknown key 'model.depth'; known here: backend, dropout, edge_bias, encodings, "),
    ({"batch": {"size": 4}}, "unknown key 'batch.size'; known here: accumulation, kind, micro_batches, parts, seeds"),
    ({"sampling": {"fan": 4}}, "unknown key 'sampling.fan'; known here: correct, fanout, method, redraw"),
    (
        {"plan": {"ranks": 4}},
        "unknown key 'plan.ranks'; known here: allow, checkpointing, file, groups, ",
    ),
    ({"engine": {"zero": 1}}, "unknown key 'engine.zero'; known here: betas, deepspeed, device, "),
    (
        {"train": {"steps": 1, "step": 1}},
        "unknown key 'train.step'; known here: checkpoint_every, epochs, eval_every, patience, steps",
    ),
    ({"monitor": {"bar": True}}, "unknown key 'monitor.bar'; known here: progress, records, tensorboard"),
    # Wrong types.
    ({"name": 3}, "name is 3: input should be a valid string"),
    ({"seed": 1.5}, "seed is 1.5: input should be a valid integer"),
    ({"seed": True}, "seed is True: input should be a valid integer"),
    ({"data": 3}, "data is 3: a section of keys is wanted here, of dedupe, edges, name, nodes, "),
    ({"model": None}, "model is None: a section of keys is wanted here, of backend, dropout, "),
    (
        {"train": [100]},
        "train is [100]: a section of keys is wanted here, of checkpoint_every, epochs, ",
    ),
    ({"data": {"options": 3}}, "data.options is 3: input should be a valid dictionary"),
    ({"data": {"root": 3}}, "data.root is 3: input should be a path"),
    ({"model": {"width": "wide"}}, "model.width is 'wide': input should be a valid integer"),
    ({"model": {"width": "64"}}, "model.width is '64': input should be a valid integer"),
    ({"model": {"width": None}}, "model.width is None: input should be a valid integer"),
    ({"model": {"dropout": "a lot"}}, "model.dropout is 'a lot': input should be a valid number"),
    ({"engine": {"lr": True}}, "engine.lr is True: input should be a valid number"),
    ({"engine": {"zero_stage": True}}, "engine.zero_stage: True is none of 0, 1, 2, 3 and auto"),
    ({"engine": {"betas": [0.9]}}, "engine.betas.1 is missing, there is only [0.9]"),
    ({"engine": {"betas": ["a", 0.9]}}, "engine.betas.0 is 'a': input should be a valid number"),
    ({"monitor": {"progress": "perhaps"}}, "monitor.progress is 'perhaps': input should be a valid boolean"),
    ({"sampling": {"fanout": "x"}}, "sampling.fanout: 'x' is neither a whole number of at least 1, nor null, nor a "),
    ({"sampling": {"fanout": 2.5}}, "sampling.fanout: 2.5 is neither a whole number "),
    ({"sampling": {"fanout": True}}, "sampling.fanout: True is neither a whole number "),
    # Out of range, or none of the choices.
    ({"seed": -1}, "seed is -1: input should be greater than or equal to 0"),
    ({"partition": {"parts": 0}}, "partition.parts is 0: input should be greater than or equal to 1"),
    ({"model": {"heads": 0}}, "model.heads is 0: input should be greater than or equal to 1"),
    ({"model": {"dropout": 1.0}}, "model.dropout is 1.0: input should be less than 1"),
    ({"model": {"dropout": -0.1}}, "model.dropout is -0.1: input should be greater than or equal to 0"),
    ({"model": {"name": "GIN"}}, "model.name: 'GIN' is neither one of 'GT', 'GPS', 'GCN', 'SAGE', 'GAT', "),
    ({"model": {"options": {"a": 1}}}, "model: options are for models of your own; GT reads none"),
    ({"batch": {"kind": "fulll"}}, "batch.kind is 'fulll': input should be 'full', 'cluster' or 'neighbor'"),
    ({"sampling": {"fanout": 0}}, "sampling.fanout: 0 is neither a whole number of at least 1, nor null, "),
    ({"sampling": {"fanout": [3, 0, 2]}}, "sampling.fanout: [3, 0, 2] is neither a whole number of at least 1, "),
    (
        {"plan": {"mode": "fast"}},
        "plan.mode is 'fast': input should be 'graph', 'model', 'pipeline', 'data', 'mixed', 'auto' or 'adaptive'",
    ),
    ({"plan": {"waves_per_round": -1}}, "plan.waves_per_round is -1: input should be greater than or equal to 0"),
    ({"engine": {"zero_stage": 4}}, "engine.zero_stage is 4: input should be 0, 1, 2, 3 or 'auto'"),
    ({"engine": {"lr": 0}}, "engine.lr is 0: input should be greater than 0"),
    ({"engine": {"lr": math.inf}}, "engine.lr is inf: input should be a finite number"),
    ({"engine": {"timeout_s": math.nan}}, "engine.timeout_s is nan: input should be "),
    ({"engine": {"weight_decay": -1}}, "engine.weight_decay is -1: input should be greater than or equal to 0"),
    ({"engine": {"betas": [0.9, 1.5]}}, "engine.betas.1 is 1.5: input should be less than 1"),
    ({"engine": {"betas": [0.9, 0.9, 0.9]}}, "engine.betas is [0.9, 0.9, 0.9]: tuple should have at most 2 items"),
    ({"train": {"steps": 0}}, "train.steps is 0: input should be greater than or equal to 1"),
    # Settings that contradict each other.
    ({"data": {"name": "table", "nodes": "n.csv"}}, "data: name table needs edges; give a .csv, .tsv or .parquet file"),
    ({"data": {"name": "table", "edges": "e.csv"}}, "data: name table needs nodes; give a .csv, .tsv or .parquet file"),
    ({"data": {"nodes": "n.csv"}}, "data: nodes n.csv has no effect with name digits; use name table"),
    (
        {"data": {"name": "table", "nodes": "n.csv", "edges": "e.csv", "root": "here"}},
        "data: root here has no effect with name table; write it into nodes and edges",
    ),
    ({"model": {"width": 10}}, "model: width 10 is not a multiple of heads 4; choose width 4 * k"),
    ({"model": {"name": "Exphormer", "expander_degree": 3}}, "model.expander_degree is 3: "),
    ({"model": {"name": "SGFormer", "graph_weight": 1.5}}, "model.graph_weight is 1.5: "),
    (
        {"model": {"name": "Polynormer", "layers": 2, "global_layers": 2}},
        "model: layers is 2 and global_layers 2; Polynormer needs a local layer, set layers to 3 or more",
    ),
    ({"model": {"name": "GPS", "width": 9, "heads": 2}}, "model: width 9 is not a multiple of heads 2; "),
    (
        {"engine": {"name": "torch", "zero_stage": 2}},
        "engine: zero_stage 2 has no effect with name torch; use name deepspeed",
    ),
    (
        {"engine": {"name": "torch", "offload_optimizer": "cpu"}},
        "engine: offload_optimizer 'cpu' has no effect with name torch; use name deepspeed",
    ),
    (
        {"engine": {"name": "torch", "deepspeed": {"x": 1}}},
        "engine: deepspeed {'x': 1} has no effect with name torch; use name deepspeed",
    ),
    (
        {"engine": {"zero_stage": "auto"}},
        "engine.zero_stage is auto and plan.mode graph: nothing is searched; use plan.mode auto or adaptive, or give a",
    ),
    ({"engine": {"name": "torch", "precision": "bf16"}}, "engine: precision 'bf16' needs name deepspeed; "),
    ({"engine": {"precision": "float64"}}, "engine: precision float64 needs name torch; "),
    ({"engine": {"offload_optimizer": "cpu"}}, "engine: offload_optimizer cpu needs zero_stage 1, 2 or 3; it is 0"),
    ({"engine": {"loss_scale": 128}}, "engine: loss_scale 128 has no effect with precision float32; remove it"),
    ({"engine": {"momentum": 0.9}}, "engine: momentum 0.9 has no effect with optimizer adamw; use sgd"),
    (
        {"engine": {"optimizer": "sgd", "betas": [0.5, 0.9]}},
        "engine: betas [0.5, 0.9] have no effect with optimizer sgd; use adam or adamw",
    ),
    ({"train": {}}, "train: neither is given; give one of steps and epochs, "),
    (
        {"train": {"steps": 5, "patience": 2}},
        "train: patience is 2 and eval_every 0: the only evaluation is at ",
    ),
    ({"train": {"steps": 5, "epochs": 2}}, "train: steps is 5 and epochs is 2; give one of steps and epochs, "),
    (
        {"batch": {"micro_batches": 3}},
        "batch.micro_batches 3 times batch.accumulation 1 has no effect with batch.kind full, ",
    ),
    ({"batch": {"accumulation": 2}}, "batch.micro_batches 1 times batch.accumulation 2 has no effect with "),
    ({"batch": {"kind": "cluster", "parts": 20}}, "batch.parts 20 exceeds partition.parts 16; lower the first"),
    ({"sampling": {"redraw": "once"}}, "sampling.redraw once has no effect without sampling.fanout; set a fanout"),
    ({"sampling": {"method": "top"}}, "sampling.method top has no effect without sampling.fanout; set a fanout"),
    ({"sampling": {"redraw": "once", "fanout": [None] * 3}}, "sampling.redraw once has no effect without "),
    ({"sampling": {"fanout": [3, 2]}}, "sampling.fanout has 2 entries, model.layers is 3; give one a layer"),
]


@pytest.mark.parametrize(("data", "start"), REFUSED, ids=[start for _, start in REFUSED])
def test_a_wrong_setting_is_one_line_with_key_and_value(data: dict[Any, Any], start: str) -> None:
    line = refusal(lambda: parse_config(data, source="run.yaml"))
    assert line.startswith(f"run.yaml: {start}")
    assert not line.endswith("more)"), "one mistake is counted as one"


def test_what_only_seems_to_contradict_is_taken() -> None:
    for data in (
        {"model": {"name": "GCN", "width": 10}},  # GCN has no heads
        {"model": {"name": "MLP", "width": 10}},
        {"engine": {"name": "torch", "precision": "float64"}},
        {"engine": {"precision": "fp16", "loss_scale": 128.0}},
        {"engine": {"optimizer": "sgd", "momentum": 0.9}},
        {"engine": {"zero_stage": 1, "offload_optimizer": "cpu"}},
        {"batch": {"kind": "cluster", "micro_batches": 3, "parts": 16}},
        {"batch": {"kind": "full", "parts": 20}},
        {"sampling": {"redraw": "once", "fanout": [None, 2, None]}},
    ):
        parse_config(data)


def test_every_section_says_which_keys_it_knows() -> None:
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            line = refusal(lambda name=name: parse_config({name: {"nonsense": 1}}))  # type: ignore[misc]
            assert f"unknown key '{name}.nonsense'; known here: {', '.join(sorted(section.model_fields))}" in line


def test_further_mistakes_are_counted() -> None:
    line = refusal(lambda: parse_config({"engine": {"weight_decay": -1, "lr": 0}, "seed": -1}))
    assert line == "config: seed is -1: input should be greater than or equal to 0 (and 2 more)"


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("model.width", "the override 'model.width' is not of the form a.b=c"),
        ("=3", "the override '=3' is not of the form a.b=c"),
        ("model..width=3", "the override 'model..width=3' is not of the form a.b=c"),
        ("model.=3", "the override 'model.=3' is not of the form a.b=c"),
        ("model.width=[", "the override 'model.width=[' has a value that is not YAML: "),
        ("name=2020-13-45", "the override 'name=2020-13-45' has a value that is not YAML: month must be in 1..12"),
        (
            "data.options={a: 1, a: 2}",
            "the override 'data.options={a: 1, a: 2}' has a value that is not YAML: line 1: ",
        ),
        ("model.width.x=3", "the override 'model.width.x=3' goes through 'width', which holds a value"),
        ("model.width=", "config: model.width is None: input should be a valid integer"),
        ("seed=1e3", "config: seed is 1000.0: input should be a valid integer"),
        ("engine.lr=1e-3x", "config: engine.lr is '1e-3x': input should be a valid number"),
        ("modle.width=3", "config: unknown key 'modle'; known here: "),
        ("model.with=3", "config: unknown key 'model.with'; known here: "),
    ],
)
def test_a_wrong_override_is_one_line(override: str, start: str) -> None:
    assert refusal(lambda: parse_config({"model": {"width": 32}}, [override])).startswith(start)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: run\nmodel: {width: 3\nseed: 1\n", "is not YAML: line 3: "),
        ("name: run\nmodel:\n\twidth: 3\n", "is not YAML: line 3: "),
        ("seed: 1\nmodel: {width: 8}\nseed: 2\n", "is not YAML: line 3: the key 'seed' comes twice; keep one"),
        ("model:\n  width: 8\n  width: 16\n", "is not YAML: line 3: the key 'width' comes twice; keep one"),
        ("name: a\n---\nname: b\n", "is not YAML: line 2: "),
        ("name: 2020-13-45\n", "is not YAML: month must be in 1..12"),
        ("name: a\0b\n", "is not YAML: unacceptable character #x0000: "),
        ("seed: !!python/object/apply:os.getpid []\n", "is not YAML: line 1: could not determine a constructor"),
        ("- name: run\n- seed: 1\n", "is a YAML list; it must be a mapping of sections"),
        ("just words\n", "is a YAML str; it must be a mapping of sections"),
        ("12\n", "is a YAML int; it must be a mapping of sections"),
    ],
)
def test_a_file_that_is_no_config_is_one_line_with_its_place(tmp_path: Path, text: str, reason: str) -> None:
    path = file_with(tmp_path, text)
    assert refusal(lambda: load_config(path)).startswith(f"{path} {reason}")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert refusal(lambda: load_config(missing)) == f"cannot read the config {missing}: No such file or directory"
    assert refusal(lambda: load_config(tmp_path)) == f"cannot read the config {tmp_path}: Is a directory"
    latin = file_with(tmp_path, "name: caf\u00e9\n".encode("latin-1"))
    assert refusal(lambda: load_config(latin)) == f"cannot read the config {latin}: it is not UTF-8 text"


def test_a_merge_key_is_not_a_key_that_comes_twice(tmp_path: Path) -> None:
    text = "data: {options: {base: &b {x: 1, y: 2}, own: {<<: *b, x: 3}}}\n"
    assert load_config(file_with(tmp_path, text)).data.options["own"] == {"x": 3, "y": 2}


def test_numbers_with_exponents_are_numbers_and_other_words_are_not(tmp_path: Path) -> None:
    text = "name: e5\nengine: {lr: 1e-3, weight_decay: 5E-4}\ndata: {options: {a: 1e3, b: 1e, c: '1e3', d: 12}}\n"
    config = load_config(file_with(tmp_path, text))
    assert (config.name, config.engine.lr, config.engine.weight_decay) == ("e5", 1e-3, 5e-4)
    assert config.data.options == {"a": 1000.0, "b": "1e", "c": "1e3", "d": 12}


def test_the_methods_of_sampling_are_those_of_the_engine() -> None:
    assert get_args(SamplingConfig.model_fields["method"].annotation) == (*METHODS, "random_walk")
