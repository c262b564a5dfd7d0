"""One layer of random experts in a real bank, work for it, and what torch makes of that in float32."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.config.tree import ExpertsFormat
from hetero_runtime.experts.store import BankStore, load_store
from hetero_runtime.hf.conversion import split_checkpoint
from hetero_runtime.hf.hooks import expert_mlp
from hetero_runtime.hf.loading import build_skeleton
from hetero_runtime.in_place.base import Floats, Work
from hetero_runtime.in_place.build import Routed
from hetero_scheduler import ExpertKey
from tests.architectures import build_checkpoint
from tests.packable_checkpoints import build_packable


class Bank(NamedTuple):
    """A tiny model's experts. `store` has to be closed."""

    store: BankStore
    routed: Routed

    @classmethod
    def load(
        cls,
        name: str,
        folder: Path,
        *,
        dtype: str,
        is_packed: bool = False,
        experts: ExpertsFormat = "checkpoint",
    ) -> Bank:
        """`dtype`: of the checkpoint and of the computation. `is_packed`: the packable model of that name.
        `experts`: the format of the records."""
        if is_packed:
            build_packable(name, folder)
        else:
            build_checkpoint(name, folder, dtype=getattr(torch, dtype))
        checkpoint = Checkpoint.open(folder)
        skeleton = build_skeleton(checkpoint, dtype=dtype, device=torch.device("cpu"))
        split = split_checkpoint(skeleton.model, checkpoint, skeleton.quantizer)
        store = load_store(split.experts, threads=2, form="packed" if is_packed else "plain", experts=experts)
        return cls(store, Routed(list(skeleton.experts.values()), skeleton.dtype))

    @torch.no_grad()
    def reference(self, work: Work) -> Floats:
        """float32 throughout, from the weights as the store decodes them."""
        mlp, total = expert_mlp(self.routed.modules[work.layer]), torch.zeros(work.hidden.shape)
        hidden = torch.from_numpy(work.hidden)
        for i, expert in enumerate(work.experts.tolist()):
            part = slice(*work.bounds[i : i + 2].tolist())
            record = self.store.plain_record(ExpertKey(work.layer, expert))
            y = mlp(hidden[work.tokens[part]], self.store.materialize(record, torch.float32))
            total.index_add_(
                0, torch.from_numpy(work.tokens[part]), y * torch.from_numpy(work.weights[part, None])
            )
        return total.numpy()


def make_work(bank: Bank, counts: dict[int, int], num_tokens: int, *, layer: int = 1, seed: int = 0) -> Work:
    """`counts`: tokens of each expert. Activations are such as the model's dtype can hold."""
    rng = np.random.default_rng(seed)
    hidden = torch.from_numpy(rng.standard_normal((num_tokens, bank.routed.hidden), dtype=np.float32))
    experts = sorted(counts)
    tokens = [np.sort(rng.permutation(num_tokens)[: counts[expert]]) for expert in experts]
    return Work(
        layer=layer,
        hidden=hidden.to(bank.routed.dtype).float().numpy(),
        experts=np.array(experts, dtype=np.int64),
        bounds=np.concatenate([[0], np.cumsum([counts[expert] for expert in experts])]),
        tokens=np.concatenate(tokens),
        weights=rng.uniform(0.1, 1.0, sum(counts.values())).astype(np.float32),
    )


def relative_error(ours: Floats, reference: Floats) -> float:
    """Root mean square of the difference, over that of the reference."""
    return float(np.linalg.norm(ours - reference) / np.linalg.norm(reference))
