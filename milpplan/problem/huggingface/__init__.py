"""Models from a Hugging Face ``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.problem.huggingface.config import model_from_config
    from milpplan.problem.huggingface.defaults import (
        CLASS_DEFAULTS,
        CLASS_SIZES,
        OBSTACLES,
        SCORED,
        UNPRICED,
        without_effect,
    )
    from milpplan.problem.huggingface.families import ALIASES, BUILDERS, RENAMED
else:
    __getattr__ = lazy_exports(__name__, __file__)
