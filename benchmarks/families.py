"""Public configurations of models: which load, with how many parameters, and why the others are refused.

    python -m benchmarks.families [--configs DIRECTORY_OR_JSON] [--transformers] [--write]

The configurations are those of ``data/public_configs.json.gz`` and ``tests/data/hf_configs``; ``--configs`` takes
others, a directory of ``*.json`` or a file whose ``models`` holds them by name. The number of parameters is
compared with that of the class in transformers, counted once (``data/public_config_counts.json``);
``--transformers`` counts again, on the meta device, and needs transformers and torch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.tables import markdown_table, replace_section
from milpplan.errors import InvalidInputError
from milpplan.problem.huggingface import BUILDERS, OBSTACLES, RENAMED, model_from_config
from milpplan.reports.files import write_whole
from milpplan.simulation.layers import total_parameters

HERE: Final = Path(__file__).parent
CONFIGS: Final = HERE / "data" / "public_configs.json.gz"
COUNTS: Final = HERE / "data" / "public_config_counts.json"
TESTED: Final = HERE.parent / "tests" / "data"
DOCUMENT: Final = HERE / "results" / "families.md"
RELABELLED: Final[dict[str, str]] = {
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "minimax_m3": "minimax_m3_vl_text",
    "deepseek_ref": "deepseek_v4",
}
"""Families without a class of their own, and that whose class they have."""
NOT_FOR_CLASSES: Final = ("quantization_config", "auto_map")
MAX_REASON: Final = 110
"""Characters of a refusal in the table."""


@dataclass(frozen=True, slots=True)
class Row:
    """Fate of a configuration.

    Attributes:
        parameters: number of parameters of the model; None if the file is refused.
        counted: number and name of the class in transformers; None if it has no class.
        reason: why it is refused, or an empty text.
    """

    name: str
    family: str
    parameters: int | None
    counted: tuple[int, str] | None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """How the number of parameters compares with that of the class."""
        if self.parameters is None:
            return "refused"
        if self.counted is None:
            return "accepted"
        return "exact" if self.parameters == self.counted[0] else f"off by {self.parameters - self.counted[0]:,}"


def configurations(place: Path | None = None) -> dict[str, dict[str, Any]]:
    """Read configurations by name: the project's own, or those of a directory or a JSON file."""
    if place is None:
        own = json.loads(gzip.decompress(CONFIGS.read_bytes()))["models"]
        return {**own, **configurations(TESTED / "hf_configs")}
    if place.is_dir():
        return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(place.glob("*.json"))}
    models = json.loads(place.read_text(encoding="utf-8"))["models"]
    return {name: model.get("config", model) for name, model in models.items()}


def counts() -> dict[str, tuple[int, str]]:
    """Read the counts of the classes by the name of the configuration."""
    stored = json.loads(COUNTS.read_text(encoding="utf-8"))["counts"]
    return {name: (number, kind) for name, (number, kind) in stored.items()}


def row_of(name: str, config: Mapping[str, Any], counted: tuple[int, str] | None) -> Row:
    """Load a configuration, and keep its number of parameters or the reason of its refusal."""
    family = str(config.get("model_type"))
    try:
        return Row(name, family, total_parameters(model_from_config(config, name)), counted)
    except InvalidInputError as error:
        return Row(name, family, None, counted, _few_words(error.seen, name))


def _few_words(seen: str, name: str) -> str:
    """Shorten the first sentence of a refusal."""
    seen = seen.removeprefix(f"Hugging Face config of {name}").lstrip(":, ").removeprefix("has ")
    seen = re.split(r": they are not priced|; found |\. Expected", seen)[0].rstrip(".")
    return seen if len(seen) <= MAX_REASON else f"{seen[:MAX_REASON]}..."


