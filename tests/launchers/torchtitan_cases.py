"""Plans that torchtitan can express, drawn at random or named, and what comes back from their files."""

from __future__ import annotations

from typing import Any

import numpy as np

from milpplan import Layout, Plan, Problem, Recompute, VirtualStage
from milpplan.launchers import TARGETS, Imported, ImportRequest, run_by
from milpplan.launchers.torchtitan.run import NEWEST, V022, V030, prices_products
from tests.simulation.cases import problem_of

TORCHTITAN = TARGETS["torchtitan"]
VERSIONS = (V022, V030, NEWEST)
MODELS = ("llama3-8b", "llama3-70b", "qwen3-32b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b")


def staged(layout: Layout, sizes: list[int], full: bool, selective: bool = False) -> Plan:
    """A plan with stages of so many layers, all of them recomputed, selectively recomputed, or none."""
    ends = np.cumsum([0, *sizes]).tolist()
    replays = [Recompute(full=size * full, selective=size * selective) for size in sizes]
    stages = tuple(
        VirtualStage(layers=(ends[j], ends[j + 1]), recompute=replay) for j, replay in enumerate(replays)
    )
    return Plan(layout=layout, virtual_stages=stages)


def random_sizes(random: np.random.Generator, layers: int, stages: int) -> list[int]:
    """Layers of stages; the first and the last may have none."""
    if stages == 1:
        return [layers]
    cuts = np.sort(random.choice(np.arange(1, layers), size=stages - 1, replace=False))
    sizes = np.diff(np.concatenate([[0], cuts, [layers]])).tolist()
    if random.integers(4) == 0:
        sizes[1] += sizes[0]
        sizes[0] = 0
    return [int(size) for size in sizes]


def random_case(seed: int) -> tuple[Problem, Plan, str]:
    """A problem, a plan and a version that torchtitan can run."""
    random = np.random.default_rng(seed)
    version = VERSIONS[int(random.integers(3))]
    model = str(random.choice(MODELS))
    piped = not (version == V022 and model.startswith(("qwen", "gpt")))
    tp = int(random.choice([1, 2, 4]))
    pp = int(random.choice([1, 2, 4])) if piped else 1
    dp = int(random.choice([2, 4, 8]))
    problem = problem_of(model, "dgx-h100", sequence_length=int(random.choice([1024, 4096])))
    if version == V022:
        # Its DeepEP is for one model, without etp.
        software = problem.hardware.software.model_copy(update={"deduplicated_dispatch": False})
        hardware = problem.hardware.model_copy(update={"software": software})
        problem = problem.model_copy(update={"hardware": hardware})
    experts = problem.model.kinds[-1].mlp.type == "moe"
    ep = int(random.choice([1, 2, 4])) if experts and dp * tp % 4 == 0 else 1
    either = version == V022 and ep > 1 and ep * tp <= dp * tp and random.integers(2)
    etp = 1 if not experts else tp if ep == 1 or either else 1
    schedule = str(random.choice(["1f1b", "gpipe", "interleaved"])) if pp > 1 else "1f1b"
    vpp = int(random.choice([2, 3])) if schedule == "interleaved" else 1
    once = pp == 1 and random.integers(2)
    count = 1 if once else pp * int(random.integers(1, 5))
    zero = 1 if pp > 1 else int(random.choice([2, 3])) if once else 3
    alone = ep == 1 and (version != V022 or tp * pp == 1) and (pp > 1 or once)
    zero = 0 if alone and random.integers(3) == 0 else zero
    parallel = tp > 1 and (version == V022 or experts or bool(random.integers(2)))
    size = int(random.choice([1, 2]))
    layout: dict[str, Any] = {
        "tp": tp, "pp": pp, "dp": dp, "ep": ep, "etp": etp, "vpp": vpp, "micro_batch_size": size,
        "global_batch_size": size * count * dp, "sequence_parallel": parallel, "gather_again": not parallel,
        "zero_stage": zero, "schedule": schedule, "overlap_grad_reduce": pp == 1,
        "overlap_param_gather": pp == 1 and zero > 0,
    }  # fmt: skip
    sizes = random_sizes(random, problem.model.num_layers, pp * vpp)
    groups = [n for n in (1, 2, 4) if n < dp and tp * dp % (ep * etp * n) == 0]
    layout |= {"dp_replicate": int(random.choice(groups))} if zero else {}
    layout |= {"keep_weights": zero == 3 and count > 1 and bool(random.integers(2))}
    full = bool(random.integers(2))
    selective = not full and prices_products(problem.model, version) and bool(random.integers(2))
    if selective:
        problem = run_by("torchtitan", version, problem)
    return problem, staged(Layout.model_validate(layout), sizes, full, selective), version


def round_trip(problem: Problem, plan: Plan, version: str, **more: Any) -> tuple[dict[str, str], Imported]:
    """The files of a plan, and what is read back from the configuration."""
    files = TORCHTITAN.files(TORCHTITAN.export(problem, plan, version), "0")
    name, text = next(iter(files.items()))
    return files, TORCHTITAN.read(ImportRequest(text, name, problem.hardware, **more))


def llama_pipeline() -> tuple[Problem, Plan]:
    """Interleaved, with fewer layers at the ends."""
    problem = problem_of("llama3-70b", "dgx-h100", num_gpus=64, global_batch_size=128)
    layout = Layout(
        tp=4, pp=4, dp=4, vpp=2, global_batch_size=128, sequence_parallel=True, gather_again=False, zero_stage=1,
        schedule="interleaved",
    )  # fmt: skip
    return problem, staged(layout, [9, 11, 10, 10, 10, 10, 11, 9], False)


def deepseek_experts() -> tuple[Problem, Plan]:
    """64-way expert parallelism over a pipeline, everything recomputed."""
    problem = problem_of("deepseek-v3", "dgx-h100", num_gpus=256, global_batch_size=1024)
    layout = Layout(ep=64, pp=4, dp=64, global_batch_size=1024, zero_stage=1)
    return problem, staged(layout, [15, 16, 15, 15], True)


def qwen_sharded() -> tuple[Problem, Plan]:
    """ZeRO 3 with experts over the replicas, four micro-batches."""
    problem = problem_of("qwen3-30b-a3b", "dgx-h100", num_gpus=16, global_batch_size=128)
    layout = Layout(
        ep=8, dp=16, micro_batch_size=2, global_batch_size=128, zero_stage=3, overlap_grad_reduce=True,
        overlap_param_gather=True,
    )  # fmt: skip
    return problem, staged(layout, [48], True)


NAMED = {
    "llama3-70b-pipeline": (llama_pipeline, V022),
    "deepseek-v3-pipeline": (deepseek_experts, V030),
    "qwen3-30b-a3b-zero3": (qwen_sharded, NEWEST),
}
"""Plans whose files are kept in tests/data/launchers, one in each dialect."""
