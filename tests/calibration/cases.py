"""Measured steps that the simulator itself made under known constants."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from milpplan.calibration import Observation, StepPredictor, observations
from milpplan.calibration.fitting import Theta
from milpplan.validation.runs import Run, RunFile
from tests.validation.cases import record

LAYOUTS = (
    {"parallel__tp": 1, "parallel__pp": 2, "parallel__dp": 8},
    {"parallel__tp": 2, "parallel__pp": 1, "parallel__dp": 8},
    {"parallel__tp": 4, "parallel__pp": 2, "parallel__dp": 2},
    {"parallel__tp": 8, "parallel__pp": 2, "parallel__dp": 1},
    {"parallel__tp": 1, "parallel__pp": 1, "parallel__dp": 16, "parallel__zero": 0},
)
MODELS = (
    {},
    {"model__hidden": 4096, "model__ffn_hidden": 14336, "model__heads": 32},
    {"model__hidden": 2048, "model__ffn_hidden": 8192, "model__seq_len": 8192},
)


def varied(**fixed: Any) -> list[dict[str, Any]]:
    """Records of several layouts, models, micro-batches and batches."""
    records = []
    for number, layout in enumerate(LAYOUTS):
        for place, model in enumerate(MODELS):
            for micro, batch in ((1, 32), (2, 128)):
                name = f"{number}-{place}-{micro}"
                words = {**layout, **model, "parallel__micro_batch": micro, "parallel__global_batch": batch}
                records.append(record(id=name, parallel__grad_accum=None, **{**words, **fixed}))
    return records


def steps(records: list[dict[str, Any]]) -> list[Observation]:
    """The records as observations."""
    runs = tuple(Run.model_validate_json(json.dumps(one), strict=True) for one in records)
    found, left_out = observations(RunFile(runs, {}, ()))
    assert left_out == []
    return found


def measured_under(
    runs: list[Observation], truth: Theta, noise: float = 0.02, outliers: float = 0.1, seed: int = 1
) -> list[Observation]:
    """Step times under known constants, with noise, and a share of runs 30 % too slow."""
    random = np.random.default_rng(seed)
    times = StepPredictor(runs).times_s(truth) * np.exp(noise * random.standard_normal(len(runs)))
    slow = random.choice(len(runs), round(outliers * len(runs)), replace=False)
    times[slow] *= 1.3
    return [replace(run, step_time_s=float(time)) for run, time in zip(runs, times, strict=True)]
