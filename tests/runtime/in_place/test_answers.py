"""Calls of a captured step, answered by the compiled loop and by Python around a backend: the same sums."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import cfunc

from hetero_cpu_kernels.experts import best_target
from hetero_cpu_kernels.experts.plan import FEW_TOKENS
from hetero_cpu_kernels.pool import WorkerPool
from hetero_gpu.control import ControlRegion, Word
from hetero_gpu.in_place import Mailbox
from hetero_runtime.errors import DeviceError
from hetero_runtime.experts.kernel_format import expert_format
from hetero_runtime.in_place.answers import Answers, CallLine, make_answers
from hetero_runtime.in_place.answers.by_backend import BackendAnswers, work_of
from hetero_runtime.in_place.answers.compiled import CompiledAnswers
from hetero_runtime.in_place.form import in_place_form
from hetero_runtime.in_place.native import NativeExperts
from tests.runtime.in_place.layers import Bank, relative_error

CPU, ROWS, TOP_K = torch.device("cpu"), 3, 2
CALLS = [
    (0, [[5, 1], [1, -1], [-1, 5]]),
    (1, [[7, 2]]),
    (1, [[-1, -1], [3, 0]]),
]
"""Layer and experts, by row; -1 where the device has the pair."""


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    bank = Bank.load("Qwen3Moe", tmp_path_factory.mktemp("model"), dtype="float32")
    yield bank
    bank.store.close()


@pytest.fixture
def experts(bank: Bank) -> Iterator[NativeExperts]:
    store, cpu = bank.store, min(os.sched_getaffinity(0))
    experts = NativeExperts(
        in_place_form(expert_format(store.layout, store.forms, bank.routed.modules[0]), None),
        WorkerPool([cpu, cpu], spins=100),
        target=best_target(rounds=False),
        records=store.records,
        num_experts=store.num_experts,
        spare_cpus=frozenset(os.sched_getaffinity(0)),
    )
    yield experts
    experts.close()


class Caller:
    """The device's end of a line, and a thread at the other."""

    def __init__(self, bank: Bank, rows: int = ROWS) -> None:
        self.line = CallLine(
            Mailbox(CPU, rows=rows, hidden=bank.routed.hidden, top_k=TOP_K), ControlRegion(CPU)
        )
        self.failures: list[BaseException] = []

    def serve(self, answers: Answers) -> threading.Thread:
        def run() -> None:
            try:
                answers.run(self.line.region.read(Word.ANSWERS))
            except DeviceError as error:
                self.failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def call(self, layer: int, experts: list[list[int]]) -> np.ndarray[Any, Any]:
        """The sum `[rows, H]` that comes back."""
        mailbox, region, rng = self.line.mailbox, self.line.region, np.random.default_rng(layer)
        mailbox.head[:] = layer, len(experts)
        mailbox.experts[: len(experts)] = experts
        mailbox.weights[:] = rng.uniform(0.1, 1, mailbox.weights.shape)
        mailbox.hidden[:] = rng.standard_normal(mailbox.hidden.shape)
        mailbox.total[:] = np.nan
        region.write(Word.CALLS, region.read(Word.CALLS) + 1)
        end = time.monotonic() + 20
        while region.read(Word.ANSWERS) < region.read(Word.CALLS):
            assert time.monotonic() < end, "nobody answers"
            time.sleep(1e-3)
        return mailbox.total[: len(experts)].copy()

    def stop(self, thread: threading.Thread) -> None:
        self.line.region.write(Word.STOP, 1)
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["compiled", "by backend"])
def test_every_call_gets_its_sum(kind: str, bank: Bank, experts: NativeExperts) -> None:
    caller = Caller(bank)
    answers = (
        make_answers(experts, caller.line) if kind == "compiled" else BackendAnswers(experts, caller.line)
    )
    assert isinstance(answers, CompiledAnswers) == (kind == "compiled")
    thread = caller.serve(answers)
    for layer, chosen in CALLS:
        total = caller.call(layer, chosen)
        assert relative_error(total, bank.reference(work_of(caller.line.mailbox))) < 2e-6
    caller.stop(thread)
    stats = answers.stats()
    assert stats.experts == 2 + 2 + 2
    assert stats.seconds > 0
    assert not caller.failures


def test_more_rows_than_a_standing_call_has_are_python_s(bank: Bank, experts: NativeExperts) -> None:
    assert isinstance(make_answers(experts, Caller(bank, FEW_TOKENS + 1).line), BackendAnswers)


@cfunc("int64(int64, int64, int64)")
def failing(plan: Any, index: Any, count: Any) -> Any:
    return 7


def test_a_call_that_fails_is_answered_with_zeros_and_the_next_ones_are_served(
    bank: Bank, experts: NativeExperts
) -> None:
    caller = Caller(bank)
    answers = make_answers(experts, caller.line)
    assert isinstance(answers, CompiledAnswers)
    plan = answers._plan
    answers._plan = plan._replace(job=failing.address)
    thread = caller.serve(answers)
    assert not caller.call(*CALLS[0]).any()
    thread.join(10)
    assert "a worker ended with status 7" in str(caller.failures[0])
    answers._plan = plan
    thread = caller.serve(answers)
    total = caller.call(*CALLS[0])
    assert relative_error(total, bank.reference(work_of(caller.line.mailbox))) < 2e-6
    caller.stop(thread)
    assert len(caller.failures) == 1
