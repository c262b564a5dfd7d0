"""What Algorithm 1's knobs do, one at a time: the depth of the prefix, the salient core, the weight.

Right answers and experts a layer of half the image tokens, against saliency alone at the same depth, on the
questions of `bench.vl_accuracy`.

    python -m bench.vl_ablation --num 300
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.harness import ResultFile, Row
from bench.vl.arguments import parser_of
from bench.vl.comparison import Outcome, Reader, compare, load_reader
from bench.vl.held_out import HeldOut, ask_rows
from hetero_scheduler.compression import TokenSelector, make_selector

DEVICE = "cpu"
_KEEP = 0.5
_DEPTHS = (1, 2, 4, 6)
_DEPTH = 4
"""Where the other knobs are turned: the depth of `bench.vl_accuracy`."""
_SALIENT_RATIOS = (0.1, 0.4)
_AFFINITIES = (0.5, 8.0)


@dataclass(frozen=True)
class Setting:
    """Of Algorithm 1; `name` for row ids."""

    name: str
    salient_ratio: float = 0.25
    affinity: float = 2.0

    def selector(self) -> TokenSelector:
        """It, made."""
        return make_selector(
            "affinity", keep_ratio=_KEEP, salient_ratio=self.salient_ratio, affinity=self.affinity
        )


def settings_at(depth: int) -> list[Setting]:
    """What is tried with that many layers before the cut."""
    settings = [Setting(f"prefix_{depth}")]
    if depth == _DEPTH:
        settings += [Setting(f"alpha_{alpha}", salient_ratio=alpha) for alpha in _SALIENT_RATIOS]
        settings += [Setting(f"lambda_{weight}", affinity=weight) for weight in _AFFINITIES]
    return settings


def measure(reader: Reader, held_out: HeldOut, depth: int) -> Iterator[Row]:
    """Rows of all settings at `depth`."""
    ways: dict[Setting | None, TokenSelector | None] = {
        None: make_selector("saliency", keep_ratio=_KEEP),
        **{setting: setting.selector() for setting in settings_at(depth)},
    }
    outcomes = compare(reader, held_out, ways, pinned=depth)
    for setting in settings_at(depth):
        note = f"{len(held_out.pictures)} held-out pictures, {depth} layers before the cut"
        yield from rows_of(setting, outcomes[setting], outcomes[None], about=note)


def rows_of(setting: Setting, affinity: Outcome, saliency: Outcome, *, about: str) -> list[Row]:
    """One setting of Algorithm 1 against saliency alone."""
    name = setting.name.replace(".", "_")
    note = f"{about}, α {setting.salient_ratio}, λ {setting.affinity}"
    values = (
        ("accuracy", affinity.mean, "share"),
        ("accuracy_lost", saliency.mean - affinity.mean, "share"),
        ("experts", affinity.experts, "experts a layer"),
        ("working_set_ratio", affinity.experts / saliency.experts, "ratio"),
    )
    return [Row(id=f"vl.{what}_50_{name}", value=value, unit=unit, note=note) for what, value, unit in values]


def main() -> None:
    parser = parser_of("vl_ablation", num=300, num_of="pictures, up to ten questions each")
    arguments = parser.parse_args()
    reader = load_reader(arguments.model, arguments.device)
    held_out = ask_rows(arguments.num, reader.tokenizer)
    rows = [row for depth in _DEPTHS for row in measure(reader, held_out, depth)]
    ResultFile.write("vl_ablation", rows, folder=arguments.out)


if __name__ == "__main__":
    main()
