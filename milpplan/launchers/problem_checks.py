"""Checks of a whole problem for torchtitan, nanotron and DeepSpeed, before a search for plans."""

from __future__ import annotations

from milpplan.launchers.capabilities import DEEPSPEED, NANOTRON, TORCHTITAN
from milpplan.launchers.deepspeed.launcher import config_of
from milpplan.launchers.expressible import job_refusals, refuse
from milpplan.launchers.nanotron.settings import model_losses
from milpplan.launchers.records import Refusal
from milpplan.launchers.torchtitan.run import flavor_of
from milpplan.problem.problem import Problem


def _formats(problem: Problem, kernels: tuple[str, ...], gradients: tuple[str, ...]) -> list[Refusal]:
    job, refusals = problem.job, job_refusals(problem)
    if job.precision != "bf16":
        refusals.append(Refusal(f"precision {job.precision}: it computes in bf16"))
    if job.grad_dtype not in gradients:
        refusals.append(Refusal(f"gradients in {job.grad_dtype}: it has them in {' or '.join(gradients)}"))
    if job.attention_kernel not in kernels:
        refusals.append(Refusal(f"attention kernel {job.attention_kernel}: its attention is fused"))
    return refusals


def check_torchtitan(problem: Problem, version: str) -> None:
    """Refuse a problem for which torchtitan can run no plan.

    Raises:
        IllegalPlanError: gives all reasons.
    """
    refusals = _formats(problem, ("flash",), ("fp32",))
    if flavor_of(problem.model) is None:
        refusals.append(
            Refusal(f"it knows models by name and flavor, and {problem.model.name} is none of its own")
        )
    refuse(TORCHTITAN.name, refusals)


def check_nanotron(problem: Problem, version: str) -> None:
    """Refuse a problem for which nanotron can run no plan.

    Raises:
        IllegalPlanError: gives all reasons.
    """
    losses = [Refusal(text) for text in model_losses(problem.model)]
    refuse(NANOTRON.name, [*_formats(problem, ("flash",), ("fp32",)), *losses])


def check_deepspeed(problem: Problem, version: str) -> None:
    """Refuse a problem for which DeepSpeed can run no plan.

    Raises:
        IllegalPlanError: gives all reasons.
    """
    refusals = _formats(problem, ("flash", "unfused"), ("fp32", "bf16"))
    if config_of(problem.model) is None:
        refusals.append(Refusal(f"{problem.model.name} is none of the dense families that its program builds"))
    refuse(DEEPSPEED.name, refusals)
