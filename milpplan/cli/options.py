"""The options of ``milpplan solve``: name, meaning and shape on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from milpplan.cli.completion import hardware_like, models_like
from milpplan.cli.job_file import read_words

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model's name, or a .toml, .json or Hugging Face config.json.",
        autocompletion=models_like,
    ),
]
Hardware = Annotated[
    str | None,
    typer.Argument(
        metavar="HARDWARE",
        help="A hardware description's name, or a .toml or .json. Several node types: NAME:GPUS+NAME:GPUS. "
        "Several to choose from: NAME,NAME.",
        autocompletion=hardware_like,
    ),
]
JobFile = Annotated[
    Path | None,
    typer.Option(
        "--job",
        metavar="JOB.toml",
        is_eager=True,
        callback=read_words,
        help="Take these arguments and options from a file (`milpplan init` writes one); the command line goes "
        "before it.",
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="KEY",
        help="Leave out this key of the model's config.json, whatever it costs; the answer names it. Repeatable.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="N|LO:HI[:STEP]",
        help="Number of GPUs, or a range.",
        show_default="the sum of several node types",
    ),
]
GlobalBatch = Annotated[
    str | None, typer.Option("--global-batch", metavar="B|LO:HI[:STEP]", help="Sequences a step, or a range.")
]
Calculon = Annotated[
    tuple[Path, Path, Path] | None,
    typer.Option(
        "--calculon",
        metavar="MODEL.json EXECUTION.json SYSTEM.json",
        help="Three files of Calculon in place of ours.",
    ),
]
SeqLen = Annotated[
    str | None,
    typer.Option("--seq-len", metavar="S", help="Tokens a sequence.", show_default="the model's own"),
]
Precision = Annotated[str, typer.Option("--precision", metavar="bf16|fp8", help="Format of the matrix products.")]
Attention = Annotated[str, typer.Option("--attention", metavar="flash|unfused", help="Attention kernel.")]
GradDtype = Annotated[
    str, typer.Option("--grad-dtype", metavar="fp32|bf16", help="Format in which gradients are accumulated.")
]
Inference = Annotated[
    bool, typer.Option("--inference", help="Forwards alone (a prefill): no gradients, no optimizer, no recompute.")
]
Backend = Annotated[str, typer.Option("--backend", metavar="auto|cpsat|cbc|highs", help="Solver.")]
SpaceKind = Annotated[
    str,
    typer.Option(
        "--space",
        metavar="uniform|free|any",
        help="uniform: equal stages and one recompute setting; free: any split (interleaved: chunks of equal "
        "size or a layer less), any recompute counts; any: interleaved chunks of any size too (proofs take much "
        "longer).",
    ),
]
ScheduleNames = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME,...|all",
        help="Pipeline schedules to choose from: gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, or all.",
        show_default="1f1b,interleaved",
    ),
]
Fix = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="NAME=VALUE",
        help="Fix a field of the layout, such as tp=8, or recompute=full. Repeatable.",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="NAME",
        help="Let the planner also decide on: offload (weights, activations, optimizer states in the host's "
        "memory), tp-overlap (tensor-parallel communication in tiles), scatter-gather (between stages), "
        "kept-gathered (inputs that are not gathered again), placement (the order of the degrees on the cluster), "
        "replicas (of different make, on two to four node types), or all. Repeatable.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Only plans that this launcher can run: megatron, and the other names of `export --to`.",
        show_default="any plan",
    ),
]
TargetVersion = Annotated[
    str | None,
    typer.Option("--target-version", metavar="V", help="Its version.", show_default="the newest known"),
]
PriceLimit = Annotated[
    float,
    typer.Option(
        "--price-limit",
        metavar="S",
        min=0.0,
        help="With --target: seconds to prove what the restriction costs; 0 does not ask.",
    ),
]
Forbid = Annotated[
    list[str] | None,
    typer.Option("--forbid", metavar="NAME=VALUE,...", help="Forbid such layouts, as tp=8,pp=4. Repeatable."),
]
ObjectiveName = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="step_time_per_token, num_gpus (the fewest that fit, or meet a deadline), or gpu_hours (the least of "
        "the whole run).",
    ),
]
DeadlineHours = Annotated[
    float | None, typer.Option("--deadline-hours", metavar="H", help="The whole run takes at most this.")
]
DeadlineDays = Annotated[
    float | None, typer.Option("--deadline-days", metavar="D", help="The same in days of 24 hours.")
]
Price = Annotated[
    str | None,
    typer.Option(
        "--price-per-gpu-hour",
        metavar="P|NAME=P,...",
        help="Price of an hour of one accelerator, of each kind of hardware if there are several: what the whole "
        "run of --tokens costs.",
    ),
]
Tokens = Annotated[float | None, typer.Option("--tokens", metavar="T", help="Tokens of the whole run.")]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="S", help="Stop after S seconds with the best plan and its gap."),
]
Gap = Annotated[float, typer.Option("--gap", metavar="REL", help="Relative tolerance of the proof.")]
SolveGap = Annotated[
    float | None,
    typer.Option(
        "--gap", metavar="REL", help="Relative tolerance of the proof.", show_default="0.0001; with --lengths 0.01"
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2_147_483_647, metavar="N", help="Solvers' seed.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Processes that prove, for --space any and --lengths; 1: this one.",
        show_default="CPUs, at most 4",
    ),
]
Witness = Annotated[
    bool, typer.Option("--witness/--no-witness", help="A second solver confirms every bound that decides.")
]
WarmStart = Annotated[Path | None, typer.Option("--warm-start", metavar="PLAN.json", help="A plan to start from.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="PLAN.json", help="Also write the result here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
CheckEnds = Annotated[
    bool,
    typer.Option("--check-ends", help="Solve again at both ends of the hardware's uncertainty (three solves)."),
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help="Sequences of several lengths in one step: one length a line, or a histogram or a law as JSON. "
        "--global-batch: how many of them (first of the file, or drawn); --seq-len: cut longer ones. Stops after "
        "60 s unless --time-limit says otherwise.",
    ),
]
MaxStrategies = Annotated[
    int | None,
    typer.Option(
        "--max-strategies", metavar="K", help="Strategies that take turns in a step.", show_default="2 (lengths)"
    ),
]
TokensPerStep = Annotated[
    int | None,
    typer.Option("--tokens-per-step", metavar="T", help="With --lengths: as many of its sequences as T tokens."),
]
Padding = Annotated[
    bool,
    typer.Option(
        "--padding",
        help="With --lengths: micro-batches hold sequences of one bucket, padded to its end, not packed.",
    ),
]
Mask = Annotated[
    str | None,
    typer.Option(
        "--mask", metavar="causal|full", help="With --lengths: what a query attends to.", show_default="causal"
    ),
]
Buckets = Annotated[
    str | None,
    typer.Option(
        "--buckets",
        metavar="END,...",
        help="With --lengths: every sequence is padded to the end of its bucket (a multiple of --align).",
    ),
]
BucketCount = Annotated[
    int | None,
    typer.Option(
        "--bucket-count",
        metavar="N",
        help="With --lengths: the N buckets with the fewest FLOPs of padded sequences.",
    ),
]
Baselines = Annotated[
    bool,
    typer.Option("--baselines", help="With --lengths: what the rules of HotSPa and FlexSP, and bucketing, take."),
]
SideBySide = Annotated[
    bool | None,
    typer.Option(
        "--side-by-side/--turns-only",
        help="With --lengths: context parallelism of several degrees on different GPUs at once as well, or only"
        " strategies in turn.",
        show_default="side by side, unless --padding",
    ),
]
UnlikeReplicas = Annotated[
    bool,
    typer.Option(
        "--unlike-replicas",
        help="With --lengths: replicas of different tensor, context and pipeline parallelism at once as well.",
    ),
]
Hetu = Annotated[
    Path | None,
    typer.Option(
        "--hetu",
        metavar="DIR",
        help="With --lengths --turns-only --fix cp=1: the files of HotSPa's runtime, into a directory.",
        show_default=False,
    ),
]
Align = Annotated[
    int | None,
    typer.Option(
        "--align", metavar="N", help="With --lengths: sequences are padded to multiples.", show_default="128"
    ),
]