def tables(rows: list[Row]) -> Iterator[str]:
    """Write the totals, the configurations, and the families."""
    verdicts = Counter(row.verdict for row in rows)
    accepted = len(rows) - verdicts["refused"]
    yield (
        f"{len(rows)} configurations: {accepted} accepted, {verdicts['exact']} of them with exactly the "
        f"parameters of the class in transformers and {verdicts['accepted']} without a class to compare; "
        f"{verdicts['refused']} refused."
    )
    listed = [
        (
            row.name.partition("--")[2] or row.name,
            row.family,
            "-" if row.parameters is None else f"{row.parameters:,}",
            row.verdict if row.parameters is not None else f"refused: {row.reason}",
            "-" if row.counted is None else row.counted[1],
        )
        for row in rows
    ]
    yield markdown_table(("configuration", "family", "parameters", "count", "class in transformers"), listed)
    cases = json.loads((TESTED / "hf_family_counts.json").read_text(encoding="utf-8"))["cases"]
    checked = Counter(case["config"]["model_type"] for case in cases)
    small = [(family, f"{checked[family]} small configurations, exact") for family in BUILDERS]
    small += [(family, f"the layers of {other}") for family, other in RENAMED.items()]
    small += [(family, f"refused: {part}; nearest: {near}") for family, (part, near) in OBSTACLES.items()]
    yield markdown_table(("family", "what is known"), sorted(small))


def class_count(config: Mapping[str, Any]) -> tuple[int, str]:
    """Count the parameters of a configuration's class on the meta device, tied weights once.

    Raises:
        ValueError: transformers has no class of the family.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values = {key: value for key, value in config.items() if key not in NOT_FOR_CLASSES}
    family = str(values.pop("model_type"))
    if isinstance(values.get("text_config"), dict):
        text = values["text_config"]
        values["text_config"] = {key: value for key, value in text.items() if key not in NOT_FOR_CLASSES}
    if family == "step3p7":
        return _step_count(values)
    settings = AutoConfig.for_model(RELABELLED.get(family, family), **values)
    with torch.device("meta"):
        if "vision_config" in values:
            model = AutoModelForImageTextToText.from_config(settings)
        else:
            model = AutoModelForCausalLM.from_config(settings.get_text_config())
    model.tie_weights()
    return sum({id(one): one.numel() for one in model.parameters()}.values()), type(model).__name__


def _step_count(values: Mapping[str, Any]) -> tuple[int, str]:
    """Count Step-3.7's language model, whose class is of images and text together, with a head of its own."""
    import torch
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    names = {"num_experts": "n_routed_experts"}
    settings = Step3p7TextConfig(**{names.get(key, key): value for key, value in values.items()})
    with torch.device("meta"):
        model = Step3p7TextModel(settings)
    head = settings.vocab_size * settings.hidden_size
    return sum(one.numel() for one in model.parameters()) + head, "Step3p7TextModel and a head"


def main() -> int:
    """Load all configurations, and print or write the tables; fail if a count is not that of the class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, help="A directory of config.json files, or a JSON of them.")
    parser.add_argument("--transformers", action="store_true", help="Count the classes again.")
    parser.add_argument("--write", action="store_true", help="Replace the section of the results page.")
    words = parser.parse_args()
    configs, known = configurations(words.configs), counts() if words.configs is None else {}
    if words.transformers:
        for name, config in configs.items():
            try:
                known[name] = class_count(config)
            except ValueError as error:
                print(f"{name}: {error}")
        if words.configs is None:
            document = json.loads(COUNTS.read_text(encoding="utf-8"))
            lines = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
            body = ",\n".join(lines)
            source = json.dumps(document["source"])
            write_whole(COUNTS, f'{{\n"source": {source},\n"counts": {{\n{body}\n}}\n}}\n')
    rows = [row_of(name, config, known.get(name)) for name, config in configs.items()]
    text = "\n\n".join(tables(rows))
    if words.write:
        replace_section(DOCUMENT, "families", text)
    else:
        print(text)
    return int(any(row.verdict.startswith("off") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
