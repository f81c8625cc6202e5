"""Parses the command line and dispatches, nothing else. It is launched, by python, deepspeed or torchrun.

The work is in `gtx/`, a file a command: `runs.py`, `predict.py`, `export.py`, `show.py`, `equality.py`,
`calibrate.py`, `simulate.py`, `ablate.py`, `report.py`, `page.py`, `compare.py` and `replay.py`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

OWN = ("gtx", "scheduler", "sparse_engine", "monitor")


def parser() -> argparse.ArgumentParser:
    """The command line. deepspeed puts `--local_rank` before the subcommand; ranks come from the environment."""
    top = argparse.ArgumentParser(prog="launch.py", description="Train graph transformers under parallel plans.")
    top.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    commands = top.add_subparsers(
        dest="command",
        required=True,
        metavar="train | predict | export | partition | plan | check | calibrate | simulate | ablate | report | replay",
    )
    with_config = argparse.ArgumentParser(add_help=False)
    with_config.add_argument("config", type=Path, help="a YAML file, see configs/")
    with_config.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace those of the file")
    train = commands.add_parser("train", parents=[with_config], help="train, evaluate, and write a run folder")
    train.add_argument("--run-dir", type=Path, help="the run folder; default runs/<name>-<date>-<time>")
    train.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on from a run folder's latest checkpoint, or from a file"
    )
    train.add_argument(
        "--seeds", help="one run a seed, such as 0..4 or 0,3,7, then mean and deviation; default runs/<name>-seeds"
    )
    train.add_argument(
        "--beside",
        metavar="MODELS",
        help="such as mlp,gcn: train these as well, all else kept, and compare their scores",
    )
    predict = commands.add_parser("predict", help="write what a run's model says of every node as Parquet")
    predict.add_argument("run_dir", type=Path)
    predict.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the run's")
    predict.add_argument("--checkpoint", choices=("best", "latest"), default="best", help="which one; default best")
    predict.add_argument("--out", type=Path, help="the file to write; default predictions.parquet in the run folder")
    predict.add_argument(
        "--chunk-rows",
        type=int,
        help="rows a rank computes at a time, layer by layer, so that large graphs fit; default 65536, 0 for all",
    )
    export = commands.add_parser("export", help="write a run's model as one file that torch alone can run")
    export.add_argument("run_dir", type=Path)
    export.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the run's")
    export.add_argument("--to", type=Path, required=True, metavar="FILE.pt2", help="the file to write")
    export.add_argument("--checkpoint", choices=("best", "latest"), default="best", help="which one; default best")
    commands.add_parser("partition", parents=[with_config], help="cut the graph and keep the partition")
    plan = commands.add_parser("plan", parents=[with_config], help="show the plan a run would have; train nothing")
    plan.add_argument("--world-size", type=int, default=2, help="ranks to plan for; default 2")
    plan.add_argument("--out", type=Path, help="write the plan as JSON, to edit and pass as plan.file")
    plan.add_argument("--topology", type=Path, help="predict each mode's cost on this machine; see calibrate")
    check = commands.add_parser(
        "check", parents=[with_config], help="whether the model computes the same under any plan; see own_layer.md"
    )
    check.add_argument("--worlds", default="1,2,3", help="numbers of ranks; default 1,2,3")
    calibrate = commands.add_parser(
        "calibrate", parents=[with_config], help="measure the launched ranks and their links, some seconds"
    )
    calibrate.add_argument("--out", type=Path, required=True, help="the topology file to write")
    simulate = commands.add_parser(
        "simulate", parents=[with_config], help="play the job on a machine one does not have, with scripted events"
    )
    simulate.add_argument("--devices", type=int, required=True, help="how many devices")
    simulate.add_argument(
        "--topology", type=Path, required=True, help="the machine; see calibrate and configs/topology"
    )
    simulate.add_argument("--devices-per-host", type=int, help="lay the devices out on hosts of as many")
    simulate.add_argument("--steps", type=int, default=400, help="steps to play; default 400")
    simulate.add_argument(
        "--event", action="append", default=[], help="'STEP:rank R:TIMES' or 'STEP:link A-B:TIMES' slower; repeatable"
    )
    simulate.add_argument("--switch-s", type=float, default=1.0, help="seconds that a switch takes; default 1")
    simulate.add_argument("--noise", type=float, default=0.0, help="relative deviation of each step; default 0")
    simulate.add_argument("--out", type=Path, help="write every step and decision as JSON")
    ablate = commands.add_parser(
        "ablate", parents=[with_config], help="run every mode at every world size, and put them side by side"
    )
    ablate.add_argument(
        "--modes",
        default="graph,model,pipeline,data,mixed,auto,adaptive",
        help="modes, and variations such as auto:greedy, auto-exchange, adaptive-hysteresis; default all modes",
    )
    ablate.add_argument("--worlds", default="1,2,4", help="numbers of ranks; default 1,2,4")
    ablate.add_argument(
        "--repeats", type=int, default=3, help="runs of each, with seeds from the config's on; default 3"
    )
    ablate.add_argument(
        "--out", type=Path, help="where runs and tables go; default runs/<name>-ablation; goes on there"
    )
    ablate.add_argument("--scheduler", help="run auto and adaptive under each of fixed,greedy,cost_model,oracle")
    ablate.add_argument("--without-terms", help="run auto and adaptive also without each of these cost terms")
    ablate.add_argument("--no-hysteresis", action="store_true", help="run adaptive also without hysteresis")
    report = commands.add_parser("report", help="print a run's strategy report as tables, or compare two runs")
    report.add_argument("run_dir", type=Path)
    report.add_argument("other", type=Path, nargs="?", help="a second run folder, to compare with the first")
    report.add_argument("--html", action="store_true", help="write the report as one HTML page into the run folder")
    again = commands.add_parser("replay", help="fold an adaptive run's windows anew, also under other thresholds")
    again.add_argument("run_dir", type=Path)
    again.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the run's")
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; overrides may stand anywhere behind the config."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    stray = [word for word in rest if word.startswith("-") or "=" not in word or options.command == "report"]
    if stray:
        top.error(f"unknown argument {stray[0]!r}")
    if options.command == "report" and options.html and options.other:
        top.error("--html makes the page of one run; leave the second folder out")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 2 for what the user can mend (one line says what), 1 for anything else (with a traceback)."""
    options = parse(arguments)
    rank = os.environ.get("RANK", "0")
    # Huge pages for tensors, read by torch at its first allocation: ranks that share a cache slow each other down less.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        if options.command == "report":
            if options.other:
                from gtx.compare import compare_runs

                compare_runs(options.run_dir, options.other)
            elif options.html:
                from gtx.page import write_page

                print(write_page(options.run_dir))
            else:
                from gtx.report import print_run

                print_run(options.run_dir)
            return 0
        if options.command == "replay":
            from gtx.replay import replay_run

            replay_run(options.run_dir, options.overrides)
            return 0
        if options.command == "predict":
            from gtx.predict import CHUNK_ROWS, run_predict

            rows = CHUNK_ROWS if options.chunk_rows is None else options.chunk_rows
            run_predict(options.run_dir, options.overrides, options.checkpoint, options.out, rows)
            return 0
        if options.command == "export":
            from gtx.export import run_export

            run_export(options.run_dir, options.overrides, options.checkpoint, options.to)
            return 0
        if options.command == "ablate":
            from gtx.ablate import run_ablation

            return run_ablation(
                options.config,
                options.overrides,
                Path(__file__).resolve(),
                modes=options.modes,
                worlds=options.worlds,
                repeats=options.repeats,
                out=options.out,
                schedulers=options.scheduler,
                without_terms=options.without_terms,
                no_hysteresis=options.no_hysteresis,
            )
        from gtx.config import load_config

        config = load_config(options.config, options.overrides)
        if options.command == "train":
            from gtx.runs import run_training

            command = shlex.join(["launch.py", *arguments])
            run_training(config, options.run_dir, command, options.resume, seeds=options.seeds, beside=options.beside)
        elif options.command == "calibrate":
            from gtx.calibrate import run_calibration

            run_calibration(config, options.out, shlex.join(["launch.py", *arguments]))
        elif options.command == "simulate":
            from gtx.simulate import simulate

            simulate(
                config,
                options.devices,
                options.topology,
                steps=options.steps,
                events=options.event,
                switch_s=options.switch_s,
                noise=options.noise,
                devices_per_host=options.devices_per_host,
                out=options.out,
            )
        elif options.command == "check":
            from gtx.equality import check_config

            check_config(config, options.worlds)
        elif options.command == "partition":
            from gtx.show import show_partition

            show_partition(config)
        else:
            from gtx.show import show_plan

            show_plan(config, options.world_size, options.out, options.topology)
        return 0
    except ValueError as error:
        print(f"gtx: {error}", file=sys.stderr, flush=True)
        status = 2
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).partition(".")[0]
        if name in OWN:
            raise
        print(
            f"gtx: the package {name} is not installed; run make setup, or pip install -c constraints.txt -e '.[dev]'",
            file=sys.stderr,
            flush=True,
        )
        status = 2
    except Exception as error:
        from gtx.parallel.world import ExchangeError

        if isinstance(error, ExchangeError):
            print(f"gtx: rank {rank}: {error}", file=sys.stderr, flush=True)
        else:
            print(f"gtx: rank {rank} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        status = 1
    # Peers may be waiting in background threads of this process: leave without joining them.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
