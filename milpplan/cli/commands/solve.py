"""The command ``solve``: its examples and its story. ``milpplan.cli.solving`` has the parts of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from milpplan.cli import command, interrupts
from milpplan.cli.outcome import ExitCode, shown_progress
from milpplan.cli.solve_options import LengthOptions, SolveWords, are_asked
from milpplan.errors import InvalidInputError

METHODS: Final = ("search", "program")
EXAMPLES: Final = (
    ("The best plan for Llama-3 70B on 8 nodes, proved", "llama3-70b dgx-h100 --gpus 64 --global-batch 128"),
    (
        "What Megatron-LM can run of it, kept for export and report",
        "llama3-70b dgx-h100 --gpus 64 --global-batch 128 --target megatron --out plan.json",
    ),
    (
        "Your model and your cluster, at most a minute",
        "path/to/config.json my-cluster.toml --gpus 32 --global-batch 256 --time-limit 60",
    ),
    (
        "The plan that loses the least whatever the network does",
        "llama3-70b dgx-h100 --gpus 64 --global-batch 128 --robust",
    ),
    (
        "Which GPUs are cheaper for 15 trillion tokens",
        "llama3-70b dgx-h100,dgx-b200 --gpus 256 --global-batch 1024 --tokens 15e12 "
        "--price-per-gpu-hour dgx-h100=2.5,dgx-b200=4.5",
    ),
)


def solve(words: SolveWords, lengths: LengthOptions) -> ExitCode:
    """Find the best plan for a model on a cluster, and prove it. For sequences of several lengths, see
    `milpplan solve-lengths`."""
    # An import could lose a signal, and the help does without.
    with interrupts.leaving():
        from milpplan.cli import solving
        from milpplan.cli.arguments import within_range
        from milpplan.optimize import solve_robust
        from milpplan.optimize.context import Deadline, undisturbed
        from milpplan.optimize.solve import solve as solve_problem
        from milpplan.problem import load_scenarios
        from milpplan.reports.files import check_writable
    if are_asked(lengths):
        return solving.solve_with_lengths(words, lengths)
    names = command.names_of(words.hardware)
    if command.choice(words.method, "--method", METHODS) == "program" and len(names) > 1:
        raise InvalidInputError(
            "--method program with several kinds of hardware.",
            "Expected one cluster, whose answer is one program.",
            "Name one, or leave --method out.",
        )
    words.check_robust(len(names))
    price_of = solving.prices(words.price, names, words.tokens)
    problem = words.problem(names[0] or None)
    options = words.options(problem)
    if len(names) > 1:
        return solving.choose_hardware(names, words, price_of, options)
    # The problem without the restriction to a launcher, to prove what the restriction costs.
    priced = words.target is not None and words.price_limit and not words.robust
    whole = words.whole(names[0] or None) if priced else None
    command.positive(options.time_limit_s, "--time-limit", "number of seconds")
    if words.out is not None:
        check_writable(words.out)
    scenarios = None if words.scenarios is None else load_scenarios(words.scenarios)
    deadline = Deadline.after(options.time_limit_s)
    options = replace(options, cancelled=interrupts.asked_to_stop)
    answers: list[solving.Answer] = []
    with (
        interrupts.keeping(answers),
        shown_progress(problem.job.objective, words.progress) as callback,
        within_range(),
        interrupts.limited(deadline.left_s()),
    ):
        asked = replace(options, callback=callback)
        if words.robust:
            answers.append(solving.Answer(solve_robust(problem, scenarios, asked)))
        else:
            answers.append(solving.Answer(solve_problem(problem, asked)))
        solving.comment_on(answers[0], options, deadline, words, whole)
    # Neither another signal nor the time limit may lose the plan now.
    with undisturbed(), within_range():
        if interrupts.asked_to_stop():
            answers[0].result = replace(answers[0].result, message=interrupts.STOPPED)
        return solving.print_answer(answers[0], options, words, price_of.get(names[0]))
