"""Benchmarks of lm-evaluation-harness, answered by what serves.

    task files ─► lm-eval ─► lm.py ─► Answers ─┬─► Harness   likelihoods, in batches
                                               └─► Engine    generated text, as any request
                  lm-eval ─► scores ─► Results, question by question

lm-eval is an optional package: `run.py` and `lm.py` alone import it. This face needs neither it nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero_runtime.evaluation.tasks.base import Answers, Likelihood

if TYPE_CHECKING:
    from hetero_runtime.evaluation.tasks.run import TaskSettings, run_tasks

__all__ = ["Answers", "Likelihood", "TaskSettings", "run_tasks"]


def __getattr__(name: str) -> Any:
    """Load what is asked for."""
    from importlib import import_module

    if name not in ("TaskSettings", "run_tasks"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.run"), name)
