"""Random experts with the sums that they should give."""

from __future__ import annotations

import dataclasses

import numpy as np

from bench.cpu_expert_records import layer_reference, random_record, random_routing
from hetero_cpu_kernels.experts import CpuExperts, ExpertForm
from hetero_cpu_kernels.experts.call import Routing


@dataclasses.dataclass
class Case:
    """Random experts of a form, a routing, and what comes out."""

    form: ExpertForm
    hidden: np.ndarray
    bank: np.ndarray
    routing: Routing
    reference: np.ndarray

    @classmethod
    def make(cls, form: ExpertForm, counts: list[int], num_tokens: int) -> Case:
        rng = np.random.default_rng(1)
        records = [random_record(form, rng) for _ in counts]
        hidden = rng.standard_normal((num_tokens, form.hidden)).astype(np.float32)
        routing = random_routing(form, counts, num_tokens, rng)
        reference = layer_reference(hidden, [plain for plain, _ in records], form, routing)
        return cls(form, hidden, np.concatenate([packed for _, packed in records]), routing, reference)

    def run(self, experts: CpuExperts) -> np.ndarray:
        out = np.full(self.hidden.shape, np.nan, dtype=np.float32)
        experts.run(self.hidden, self.bank, routing=self.routing, out=out)
        return out
