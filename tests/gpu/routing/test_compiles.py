"""The routing step's kernels compile for GPUs that are not here, for each kind of policy, starting early."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.absent_gpu import assert_compiles

pytest.importorskip("triton")

STEPS = """
from hetero_gpu import overlap
from hetero_gpu.routing import DeviceCaches, Following, Said, decide, follow
from hetero_gpu.router import Router
from hetero_gpu.score_router import ScoreForm, ScoreRouter
from hetero_gpu.weigh import WeightRule, weigh
from hetero_scheduler.routing import LogicalCache, Shape, make_routing_policy, uncalibrated

overlap._can_overlap = lambda device: True
shape, rows, cpu = Shape(48, 256, 8), 2, torch.device("cpu")
for policy in (
    make_routing_policy("cache_prior", protected=2, range="running"),
    make_routing_policy("speculative_experts", insertions=2, window=16),
):
    cache = LogicalCache(policy, shape, capacity=64, calibration=uncalibrated(shape))
    caches = DeviceCaches(cache, rows=rows, vocab_size=9, device=cpu)
    tokens, active = torch.zeros(rows, dtype=torch.long), torch.ones(rows, dtype=torch.bool)
    said = Said(torch.zeros(rows, 256), torch.zeros(rows, 8, dtype=torch.long), torch.zeros(rows, 256))
    decide(caches, 1, said, tokens=tokens, active=active)
    alone = Said(*(each[:1] for each in said))
    following = Following(torch.zeros(48, 256, dtype=torch.float64), 2.0**32)
    decide(caches, 1, alone, tokens=tokens[:1], active=active[:1], following=following)
    decide(caches, 47, said._replace(guess=None), tokens=tokens, active=active)
    score = torch.zeros(48, 256, dtype=torch.float64)
    follow(caches, 1, num_layers=2, active=active, score=score, held=2.0**32)
    halves = Said(said.scores.bfloat16(), said.own, said.guess.bfloat16())
    experts = decide(caches, 1, halves, tokens=tokens, active=active).experts
    weigh(halves.scores, experts, rule=WeightRule(True), dtype=torch.bfloat16)
    weigh(said.scores, experts, rule=WeightRule(True, True, 2.5), dtype=torch.float32)
for weighing, groups in ((WeightRule(True, True, 2.5), (8, 4)), (WeightRule(False, False, 16.0), (4, 3))):
    form, correction = ScoreForm(160, 6, weighing, *groups), torch.zeros(160) if weighing.is_sigmoid else None
    router = ScoreRouter(torch.zeros(160, 64), correction, form=form, dtype=torch.float32)
    router.choose(router(torch.zeros(1, 64, dtype=torch.bfloat16)).logits)
    router.with_next(torch.zeros(1, 64, dtype=torch.bfloat16), router)
for bias in (None, torch.zeros(64, dtype=torch.bfloat16)):
    weight = torch.zeros(64, 2048, dtype=torch.bfloat16)
    softmax = Router(weight, bias, top_k=8, is_renormalised=False, dtype=torch.bfloat16)
    softmax.with_next(torch.zeros(1, 2048, dtype=torch.bfloat16), softmax)
assert all("griddepcontrol.wait" in each.asm["ptx"] for each in compiled)
"""


def test_the_kernels_compile(tmp_path: Path) -> None:
    assert_compiles(STEPS, 90, tmp_path)
