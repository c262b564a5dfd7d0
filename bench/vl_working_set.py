"""What fewer image tokens do to the experts that a prompt needs (VisMMOE, Fig. 1, 3 and 4).

For each method of `vision.method` and each keep ratio an engine with a pinned prefix reads the same (image,
question) pairs, one prompt each: experts activated a layer, how concentrated and how foreseeable routing is,
and what the slab cache hits behind the prefix. It keeps what is used most (LFU): a prompt asks every layer
for more than its share of slabs, in the same order each time, and LRU then has nothing left of the last one.

    python -m bench.vl_working_set --num 60
    python -m bench.vl_working_set MODEL --pairs package.module:function

Without MODEL the small vision-language model and held-out questions; `function(num)` gives that many (PIL
image, question) pairs. Counts, no times: any machine gives the same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bench.harness import ResultFile, Row
from bench.visual_routing import Floats, LayerRouting, RoutingListener
from bench.vl.arguments import parser_of
from hetero_runtime import Engine
from hetero_scheduler.compression import METHODS
from hetero_scheduler.trace import load_entropies

DEVICE = "cpu"
Pair = tuple[Image.Image, str]
KEEP_RATIOS = (0.7, 0.5)
_PAIRS = "bench.vl.held_out:pairs"


class Case(NamedTuple):
    """`method` none: all tokens, `keep_ratio` 1."""

    method: str
    keep_ratio: float

    @property
    def name(self) -> str:
        """For row ids: `affinity_50`."""
        return f"{self.method}_{round(100 * self.keep_ratio)}"


CASES = (Case("none", 1.0), *(Case(method, keep) for keep in KEEP_RATIOS for method in METHODS))


@dataclass(frozen=True)
class WorkingSet:
    """One case; means over prompts. Layers are MoE layers, the pinned prefix among them."""

    case: Case
    prefix: int
    experts: Floats
    """`[L]`: distinct experts that a prompt activates."""
    loads: dict[str, Floats]
    """By kind of token, `text` and `visual`: choices `[L, E]`, all prompts together."""
    foretold: dict[str, Floats]
    """By kind, `[L - 1]`: `LayerRouting.foretold` of all layers but the first, mean over tokens."""
    hit_rate: float
    """Of experts required behind the prefix, those resident."""
    loads_a_prompt: float
    """Experts that had to be loaded."""

    @property
    def behind(self) -> float:
        """Experts a layer behind the prefix."""
        return float(self.experts[self.prefix :].mean())

    def coverage(self) -> Floats:
        """`[E]`: share of all choices behind the prefix that the 1, 2, ... most chosen experts of a layer
        take, mean over layers."""
        load = np.sort((self.loads["text"] + self.loads["visual"])[self.prefix :], axis=1)[:, ::-1]
        shares: Floats = (np.cumsum(load, axis=1) / load.sum(axis=1, keepdims=True)).mean(axis=0)
        return shares

    def entropy(self) -> float:
        """Entropy of the load behind the prefix over log E, mean over layers: 1 when all are chosen alike."""
        load = self.loads["text"] + self.loads["visual"]
        return float(load_entropies(load[self.prefix :]).mean())


def measure(
    folder: Path, pairs: Sequence[Pair], case: Case, *, prefix: int, residency: float, device: str = "cpu"
) -> WorkingSet:
    """All `pairs` through an engine of its own."""
    with Engine.load(folder, **_settings(case, prefix=prefix, residency=residency, device=device)) as engine:
        listener = RoutingListener(engine)
        prompts = [listener.read(image, question) for image, question in pairs]
        cache, num_experts = engine.stats().prefill.cache, listener.num_experts
    experts = np.array([[len(np.unique(layer.chosen)) for layer in prompt] for prompt in prompts])  # [n, L]
    in_prefix = int(experts[:, :prefix].sum())  # all of them are resident
    required = cache.required - in_prefix
    return WorkingSet(
        case,
        prefix,
        experts.mean(axis=0),
        {kind: _load(prompts, kind, num_experts) for kind in ("text", "visual")},
        {kind: _foretold(prompts, kind) for kind in ("text", "visual")},
        hit_rate=(cache.hits - in_prefix) / required,
        loads_a_prompt=(required - cache.hits + in_prefix) / len(pairs),
    )


def vision_of(case: Case) -> dict[str, Any]:
    """The `vision` section of `case`."""
    return {} if case.method == "none" else case._asdict()


def _settings(case: Case, *, prefix: int, residency: float, device: str) -> dict[str, Any]:
    return {
        "device": device,
        "memory": {"residency": residency, "pinned_prefix": prefix},
        "eviction": {"policy": "lfu"},
        "prediction": {"predictor": "none"},
        "prefetch": {"schedule": "none"},
        "execution": {"mode": "eager", "max_rows": 1},
        "vision": vision_of(case),
    }


def _layers(prompts: Sequence[Sequence[LayerRouting]]) -> Iterator[tuple[int, LayerRouting]]:
    for prompt in prompts:
        yield from enumerate(prompt)


def _of(kind: str, layer: LayerRouting) -> Any:
    return layer.is_visual if kind == "visual" else ~layer.is_visual


def _load(prompts: Sequence[Sequence[LayerRouting]], kind: str, num_experts: int) -> Floats:
    load = np.zeros((len(prompts[0]), num_experts))
    for number, layer in _layers(prompts):
        load[number] += np.bincount(layer.chosen[_of(kind, layer)].ravel(), minlength=num_experts)
    return load


def _foretold(prompts: Sequence[Sequence[LayerRouting]], kind: str) -> Floats:
    total, number_of = np.zeros(len(prompts[0])), np.zeros(len(prompts[0]))
    for number, layer in _layers(prompts):
        if number:
            total[number] += layer.foretold[_of(kind, layer)].sum()
            number_of[number] += _of(kind, layer).sum()
    return total[1:] / number_of[1:]


def rows_of(sets: Sequence[WorkingSet], *, about: str) -> list[Row]:
    """The numbers of all cases, and the verdict on Algorithm 1."""
    rows = []
    for each in sets:
        note = f"{about}, load entropy {each.entropy():.3f}"
        values = (
            ("experts", each.behind, "experts a layer"),
            ("hit_rate", each.hit_rate, "share"),
            ("loads", each.loads_a_prompt, "experts a prompt"),
            ("foretold", float(each.foretold["visual"][each.prefix - 1 :].mean()), "share of choices"),
        )
        rows += [
            Row(id=f"vl.{what}_{each.case.name}", value=value, unit=unit, note=note)
            for what, value, unit in values
        ]
    by_case = {each.case: each for each in sets}
    for keep in KEEP_RATIOS:
        affinity, saliency = by_case[Case("affinity", keep)], by_case[Case("saliency", keep)]
        rows.append(
            Row(
                id=f"vl.working_set_ratio_{round(100 * keep)}",
                value=affinity.behind / saliency.behind,
                unit="ratio",
                target="<=1" if keep == 0.5 else None,
                note=f"experts a layer behind the prefix, affinity over saliency alone; {about}",
            )
        )
    return rows


def load_pairs(name: str, number: int) -> list[Pair]:
    """`number` pairs of the function `package.module:function`."""
    module, colon, function = name.partition(":")
    if not colon:
        raise SystemExit(f"--pairs {name}: write it as package.module:function")
    give: Callable[[int], Iterable[Pair]] = getattr(import_module(module), function)
    return list(give(number))


def main() -> None:
    parser = parser_of("vl_working_set", num=60, num_of="prompts")
    parser.add_argument("--pairs", default=_PAIRS, help="package.module:function, called with --num")
    parser.add_argument("--prefix", type=int, default=4, help="MoE layers before the cut, all resident")
    parser.add_argument("--residency", type=float, default=0.25, help="of the routed experts behind them")
    arguments = parser.parse_args()
    pairs = load_pairs(arguments.pairs, arguments.num)
    sets = []
    for case in CASES:
        sets.append(
            measure(
                arguments.model,
                pairs,
                case,
                prefix=arguments.prefix,
                residency=arguments.residency,
                device=arguments.device,
            )
        )
        print(f"{case.name}: {sets[-1].behind:.1f} experts a layer, {sets[-1].hit_rate:.1%} hits", flush=True)
    from bench.vl_working_set_figure import draw

    about = (
        f"{arguments.model.name}, {len(pairs)} prompts, {arguments.prefix} layers pinned, LFU at "
        f"{arguments.residency:.0%}"
    )
    ResultFile.write("vl_working_set", rows_of(sets, about=about), folder=arguments.out)
    draw(sets, arguments.out / "vl_working_set.png", title=about)


if __name__ == "__main__":
    main()
