"""Every key of every launcher's schema: priced, known to change nothing, or refused by name, with any value."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from milpplan.cli.app import app
from milpplan.errors import IllegalPlanError, MilpplanError
from milpplan.launchers import TARGETS, Code, Imported, ImportRequest, is_quiet, known_settings
from milpplan.launchers.accelerate import launcher as accelerate_import
from milpplan.launchers.automodel import launcher as automodel_import
from milpplan.launchers.deepspeed import launcher as deepspeed_settings
from milpplan.launchers.megatron_bridge import launcher as bridge_import
from milpplan.launchers.nanotron import launcher as nanotron_settings
from milpplan.launchers.torchtitan import settings as torchtitan_settings
from tests.amounts import long_but
from tests.launchers.key_cases import Schema, schemas
from tests.refusals import in_three_parts
from tests.simulation.cases import shipped_hardware, shipped_model

NAMES = tuple(schemas())
FEW = [name for name in NAMES if name not in ("torchtitan 0.2.2", "torchtitan b5bcd76c")]
"""One version of every launcher."""
NEW = "no_such_thing"
JUNK: tuple[Any, ...] = (
    None, [], {}, True, 10**30, -1, float("nan"), "", [[0, 1]], {"a": {"b": 1}}, [None], "x", 1.5, [{"a": 1}],
)  # fmt: skip
TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "count": (int,), "int": (int,), "number": (int, float, str), "text": (str,), "texts": (list,),
    "counts": (list,), "numbers": (list,), "parts": (list,), "table": (dict, list), "null": (), "auto": (str,),
    "code": (),
}  # fmt: skip
"""What a value of a kind is in a file. YAML reads 1e-5 as a text, and takes it for a number."""
OTHER: dict[str, Any] = {
    "count": 3, "int": 3, "number": 0.25, "text": "other", "texts": ["other"], "counts": [3], "numbers": [0.25],
    "parts": [["other"]], "table": {"other": 1}, "null": None, "auto": "auto", "code": None,
}  # fmt: skip


def kinds(row: tuple[Any, ...]) -> tuple[str, ...]:
    """List the kinds of a row: declared, or those of its default."""
    if len(row) > 1 and isinstance(row[1], str):
        return tuple(row[1].split("|"))
    of = {bool: "bool", int: "count", float: "number", str: "text", list: "texts"}
    return (of[type(row[0])],) if len(row) == 1 else ()


def of_its_type(row: tuple[Any, ...], value: Any) -> bool:
    """Test whether a value is of the type that a row asks for, or is its default."""
    if value is None:
        return row[0] is None or "null" in kinds(row)
    if not kinds(row):
        return value in row[1] and type(value) in {type(one) for one in row[1]}
    return type(value) in {one for kind in kinds(row) for one in TYPES[kind]}


def another(row: tuple[Any, ...]) -> Any:
    """Choose a value of the right kind that is not the default."""
    if not kinds(row):
        return next(one for one in row[1] if one != row[0] or len(row[1]) == 1)
    kind = kinds(row)[0]
    return (not row[0]) if kind == "bool" else OTHER[kind]


def with_key(schema: Schema, key: str, value: Any) -> dict[str, Any]:
    """Add a setting to the file's; one that it is part of, or that is part of it, makes way."""
    kept = {
        name: one
        for name, one in schema.base.items()
        if not name.startswith(f"{key}.") and not key.startswith(f"{name}.")
    }
    return kept | {key: value}


def answer(found: Imported) -> tuple[Any, ...]:
    """Return what the settings decide."""
    return found.problem, found.plan, found.notes


@pytest.mark.parametrize("name", NAMES)
def test_the_file_itself_is_read(name: str) -> None:
    """What is changed below is whole here."""
    found = schemas()[name].read(schemas()[name].base)
    assert isinstance(found, Imported), found


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_priced_listed_or_refused(name: str) -> None:
    """Another value of a key changes the answer, or the key is on the list of those that change nothing, or the
    import refuses it by name."""
    schema = schemas()[name]
    plain = schema.read(schema.base)
    assert isinstance(plain, Imported)
    silent = []
    for key, row in schema.known.items():
        if schema.base.get(key) == another(row) or (another(row) is None and row[0] is None):
            continue
        found = schema.read(with_key(schema, key, another(row)))
        if isinstance(found, MilpplanError):
            in_three_parts(found)
            silent += [f"{key}: {found}"] * (not names(found, schema.target, key))
            silent += [f"--ignore {key}"] * (not can_be_ignored(schema, key, plain))
        elif not schema.quiet(key) and answer(found) == answer(plain):
            silent.append(key)
    assert [key for key in silent if key not in ALIKE[schema.target]] == []


