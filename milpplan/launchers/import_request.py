"""What the readers of launchers' files share: the model, the processes and the job that a file stands for."""

from __future__ import annotations

from milpplan.errors import InvalidInputError
from milpplan.problem.model import ModelSpec
from milpplan.problem.plan import Layout
from milpplan.problem.problem import Job
from milpplan.problem.reading import validated


def described(model: ModelSpec | None, vocab_size: int | None, source: str) -> ModelSpec:
    """The description of a model that a file only names.

    Raises:
        InvalidInputError: there is none, or the vocabulary is another.
    """
    if model is None or vocab_size not in (None, model.vocab_size):
        raise InvalidInputError(
            f"{source} only names its model{'' if model is None else ', and --vocab-size is another'}.",
            "Expected the description of the model.",
            "Give --model, without --vocab-size.",
        )
    return model


def check_vocabulary(asked: int | None, model: ModelSpec, words: str) -> None:
    """Refuse another vocabulary than the file's model, called ``words``, has.

    Raises:
        InvalidInputError: ``--vocab-size`` is another.
    """
    if asked not in (None, model.vocab_size):
        raise InvalidInputError(
            f"--vocab-size is {asked}, and {words} has {model.vocab_size} words.",
            "Expected the vocabulary of that model.",
            "Leave --vocab-size out.",
        )


def check_gpus(asked: int | None, started: int, source: str) -> None:
    """Refuse another number of processes than the file starts.

    Raises:
        InvalidInputError: ``--gpus`` is another.
    """
    if asked not in (None, started):
        raise InvalidInputError(
            f"--gpus is {asked}, and {source} starts {started} processes.",
            "Expected the same number.",
            "Leave --gpus out, or correct the sizes in the file.",
        )


def job_of(layout: Layout, sequence_length: object, **formats: str) -> Job:
    """The training job of a layout, as a file says it.

    Args:
        layout: its accelerators, and the sequences of a step.
        sequence_length: tokens, as the file has them.
        formats: of numbers, gradients and kernels, where they are not the usual ones.

    Raises:
        InvalidInputError: no job is like that.
    """
    data = {
        "num_gpus": layout.num_gpus,
        "global_batch_size": layout.global_batch_size,
        "sequence_length": sequence_length,
    }
    return validated(Job, data | formats, "the job that the file describes")
