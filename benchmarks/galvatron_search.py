"""Galvatron's own search of one case, run by an interpreter that has what Galvatron imports (``galvatron``).

python galvatron_search.py CHECKOUT FOLDER INPUTS

FOLDER takes its logs and profiles. INPUTS are a case of ``examples/adapters/galvatron_cases.json``, as JSON.
Prints one line of JSON: step, CPU and wall seconds of the search.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import sys
import time
import types
from pathlib import Path

SAME_NAMES = (
    "default_dp_type",
    "pipeline_type",
    "async_grad_reduce",
    "mixed_precision",
    "sequence_parallel",
    "global_memory_buffer",
    "fine_grained_mode",
    "time_profile_mode",
    "memory_profile_mode",
)
BATCH_NAMES = {"min_bsz": "min", "max_bsz": "max", "settle_bsz": "settle_bsz", "settle_chunk": "settle_chunk"}
PROFILES = (
    "memory_profiling",
    "time_profiling",
    "allreduce_bandwidth_config",
    "p2p_bandwidth_config",
    "overlap_coe",
    "sp_time",
)


class Empty(types.ModuleType):
    """Module with any name in it: Galvatron's runtime imports kernels that its search never calls."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return object


class Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of ``flash_attn``, which needs a GPU."""

    def find_spec(self, name, path=None, target=None):
        """Return an empty package for ``flash_attn`` and all below it."""
        kernels = name.split(".")[0] == "flash_attn"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if kernels else None

    def create_module(self, spec):
        """Return the empty module."""
        return Empty(spec.name)

    def exec_module(self, module):
        """Run nothing: the module is empty."""


def main() -> None:
    """Search, and print what it took."""
    checkout, folder, inputs = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    sys.path.insert(0, str(checkout))
    sys.meta_path.insert(0, Kernels())
    from galvatron.core.search_engine.args_schema import GalvatronSearchArgs
    from galvatron.core.search_engine.search_engine import GalvatronSearchEngine
    from tests.utils import search_configs

    settings = {
        "memory_constraint": inputs["memory_constraint_GB"],
        "hidden_size": inputs["hidden"][0],
        "num_layers": inputs["layers"][0],
        **{theirs: inputs["bsz"][ours] for theirs, ours in BATCH_NAMES.items()},
        **{name: inputs[name] for name in SAME_NAMES},
        **inputs["search_space"],
    }
    args = search_configs._auto_update_nested_args(GalvatronSearchArgs(), settings)
    args.options_info.log_dir = str(folder / "logs")
    args.options_info.output_config_path = str(folder)
    profiles, model = checkout / "galvatron" / "models" / "gpt", "llama2-7b"
    if inputs["time_profile_mode"] == "sequence":
        # Its golden test writes the profiles that it reads; the other cases use those that the project ships.
        profiles, model = folder, "llama_search"
        search_configs.write_time_config(folder, profile_mode="sequence", model_name=model)
        search_configs.write_memory_config(folder, profile_mode="sequence", sp_mode=True, model_name=model)
        search_configs.write_hardware_config(folder)
        for name in PROFILES:
            setattr(args.profiling_info, f"{name}_path", str(folder))
    engine = GalvatronSearchEngine(args)
    columns = zip(inputs["hidden"], inputs["layers"], inputs["seqlen"], strict=True)
    layers = [
        {"hidden_size": hidden, "layer_num": number, "seq_len": length} for hidden, number, length in columns
    ]
    engine.set_search_engine_info(str(profiles), layers, model)
    with contextlib.redirect_stdout(io.StringIO()):
        engine.initialize_search_engine()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        throughput = engine.parallelism_optimization()
    told = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}
    print(json.dumps({"step_s": inputs["bsz"]["settle_bsz"] / throughput, **told}))


if __name__ == "__main__":
    main()
