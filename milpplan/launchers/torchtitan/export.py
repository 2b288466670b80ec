"""Export of a plan as torchtitan's files, checked against its rules before writing."""

from __future__ import annotations

from milpplan.launchers.capabilities import TORCHTITAN
from milpplan.launchers.expressible import (
    field_refusals,
    job_refusals,
    layout_differences,
    recompute_refusals,
    refuse,
    title_of,
    whole_nodes,
)
from milpplan.launchers.records import ConfigLaunch, Refusal
from milpplan.launchers.scripts import slurm_script, torchrun_script
from milpplan.launchers.torchtitan.files import MODULE, config_text
from milpplan.launchers.torchtitan.flavors import Pair, flavor_of
from milpplan.launchers.torchtitan.rules import RULES, broken_rules
from milpplan.launchers.torchtitan.run import (
    V022,
    Run,
    layout_of_run,
    plan_losses,
    run_of_plan,
    sharding_of,
)
from milpplan.launchers.torchtitan.settings import settings_of
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem

SCRIPT = "torchtitan.sh"
BATCH_SCRIPT = "torchtitan.sbatch"


def exported(problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
    """Turn a plan into a launch.

    Raises:
        IllegalPlanError: torchtitan cannot express the plan or would refuse it; gives all reasons.
    """
    layout = plan.layout
    refusals = [*job_refusals(problem), *_problem_refusals(problem), *recompute_refusals(plan)]
    num_nodes, per_node, uneven = whole_nodes(problem, layout)
    refusals += [*uneven, *field_refusals(TORCHTITAN, layout)]
    flavor = flavor_of(problem.model)
    if flavor is None:
        refuse(TORCHTITAN.name, [*refusals, Refusal(_no_flavor(problem.model.name))])
        raise AssertionError("refuse raises for a reason")
    experts = problem.model.has_experts
    deduplicated = problem.hardware.software.deduplicated_dispatch
    run = run_of_plan(version, flavor, experts, problem.job.sequence_length, deduplicated, plan)
    refusals += _run_refusals(plan, run, refusals)
    refuse(TORCHTITAN.name, refusals)
    return ConfigLaunch(
        target=TORCHTITAN.name,
        version=version,
        title=title_of(problem, plan),
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        settings=settings_of(run),
        notes=_notes(run, flavor),
    )


def _no_flavor(name: str) -> str:
    return f"it knows models by name and flavor, and {name} is none of its own (torchtitan/models)"


def _problem_refusals(problem: Problem) -> list[Refusal]:
    job, refusals = problem.job, []
    if job.precision == "fp8":
        refusals.append(
            Refusal("precision fp8: its float8 converters leave out layers that the plan counts in fp8")
        )
    if job.grad_dtype != "fp32":
        refusals.append(Refusal(f"gradients in {job.grad_dtype}: mixed_precision_reduce is float32 alone"))
    if job.attention_kernel != "flash":
        refusals.append(Refusal(f"attention kernel {job.attention_kernel}: its attention is fused"))
    return refusals


def _run_refusals(plan: Plan, run: Run, before: list[Refusal]) -> list[Refusal]:
    """List the differences between the plan and the run that the files start."""
    sharding = sharding_of(run)
    named = {refusal.why.split("=")[0] for refusal in before}
    runs = layout_of_run(run)
    reasons = dict.fromkeys(("zero_stage", "overlap_grad_reduce", "overlap_param_gather"), sharding.why)
    reasons |= {
        "sequence_parallel": f"up to {V022} tensor parallelism is sequence parallel always",
        "etp": "experts are cut over tp without ep; with it over 1 rank, or (0.2.2) over tp",
        "gather_again": "autograd keeps the gathered inputs of products, and nothing gathers them again",
        "schedule": "without a pipeline there is one schedule",
    }
    differences = layout_differences(plan, runs, reasons, runs.expert_dp if run.experts else 1, named)
    differences += [Refusal(text) for text in plan_losses(run) if run.cp == 1 or not text.startswith("context")]
    broken = broken_rules(run)
    return differences + [Refusal(f"rule {name} ({RULES[name][0]}): {text}") for name, text in broken.items()]


def _notes(run: Run, flavor: Pair) -> tuple[str, ...]:
    notes = [
        "Weights are kept in fp32, sharded, beside the gathered bf16 ones: what the plan counts as master weights."
    ]
    if run.pp > 1 and run.shard > 1:
        notes.append(
            "The first gather of weights may overlap the first forward; the plan counts it before the step."
        )
    if run.version != V022:
        notes.append("Documents are packed and masked apart; the plan counts attention over whole sequences.")
    if run.deduplicated:
        notes.append("The dispatcher deepep needs DeepEP installed.")
    if flavor[0] == "deepseek_v3" or run.experts:
        notes.append("Experts are balanced by torchtitan's own bias, not by dropping tokens.")
    return tuple(notes)


def files_of(launch: ConfigLaunch, version: str) -> dict[str, str]:
    """Write the launch as files by name: first the configuration, then scripts that start it. ``version`` is
    milpplan's."""
    toml = launch.version == V022
    config = f"{MODULE}.toml" if toml else f"{MODULE}.py"
    program: tuple[str, ...] = ("-m torchtitan.train", f'--job.config_file "$HERE/{config}"')
    before = ['HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)']
    if not toml:
        before.append('export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"')
        program = ("-m torchtitan.train", f"--module {MODULE} --config plan")
    return {
        config: config_text(launch, version),
        SCRIPT: torchrun_script(launch, version, program, tuple(before)),
        BATCH_SCRIPT: slurm_script(launch, version, SCRIPT),
    }
