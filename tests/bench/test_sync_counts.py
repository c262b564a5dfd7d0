"""Synchronisations are told apart: in a replay, and between replays (a stand-in plays torch's CUDA)."""

from __future__ import annotations

import warnings

import pytest
import torch

from bench.sync_counts import syncs_counted


class StandInCuda:
    """What torch does at a synchronisation in each mode."""

    def __init__(self) -> None:
        self.mode = "default"
        self.num_launched = 0

    def set_mode(self, mode: str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        self.mode = mode

    def synchronize(self) -> None:
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()

    class Graph:
        def __init__(self, *, asks: bool) -> None:
            self.asks = asks

        def replay(self) -> None:
            if self.asks:
                stand_in.synchronize()
            stand_in.num_launched += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", stand_in.set_mode)
    return stand_in


def test_replays_and_what_lies_between_them(cuda: StandInCuda) -> None:
    quiet, asking = torch.cuda.CUDAGraph(asks=False), torch.cuda.CUDAGraph(asks=True)  # type: ignore[call-arg]
    with syncs_counted() as counts:
        for graph in (quiet, quiet, asking):
            graph.replay()
            cuda.synchronize()
        cuda.synchronize()
    assert (counts.num_replays, counts.in_replays, counts.elsewhere) == (3, 1, 4)
    assert cuda.num_launched == 3, "a replay that was refused was not made good"
    assert cuda.mode == "default"


def test_mode_and_replay_are_put_back_after_an_error(cuda: StandInCuda) -> None:
    replay = torch.cuda.CUDAGraph.replay
    with pytest.raises(ZeroDivisionError), syncs_counted():
        raise ZeroDivisionError
    assert cuda.mode == "default"
    assert torch.cuda.CUDAGraph.replay is replay


def test_other_errors_of_a_replay_are_not_counted(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_graph: object) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"), syncs_counted():
        torch.cuda.CUDAGraph(asks=False).replay()  # type: ignore[call-arg]
    assert cuda.mode == "default"
