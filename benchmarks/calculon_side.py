"""Calculon (a checkout that the user gives) beside milpplan: its estimates, and executions in both languages.

Calculon: Isaev et al. 2023, github.com/calculon-ai/calculon, measured at caa4b11. Nothing of it is shipped here.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import logging
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from milpplan import Layout, Plan, Problem, Space, simulate
from milpplan.problem.calculon.system import CalculonExecution, CalculonModel, CalculonSystem
from milpplan.problem.calculon.translation import SWITCHES, CalculonFiles, calculon_problem
from milpplan.problem.reading import validated
from milpplan.simulation.layers.shard import Part, Phase
from milpplan.simulation.layout_columns import LayoutColumns
from milpplan.simulation.layout_costs import layout_costs
from milpplan.units import GIB, NS_PER_S

Tree = dict[str, Any]
TIME_TERMS = ("forward", "backward", "recompute", "tp", "bubble, pp", "dp", "optimizer", "offload", "ends")
MEMORY_TERMS = ("weights", "gradients", "optimizer", "activations")
MOST_GIB = 100_000
"""More than any execution holds, and within what a system file may say."""
MODES = {"full": "full", "selective": "attn_only", "none": "none"}


@dataclass(frozen=True, slots=True)
class Checkout:
    """Calculon, imported from a directory."""

    path: Path
    llm: Any
    system: Any
    search: Any

    def files(self, kind: str) -> dict[str, Tree]:
        """The JSON files of a directory of the checkout (models, systems, examples), by name."""
        found = sorted((self.path / kind).glob("*.json"))
        return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in found}

    def estimate(self, model: Any, execution: Tree, system: Any, *, talk: bool = False) -> Tree | None:
        """Every statistic of one execution as its search takes them; None where Calculon says it cannot run.

        ``talk``: with the logger that its search makes, which builds every debug message and drops it.
        """
        logger = logging.Logger("sub") if talk else logging.Logger("sub", logging.CRITICAL)
        run = self.llm(model, logger)
        try:
            run.compile(system, self.llm.Execution.from_json(execution))
            run.run(system)
        except self.llm.Error:
            return None
        stats: Tree = run.get_stats_json(False)
        return stats


def load(path: Path) -> Checkout:
    """Import Calculon from a checkout."""
    if not (path / "calculon" / "llm").is_dir():
        raise SystemExit(f"{path} is no checkout of Calculon (github.com/calculon-ai/calculon).")
    sys.path.insert(0, str(path.resolve()))
    try:
        llm = importlib.import_module("calculon.llm.llm")
        system = importlib.import_module("calculon.system")
        search = importlib.import_module("calculon.llm.optimal_execution")
    except ModuleNotFoundError as error:
        raise SystemExit(f"Calculon needs {error.name}: pip install {error.name}") from error
    return Checkout(path, llm.Llm, system.System, search.OptimalExecution)


class _NoMessages(ast.NodeTransformer):
    """Takes calls of ``debug`` that stand alone out of a module."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """A statement that is an expression."""
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "debug":
            return ast.copy_location(ast.Pass(), node)
        return node


def without_messages(checkout: Checkout) -> Checkout:
    """Calculon as if it had no debug messages."""
    name = checkout.llm.__module__
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    module = ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    tree = _NoMessages().visit(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    exec(compile(tree, spec.origin, "exec"), module.__dict__)
    return replace(checkout, llm=module.Llm)


def copy_without_messages(checkout: Checkout, folder: Path) -> Path:
    """Copy the checkout's program and files with all debug messages taken out of the source.

    Returns:
        The path of the copy, in the folder.
    """
    copy = folder / "calculon"
    shutil.copytree(checkout.path, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (copy / "calculon").rglob("*.py"):
        tree = _NoMessages().visit(ast.parse(path.read_text(encoding="utf-8")))
        path.write_text(ast.unparse(tree), encoding="utf-8")
    return copy


def without_memory_limit(system: Tree) -> Tree:
    """The system with memories that hold everything, so that times can be compared where a plan does not fit."""
    return system | {name: system[name] | {"GiB": MOST_GIB} for name in ("mem1", "mem2")}


def placed(execution: Tree, system: Tree) -> Tree:
    """The execution on the networks that milpplan's order of ranks gives it: tensor, data, pipeline from the
    inside outwards, each on network 0 as long as it fits."""
    inner, nets, size = system["networks"][0], {}, 1
    inside = len(system["networks"]) > 0
    for name in ("tensor", "data", "pipeline"):
        degree = execution[f"{name}_par"]
        inside = inside and size * degree <= inner["size"]
        inside = inside and (not inner["must_be_filled"] or inner["size"] % (size * degree) == 0)
        size *= degree
        nets[f"{name}_par_net"] = 0 if inside or degree == 1 else 1
    return execution | nets


def files_of(model: Tree, execution: Tree, system: Tree) -> CalculonFiles:
    """Three descriptions as checked records."""
    return CalculonFiles(
        validated(CalculonModel, model, "model"),
        validated(CalculonExecution, execution, "execution"),
        validated(CalculonSystem, system, "system"),
    )


def execution_of(problem: Problem, layout: Layout, mode: str, system: Tree) -> Tree:
    """A plan of the uniform space in Calculon's words. ZeRO 2 and 3 have none, and become its sharding."""
    sequence_parallel, scattered = layout.sequence_parallel, layout.pp_scatter_gather
    execution = {
        "num_procs": layout.num_gpus,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": layout.dp,
        "batch_size": layout.global_batch_size,
        "microbatch_size": layout.micro_batch_size,
        "datatype": "float16" if problem.job.precision == "bf16" else "float8",
        "fused_activation": problem.hardware.software.activate_again,
        "attention_type": "multihead",
        "activation_recompute": MODES[mode],
        "pipeline_interleaving": layout.vpp,
        "optimizer_sharding": layout.zero_stage > 0,
        "tensor_par_comm_type": "rs_ag" if sequence_parallel else "p2p_rs_ag" if scattered else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": sequence_parallel and mode != "full" and layout.gather_again,
        "data_par_overlap": layout.overlap_grad_reduce,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
    for switch in SWITCHES:
        back = {value: key for key, value in switch.values.items()}
        if switch.theirs not in ("tensor_par_comm_type", "training"):
            execution[switch.theirs] = back[getattr(layout, switch.ours)]
    return placed(execution, system)


PLAIN = {
    "tensor_par_net": 0,
    "pipeline_par_net": 0,
    "data_par_net": 0,
    "microbatch_size": 1,
    "datatype": "float16",
    "fused_activation": True,
    "attention_type": "multihead",
    "activation_recompute": "none",
    "pipeline_interleaving": 1,
    "optimizer_sharding": False,
    "tensor_par_comm_type": "rs_ag",
    "tensor_par_overlap": "none",
    "seq_par_ag_redo": True,
    "data_par_overlap": False,
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": False,
    "training": True,
}
"""The options of an execution whose layout is still to be found."""


def search_problem(model: Tree, system: Tree, procs: int, batch: int, space: Space) -> Problem:
    """The problem of a search: model, system, processors and batch in a space of ours."""
    degrees = {"num_procs": procs, "tensor_par": procs, "pipeline_par": 1, "data_par": 1, "batch_size": batch}
    return calculon_problem(files_of(model, PLAIN | degrees, system), space)


def mode_of(plan: Plan) -> str | None:
    """The recompute setting of a uniform plan; None where virtual stages or layers differ."""
    settings = set()
    for stage in plan.virtual_stages:
        counts = {"full": stage.recompute.full, "selective": stage.recompute.selective}
        settings.add(next((name for name, count in counts.items() if count == stage.num_layers), "none"))
        if sum(counts.values()) not in (0, stage.num_layers):
            return None
    return settings.pop() if len(settings) == 1 else None


def without_ends(problem: Problem, layout: Layout) -> Problem:
    """The problem with a vocabulary of a word a tensor-parallel rank: Calculon estimates blocks only."""
    return problem.model_copy(update={"model": problem.model.model_copy(update={"vocab_size": layout.tp})})


def our_terms(problem: Problem, plan: Plan) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step by term, and GiB of the first pipeline rank; of the mean rank, its bubble included."""
    report = simulate(problem, plan)
    layout, parts = plan.layout, layout_costs(problem, LayoutColumns.of([plan.layout])).at(0).parts
    scale = layout.num_micro_batches * problem.model.num_layers / layout.pp / NS_PER_S
    mode = {"full": Phase.FULL, "selective": Phase.SELECTIVE}.get(mode_of(plan) or "none")
    layer = parts.layer[0] * scale
    replayed = layer[:, mode] if mode is not None else layer[:, 0] * 0
    shares = report.breakdown_s
    times = {
        "forward": layer[Part.COMPUTE, Phase.FORWARD],
        "backward": layer[Part.COMPUTE, Phase.BACKWARD],
        "recompute": replayed[Part.COMPUTE],
        "tp": layer[Part.TP, Phase.FORWARD] + layer[Part.TP, Phase.BACKWARD] + replayed[Part.TP],
        "bubble, pp": shares["bubble"],
        "dp": sum(shares[f"{name}"] for name in ("param_gather_exposed", "grad_reduce_exposed", "zero_exposed")),
        "optimizer": shares["optimizer"],
        "offload": shares.get("offload_exposed", 0.0),
    }
    times["ends"] = report.step_time_s - sum(times.values())
    memory = report.stages[0].memory
    held = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes + memory.transient_bytes + memory.buffers_bytes,
    }
    return {name: float(value) for name, value in times.items()}, {k: v / GIB for k, v in held.items()}


def their_terms(stats: Tree) -> tuple[dict[str, float], dict[str, float]]:
    """The same of Calculon's statistics."""
    times = {
        "forward": stats["fw_time"],
        "backward": stats["bw_time"],
        "recompute": stats["recompute_time"],
        "tp": stats["tp_comm_exposed_time"] + stats["recomm_exposed_time"],
        "bubble, pp": stats["bubble_time"] + stats["pp_comm_exposed_time"],
        "dp": stats["dp_comm_exposed_time"],
        "optimizer": stats["optim_step_time"],
        "offload": stats["fw_offload_exposed_time"] + stats["bw_offload_exposed_time"],
        "ends": 0.0,
    }
    held = {
        "weights": stats["weight_space"],
        "gradients": stats["weight_grad_space"],
        "optimizer": stats["optimizer_space"],
        "activations": stats["act_space"] + stats["act_checkpoint_size"] + stats["act_grad_space"],
    }
    return times, {name: value / GIB for name, value in held.items()}
