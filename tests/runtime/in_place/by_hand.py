"""A backend that computes when it is waited for, in the thread that waits, and fails when it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetero_runtime.hf.hooks import expert_mlp
from hetero_runtime.in_place import Done, InPlaceExperts, Work


class ExpertsByHand(InPlaceExperts):
    """`modules`: transformers' Experts modules with their weights, one a layer."""

    num_workers = 1

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self._work: Work | None = None
        self.fail_next: Exception | None = None
        self.seconds = 1.0
        self.is_closed = False
        self.asked: list[list[int]] = []
        """The experts of each work that was submitted."""

    @property
    def is_at_rest(self) -> bool:
        return self._work is None

    def submit(self, work: Work) -> None:
        assert self._work is None, "the work before was not waited for"
        self._work = work
        self.asked.append(work.experts.tolist())

    @torch.no_grad()
    def wait(self) -> Done:
        work, self._work = self._work, None
        assert work is not None, "wait without submitted work"
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        module, total = self._modules[work.layer], torch.zeros(work.hidden.shape)
        for i, expert in enumerate(work.experts.tolist()):
            tokens = torch.from_numpy(work.tokens[work.bounds[i] : work.bounds[i + 1]])
            weights = torch.from_numpy(work.weights[work.bounds[i] : work.bounds[i + 1], None])
            params = {name: p[expert].float() for name, p in module.named_parameters()}
            y = expert_mlp(module)(torch.from_numpy(work.hidden)[tokens], params)
            total.index_add_(0, tokens, y * weights)
        return Done(total.numpy(), self.seconds)

    def close(self) -> None:
        self.is_closed = True