def can_be_ignored(schema: Schema, key: str, plain: Imported) -> bool:
    """Test whether a refused setting can be ignored where the file is whole without it, and is then told."""
    values = with_key(schema, key, another(schema.known[key]))
    if not set(schema.base) < set(values):
        return True
    name = key.replace("[]", "[0]")
    found = schema.read(values, (name,))
    told = isinstance(found, Imported) and name.lstrip("-") in " ".join(found.ignored_flags)
    return isinstance(found, Imported) and found.plan == plain.plan and told


def names(found: MilpplanError, target: str, key: str) -> bool:
    """Test whether a refusal names the key, the rule that it breaks, or another key that must go with it."""
    parts = [part.lstrip("-").removeprefix("fsdp_") for part in key.split(".")[-2:]]
    told = (*parts, *([GOES_WITH[target][key]] if key in GOES_WITH.get(target, {}) else []))
    return isinstance(found, IllegalPlanError) or any(part in str(found) for part in told)


TITAN_ALIKE = {
    "parallelism.fsdp_reshard_after_forward": "what default does without a pipeline",
    "parallelism.expert_parallel_comm_backend": "no experts",
    "model.moe_comm_backend": "no experts",
    "parallelism.expert_tensor_parallel_degree": "no experts",
    "parallelism.enable_sequence_parallel": "no tensor parallelism",
    **dict.fromkeys(
        (
            "parallelism.module_fqns_per_model_part",
            *(f"parallelism.pipeline_parallel_{name}" for name in ("schedule", "layers_per_stage")),
            *(f"parallelism.pipeline_parallel_{name}_stage_less_layers" for name in ("first", "last")),
            *(f"experimental.pipeline_parallel_{name}" for name in ("schedule", "layers_per_stage")),
        ),
        "no pipeline",
    ),
    "experimental.context_parallel_rotate_method": "no context parallelism",
    "training.mixed_precision_reduce": "the only choice",
}
PIPELINE = ("layers_per_stage", "module_fqns_per_model_part", "pp_microbatch_size", "pp_recv_buffer_pool",
            "pp_recv_buffer_pool_slack", "dtype", "pp_schedule", "pp_schedule_csv", "pp_seq_len",
            "round_virtual_stages_to_pp_multiple")  # fmt: skip
ALIKE: dict[str, dict[str, str]] = {
    "torchtitan": TITAN_ALIKE,
    "deepspeed": {"zero_optimization.overlap_comm": "what ZeRO 3 does without it"},
    "nanotron": {
        "model.model_config.attention_bias": "LlamaForTraining has the setting and no such bias",
        "parallelism.tp_linear_async_communication": "no tensor parallelism",
        "parallelism.tp_recompute_allgather": "no tensor parallelism",
    },
    "automodel": {
        "distributed.moe.reshard_after_forward": "no experts",
        "distributed.mp_policy.param_dtype": "another spelling",
        "distributed.mp_policy.reduce_dtype": "another spelling",
        "distributed.sequence_parallel": "no tensor parallelism",
        **{f"distributed.pipeline.{name}": "no pipeline" for name in PIPELINE},
    },
    "accelerate": {"--bf16": "what mixed_precision says", "--packing": "block_size says the length"},
    "megatron-bridge": {"model.cp_comm_type": "no context parallelism"},
}
"""Keys that are looked at, and whose other value means the same in the file at hand, with the reason."""
GOES_WITH = {
    "torchtitan": {
        "parallelism.pipeline_parallel_degree": "num_pp_microbatches",
        "experimental.pipeline_parallel_degree": "pipeline_parallel_microbatch_size",
        "training.pipeline_parallel_degree": "pipeline_parallel_microbatch_size",
    },
    "automodel": {
        "distributed.pp_size": "defer_fsdp_grad_sync",
        "distributed.ep_size": "moe.reshard_after_forward",
    },
    "megatron-bridge": {"model.window_size": "--window-size"},
}
"""Keys whose other value needs another key, which the refusal names; or whose name is Megatron-LM's there."""


