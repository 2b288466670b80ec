"""The commands and calls whose answers must not change when code is moved, merged or renamed.

Everything here goes through the command line or through public names, so a refactoring leaves this file alone.

    python -m tests.golden.cases        write answers.json
    python -m tests.golden.cases DIR    also write the whole documents, to see which numbers of two commits differ
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, Final

import numpy as np
from typer.testing import CliRunner

import milpplan
from milpplan.cli.app import app
from milpplan.graph import Peak, StrategyGraph, split_chain

ROOT: Final = Path(__file__).resolve().parents[2]
DATA: Final = ROOT / "tests" / "data"
ANSWERS: Final = Path(__file__).with_name("answers.json")
CALCULON: Final = " ".join(f"{DATA}/calculon/{name}.json" for name in ("model", "execution", "system"))

READ: Final = {
    "megatron": ("mixtral-8x7b", "megatron.sh"),
    "megatron-bridge": ("llama2-13b", "megatron-bridge.sh"),
    "torchtitan": ("llama3-8b", "torchtitan_plan.py"),
    "nanotron": ("llama3-8b", "nanotron.yaml"),
    "deepspeed": ("llama3-8b", "deepspeed.json"),
    "accelerate": ("llama3-8b", "accelerate.sh"),
    "automodel": ("llama3-8b", "automodel.yaml"),
}
"""By launcher, a model that it trains and the file of an export that `milpplan import` reads."""

SMALL: Final = "solve llama3-8b dgx-h100 --gpus 32 --global-batch 64"
UNEVEN: Final = "solve llama2-13b dgx-a100-40 --gpus 16 --global-batch 32 --fix pp=4"
MIXED: Final = "solve llama2-7b dgx-a100-80:8+dgx-h100:8 --global-batch 32 --fix tp=4"
LENGTHS: Final = "solve llama2-7b dgx-h100 --gpus 8 --lengths lengths.txt --global-batch 48 --gap 0.05"
UNIFORM: Final = "--space uniform"

COMMANDS: Final[dict[str, str]] = {
    # spaces
    "uniform": f"solve llama3-70b dgx-h100 --gpus 512 --global-batch 512 {UNIFORM}",
    "free": "solve llama3-70b dgx-h100 --gpus 512 --global-batch 512",
    "any": "solve llama3-8b dgx-h100 --gpus 16 --global-batch 16 --space any --fix pp=4,tp=2,vpp=2 --workers 1"
    " --gap 1e-2",
    "megatron's": "solve llama3-8b dgx-h100 --gpus 16 --global-batch 64 --target megatron --out free.json",
    "fixed": f"{SMALL} --fix tp=2 --fix recompute=full --out fixed.json",
    "forbidden": f"{SMALL} --forbid tp=1 --forbid pp=1,dp=16 {UNIFORM}",
    "experts": f"solve mixtral-8x7b dgx-h100 --gpus 64 --global-batch 128 {UNIFORM} --out experts.json",
    "latent attention": f"solve deepseek-v3 dgx-h100 --gpus 512 --global-batch 1024 {UNIFORM} --schedule all",
    "uneven experts": "solve gpt-oss-120b dgx-h100 --gpus 32 --global-batch 64 --fix pp=4,tp=2,vpp=1"
    " --fix micro_batch_size=1,zero_stage=1 --gap 5e-3",
    "every switch": f"solve llama2-7b dgx-a100-80 --gpus 64 --global-batch 512 {UNIFORM} --schedule all"
    " --allow all",
    "every schedule": "solve llama2-7b dgx-a100-80 --gpus 32 --global-batch 64 --fix pp=4 --schedule all",
    "offload": f"solve llama2-7b rtx4090 --gpus 2 --global-batch 8 --seq-len 2048 {UNIFORM} --allow offload",
    "placement": f"solve llama3-8b l40s --gpus 32 --global-batch 64 {UNIFORM} --allow placement",
    "fp8": f"solve llama3-8b dgx-h100 --gpus 8 --global-batch 32 --precision fp8 --grad-dtype bf16 {UNIFORM}",
    "unfused": f"solve gpt3-175b dgx-a100-80 --gpus 64 --global-batch 64 --attention unfused {UNIFORM}",
    "long context": f"solve llama3-8b dgx-h200 --gpus 16 --global-batch 8 --seq-len 131072 {UNIFORM}",
    "inference": f"solve llama3-70b dgx-h100 --gpus 8 --global-batch 16 --inference {UNIFORM}",
    "mixed cluster": f"{MIXED} --out mixed.json",
    "unlike replicas": f"{MIXED} --allow replicas",
    "infeasible": "solve llama3-405b dgx-h100 --gpus 8 --global-batch 8",
    "warm start": "solve llama3-8b dgx-h100 --gpus 16 --global-batch 64 --warm-start free.json",
    "Hugging Face": f"solve {DATA}/hf_configs/qwen3-30b-a3b.json dgx-h100 --gpus 16 --global-batch 32 {UNIFORM}",
    "Calculon": f"simulate --calculon {CALCULON}",
    "Calculon's space": f"solve --calculon {CALCULON} {UNIFORM} --gap 1e-2",
    # backends
    "uneven": f"{UNEVEN} --out uneven.json",
    "cpsat": f"{UNEVEN} --backend cpsat",
    "cbc": f"{UNEVEN} --backend cbc",
    "highs": f"{UNEVEN} --backend highs",
    "no witness": f"{UNEVEN} --no-witness",
    # objectives
    "range of GPUs": f"solve llama3-8b dgx-h100 --gpus 8:32:8 --global-batch 48 {UNIFORM}",
    "fewest GPUs": f"min-gpus llama2-13b dgx-a100-80 --global-batch 128 {UNIFORM}",
    "deadline": "solve llama3-8b dgx-h100 --gpus 8:64:8 --global-batch 64 --tokens 1e11 --deadline-days 20"
    f" --objective num_gpus {UNIFORM}",
    "GPU hours": "solve llama3-8b dgx-h100,dgx-b200 --gpus 8:32:8 --global-batch 64 --tokens 1e12"
    f" --price-per-gpu-hour dgx-h100=2.5,dgx-b200=4.5 --objective gpu_hours {UNIFORM}",
    "both ends": f"solve llama3-8b overlay.toml --gpus 64 --global-batch 512 {UNIFORM} --check-ends",
    # one plan
    "simulate": "simulate free.json",
    "simulate uneven": "simulate uneven.json",
    "simulate mixed": "simulate mixed.json",
    "certify": "certify free.json --backend cbc",
    "certify uneven": "certify uneven.json",
    "explain": "explain fixed.json --why-not tp=4 --gap 1e-3 --time-limit 600",
    "compare": "compare free.json warm.json",
    "gap": "gap fixed.json --space uniform --time-limit 600",
    "traffic": "traffic uneven.json",
    "traffic of experts": "traffic experts.json",
    "switch": "switch fixed.json other.json",
    "switch from the nearest": "switch fixed.json other.json --senders nearest",
    "trace": "report free.json --trace trace.json --time-limit 600",
    # launchers: the files of an export, and what an import says of them
    **{
        f"{name}: solve": f"solve {model} dgx-h100 --gpus 16 --global-batch 32 {UNIFORM} --target {name}"
        f" --price-limit 0 --out {name}.json"
        for name, (model, _) in READ.items()
    },
    **{
        f"{name}: export, import": f"import {name}/{file} --from {name} --hardware dgx-h100 --model {model}"
        for name, (model, file) in READ.items()
    },
    # measured runs, studies, descriptions
    "validate": f"validate --runs {ROOT}/examples/measured_steps.json",
    "calibrate": f"calibrate {ROOT}/examples/measured_steps.json --hardware dgx-h100 --constant gemm_efficiency"
    " --out overlay.toml",
    "sweep": "sweep study.toml --workers 1",
    "show": "show deepseek-v3",
    # lengths
    "lengths in turn": f"{LENGTHS} --turns-only --max-strategies 2",
    "lengths side by side": LENGTHS,
}
"""By name, the words of a command, which runs where the files of other commands are."""

INPUTS: Final = {
    "study.toml": """name = "golden"
