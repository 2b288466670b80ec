"""Calculon and milpplan on the same executions: where they differ, and in which term.

    python -m benchmarks.calculon CHECKOUT_PATH [--number 200] [--samples FILE.json.gz] [--json]

CHECKOUT_PATH: a checkout of github.com/calculon-ai/calculon (its one dependency is psutil). Executions are its
example files and random ones of its search's space, on its models and systems; ``--samples`` takes a file of
executions instead. Switches that milpplan has no field for are set to their plain value in both. Memory is made
unlimited in both, so that all executions have a time. milpplan prices blocks alone here (a vocabulary of a word),
as Calculon does, on Calculon's rates: what differs is the model, not the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calculon_side import (
    MEMORY_TERMS,
    TIME_TERMS,
    Checkout,
    Tree,
    files_of,
    load,
    our_terms,
    their_terms,
    without_ends,
    without_memory_limit,
)
from benchmarks.tables import markdown_table, measured_on
from milpplan import MilpplanError
from milpplan.problem.calculon.translation import calculon_run
from milpplan.units import percent_text

DIFFERS = 0.10
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Case:
    """One execution with its files."""

    name: str
    model: Tree
    execution: Tree
    system: Tree


@dataclass(frozen=True, slots=True)
class Compared:
    """One execution priced by both: seconds and GiB by term."""

    name: str
    ours: dict[str, float]
    theirs: dict[str, float]
    our_gib: dict[str, float]
    their_gib: dict[str, float]

    @property
    def ratio(self) -> float:
        """milpplan's step over Calculon's."""
        return sum(self.ours.values()) / sum(self.theirs.values())

    @property
    def blame(self) -> str:
        """The term that differs most, in seconds."""
        return max(TIME_TERMS, key=lambda term: abs(self.ours[term] - self.theirs[term]))


def drawn(checkout: Checkout, rng: np.random.Generator) -> Iterator[Case]:
    """The checkout's examples, then random executions without end."""
    models, systems = checkout.files("models"), checkout.files("systems")
    for name, execution in checkout.files("examples").items():
        yield Case(name, models["megatron-1T"], execution, systems["a100_80g"])
    names = [name for name in models if name != "gpt3-13B"]  # its hidden size is divided by no useful tp
    while True:
        name, system = str(rng.choice(names)), str(rng.choice(list(systems)))
        execution = random_execution(models[name], rng)
        if execution is not None:
            yield Case(f"{name}/{system}", models[name], execution, systems[system])