QUIETS = {
    "torchtitan": torchtitan_settings.QUIET,
    "deepspeed": deepspeed_settings.QUIET,
    "nanotron": nanotron_settings.QUIET,
    "automodel": automodel_import.QUIET,
    "accelerate": {**accelerate_import.ALL_QUIET},
    "megatron-bridge": bridge_import.QUIET,
}


@pytest.mark.parametrize("target", QUIETS)
def test_the_list_of_what_changes_nothing_is_of_the_schema(target: str) -> None:
    """Every pattern of the list is of a key, and has its reason; every listed key of Bridge has one."""
    known = {key for schema in schemas().values() if schema.target == target for key in schema.known}
    if target == "accelerate":
        known |= set(known_settings("accelerate_keys.json", "launch"))
    for pattern, reason in QUIETS[target].items():
        assert [key for key in known if is_quiet(key, {pattern: reason})], pattern
        assert len(reason) > 5
    if target == "megatron-bridge":
        assert all(is_quiet(key, QUIETS[target]) for key in known_settings("bridge_keys.json", "quiet"))


@pytest.mark.parametrize("name", long_but(FEW, NAMES))
def test_an_invented_key_is_refused_in_every_section(name: str) -> None:
    """Whatever the section: the key is named, and when it is ignored the answer says so."""
    schema = schemas()[name]
    plain = schema.read(schema.base)
    assert isinstance(plain, Imported)
    sections = {key.rpartition(".")[0] for key in schema.known} | {"", "no_such_section"}
    sections |= {section.rpartition(".")[0] for section in sections}
    free = {key for key, row in schema.known.items() if "table" in kinds(row)}
    for section in sorted(sections - free):
        key = f"{section}.{NEW}" if section else NEW
        key = key if not schema.texts or section else f"no_such_section.{NEW}"
        if section in ("training", "parallelism") and schema.file == "run.py":
            assert section in schema.write(with_key(schema, key, 3))
        values = with_key(schema, key, 3)
        found = schema.read(values)
        assert isinstance(found, MilpplanError), key
        assert NEW in str(found), (key, found)
        again = schema.read(values, (key.replace("[]", "[0]").lstrip("-"),))
        if isinstance(again, Imported):
            assert any(NEW in flag for flag in again.ignored_flags), key
        else:
            assert NEW not in str(again), (key, again)


@pytest.mark.parametrize("share", long_but((0.04,), (0.04, 1.0)))
@pytest.mark.parametrize("name", long_but(set(NAMES) - {"nanotron", "automodel"}, NAMES))
def test_a_value_of_another_type_is_refused(name: str, share: float) -> None:
    """Null, lists, tables, numbers out of range, not-a-number and texts where they do not belong: refused, never
    accepted in silence and never an error of the program."""
    schema, drawn = schemas()[name], random.Random(7)
    wrong = []
    for key, row in schema.known.items():
        if schema.texts and not schema.quiet(key):
            continue
        for value in JUNK:
            if drawn.random() > share:
                continue
            found = schema.read(with_key(schema, key, value))
            if isinstance(found, MilpplanError):
                in_three_parts(found)
            elif not of_its_type(row, value) and not written_alike(schema, key, row, value):
                wrong.append((key, value))
    assert wrong == []


def written_alike(schema: Schema, key: str, row: tuple[Any, ...], value: Any) -> bool:
    """Tell whether a file has a value as one of the right type: an empty table is no setting at all, and
    words of a command line are texts."""
    if value == {} or isinstance(value, Code):
        return any(other.startswith(f"{key}.") for other in schema.known)
    if schema.target == "accelerate" and key.startswith("--") and isinstance(value, bool | int | float | None):
        return of_its_type(row, str(value)) or (value is True and "bool" in kinds(row))
    if schema.target == "accelerate" and key.startswith("--") and isinstance(value, list):
        return ("text" if value else "bool") in kinds(row)
    if schema.texts:
        return "text" in kinds(row)
    return value is None and schema.file == "run.toml" and "text" in kinds(row)