[grid]
model = ["llama2-7b"]
hardware = ["dgx-h100", "dgx-a100-80"]
num_gpus = [8, 16]
global_batch_size = [32]
space = ["uniform"]
""",
    "lengths.txt": "\n".join(str(256 + 97 * (i * i % 211)) for i in range(48)) + "\n",
}
"""Files that are there before any command."""

WRITTEN: Final = {words.rpartition(" --out ")[2]: words for words in COMMANDS.values() if " --out " in words} | {
    "warm.json": f"solve llama3-8b dgx-h100 --gpus 16 --global-batch 64 --fix tp=2 {UNIFORM} --out warm.json",
    "other.json": f"{SMALL} --fix tp=4 --fix pp=2 {UNIFORM} --out other.json",
    **{f"{name}/{file}": f"export {name}.json --to {name} --out {name}" for name, (_, file) in READ.items()},
}
"""By file, the command that writes it."""

LOOSE: Final = {"lengths in turn": 0.05, "lengths side by side": 0.05}
"""Relative tolerance of steps whose search still stops by its clock; nothing else of these is compared."""

FACTS: Final = frozenset(
    {"status", "step_time_s", "lower_bound_s", "peak_memory_bytes", "objective_bound", "verdict"}
)
"""Fields of a document that are kept in clear, wherever they stand."""

VOLATILE: Final = frozenset(
    {
        "wall_time_s",
        "solver",
        "log",
        "certificate",
        "milpplan_version",
        "versions",
        "layouts",
        "problem",
        "directory",
    }
)
"""Keys of a document that tell of the request, the search or the machine, not of the answer."""


def simulate_many() -> list[float]:
    """Simulate nine layouts at once, with every recompute mode."""
    model, hardware = milpplan.load_model("llama3-8b"), milpplan.load_hardware("dgx-h100")
    job = milpplan.Job(num_gpus=16, global_batch_size=64, sequence_length=8192)
    problem = milpplan.Problem(model=model, hardware=hardware, job=job, space=milpplan.Space(kind="uniform"))
    layouts = [
        milpplan.Layout(tp=tp, pp=pp, dp=16 // (tp * pp), micro_batch_size=1, global_batch_size=64)
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
    ]
    steps = milpplan.simulate_many(problem, layouts)
    return [*steps.step_time_ns.ravel().tolist(), *steps.peak_memory_bytes.ravel().tolist()]


def chain_with_skips() -> StrategyGraph:
    """State a graph of 30 nodes with a memory limit half-way and a maximum of two sums."""
    random = np.random.default_rng(7)
    nodes = [random.integers(1, 100, 5) for _ in range(30)]
    pairs = [(i, i + 1) for i in range(29)] + [(i, i + 4) for i in range(0, 26, 8)]
    memory = [random.integers(1, 50, 5) for _ in nodes]
    limit = sum((int(row.min()) + int(row.max())) / 2 for row in memory)
    peaks = [Peak(0.0, {i: random.integers(0, 9, 5) for i in range(first, 30, 2)}) for first in (0, 1)]
    edges = {pair: random.integers(0, 40, (5, 5)) for pair in pairs}
    return StrategyGraph(nodes, edges, memory, limit, peaks=[peaks])


def graph() -> list[float]:
    """Solve the graph, and cut a chain into stages."""
    answer = chain_with_skips().solve()
    assert answer.choice is not None
    random = np.random.default_rng(8)
    chain = StrategyGraph(
        [random.integers(1, 100, 3) for _ in range(12)],
        {(i, i + 1): random.integers(0, 40, (3, 3)) for i in range(11)},
        [random.integers(1, 50, 3) for _ in range(12)],
        200,
    )
    split = split_chain(chain, 3, 8)
    return [*answer.choice, answer.objective or 0.0, *split.choice, split.objective]


CALLS: Final[dict[str, Callable[[], list[float]]]] = {"simulate_many": simulate_many, "graph": graph}
"""By name, calls of the library and the numbers that they give."""


class Net:
    """A directory in which commands run and find the files of others, each made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in INPUTS.items():
            (folder / name).write_text(text, encoding="utf-8")

    def run(self, words: str) -> tuple[int, str]:
        """Run a command in this process, after those that write its files.

        Args:
            words: The command line, without the program.

        Returns:
            The exit code, and what was written to standard output.
        """
        for word in words.partition(" --out ")[0].split():
            if word in WRITTEN and not (self.folder / word).exists():
                assert self.run(WRITTEN[word])[0] == 0, WRITTEN[word]
        with chdir(self.folder):
            done = CliRunner().invoke(app, words.split())
        return done.exit_code, done.stdout

    def document(self, name: str) -> tuple[int, Any]:
        """Run a case.

        Args:
            name: A key of ``COMMANDS`` or ``CALLS``.

        Returns:
            The exit code, and the document: JSON, text, or numbers of a call.
        """
        if name in CALLS:
            return 0, CALLS[name]()
        words = COMMANDS[name]
        if words.startswith("show"):
            return self.run(words)
        code, text = self.run(words if "--trace" in words else f"{words} --json")
        return code, json.loads(
            (self.folder / "trace.json").read_text(encoding="utf-8") if "--trace" in words else text
        )

    def answer(self, name: str) -> dict[str, Any]:
        """Answer a case.

        Args:
            name: A key of ``COMMANDS`` or ``CALLS``.

        Returns:
            What must not change: exit code, some numbers in clear, digests of the others, of plans and of files.
        """
        code, document = self.document(name)
        facts: dict[str, Any] = {"exit_code": code} | facts_of(document)
        if name in LOOSE:
            return {"exit_code": code, "step_time_s": document["step_time_s"]}
        launcher = name.partition(": export")[0]
        if launcher != name:
            files = sorted((self.folder / launcher).iterdir())
            facts["files"] = {file.name: digest(file.read_text(encoding="utf-8")) for file in files}
        return facts