def random_execution(model: Tree, rng: np.random.Generator) -> Tree | None:
    """One point of the space of Calculon's search; None where the draw has none."""

    def one_of(values: Sequence[Any]) -> Any:
        return values[int(rng.integers(len(values)))]

    procs = one_of(SIZES)
    tp = one_of([t for t in (1, 2, 4, 8, 16, 32) if procs % t == 0 and model["attn_heads"] % t == 0])
    pp = one_of(
        [p for p in range(1, model["num_blocks"] + 1) if (procs // tp) % p == 0 and model["num_blocks"] % p == 0]
    )
    dp = procs // (tp * pp)
    share = one_of((4, 8, 16, 32, 64))
    recompute, comm = one_of(("full", "attn_only", "none")), one_of(("ar", "p2p_rs_ag", "rs_ag"))
    inner = one_of((0, 1))
    vpp = one_of([v for v in range(1, model["num_blocks"] // pp + 1) if model["num_blocks"] // pp % v == 0])
    return {
        "num_procs": procs,
        "tensor_par": tp,
        "pipeline_par": pp,
        "data_par": dp,
        "tensor_par_net": 0 if tp <= 8 else 1,
        "pipeline_par_net": inner if tp * pp <= 8 else 1,
        "data_par_net": 1,
        "batch_size": dp * share,
        "microbatch_size": one_of([b for b in (1, 2, 4, 8) if share % b == 0]),
        "datatype": "float16",
        "fused_activation": bool(one_of((True, False))),
        "attention_type": "multihead",
        "activation_recompute": recompute,
        "pipeline_interleaving": vpp if pp > 1 else 1,
        "optimizer_sharding": dp > 1 and bool(one_of((True, False))),
        "tensor_par_comm_type": comm,
        "tensor_par_overlap": one_of(("none", "ring", "pipe")) if tp > 1 else "none",
        "seq_par_ag_redo": comm == "rs_ag" and recompute != "full" and bool(one_of((True, False))),
        "data_par_overlap": dp > 1 and bool(one_of((True, False))),
        "weight_offload": bool(one_of((True, False))),
        "activations_offload": recompute != "full" and bool(one_of((True, False))),
        "optimizer_offload": bool(one_of((True, False))),
        "training": True,
    }


def sampled(path: Path) -> Iterator[Case]:
    """The executions of a file: {"models", "systems", "samples": [{"model", "system", "execution"}]}."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = json.loads(text)
    for one in data["samples"]:
        name = f"{one['model']}/{one['system']}"
        yield Case(name, data["models"][one["model"]], one["execution"], data["systems"][one["system"]])


def compared(checkout: Checkout, case: Case) -> Compared | str:
    """Both estimates; a text says why there are none."""
    execution = dict(case.execution)
    if execution["tensor_par_comm_type"] != "rs_ag" or execution["tensor_par"] == 1:
        # Nothing is gathered; Calculon would store less, at no cost.
        execution["seq_par_ag_redo"] = False
    system = without_memory_limit(case.system)
    stats = checkout.estimate(
        checkout.llm.Application(case.model), execution, _system(checkout, system, execution)
    )
    if stats is None:
        return "Calculon: it cannot run so"
    try:
        problem, plan = calculon_run(files_of(case.model, execution, system))
        ours, our_gib = our_terms(without_ends(problem, plan.layout), plan)
    except MilpplanError as error:
        return f"milpplan: {error.seen.partition(', got ')[0]}"
    theirs, their_gib = their_terms(stats)
    return Compared(case.name, ours, theirs, our_gib, their_gib)


def _system(checkout: Checkout, system: Tree, execution: Tree) -> Any:
    built = checkout.system(system)
    built.set_datatype(execution["datatype"])
    return built


def difference_table(all_: Sequence[Compared]) -> str:
    """Step time: how far apart, and the term to blame where it is more than a tenth."""
    ratios = np.array([one.ratio for one in all_])
    apart = [one for one in all_ if abs(one.ratio - 1) > DIFFERS]
    blame = Counter(one.blame for one in apart)
    rows = [
        ("executions", f"{len(all_)}"),
        ("median of milpplan / Calculon", f"{np.median(ratios):.3f}"),
        ("10th and 90th percentile", f"{np.quantile(ratios, 0.1):.3f}, {np.quantile(ratios, 0.9):.3f}"),
        ("rank correlation of the rates", f"{_rank_correlation(all_):.3f}"),
        (f"differ by more than {percent_text(DIFFERS, 0)}", f"{len(apart)}"),
        *((f"... most in: {term}", f"{count}") for term, count in blame.most_common()),
    ]
    return markdown_table(("step time", "value"), rows)


def _rank_correlation(all_: Sequence[Compared]) -> float:
    """Spearman's, of the step times."""
    ranks = [
        np.argsort(np.argsort([sum(getattr(one, side).values()) for one in all_])) for side in ("ours", "theirs")
    ]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def term_table(all_: Sequence[Compared], names: Sequence[str], fields: tuple[str, str], title: str) -> str:
    """Each term where it is at least a hundredth of either sum."""
    rows = []
    for name in names:
        pairs = []
        for one in all_:
            ours, theirs = getattr(one, fields[0]), getattr(one, fields[1])
            if max(ours[name] / sum(ours.values()), theirs[name] / sum(theirs.values())) >= 0.01:
                pairs.append((ours[name], theirs[name], sum(theirs.values())))
        if not pairs:
            continue
        table = np.array(pairs)
        both = (table[:, 0] > 0) & (table[:, 1] > 0)
        ratios = table[both, 0] / table[both, 1]
        apart = np.abs(table[:, 0] - table[:, 1]) > DIFFERS * np.maximum(table[:, 1], 1e-12)
        shown = [f"{q:.2f}" for q in np.quantile(ratios, (0.1, 0.5, 0.9))] if len(ratios) else ["-"] * 3
        share = np.median((table[:, 0] - table[:, 1]) / table[:, 2])
        rows.append(
            (
                name,
                len(pairs),
                *shown,
                int(apart.sum()),
                percent_text(float(share)),
            )
        )
    header = (
        title,
        "executions",
        "p10 ours / theirs",
        "median",
        "p90",
        "differ > 10 %",
        "median difference / sum",
    )
    return markdown_table(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description="Calculon and milpplan on the same executions.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT_PATH", help="a checkout of Calculon")
    parser.add_argument("--number", type=int, default=200, help="executions to compare (200)")
    parser.add_argument("--samples", type=Path, help="take the executions of this file")
    parser.add_argument("--seed", type=int, default=1, help="of the random executions (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    options = parser.parse_args(arguments)
    checkout = load(options.checkout)
    cases = sampled(options.samples) if options.samples else drawn(checkout, np.random.default_rng(options.seed))
    results: list[Compared] = []
    skipped: Counter[str] = Counter()
    for case in cases:
        result = compared(checkout, case)
        if isinstance(result, str):
            skipped[result] += 1
        else:
            results.append(result)
        if len(results) >= options.number:
            break
    if options.json:
        compared_ = [asdict(one) for one in results]
        document = {"measured_on": measured_on(), "skipped": skipped, "compared": compared_}
        print(json.dumps(document, indent=2))
        return
    if not results:
        raise SystemExit(f"No execution could be compared: {dict(skipped.most_common(6))}.")
    print(difference_table(results), term_table(results, TIME_TERMS, ("ours", "theirs"), "seconds"), sep="\n\n")
    print("\n" + term_table(results, MEMORY_TERMS, ("our_gib", "their_gib"), "bytes of rank 0"))
    print(f"\nLeft out: {dict(skipped.most_common(6))}.")
    print("\n" + ", ".join(f"{name} {value}" for name, value in measured_on().items()))


if __name__ == "__main__":
    main()
