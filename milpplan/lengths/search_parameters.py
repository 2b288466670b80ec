"""Tuning parameters of the search for a step: shares of time, seconds of a slice, numbers of trials.

No bound and no time of a step depends on their values, only how much is found and proved within a time limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SearchParameters:
    """Parameters of ``solve_lengths``: solve, single strategies, sets in turn, heterogeneous replicas, master."""

    singles_share: float = 0.3
    """Share of the time that is left for single strategies if other searches follow."""
    singles_alone_share: float = 0.65
    """Share of the time that is left for single strategies if none follow."""
    turns_share: float = 0.65
    """Share of the time that is left for sets in turn, before the part with the lowest bound goes on."""
    teams_share: float = 0.1
    """Share of the time that is left for degrees side by side."""
    heterogeneous_share: float = 0.5
    """Share of the time that is left for heterogeneous replicas."""
    later_visits: int = 4
    """Factor on the visits of a later search of degrees side by side if that part has the lowest bound."""
    resume_s: float = 2.0
    """Seconds of a slice of the part with the lowest bound."""
    baselines_share: float = 1 / 3
    """Extra time for the programs of other planners' rules, as a share of the time limit."""
    far_start: float = 0.06
    """Starts that are longer than the shortest by more than this share get no effort."""
    far_improved_start: float = 0.01
    """Starts that are longer than the best packing by more than this share after little effort get no more."""
    max_improved_singles: int = 3
    """Number of strategies that are improved."""
    hopeless_excess: float = 0.02
    """Relative excess over the best step from which a strategy is not improved."""
    proof_share: float = 0.65
    """Share of a slice for proofs of single strategies before the best one is improved."""
    first_packing_s: float = 1.0
    """Seconds of a first packing."""
    shapes_s: float = 1.0
    """Seconds of starts from load shapes, as programs of deep pipelines are slow."""
    configuration_rise: float = 0.02
    """Relative rise of the bound that one call of the configuration bound aims at."""
    num_packed_early: int = 6
    """Number of pipelines that are packed early."""
    configuration_s: float = 0.5
    """Seconds per call of the configuration bound."""
    screening_share: float = 0.35
    """Share of the remaining time for screening all sets."""
    refinement_share: float = 0.5
    """Share of the remaining time for each of the two steps that bound pipelines by their work."""
    exclusive_aim: float = 1.001
    """Factor on the bound that programs of exclusive sequences aim at."""
    exclusive_s: float = 2.5
    """Seconds of one call for programs of exclusive sequences."""
    max_kept_sets: int = 20_000
    """Maximum number of sets that are kept after screening."""
    screening_batch: int = 128
    """Number of sets that are cut in one batch."""
    even_weight_share: float = 0.05
    """Share of even weights in the weights that a set's bound starts from."""
    weight_updates: int = 60
    """Maximum number of updates of the weights of a set's bounds."""
    updates_per_forecast: int = 12
    """Number of updates after which sets leave that twice their recent rise would not close."""
    num_packed_first: int = 6
    """Number of sets without pipelines that are packed first."""
    packed_first_share: float = 0.15
    """Share of the time for sets without pipelines that are packed first."""
    shaped_excess: float = 0.02
    """Relative excess up to which a packing from load shapes is preferred, as it gains more by local search."""
    first_local_effort: int = 120_000
    """Effort of the first local search."""
    longer_local_effort: int = 400_000
    """Effort of a longer local search."""
    group_effort: int = 60_000
    """Effort of the local search on a group of a plan on tables."""
    heterogeneous_shapes_s: float = 0.4
    """Seconds for the load shapes of one strategy."""
    fixed_cost_level: float = 0.003
    """Maximum difference of the fixed costs of a level, as a share of the step."""
    ignored_gpus: float = 0.02
    """Share of all GPUs below which replicas of a class are ignored."""
    growth_of_missing: float = 0.1
    """Assumed relative growth of the step's time per missing share of the work."""
    linear_precision: float = 0.02
    """Relative precision of the shortest step that is left, for linear programs."""
    integer_precision: float = 2e-3
    """Relative precision of the shortest step that is left, for integer programs."""
    wanted_share: float = 0.02
    """Share of all sequences that is added to what a strategy holds before prices are sought."""
    max_prices: int = 4
    """Maximum number of price vectors of a strategy."""
    packing_ratio: float = 0.5
    """Number of packings for each proof, while proofs make progress."""
    max_program_s: float = 10.0
    """Maximum seconds of a program."""
    shared_memory_share: float = 0.3
    """Share of the workload at which work bounds of pipelines that share their memory are tight, too."""
    share_step: float = 0.01
    """Pipelines whose stages' shares are equal in multiples of it have the same programs."""
    alone_programs: int = 18
    """Number of programs of a work bound of a pipeline with its own memory."""
    shared_programs: int = 7
    """Number of programs of a work bound with shared memory."""
    exact_programs: int = 40
    """Number of programs of a work bound with constants, links and kinds."""
    longest_programs: int = 60
    """Number of programs around the longest sequence."""
    refined_programs: tuple[int, int] = (28, 48)
    """Number of programs of a refined work bound, and around the longest sequence in it."""
    large_programs: int = 30
    """Number of programs around a large micro-batch."""
    learned_programs: tuple[int, int] = (24, 100)
    """Number of programs around a sequence of an assignment on tables, at first and for its final load."""
    max_program_size: int = 70
    """Maximum number of micro-batches of a program around one."""
    max_listed_numbers: int = 400
    """Maximum number of micro-batches with cuts of their own."""
    max_window_entries: float = 4e8
    """Maximum number of table entries of a window of the configuration bound."""
    configuration_rounds: int = 14
    """Maximum number of rounds of a configuration program."""
    configuration_gap: float = 3e-4
    """Relative gap at which its rounds end."""
    price_rounds: int = 45
    """Maximum number of rounds of a configuration program with a price for every length."""
    price_width: float = 0.1
    """Relative width of the box around the best prices at first."""
    content_gap: float = 5e-5
    """Relative gap between the bound of a micro-batch and the value of its contents at which pricing ends."""
    master_rounds: int = 80
    """Maximum number of rounds of a master of micro-batches."""
    master_gap: float = 2e-4
    """Relative gap between a restricted master and its proved value at which its rounds end."""
    max_pricing_entries: float = 6e7
    """Maximum number of table entries of a pricing problem; larger ones are left out."""
    max_master_entries: float = 6e9
    """Maximum number of table entries of a master in all rounds."""
    smoothing: float = 0.5
    """Weight of the best dual values in the next ones (Wentges 1997)."""
    max_columns: int = 1500
    """Number of columns from which a restricted master is pruned."""
    kept_columns: int = 900
    """Number of columns that pruning keeps."""


PARAMETERS: Final = SearchParameters()
"""Values of every solve."""

TOLERANCE: Final = 1e-9
"""Relative error of float sums."""
SAFETY: Final = 1.0 - TOLERANCE
"""Factor on bounds that covers the rounding of float sums."""
ROUNDED_UP: Final = 1.0 + TOLERANCE
"""Factor on capacities and limits that covers the rounding of float sums."""
SOLVER_TOLERANCE: Final = 1e-6
"""Relative error of values of a linear program."""
UNFIT_NS: Final = 1e18
"""Time of a length that does not fit, ns."""
