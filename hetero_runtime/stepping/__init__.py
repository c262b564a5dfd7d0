"""Stepping: how the tokens of many requests come out of one model.

eager          a pass a token, sampled by the host; any device
speculative    a pass a draft, its tokens checked together; any device
graph          all rows in one captured step, sampled on the device, a step ahead of whoever reads
"""

from __future__ import annotations

from hetero_runtime.hf.forward import Sequences
from hetero_runtime.hf.graph_sequences import GraphSequences
from hetero_runtime.passes import Passes
from hetero_runtime.speculation import CheckedSequences, Speculation
from hetero_runtime.stepping.base import Stepper, Tokens
from hetero_runtime.stepping.eager import EagerStepper
from hetero_runtime.stepping.graph import GraphStepper
from hetero_runtime.stepping.speculative import SpeculativeStepper

__all__ = ["Stepper", "Tokens", "make_stepper"]


def make_stepper(sequences: Sequences, passes: Passes, speculation: Speculation | None = None) -> Stepper:
    """The stepper for these sequences; with `speculation` they have to be CheckedSequences."""
    if speculation is not None:
        assert isinstance(sequences, CheckedSequences), "no draft can be checked in these sequences"
        return SpeculativeStepper(sequences, passes, speculation)
    if isinstance(sequences, GraphSequences):
        return GraphStepper(sequences, passes)
    return EagerStepper(sequences, passes)