def facts_of(document: Any) -> dict[str, Any]:
    """Collect what must not change of a document.

    Args:
        document: What a command printed.

    Returns:
        The first few ``FACTS`` in clear, every plan's digest, and the digest of all numbers.
    """
    if isinstance(document, str):
        return {"text": digest(document)}
    clear: dict[str, Any] = {}
    plans: list[str] = []
    for name, value in leaves(document):
        if name in FACTS:
            clear.setdefault(name, value)
        elif name == "plan" and value is not None:
            plans.append(digest(json.dumps(plan_of(value), sort_keys=True)))
    numbers = [rounded(value) for _, value in leaves(document) if isinstance(value, int | float)]
    found = {"plans": digest(" ".join(plans))} if plans else {}
    return clear | found | {"numbers": digest(" ".join(numbers)), "count": len(numbers)}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """List the names and values of a document, in its order, without what is volatile.

    Args:
        value: The document, or a part of it.
        name: The key under which the part stands.

    Yields:
        Key and value of every number, string and plan.
    """
    if isinstance(value, dict):
        if name == "plan":
            yield name, value
        for key, part in value.items():
            if key not in VOLATILE:
                yield from leaves(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, name)
    else:
        yield name, value


LATER: Final = {"expert_dispatch": "default"}
"""Fields of a layout that came after the answers, at the values that change nothing: digests leave them out."""


