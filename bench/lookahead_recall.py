"""Hot recall of the lookahead predictor on a vision-language model, with and without what images look like.

`python -m bench.lookahead_recall MODEL --pairs package.module:function --num 400`: `function(num)` gives that
many (PIL image, question) pairs that the model was not trained on, such as `bench.vl.held_out:pairs`. The
model answers them itself; a tenth of them validates and a tenth tests, the rest teaches (VisMMOE §4.3.2).

Recall is of single tokens, those behind the image and those of the answer, mean over the one to five layers
ahead: the paper's own figure does not say which distance it shows. Only counts, but for the milliseconds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.harness import ResultFile, Row, measure
from bench.vl_working_set import Pair, load_pairs
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import Config, load_config
from hetero_runtime.evaluation.configuration import exactly_routed
from hetero_runtime.hf.router_hooks import router_top_k
from hetero_runtime.lookahead.file import read_lookahead
from hetero_runtime.lookahead.gather import GatherOptions, gather
from hetero_runtime.lookahead.lessons import encode_lessons
from hetero_runtime.lookahead.train import LookaheadReport, train_from_passes
from hetero_runtime.plan import read_geometry
from hetero_runtime.planned import plan_for
from hetero_runtime.prediction import RouterFingerprint
from hetero_runtime.prompt import PromptReader
from hetero_scheduler.predict.lookahead_features import LookaheadShape, Passes
from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp
from hetero_scheduler.predict.lookahead_model import LookaheadWeights
from hetero_scheduler.predict.lookahead_training import LookaheadOptions

NAMES = ("10", "20", "30")
TARGETS = (">=0.64", ">=0.82", ">=0.90")
SEEING, BLIND = "lookahead", "without the visual feature"


def gathered(config: Config, pairs: Sequence[Pair], *, options: GatherOptions) -> tuple[Passes, int]:
    """Passes of the model over `pairs`, and its top-k."""
    parts = assemble(plan_for(exactly_routed(config)).config)
    try:
        asked = [question_about(image, question) for image, question in pairs]
        return passes_over(parts, asked, options=options), router_top_k(parts.model)
    finally:
        parts.close()


def question_about(image: Image.Image, question: str) -> list[dict[str, Any]]:
    """As messages."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def passes_over(
    parts: Parts, conversations: Sequence[list[dict[str, Any]]], *, options: GatherOptions
) -> Passes:
    """What `hetero-runtime calibrate lookahead` learns from, of conversations with images."""
    length = parts.config.execution.max_length
    reader = PromptReader(
        parts.config.model.path,
        tokenizer=parts.tokenizer,
        config=parts.model.config,
        has_images=True,
        max_length=length,
    )
    lessons = encode_lessons(list(conversations), reader, parts.tokenizer, length=length)
    return gather(parts, lessons, options=options)


def recall_rows(report: LookaheadReport, about: str) -> list[Row]:
    """Recall of single tokens and of prompts, with the rivals beside it."""
    note = (
        f"{about}; {report.counts} of the experts, load entropy {report.load_entropy:.3f}, "
        f"{report.num_documents['test']} questions that were not learnt from"
    )
    rows = []
    for kind, recalls in (("", report.tokens), ("_prompt", report.prompts)):
        found = {(each.predictor, each.distance): each.at for each in recalls}
        for place, name in enumerate(NAMES):
            beside = ", ".join(f"{who} {at[place]:.3f}" for (who, far), at in found.items() if far == 0)
            target = TARGETS[place] if not kind else None
            rows.append(
                Row(
                    id=f"vl.recall_{name}{kind}",
                    value=found[SEEING, 0][place],
                    unit="share",
                    target=target,
                    reference=beside,
                    note=note,
                )
            )
            rows.append(Row(id=f"vl.recall_{name}{kind}_next", value=found[SEEING, 1][place], unit="share"))
            rows.append(Row(id=f"vl.recall_{name}{kind}_blind", value=found[BLIND, 0][place], unit="share"))
    ratio = report.tokens[0].at[0] / report.tokens[-1].at[0]
    return [*rows, Row(id="vl.recall_10_over_random", value=ratio, unit="ratio", target=">=5")]


def cost_row(weights: LookaheadWeights, shape: LookaheadShape, device: str) -> Row:
    """What one layer's prediction takes, from routed experts to scores on the host."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    predictor = LookaheadMlp(weights.to(device, dtype), shape)
    chosen = np.arange(shape.top_k)[None]
    pooled = torch.randn(shape.hidden_size, device=device)

    def predict() -> None:
        for layer in range(shape.num_speaking):
            predictor.observe_tokens(0, layer, chosen, pooled)
            assert predictor.forecast() is not None, "a layer with others behind it says nothing"

    ms = measure(predict).median / shape.num_speaking * 1e3
    size = sum(part.numel() for part in weights)
    return Row(
        id="vl.predict_ms",
        value=ms,
        unit="ms",
        target="<=1",
        note=f"a layer, {device}, {shape.num_experts} experts, hidden {shape.hidden_size}, {size} weights",
    )


def rows_for(
    folder: Path,
    pairs: Sequence[Pair],
    *,
    options: LookaheadOptions,
    keep_ratio: float,
    prefix: int,
    device: str,
) -> list[Row]:
    """Gather, train twice, measure."""
    config = load_config(
        {
            "model": {"path": str(folder)},
            "device": device,
            "memory": {"slabs": "all", "pinned_prefix": prefix},
            "vision": {"keep_ratio": keep_ratio},
        }
    )
    passes, top_k = gathered(config, pairs, options=GatherOptions(tokens=64, max_new=16, seed=options.seed))
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "lookahead.safetensors"
        fingerprint = RouterFingerprint.of_model(read_geometry(folder))
        report = train_from_passes(
            passes, out, top_k=top_k, fingerprint=fingerprint, options=options, compares_visual=True
        )
        stored = read_lookahead(out)
    about = f"{folder.name}, {keep_ratio:.0%} of image tokens behind {prefix} layers"
    return [*recall_rows(report, about), cost_row(*stored[:1], stored.description.shape, device)]


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", required=True, help="package.module:function, called with --num")
    parser.add_argument("--num", type=int, default=400, help="questions")
    parser.add_argument("--prefix", type=int, default=1, help="first MoE layers, before tokens are dropped")
    parser.add_argument("--keep-ratio", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    rows = rows_for(
        arguments.model,
        load_pairs(arguments.pairs, arguments.num),
        options=replace(LookaheadOptions(), epochs=arguments.epochs),
        keep_ratio=arguments.keep_ratio,
        prefix=arguments.prefix,
        device=arguments.device,
    )
    ResultFile.write("lookahead_recall", rows)


if __name__ == "__main__":
    main()
