"""The command ``solve``: its options, their problem, examples. ``milpplan.cli.solving`` does the work.

The help of the command must not wait for the imports of a solve, so methods import what they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from milpplan.cli import checks, interrupts
from milpplan.cli import options as o
from milpplan.cli.length_options import LengthOptions
from milpplan.cli.outcome import ExitCode
from milpplan.errors import InvalidInputError
from milpplan.problem.reading import shown

if TYPE_CHECKING:
    from milpplan.optimize import SolveOptions
    from milpplan.problem import Problem

EXAMPLES: Final = (
    ("The best plan for Llama-3 70B on 8 nodes, proved", "llama3-70b dgx-h100 --gpus 64 --global-batch 128"),
    (
        "What Megatron-LM can run of it, kept for export and report",
        "llama3-70b dgx-h100 --gpus 64 --global-batch 128 --target megatron --out plan.json",
    ),
    (
        "Your model and your cluster, at most a minute",
        "path/to/config.json my-cluster.toml --gpus 32 --global-batch 256 --time-limit 60",
    ),
    (
        "The plan that loses the least whatever the network does",
        "llama3-70b dgx-h100 --gpus 64 --global-batch 128 --robust",
    ),
    (
        "Which GPUs are cheaper for 15 trillion tokens",
        "llama3-70b dgx-h100,dgx-b200 --gpus 256 --global-batch 1024 --tokens 15e12 "
        "--price-per-gpu-hour dgx-h100=2.5,dgx-b200=4.5",
    ),
)


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
    optimizer: o.Optimizer = "adam"
    muon_tp_mode: o.MuonTpMode = None
    vision_tokens: o.VisionTokens = None
    image_tokens: o.ImageTokens = None
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

        names = checks.names_of(self.hardware)
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
            "optimizer": self.optimizer,
            "muon_tp_mode": self.muon_tp_mode,
            "vision_tokens": self.vision_tokens,
            "image_tokens": self.image_tokens,
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


def solve(words: SolveWords, lengths: LengthOptions) -> ExitCode:
    """Find the best plan for a model on a cluster, and prove it. For sequences of several lengths, see
    `milpplan solve-lengths`."""
    # An import could lose a signal.
    with interrupts.leaving():
        from milpplan.cli.solving import run

    return run(words, lengths)
