"""Arguments and options of ``solve`` and their problem, and the options of ``solve-lengths``.

Other commands take a part of them. The help of a command must not wait for the imports of a solve, so methods
import what they need.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from milpplan.cli import command
from milpplan.cli import options as o
from milpplan.errors import InvalidInputError
from milpplan.problem.problem import MAX_SEQUENCE
from milpplan.problem.reading import shown

if TYPE_CHECKING:
    from milpplan.lengths import SequenceRules
    from milpplan.optimize import SolveOptions
    from milpplan.problem import Problem

DEFAULT_ALIGNMENT: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveWords:
    """Arguments and options of ``solve``, apart from those about lengths, in the order of its help.

    A new option is a name in ``milpplan.cli.options`` and a field here.
    """

    model: o.Model = None
    hardware: o.Hardware = None
    gpus: o.Gpus = None
    global_batch: o.GlobalBatch = None
    seq_len: o.SeqLen = None
    precision: o.Precision = "bf16"
    target: o.Target = None
    space: o.SpaceKind = "free"
    fix: o.Fix = None
    time_limit: o.TimeLimit = None
    out: o.Out = None
    verbose: o.Verbose = False
    job: o.JobFile = None
    calculon: o.Calculon = None
    ignore: o.Ignore = None
    attention: o.Attention = "flash"
    grad_dtype: o.GradDtype = "fp32"
    inference: o.Inference = False
    lora_rank: o.LoraRank = None
    lora_modules: o.LoraModules = None
    freeze: o.Freeze = None
    mtp_layers: o.MtpLayers = 0
    expert_imbalance: o.ExpertImbalance = None
    optimizer: o.Optimizer = "adam"
    muon_tp_mode: o.MuonTpMode = None
    vision_tokens: o.VisionTokens = None
    image_tokens: o.ImageTokens = None
    images: o.ImageShares = None
    alignment: o.AlignmentName = None
    reference: o.ReferenceName = None
    rollout_seconds: o.RolloutSeconds = None
    rollout_tokens_per_s: o.RolloutRate = None
    rollout_memory: o.RolloutMemory = None
    rollout_apart: o.RolloutApart = False
    schedule: o.ScheduleNames = None
    allow: o.Allow = None
    forbid: o.Forbid = None
    memory_margin: o.MemoryMargin = None
    target_version: o.TargetVersion = None
    stack: o.Stack = True
    price_limit: o.PriceLimit = 60.0
    objective: o.ObjectiveName = "step_time_per_token"
    deadline_hours: o.DeadlineHours = None
    deadline_days: o.DeadlineDays = None
    tokens: o.Tokens = None
    price: o.Price = None
    gap: o.SolveGap = None
    fastest: o.Fastest = False
    method: o.Method = "search"
    backend: o.Backend = "auto"
    seed: o.Seed = 1
    workers: o.Workers = None
    witness: o.Witness = True
    warm_start: o.WarmStart = None
    check_ends: o.CheckEnds = False
    robust: o.Robust = False
    scenarios: o.ScenariosFile = None
    progress: o.ShowProgress = False
    as_json: o.AsJson = False

    def check_robust(self, num_kinds: int) -> None:
        """Refuse words that have no meaning for a robust plan, of which there is one on one kind of hardware.

        Raises:
            InvalidInputError: words that contradict each other.
        """
        if self.scenarios is not None and not self.robust:
            raise InvalidInputError(
                "--scenarios without --robust.",
                "Expected scenarios of a robust plan.",
                "Add --robust, or leave --scenarios out.",
            )
        others = {
            "--method program": self.method == "program",
            "--check-ends": self.check_ends,
            "several kinds of hardware": num_kinds > 1,
        }
        given = [name for name, is_given in others.items() if is_given]
        if self.robust and given:
            raise InvalidInputError(
                f"--robust is given together with {' and '.join(given)}.",
                "Expected the search for one plan on one cluster, whose doubts are the scenarios.",
                "Leave one of the two out.",
            )

    def problem(self, hardware: str | None) -> Problem:
        """Build the problem on one kind of hardware, with the space that ``--target`` can run."""
        whole = self.whole(hardware)
        if self.target is not None:
            from milpplan.launchers import restrict

            return restrict(whole, self.target, self.target_version, stack=self.stack and not self.unfitted())
        if self.target_version is not None:
            raise InvalidInputError(
                f"--target-version is {shown(self.target_version)}, without --target.",
                "Expected the launcher that it is a version of.",
                "Add --target, or leave --target-version out.",
            )
        return whole

    def whole(self, hardware: str | None) -> Problem:
        """Build the problem on one kind of hardware, for any launcher."""
        from milpplan.cli import arguments

        words = self.model, hardware, self.job_words(), self.space, self.fix or [], self.allow or [], self.schedule
        if self.calculon is None:
            return arguments.problem_of(*words)
        from milpplan.cli import calculon

        return calculon.problem_of(self.calculon, *words)

    def unfitted(self) -> tuple[str, ...]:
        """Name the kinds of hardware without a stack of ``--target``, where several are compared: stacks on some
        of them would decide the comparison."""
        from milpplan.problem import stack_names
        from milpplan.problem.catalog import launcher_stack

        names = command.names_of(self.hardware)
        kinds = names if len(names) > 1 else []
        return tuple(
            name for name in kinds if name not in stack_names() and launcher_stack(self.target, name) is None
        )

    def job_words(self) -> dict[str, Any]:
        """Collect the options that describe the job."""
        from milpplan.cli import arguments

        return {
            "gpus": self.gpus,
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "precision": self.precision,
            "attention": self.attention,
            "grad_dtype": self.grad_dtype,
            "objective": self.objective,
            "deadline_hours": arguments.deadline_hours(self.deadline_hours, self.deadline_days),
            "tokens": self.tokens,
            "kind": "inference" if self.inference else "training",
            "lora_rank": self.lora_rank,
            "lora_modules": self.lora_modules,
            "freeze": self.freeze,
            "mtp_layers": self.mtp_layers,
            "expert_imbalance": self.expert_imbalance,
            "optimizer": self.optimizer,
            "muon_tp_mode": self.muon_tp_mode,
            "vision_tokens": self.vision_tokens,
            "image_tokens": self.image_tokens,
            "images": self.images,
            "alignment": self.alignment,
            "reference": self.reference,
            "rollout_seconds": self.rollout_seconds,
            "rollout_tokens_per_s": self.rollout_tokens_per_s,
            "rollout_memory": self.rollout_memory,
            "rollout_apart": self.rollout_apart,
            "ignore": self.ignore,
            "memory_margin": self.memory_margin,
        }

    def options(self, problem: Problem) -> SolveOptions:
        """Collect the options of the search, which starts from the plan of a file if there is one.

        Raises:
            IllegalPlanError: that is no plan for this model, or for none of these numbers of GPUs and batches.
        """
        from milpplan.cli import arguments
        from milpplan.optimize.records import DEFAULT_GAP, ROBUST_GAP, SolveOptions
        from milpplan.reports.documents.document import read_plan

        start = None if self.warm_start is None else read_plan(self.warm_start)[1]
        if start is not None:
            arguments.check_plan_of_file(problem, start)
        return SolveOptions(
            backend=self.backend,
            gap=self.gap if self.gap is not None else ROBUST_GAP if self.robust else DEFAULT_GAP,
            simplest=not self.fastest,
            time_limit_s=self.time_limit,
            seed=self.seed,
            workers=self.workers,
            witness=self.witness,
            warm_start=start,
            forbid=arguments.forbidden_values(self.forbid or []),
        )


DEFAULTS: Final[dict[str, Any]] = {field.name: field.default for field in fields(SolveWords)}
"""Values of the options that are not given. Commands with fewer options keep these for the others."""


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Options about lengths; None where an option is not given."""

    lengths: o.Lengths = None
    """File of the lengths."""
    max_strategies: o.MaxStrategies = None
    """Maximum number of strategies in turn."""
    tokens_per_step: o.TokensPerStep = None
    """Tokens of the sequences that are taken from the file."""
    align: o.Align = None
    """Token quantum: lengths are padded to multiples of it."""
    padding: o.Padding = False
    """Pad the sequences of a micro-batch, instead of packing them."""
    mask: o.Mask = None
    """Attention mask: causal or full."""
    buckets: o.Buckets = None
    """Ends of buckets, with commas between them."""
    bucket_count: o.BucketCount = None
    """Number of buckets to choose."""
    baselines: o.Baselines = False
    """Price the rules of other planners."""
    side_by_side: o.SideBySide = None
    """Allow several degrees of context parallelism at once."""
    unlike_replicas: o.UnlikeReplicas = False
    """Allow heterogeneous replicas."""
    hetu: o.Hetu = None
    """Directory for the files of HotSPa's runtime."""
    megatron: o.Megatron = None
    """Directory for a scheduler of Megatron-LM's hybrid context parallelism."""
    seed: o.Seed = 1
    """Seed of lengths that are drawn."""

    @property
    def alignment(self) -> int:
        """Token quantum, given or by default."""
        return DEFAULT_ALIGNMENT if self.align is None else self.align

    @property
    def rules(self) -> SequenceRules:
        """Rules by which sequences form micro-batches, and their attention mask."""
        from milpplan.lengths import SequenceRules

        if self.mask not in (None, "causal", "full"):
            raise InvalidInputError(f"--mask is {self.mask}.", "Expected causal or full.", "Correct --mask.")
        return SequenceRules("full" if self.mask == "full" else "causal", self.padding)


