"""Tuning parameters of the search for a step: shares of time, numbers of trials, gaps at which work ends.

No bound and no time of a step depends on their values, only how much is found and proved within a time limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SearchParameters:
    """Parameters of ``solve_lengths`` and ``solve_groups``, in the order in which a solve needs them."""

    # Division of the time between the searches.
    teams_share: float = 0.1
    """Share of the time that is left for degrees side by side."""
    heterogeneous_share: float = 0.5
    """Share of the time that is left for heterogeneous replicas."""
    singles_share: float = 0.3
    """Share of the time that is left for single strategies if other searches follow."""
    main_share: float = 0.65
    """Share of the time that is left for a search before another one has its turn."""
    resume_s: float = 2.0
    """Seconds of a slice of the part with the lowest bound."""
    packing_s: float = 1.0
    """Seconds of a first packing, and of starts from load shapes."""
    num_packed_first: int = 6
    """Number of pipelines that are packed early, and of sets without pipelines that are packed first."""

    # Single strategies.
    far_start: float = 0.06
    """Starts that are longer than the shortest by more than this share get no effort."""
    far_improved_start: float = 0.01
    """Starts that are longer than the best packing by more than this share after little effort get no more."""
    max_improved_singles: int = 3
    """Number of strategies that are improved."""
    local_gain: float = 0.02
    """Relative gain that local search may bring: what is longer than the best by more is not improved."""
    configuration_s: float = 0.5
    """Seconds per call of the configuration bound."""
    configuration_rise: float = 0.02
    """Relative rise of the bound that one call of the configuration bound aims at."""

    # Strategies in turn.
    screening_share: float = 0.35
    """Share of the remaining time for screening all sets."""
    refinement_share: float = 0.5
    """Share of the remaining time for each of the two steps that bound pipelines by their work."""
    packed_first_share: float = 0.15
    """Share of the time for sets without pipelines that are packed first."""
    exclusive_s: float = 2.5
    """Seconds of one call for programs of exclusive sequences."""
    max_kept_sets: int = 20_000
    """Maximum number of sets that are kept after screening."""
    weight_updates: int = 60
    """Maximum number of updates of the weights of a set's bounds."""

    # Local search, by counted work.
    first_local_effort: int = 120_000
    """Effort of the first local search on heterogeneous replicas."""
    longer_local_effort: int = 400_000
    """Effort of a longer local search."""
    group_effort: int = 60_000
    """Effort of the local search on a group of a plan on tables."""
    batch_effort: int = 5_500
    """Effort of the local search for a batch of up to 768 sequences on four stages; less for larger ones."""
    local_threshold: tuple[float, float] = (3e-3, 1e-5)
    """Accepted relative lengthening of the slowest replica, at first and in the end."""

    # Degrees side by side.
    team_visits: int = 10
    """Maximum number of times that a family is packed or proved."""
    team_gap_share: float = 0.4
    """Share of the gap that first searches leave open; later ones leave twice as much."""
    team_tau: tuple[float, float] = (1e-2, 2e-4)
    """Temperature of the exchanges as a share of the step, at first and in the end."""

    # Heterogeneous replicas.
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
    max_program_s: float = 10.0
    """Maximum seconds of a program."""

    # Steps on tables.
    program_share: float = 0.34
    """Share of the remaining time that one assignment program may take."""
    max_exact_variables: int = 512
    """Maximum number of variables of an exact program."""

    # Programs of divisible loads: the loosest window has one until so many are solved.
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

    # Configuration programs and the master: column generation.
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
    smoothing: float = 0.5
    """Weight of the best dual values in the next ones (Wentges 1997)."""
    master_rounds: int = 80
    """Maximum number of rounds of a master of micro-batches."""
    master_gap: float = 2e-4
    """Relative gap between a restricted master and its proved value at which its rounds end."""
    max_pricing_entries: float = 6e7
    """Maximum number of table entries of a pricing problem; larger ones are left out."""
    max_master_entries: float = 6e9
    """Maximum number of table entries of a master in all rounds."""
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