def plan_of(plan: Any) -> Any:
    """Reduce the document of a plan to its decisions."""
    if not isinstance(plan, dict):
        return plan
    stages = [
        {key: stage[key] for key in ("layers", "recompute") if key in stage} for stage in plan.get("stages", ())
    ]
    layout = plan.get("layout")
    if isinstance(layout, dict):
        layout = {name: value for name, value in layout.items() if LATER.get(name) != value}
    return {"layout": layout, "stages": stages}


def rounded(number: float) -> str:
    """Write a number with 12 digits: processors differ in the last ones of powers and logarithms."""
    return format(number, ".12g") if isinstance(number, float) else str(number)


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


NAMES: Final = (*COMMANDS, *CALLS)


def main(folder: str | None) -> None:
    """Answer all cases anew, write ``answers.json`` and say how long each took.

    Args:
        folder: Where the whole documents go; None: nowhere.
    """
    answers = {}
    with tempfile.TemporaryDirectory() as work:
        net = Net(Path(work))
        for name in NAMES:
            started = time.process_time()
            answers[name] = net.answer(name)
            print(f"{name}: {time.process_time() - started:.2f} s", file=sys.stderr)
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                path = Path(folder) / f"{name.replace(' ', '_').replace(':', '')}.json"
                path.write_text(json.dumps(net.document(name), indent=1, default=int), encoding="utf-8")
    ANSWERS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
