"""Arguments and options that several commands share: name, meaning, shape, completion, values from a job file.

``rich_help_panel`` names the section of a long help that an option is listed in; options without one come first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from milpplan.cli.command import LENGTHS, read_words
from milpplan.problem import hardware_names, model_names, stack_names
from milpplan.problem.hardware import PRECISIONS

JOB: Final = "Model and job"
PLANS: Final = "Plans to choose from"
COST: Final = "Objective, deadline and cost"
PROOF: Final = "Search and proof"
OUTPUT: Final = "Output"

LAUNCHERS: Final = (
    "megatron|megatron-bridge|torchtitan|nanotron|deepspeed|accelerate|automodel|slime|ms-swift|verl|trl|"
    "llama-factory|axolotl"
)
"""Launchers, as the help shows them."""


def models_like(incomplete: str) -> list[str]:
    """List the shipped models that start with a text."""
    return [name for name in model_names() if name.startswith(incomplete)]


def hardware_like(incomplete: str) -> list[str]:
    """List the shipped hardware and stacks that start with a text, or with the part after its last comma."""
    before, comma, word = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in (*hardware_names(), *stack_names()) if name.startswith(word)]


def presets_like(incomplete: str) -> list[str]:
    """List the shipped models and hardware that start with a text."""
    return [*models_like(incomplete), *hardware_like(incomplete)]


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
        help="A hardware description's name, or a .toml or .json. For solve also several node types, "
        "NAME:GPUS+NAME:GPUS, or several to choose from, NAME,NAME.",
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
        help="Read arguments and options from a file (`milpplan init` writes one); command-line options override "
        "the file.",
        rich_help_panel=JOB,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="KEY",
        help="Leave out this key of the model's config.json, whatever it costs; the answer names it. Repeatable.",
        rich_help_panel=JOB,
    ),
]
IgnoreFlag = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="FLAG", help="Ignore this flag when pricing. Repeatable."),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="N|LO:HI[:STEP]",
        help="Number of GPUs; for solve also a range.",
        show_default="the sum of several node types",
    ),
]
GlobalBatch = Annotated[
    str | None,
    typer.Option("--global-batch", metavar="B|LO:HI[:STEP]", help="Global batch size (sequences), or a range."),
]
Calculon = Annotated[
    tuple[Path, Path, Path] | None,
    typer.Option(
        "--calculon",
        metavar="MODEL.json EXECUTION.json SYSTEM.json",
        help="Read three files of Calculon instead of MODEL and HARDWARE.",
        rich_help_panel=JOB,
    ),
]
SeqLen = Annotated[
    str | None,
    typer.Option("--seq-len", metavar="S", help="Sequence length (tokens).", show_default="the model's own"),
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="|".join(PRECISIONS),
        help="Format of the matrix products. fp8 has delayed scaling, the others scale as they say.",
    ),
]
Attention = Annotated[
    str,
    typer.Option("--attention", metavar="flash|unfused", help="Attention kernel.", rich_help_panel=JOB),
]
GradDtype = Annotated[
    str,
    typer.Option(
        "--grad-dtype",
        metavar="fp32|bf16",
        help="Format in which gradients are accumulated.",
        rich_help_panel=JOB,
    ),
]
Inference = Annotated[
    bool,
    typer.Option(
        "--inference",
        help="Forward only (prefill): no gradients, no optimizer, no recomputation.",
        rich_help_panel=JOB,
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(
        "--lora-rank",
        metavar="R",
        help="Train LoRA adapters of this rank; all weights of the model are frozen.",
        rich_help_panel=JOB,
    ),
]
LoraModules = Annotated[
    str | None,
    typer.Option(
        "--lora-modules",
        metavar="NAME,NAME|all-linear",
        help="Matrices with an adapter, as in Hugging Face PEFT's target_modules.",
        show_default="q_proj,v_proj",
        rich_help_panel=JOB,
    ),
]
Freeze = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        metavar="embedding|head|vision",
        help="Leave a part as it is: no gradients, no optimizer states. Repeatable.",
        rich_help_panel=JOB,
    ),
]
MtpLayers = Annotated[
    int,
    typer.Option(
        "--mtp-layers",
        metavar="N",
        help="Train N layers of multi-token prediction on the last stage, whatever the published model has.",
        rich_help_panel=JOB,
    ),
]
ExpertImbalance = Annotated[
    float | None,
    typer.Option(
        "--expert-imbalance",
        metavar="F",
        help="Token copies of the fullest expert rank over the mean, or the capacity that experts are padded to.",
        rich_help_panel=JOB,
    ),
]
Optimizer = Annotated[
    str,
    typer.Option("--optimizer", metavar="adam|muon", help="Rule of the update.", rich_help_panel=JOB),
]
MuonTpMode = Annotated[
    str | None,
    typer.Option(
        "--muon-tp-mode",
        metavar="duplicated|distributed|blockwise",
        help="Muon's work on matrices that tensor parallelism divides, as in Megatron-LM.",
        show_default="duplicated",
        rich_help_panel=JOB,
    ),
]
VisionTokens = Annotated[
    int | None,
    typer.Option(
        "--vision-tokens",
        metavar="N",
        min=0,
        help="Tokens of images in a sequence, a mean; the sequence length includes them.",
        show_default="0",
        rich_help_panel=JOB,
    ),
]
ImageTokens = Annotated[
    int | None,
    typer.Option(
        "--image-tokens",
        metavar="N",
        min=1,
        help="Tokens of an image.",
        show_default="those of the model, else one image a sequence",
        rich_help_panel=JOB,
    ),
]
ImageShares = Annotated[
    str | None,
    typer.Option(
        "--images",
        metavar="N:SHARE,...",
        help="Shares of the sequences by their images, such as 0:0.5,1:0.3,4:0.2, instead of --vision-tokens.",
        rich_help_panel=JOB,
    ),
]
AlignmentName = Annotated[
    str | None,
    typer.Option(
        "--alignment",
        metavar="dpo|grpo|reward|critic",
        help="Train on pairs (dpo, reward), both of whose sequences count in the batch, or on rollouts. "
        "reward and critic train a score of every token instead of the vocabulary's logits.",
        rich_help_panel=JOB,
    ),
]
ReferenceName = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="frozen|none",
        help="Reference model of --alignment: a frozen copy (LoRA: the base), or none on the GPUs.",
        show_default="frozen",
        rich_help_panel=JOB,
    ),
]
RolloutSeconds = Annotated[
    float | None,
    typer.Option(
        "--rollout-seconds",
        metavar="S",
        help="Time in which a step of --alignment grpo generates its sequences and moves weights to the engine.",
        rich_help_panel=JOB,
    ),
]
RolloutRate = Annotated[
    float | None,
    typer.Option(
        "--rollout-tokens-per-s",
        metavar="R",
        help="In place of seconds: generated tokens of whole sequences, a second and GPU of the job.",
        rich_help_panel=JOB,
    ),
]
RolloutMemory = Annotated[
    float | None,
    typer.Option(
        "--rollout-memory",
        metavar="GIB",
        help="Memory that the engine holds on a GPU while the policy trains.",
        show_default="0: all is offloaded",
        rich_help_panel=JOB,
    ),
]
RolloutApart = Annotated[
    bool,
    typer.Option(
        "--rollout-apart",
        help="Other GPUs generate the next step's sequences meanwhile (one step off-policy).",
        rich_help_panel=JOB,
    ),
]
Backend = Annotated[
    str,
    typer.Option("--backend", metavar="auto|cpsat|cbc|highs|scip", help="Solver.", rich_help_panel=PROOF),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="search|program",
        help="program: after the search, also write its answer as one integer program, solve it with --backend, "
        "and compare both.",
        rich_help_panel=PROOF,
    ),
]
SpaceKind = Annotated[
    str,
    typer.Option(
        "--space",
        metavar="uniform|free|any",
        help="uniform: equal virtual stages (the last may be smaller) and one recompute setting; free: any split "
        "(interleaved: chunks of equal size or a layer less), any recompute counts; any: interleaved chunks of "
        "any size too (proofs take much longer).",
    ),
]
ScheduleNames = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME,...|all",
        help="Pipeline schedules to choose from: gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, or all.",
        show_default="1f1b,interleaved",
        rich_help_panel=PLANS,
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
        help="Also decide on what is off by default: offload (weights, activations, optimizer states in the "
        "host's memory), tp-overlap (tensor-parallel communication in tiles), scatter-gather (between stages), "
        "kept-gathered (inputs that are not gathered again), recompute-modules (which of a "
        "chain of module sets selective recomputation replays), offload-modules (a chain of module sets "
        "whose inputs lie in the host's memory), ulysses (all-to-alls of heads in context "
        "parallelism), shared-images (each context-parallel rank computes some), "
        "hsdp (states sharded within groups of replicas), "
        "kept-weights (ZeRO 3 that gathers once a micro-batch), dispatch (how tokens reach experts), "
        "placement (the order of the degrees on the cluster), replicas (heterogeneous ones, on two to four node "
        "types), zero-pipeline (ZeRO 2 and 3 with a pipeline), or all. Repeatable.",
        rich_help_panel=PLANS,
    ),
]
MemoryMargin = Annotated[
    float | None,
    typer.Option(
        "--memory-margin",
        metavar="SHARE",
        help="Share of the device's memory that every plan leaves, from 0 to 0.5.",
        show_default="what the error of predicted peaks asks, about 0.05",
        rich_help_panel=PLANS,
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
Stack = Annotated[
    bool,
    typer.Option(
        "--stack/--no-stack",
        help="With the constants fitted to the launcher's software, where the hardware is a bare name that has "
        "them, or with those of the hardware alone.",
        rich_help_panel=PLANS,
    ),
]
TargetVersion = Annotated[
    str | None,
    typer.Option(
        "--target-version",
        metavar="V",
        help="Version of the --target.",
        show_default="the newest known",
        rich_help_panel=PLANS,
    ),
]
PriceLimit = Annotated[
    float,
    typer.Option(
        "--price-limit",
        metavar="S",
        min=0.0,
        help="Seconds to prove what --target costs, and --memory-margin; 0: do not ask.",
        rich_help_panel=PLANS,
    ),
]
Forbid = Annotated[
    list[str] | None,
    typer.Option(
        "--forbid",
        metavar="NAME=VALUE,...",
        help="Forbid layouts with these values, such as tp=8,pp=4. Repeatable.",
        rich_help_panel=PLANS,
    ),
]
ObjectiveName = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="Minimise step_time_per_token, num_gpus (that fit, or meet a deadline), or gpu_hours (of the whole "
        "run).",
        rich_help_panel=COST,
    ),
]
DeadlineHours = Annotated[
    float | None,
    typer.Option("--deadline-hours", metavar="H", help="Hours that the whole run may take.", rich_help_panel=COST),
]
DeadlineDays = Annotated[
    float | None,
    typer.Option("--deadline-days", metavar="D", help="The deadline in days of 24 hours.", rich_help_panel=COST),
]
Price = Annotated[
    str | None,
    typer.Option(
        "--price-per-gpu-hour",
        metavar="P|NAME=P,...",
        help="Price of an hour of one accelerator, of each kind of hardware if there are several: the answer "
        "says what the whole run of --tokens costs.",
        rich_help_panel=COST,
    ),
]
Tokens = Annotated[
    float | None,
    typer.Option("--tokens", metavar="T", help="Tokens of the whole run.", rich_help_panel=COST),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="S", help="Stop after S seconds with the best plan and its gap."),
]
Gap = Annotated[
    float,
    typer.Option("--gap", metavar="REL", help="Relative tolerance of the proof.", rich_help_panel=PROOF),
]
SolveGap = Annotated[
    float | None,
    typer.Option(
        "--gap",
        metavar="REL",
        help="Relative tolerance of the proof.",
        show_default="0.001",
        rich_help_panel=PROOF,
    ),
]
Fastest = Annotated[
    bool,
    typer.Option(
        "--fastest",
        help="Print the fastest plan found, not the simplest plan within the tolerance.",
        rich_help_panel=PROOF,
    ),
]
LengthsGap = Annotated[
    float | None,
    typer.Option(
        "--gap",
        metavar="REL",
        help="Relative tolerance of the proof.",
        show_default="0.01",
        rich_help_panel=PROOF,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", min=0, max=2_147_483_647, metavar="N", help="Seed of the solvers.", rich_help_panel=PROOF
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Processes that search, this one included; not for --space uniform.",
        show_default="CPUs, at most 4",
        rich_help_panel=PROOF,
    ),
]
Witness = Annotated[
    bool,
    typer.Option(
        "--witness/--no-witness",
        help="Let a second solver confirm every bound that decides.",
        rich_help_panel=PROOF,
    ),
]
WarmStart = Annotated[
    Path | None,
    typer.Option("--warm-start", metavar="PLAN.json", help="Plan to start from.", rich_help_panel=PROOF),
]
CheckEnds = Annotated[
    bool,
    typer.Option(
        "--check-ends",
        help="Solve again with all uncertain constants one sigma faster together, and slower (three solves).",
        rich_help_panel=PROOF,
    ),
]
Robust = Annotated[
    bool,
    typer.Option(
        "--robust",
        help="Find the plan that loses the least to the best plan of any scenario, and prove both.",
        rich_help_panel=PROOF,
    ),
]
ScenariosFile = Annotated[
    Path | None,
    typer.Option(
        "--scenarios",
        metavar="FILE.toml",
        help="Scenarios of --robust, beside the nominal one (`milpplan schema scenarios`).",
        show_default="slower communication, hosts and experts",
        rich_help_panel=PROOF,
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="PLAN.json", help="Also write the result here.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Also print stages, where time and memory go, all evidence, and the search."),
]
ShowProgress = Annotated[
    bool,
    typer.Option(
        "--progress",
        help="Print progress on stderr also where that is no terminal.",
        rich_help_panel=OUTPUT,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=OUTPUT)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Variable of the script, or setting of the configuration. Repeatable."
    ),
]
Arguments = Annotated[
    str | None,
    typer.Option("--args", metavar="WORDS", help='Arguments that the script is given; "": none.'),
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="FILE",
        help="Lengths of the sequences of a step: one a line, or a histogram or a law as JSON. --global-batch: "
        "how many of them (first of the file, or drawn); --seq-len: cut longer ones.",
        rich_help_panel=LENGTHS,
    ),
]
LengthsTimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="S",
        help="Stop after S seconds with the best step and its gap.",
        show_default="60",
    ),
]
MaxStrategies = Annotated[
    int | None,
    typer.Option(
        "--max-strategies",
        metavar="K",
        help="Maximum number of strategies that take turns in a step.",
        show_default="2",
        rich_help_panel=LENGTHS,
    ),
]
TokensPerStep = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-step",
        metavar="T",
        help="Take as many sequences as T tokens hold, at least one.",
        rich_help_panel=LENGTHS,
    ),
]
Align = Annotated[
    int | None,
    typer.Option(
        "--align",
        metavar="N",
        help="Pad every sequence to a multiple of N tokens.",
        show_default="128",
        rich_help_panel=LENGTHS,
    ),
]
Padding = Annotated[
    bool,
    typer.Option(
        "--padding",
        help="Do not pack: a micro-batch holds sequences of one bucket, padded to its end.",
        rich_help_panel=LENGTHS,
    ),
]
Mask = Annotated[
    str | None,
    typer.Option(
        "--mask",
        metavar="causal|full",
        help="What a query attends to.",
        show_default="causal",
        rich_help_panel=LENGTHS,
    ),
]
Buckets = Annotated[
    str | None,
    typer.Option(
        "--buckets",
        metavar="END,...",
        help="Pad every sequence to the end of its bucket (a multiple of --align).",
        rich_help_panel=LENGTHS,
    ),
]
BucketCount = Annotated[
    int | None,
    typer.Option(
        "--bucket-count",
        metavar="N",
        help="Choose the N buckets with the fewest FLOPs of padded sequences.",
        rich_help_panel=LENGTHS,
    ),
]
Baselines = Annotated[
    bool,
    typer.Option(
        "--baselines",
        help="Also price the rules of HotSPa and FlexSP, and bucketing.",
        rich_help_panel=LENGTHS,
    ),
]
SideBySide = Annotated[
    bool | None,
    typer.Option(
        "--side-by-side/--turns-only",
        help="Also run several degrees of context parallelism on different GPUs at once, or only strategies in "
        "turn.",
        show_default="side by side, unless --padding",
        rich_help_panel=LENGTHS,
    ),
]
UnlikeReplicas = Annotated[
    bool,
    typer.Option(
        "--unlike-replicas",
        help="Also run replicas of different tensor, context and pipeline parallelism at once.",
        rich_help_panel=LENGTHS,
    ),
]
Megatron = Annotated[
    Path | None,
    typer.Option(
        "--megatron",
        metavar="DIR",
        help="With --fix recompute=MODE: write a scheduler for Megatron-LM's hybrid context parallelism into a "
        "directory.",
        show_default=False,
        rich_help_panel=LENGTHS,
    ),
]
Hetu = Annotated[
    Path | None,
    typer.Option(
        "--hetu",
        metavar="DIR",
        help="With --turns-only --fix cp=1: write the files of HotSPa's runtime into a directory.",
        show_default=False,
        rich_help_panel=LENGTHS,
    ),
]
