"""A whole file for every command that reads one: what the fuzz tests break."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path

from typer.testing import CliRunner

import milpplan
from milpplan.cli.app import app
from milpplan.problem import preset_text
from milpplan.reports.documents import PlanFile, document_text, plan_document
from tests.calibration.test_gemm_table import products
from tests.calibration.test_nccl import log
from tests.fuzzing import FILE, Language, Seed
from tests.launchers.test_fuzz import NAMES_ITS_MODEL, TARGETS, file_of
from tests.small import small_hardware, small_model, small_problem
from tests.studies.cases import QUICK
from tests.validation.cases import record

DATA = Path(__file__).parent / "data"
SOLVE = ("--gpus", "4", "--global-batch", "8", "--space", "uniform", "--time-limit", "2")
LANGUAGES: dict[str, Language] = {"json": "json", "toml": "toml", "yaml": "yaml"}
MORE_FILES = {
    "megatron": ("deepseek-v3-experts.sh", "llama3-70b-uneven.sh", "mixtral-8x7b-sharded.sh"),
    "megatron-bridge": ("llama3-70b-uneven.bridge-sh", "mixtral-8x7b-sharded.bridge-sh"),
    "torchtitan": ("deepseek-v3-pipeline.titan-py", "llama3-70b-pipeline.titan-toml"),
}
"""Files with pipelines, experts and uneven stages."""
KEYS = {"deepspeed": "deepspeed_keys.json", "nanotron": "nanotron_keys.json", "torchtitan": "torchtitan_keys.json"}
"""Lists of the keys of a launcher, beside its code."""


@cache
def documents() -> dict[str, str]:
    """A plan file, the result of a solve, and the same problem's model and hardware, as texts."""
    problem = small_problem()
    plan = milpplan.solve(problem).plan
    assert plan is not None
    found = {
        "plan": document_text(PlanFile(plan=plan_document(plan), problem=problem)),
        "model": document_text(small_model()),
        "hardware": document_text(small_hardware()),
    }
    for name in ("model", "hardware"):
        Path(f"{name}.json").write_text(found[name])
    solved = CliRunner().invoke(app, ["solve", "model.json", "hardware.json", *SOLVE, "--json"])
    assert solved.exit_code == 0
    return {**found, "result": solved.stdout}


def of_plans() -> list[Seed]:
    """Commands that read plans."""
    found = documents()
    plan, beside = found["plan"], {"other.json": found["plan"]}
    simple = {
        "simulate": ("simulate", FILE),
        "explain": ("explain", FILE, "--time-limit", "2"),
        "traffic": ("traffic", FILE),
        "report": ("report", FILE, "-o", "page.html", "--trace", "trace.json", "--time-limit", "2"),
        "gap": ("gap", FILE, "--space", "uniform", "--time-limit", "2"),
        "compare": ("compare", "other.json", FILE),
        "switch": ("switch", "other.json", FILE),
        "warm start": ("solve", "model.json", "hardware.json", *SOLVE, "--warm-start", FILE),
    }
    beside |= {f"{name}.json": found[name] for name in ("model", "hardware")}
    seeds = [Seed(label, words, plan, beside=beside) for label, words in simple.items()]
    for name in TARGETS:
        imported = of_launchers(name)[0]
        Path(imported.name).write_text(imported.text)
        words = [imported.name if word == FILE else word for word in imported.words]
        plan = CliRunner().invoke(app, [*words, "--json"]).stdout
        seeds.append(Seed("export", ("export", FILE, "--to", name, "-o", "launch"), plan))
    return [*seeds, Seed("certify", ("certify", FILE), found["result"])]


def of_descriptions() -> list[Seed]:
    """Commands that read models, clusters, jobs and studies."""
    found, config = documents(), (DATA / "hf_configs" / "llama3-8b.json").read_text()
    beside = {f"{name}.json": found[name] for name in ("model", "hardware")}
    toml = preset_text("dgx-h100")
    job = 'model = "llama3-8b"\nhardware = "dgx-h100"\ngpus = "8"\nglobal-batch = "8"\nspace = "uniform"\n'
    job += 'seq-len = 2048\ntime-limit = 2.0\nfix = ["tp=8"]\nprecision = "bf16"\n'
    calculon = {
        name: (DATA / "calculon" / f"{name}.json").read_text() for name in ("model", "execution", "system")
    }
    study = QUICK.replace("[32, 64]", "[32]").replace("[4, 8]", "[4]").replace("[1, 0.5, 0.2]", "[1]")
    overlay = preset_text("dgx-h100+plain")
    return [
        Seed("model", ("solve", FILE, "dgx-h100", *SOLVE), found["model"]),
        Seed("model", ("show", FILE), found["model"]),
        Seed("config.json", ("show", FILE), config),
        Seed("config.json", ("show", FILE), (DATA / "hf_configs" / "mixtral-8x7b.json").read_text()),
        Seed("config.json", ("solve", FILE, "dgx-h100", *SOLVE), (DATA / "hf_configs" / "gpt2.json").read_text()),
        Seed("hardware", ("solve", "model.json", FILE, *SOLVE), found["hardware"], beside=beside),
        Seed("hardware", ("show", FILE), toml, "toml", "file.toml"),
        Seed("hardware", ("show", FILE), overlay, "toml", "file.toml"),
        Seed(
            "hardware",
            ("min-gpus", "model.json", FILE, "--global-batch", "8", "--gpus", "2:4:2", *SOLVE[-4:]),
            found["hardware"],
            beside=beside,
        ),
        Seed("job", ("solve", "--job", FILE), job, "toml", "file.toml"),
        Seed("sweep", ("sweep", FILE, "--out", "results", "--workers", "1"), study, "toml", "file.toml"),
        *(
            Seed(
                "calculon",
                ("simulate", "--calculon", *(FILE if one == name else f"{one}.txt" for one in calculon)),
                text,
                beside={f"{one}.txt": other for one, other in calculon.items()},
            )
            for name, text in calculon.items()
        ),
    ]


