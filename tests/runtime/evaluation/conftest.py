"""Tiny models as evaluations load them: a quarter of the experts resident, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import load_config
from hetero_runtime.evaluation.configuration import for_evaluation
from hetero_runtime.planned import plan_for
from tests.architectures import build_checkpoint

PartsOf = Callable[[str], Parts]


@pytest.fixture(scope="module")
def parts_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartsOf]:
    """`parts_of(name)`: the tiny model `name`, loaded once a module."""
    with ExitStack() as stack:

        @cache
        def load(name: str) -> Parts:
            tree = {
                "model": {"path": str(build_checkpoint(name, tmp_path_factory.mktemp(name)))},
                "device": "cpu",
                "memory": {"residency": 0.25},
                "execution": {"max_length": 128},
            }
            parts = assemble(plan_for(for_evaluation(load_config(tree))).config)
            stack.callback(parts.close)
            return parts

        yield load
