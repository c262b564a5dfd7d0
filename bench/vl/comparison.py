"""Ways of choosing visual tokens beside each other: right answers and experts, on the same questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tokenizers import Tokenizer
from transformers import Qwen3VLMoeForConditionalGeneration

from bench.vl.compressed import CompressedForward, count_experts
from bench.vl.evaluate import answered_rightly, by_kind
from bench.vl.held_out import MEASURED, HeldOut
from bench.vl.questions import KINDS
from bench.vl.text import prefix_ids
from hetero_scheduler.compression import TokenSelector

Way = TypeVar("Way")
_BATCH = 16


class Reader(NamedTuple):
    """A trained model and its tokenizer."""

    model: Qwen3VLMoeForConditionalGeneration
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Outcome:
    """Of one way of choosing."""

    right: dict[str, int]
    asked: dict[str, int]
    """Questions by measured kind."""
    experts: float
    """Distinct ones that a prompt activates in a layer behind the cut; mean over layers and pictures."""

    def accuracy(self, kind: str) -> float:
        """Share of the questions of `kind` that were answered rightly."""
        return self.right[kind] / self.asked[kind]

    @property
    def mean(self) -> float:
        """Mean over kinds that were asked for."""
        asked = [kind for kind, number in self.asked.items() if number]
        return sum(map(self.accuracy, asked)) / len(asked)


def load_reader(folder: Path, device: str) -> Reader:
    """The model of `bench.vl.train` in `folder`, in float32."""
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return Reader(model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json")))


def compare(
    reader: Reader, held_out: HeldOut, ways: Mapping[Way, TokenSelector | None], *, pinned: int
) -> dict[Way, Outcome]:
    """Ask all of `held_out` once for each of `ways`; None keeps all tokens.

    `pinned`: layers before the cut.
    """
    forward = CompressedForward(reader.model, prefix_ids(reader.tokenizer), pinned=pinned)
    counts = {way: torch.zeros(2, len(KINDS), dtype=torch.int64) for way in ways}
    experts = dict.fromkeys(ways, 0.0)
    for part in zip(*(tensor.split(_BATCH) for tensor in held_out), strict=True):
        pictures, rows, kinds = (tensor.to(reader.model.device) for tensor in part)
        half = forward.begin(pictures, rows)
        for way, selector in ways.items():
            answered = forward.finish(half, selector)
            counts[way] += torch.stack(by_kind(answered_rightly(answered.logits, rows), kinds)).cpu()
            activated = count_experts(answered, rows, reader.model.config.text_config.num_experts)
            experts[way] += float(activated.double().mean(0).sum()) / len(held_out.pictures)
    forward.close()
    return {way: _outcome(counts[way], experts[way]) for way in ways}


def _outcome(counts: torch.Tensor, experts: float) -> Outcome:
    places = [KINDS.index(kind) for kind in MEASURED]
    right, asked = (dict(zip(MEASURED, each[places].tolist(), strict=True)) for each in counts)
    return Outcome(right, asked, experts)
