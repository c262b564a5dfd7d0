"""Synchronisations are told apart: in a submitted round, and elsewhere (a stand-in plays torch's CUDA)."""

from __future__ import annotations

import warnings

import pytest
import torch

from bench.sync_counts import syncs_counted
from hetero_runtime.hf.graph_sequences import GraphSequences, StepPlan, Submitted


class StandInCuda:
    """What torch does at a synchronisation in each mode."""

    def __init__(self) -> None:
        self.mode = "default"

    def set_mode(self, mode: str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        self.mode = mode

    def synchronize(self) -> None:
        if self.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", stand_in.set_mode)
    return stand_in


def submitting(monkeypatch: pytest.MonkeyPatch, cuda: StandInCuda, *, num_syncs: int) -> None:
    """Rounds are submitted by sequences that wait for the device `num_syncs` times."""

    def submit(_sequences: object, _plan: StepPlan) -> Submitted:
        for _ in range(num_syncs):
            cuda.synchronize()
        return Submitted(torch.zeros(1, 1, dtype=torch.long))

    monkeypatch.setattr(GraphSequences, "submit", submit)


def submit(num_steps: int) -> None:
    sequences = object.__new__(GraphSequences)
    sequences.submit(StepPlan(active=[[True]] * num_steps, uniforms=None))


def test_rounds_and_what_lies_between_them(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    submitting(monkeypatch, cuda, num_syncs=0)
    with syncs_counted() as counts:
        for num_steps in (4, 2):
            submit(num_steps)
            cuda.synchronize()
    assert (counts.num_steps, counts.in_submissions, counts.elsewhere) == (6, 0, 2)
    assert cuda.mode == "default"


def test_a_round_that_waits_is_found_out(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    submitting(monkeypatch, cuda, num_syncs=3)
    with syncs_counted() as counts:
        submit(2)
        cuda.synchronize()
    assert (counts.num_steps, counts.in_submissions, counts.elsewhere) == (2, 3, 1)


def test_everything_is_put_back_after_an_error(cuda: StandInCuda) -> None:
    before = GraphSequences.submit
    with pytest.raises(ZeroDivisionError), syncs_counted():
        raise ZeroDivisionError
    assert cuda.mode == "default"
    assert GraphSequences.submit is before