@pytest.mark.parametrize("count", long_but((8,), (8, 300)))
@pytest.mark.parametrize("name", long_but(FEW, NAMES))
def test_the_command_ends_with_an_answer_or_a_message(name: str, count: int, tmp_path: Path) -> None:
    """Through the command line: exit code 0 with a plan, or 2 with three lines, whatever a key is given."""
    schema, drawn = schemas()[name], random.Random(11)
    file = tmp_path / schema.file
    words = ["import", str(file), "--from", schema.target, "--hardware", "dgx-h100", "--json"]
    words += ["--model", "llama3-8b"] if schema.target in ("accelerate", "automodel", "deepspeed") else []
    words += ["--gpus", "8"] if schema.target == "deepspeed" else []
    keys = [key for key in schema.known if not schema.quiet(key)]
    codes = set()
    for _ in range(count):
        key, value = drawn.choice(keys), drawn.choice((*JUNK, 2, 8, 10**9, "true", "8"))
        file.write_text(schema.write(with_key(schema, key, value)))
        result = CliRunner().invoke(app, words)
        assert result.exit_code in (0, 2), (key, value, result.output)
        assert "Traceback" not in result.output
        codes.add(result.exit_code)
        if result.exit_code == 2:
            assert len(result.stderr.splitlines()) == 3
            assert result.stdout == ""
    assert 2 in codes


LONG_LISTS = "a0: &a0 [1, 1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}, *a{n}, *a{n}]\n" for n in range(40))
LONG_TABLES = "a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{x: *a{n}, y: *a{n}}}\n" for n in range(40))
HEAD = "from torchtitan.models.llama3 import model_registry\ndef plan():\n    return Trainer.Config(model_spec="


@pytest.mark.parametrize(
    ("target", "file", "text", "word"),
    [
        ("torchtitan", "x.toml", f"a{'.a' * 20_000} = 1\n", "64 parts"),
        ("torchtitan", "x.toml", f"[a{'.a' * 20_000}]\n", "64 parts"),
        ("torchtitan", "x.toml", "x = 1\n" + "# filler\n" * 300_000, "characters"),
        ("torchtitan", "x.toml", f"x = {'[' * 50_000}", "nested too deeply"),
        ("torchtitan", "x.py", "# filler\n" * 40_000, "characters"),
        ("torchtitan", "x.py", f"{HEAD}a{'.b' * 1_500}(1))\n", "model_registry"),
        ("torchtitan", "x.py", f"{HEAD}a{'.b' * 100_000}(1))\n", "no Python"),
        ("torchtitan", "x.py", f"{HEAD}{'(' * 50_000}\n", "no Python"),
        ("torchtitan", "x.py", f"{HEAD}model_registry({'*'.join(['9' * 4_000] * 60)}))\n", "not a literal"),
        ("torchtitan", "x.py", f"{HEAD}model_registry({'*'.join(['2'] * 500)}))\n", "not a literal"),
        ("nanotron", "x.yaml", "x: 1\n" + "# filler\n" * 40_000, "characters"),
        ("nanotron", "x.yaml", LONG_LISTS, "not known here"),
        ("nanotron", "x.yaml", LONG_TABLES, "settings"),
        ("automodel", "x.yaml", f"model: {'[' * 1_200}", "YAML"),
        ("deepspeed", "x.json", '{"a": ' * 900 + "1" + "}" * 900, "nest more than"),
        ("deepspeed", "x.json", '{"a": ' + "[" * 100_000, "nested too deeply"),
        ("deepspeed", "x.json", json.dumps({f"k{n}": n for n in range(100_001)}), "settings"),
        ("deepspeed", "x.json", json.dumps({"k" * 1_000_000: 1}), "not known here"),
    ],
)  # fmt: skip
def test_files_that_are_too_deep_or_too_large_are_refused(target: str, file: str, text: str, word: str) -> None:
    """Readers are bounded: what nests, repeats or multiplies without end is refused before it takes the memory."""
    model = shipped_model("llama3-8b")
    with pytest.raises(MilpplanError, match=word) as caught:
        TARGETS[target].read(ImportRequest(text, file, shipped_hardware("dgx-h100"), 8, model))
    in_three_parts(caught.value)
    assert len(str(caught.value)) < 5_000