def of_measurements() -> list[Seed]:
    """Commands that read lengths and what was measured."""
    mixture = {
        "distribution": "mixture",
        "parts": [
            {"share": 0.9, "distribution": "lognormal", "mean_log": 6.1, "sigma_log": 1.2},
            {"share": 0.1, "distribution": "pareto", "shortest": 2000, "tail": 1.1},
        ],
    }
    histogram = {"bin_edges": [0, 128, 1024], "counts": [50, 40]}
    lengths = ("solve", "llama2-7b", "dgx-h100", "--gpus", "8", "--lengths", FILE, "--turns-only", "--fix", "cp=1")
    lengths += ("--max-strategies", "1", "--time-limit", "1", "--global-batch", "8")
    runs = json.dumps([record(id=f"run-{pp}", parallel__pp=pp, parallel__dp=8 // pp) for pp in (1, 2)])
    fit = ("--hardware", "dgx-h100", "--out", "overlay.toml", "--constant", "gemm_efficiency")
    return [
        Seed("lengths", lengths, "500\n900\n30\n2048\n700\n64\n1000\n128\n", "text", "file.txt"),
        Seed("lengths", lengths, json.dumps(mixture)),
        Seed("lengths", lengths, json.dumps(histogram)),
        Seed("validate", ("validate", "--runs", FILE), runs),
        Seed("validate", ("validate", "--runs", FILE), runs[1:-1].replace('}, {"id', '}\n{"id'), "text"),
        Seed("calibrate", ("calibrate", FILE, *fit), runs),
        Seed("calibrate", ("calibrate", FILE, *fit), log(), "text", "file.log"),
        Seed(
            "calibrate", ("calibrate", FILE, *fit), "\n".join(products(0.9).split("\n")[:80]), "text", "file.csv"
        ),
    ]


def of_launchers(name: str) -> list[Seed]:
    """``import`` and ``gap`` of a launcher's files."""
    model = ("--model", "llama3-8b") if name in NAMES_ITS_MODEL else ()
    words = ("--from", name, "--hardware", "dgx-h100", *model)
    files = [
        (
            f"file.{file.rpartition('.')[2].removeprefix('titan-').removeprefix('bridge-')}",
            DATA / "launchers" / file,
        )
        for file in MORE_FILES.get(name, ())
    ]
    texts = [file_of(name)[1:], *((file, path.read_text()) for file, path in files)]
    seeds = []
    for file, text in texts:
        language = LANGUAGES.get(file.rpartition(".")[2], "text")
        seeds.append(Seed(f"import {name}", ("import", FILE, *words), text, language, file))
    first = seeds[0]
    judged = ("gap", FILE, *words, "--space", "uniform", "--time-limit", "1")
    return [*seeds, Seed("gap of a script", judged, first.text, first.language, first.name)]


@cache
def seeds() -> dict[str, list[Seed]]:
    """All seeds by label."""
    found: dict[str, list[Seed]] = {}
    launchers = [seed for name in TARGETS for seed in of_launchers(name)]
    for seed in (*of_plans(), *of_descriptions(), *of_measurements(), *launchers):
        found.setdefault(seed.label, []).append(seed)
    return found


LABELS = (
    *("simulate", "explain", "traffic", "report", "gap", "compare", "switch", "warm start", "export", "certify"),
    *("model", "config.json", "hardware", "job", "sweep", "calculon", "lengths", "validate", "calibrate"),
    *(f"import {name}" for name in TARGETS),
    "gap of a script",
)


def keys_of(name: str) -> dict[str, object]:
    """The dotted keys that a launcher has, of all its versions."""
    if name not in KEYS:
        return {}
    found = json.loads(resources.files("milpplan.launchers").joinpath(KEYS[name]).read_text(encoding="utf-8"))
    keys: dict[str, object] = {}
    for key, value in found.items():
        keys |= value if isinstance(value, dict) else {key: value}
    return keys