def are_asked(asked: LengthOptions) -> bool:
    """Check the options about lengths, and tell whether a file is given.

    Raises:
        InvalidInputError: the other options are given without the file, or are no positive numbers.
    """
    options = {
        "--max-strategies": asked.max_strategies,
        "--tokens-per-step": asked.tokens_per_step,
        "--align": asked.align,
        "--bucket-count": asked.bucket_count,
    }
    given = [name for name, value in options.items() if value is not None]
    for name in given:
        from milpplan.lengths import MAX_SEQUENCES

        maximum = MAX_SEQUENCE * (MAX_SEQUENCES if name == "--tokens-per-step" else 1)
        command.whole(str(options[name]), name, maximum)
    switches = {
        "--padding": asked.padding,
        "--mask": asked.mask,
        "--buckets": asked.buckets,
        "--baselines": asked.baselines,
        "--side-by-side": asked.side_by_side,
        "--turns-only": asked.side_by_side is False,
        "--unlike-replicas": asked.unlike_replicas,
        "--hetu": asked.hetu,
        "--megatron": asked.megatron,
    }
    given += [name for name, value in switches.items() if value]
    if given and asked.lengths is None:
        raise InvalidInputError(
            f"{' and '.join(given)} is given without --lengths.",
            "Expected a file of lengths.",
            "Add --lengths FILE.",
        )
    return asked.lengths is not None
