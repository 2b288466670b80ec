"""The command ``solve``: its options and examples. ``milpplan.cli.solving`` does the work."""

from __future__ import annotations

from typing import Final

from milpplan.cli import interrupts
from milpplan.cli import options as o
from milpplan.cli.outcome import ExitCode

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


def solve(
    model: o.Model = None,
    hardware: o.Hardware = None,
    gpus: o.Gpus = None,
    global_batch: o.GlobalBatch = None,
    seq_len: o.SeqLen = None,
    precision: o.Precision = "bf16",
    target: o.Target = None,
    space: o.SpaceKind = "free",
    fix: o.Fix = None,
    time_limit: o.TimeLimit = None,
    out: o.Out = None,
    verbose: o.Verbose = False,
    job: o.JobFile = None,
    calculon: o.Calculon = None,
    ignore: o.Ignore = None,
    attention: o.Attention = "flash",
    grad_dtype: o.GradDtype = "fp32",
    inference: o.Inference = False,
    lora_rank: o.LoraRank = None,
    lora_modules: o.LoraModules = None,
    freeze: o.Freeze = None,
    mtp_layers: o.MtpLayers = 0,
    optimizer: o.Optimizer = "adam",
    muon_tp_mode: o.MuonTpMode = "duplicated",
    vision_tokens: o.VisionTokens = None,
    image_tokens: o.ImageTokens = None,
    alignment: o.AlignmentName = None,
    reference: o.ReferenceName = None,
    rollout_seconds: o.RolloutSeconds = None,
    rollout_tokens_per_s: o.RolloutRate = None,
    rollout_memory: o.RolloutMemory = None,
    rollout_apart: o.RolloutApart = False,
    schedule: o.ScheduleNames = None,
    allow: o.Allow = None,
    forbid: o.Forbid = None,
    memory_margin: o.MemoryMargin = None,
    target_version: o.TargetVersion = None,
    stack: o.Stack = True,
    price_limit: o.PriceLimit = 60.0,
    objective: o.ObjectiveName = "step_time_per_token",
    deadline_hours: o.DeadlineHours = None,
    deadline_days: o.DeadlineDays = None,
    tokens: o.Tokens = None,
    price: o.Price = None,
    gap: o.SolveGap = None,
    fastest: o.Fastest = False,
    method: o.Method = "search",
    backend: o.Backend = "auto",
    seed: o.Seed = 1,
    workers: o.Workers = None,
    witness: o.Witness = True,
    warm_start: o.WarmStart = None,
    check_ends: o.CheckEnds = False,
    robust: o.Robust = False,
    scenarios: o.ScenariosFile = None,
    progress: o.ShowProgress = False,
    as_json: o.AsJson = False,
    lengths: o.Lengths = None,
    max_strategies: o.MaxStrategies = None,
    tokens_per_step: o.TokensPerStep = None,
    align: o.Align = None,
    padding: o.Padding = False,
    mask: o.Mask = None,
    buckets: o.Buckets = None,
    bucket_count: o.BucketCount = None,
    baselines: o.Baselines = False,
    side_by_side: o.SideBySide = None,
    unlike_replicas: o.UnlikeReplicas = False,
    hetu: o.Hetu = None,
) -> ExitCode:
    """Find the best plan for a model on a cluster, and prove it. For sequences of several lengths, see
    `milpplan solve-lengths`."""
    # The help of the command must not wait for the imports of a solve, and an import could lose a signal.
    with interrupts.leaving():
        from milpplan.cli.length_options import LengthOptions
        from milpplan.cli.solving import SolveWords, run

    return run(o.pick(SolveWords, locals()), o.pick(LengthOptions, locals()))
