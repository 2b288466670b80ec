"""The command ``solve-lengths``."""

from __future__ import annotations

from typing import Final

import typer

from milpplan.cli import options as o

EXAMPLES: Final = (
    (
        "The best step for sequences of several lengths",
        "llama2-7b dgx-a100-80 --gpus 16 --lengths examples/lengths.txt",
    ),
    (
        "With one strategy, beside the rules of HotSPa and FlexSP",
        "llama2-7b dgx-a100-80 --gpus 16 --lengths examples/lengths.txt --max-strategies 1 --baselines",
    ),
)


def solve_lengths(
    model: o.Model = None,
    hardware: o.Hardware = None,
    gpus: o.Gpus = None,
    global_batch: o.GlobalBatch = None,
    seq_len: o.SeqLen = None,
    precision: o.Precision = "bf16",
    fix: o.Fix = None,
    time_limit: o.LengthsTimeLimit = None,
    out: o.Out = None,
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
    job: o.JobFile = None,
    ignore: o.Ignore = None,
    attention: o.Attention = "flash",
    grad_dtype: o.GradDtype = "fp32",
    gap: o.LengthsGap = None,
    backend: o.Backend = "auto",
    seed: o.Seed = 1,
    workers: o.Workers = None,
    as_json: o.AsJson = False,
) -> None:
    """Find the best step for sequences of several lengths: which strategies run which sequences, in turn or side
    by side, with a proved bound."""
    from milpplan.cli import lengths as lengths_work
    from milpplan.cli.length_options import LengthOptions

    asked = LengthOptions(
        path=lengths,
        max_strategies=max_strategies,
        tokens_per_step=tokens_per_step,
        align=align,
        padding=padding,
        mask=mask,
        buckets=buckets,
        bucket_count=bucket_count,
        baselines=baselines,
        side_by_side=side_by_side,
        unlike_replicas=unlike_replicas,
        hetu=hetu,
        seed=seed,
    )
    lengths_work.need_file(asked)
    described = {
        "gpus": gpus,
        "global_batch": global_batch,
        "seq_len": seq_len,
        "precision": precision,
        "attention": attention,
        "grad_dtype": grad_dtype,
        "objective": "step_time_per_token",
        "deadline_hours": None,
        "tokens": None,
        "kind": "training",
        "ignore": ignore,
    }
    named = {"MODEL": model, "HARDWARE": hardware}
    limits = gap, time_limit, backend, workers
    code = lengths_work.solve(named, described, "free", fix or [], asked, limits, out, as_json)
    raise typer.Exit(int(code))
