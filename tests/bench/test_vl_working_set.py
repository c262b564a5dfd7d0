"""The working-set bench on a tiny random model: what it counts, what its rows and its picture say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench import vl_working_set
from bench.harness import ResultFile
from bench.vl_working_set import CASES, Case, Pair, WorkingSet, load_pairs, measure
from tests.architectures import build_checkpoint

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 16, 4
IMAGE_TOKENS = 16


def noise(number: int) -> list[Pair]:
    draw = np.random.default_rng(0)
    return [
        (Image.fromarray(draw.integers(0, 255, (128, 128, 3), dtype=np.uint8)), f"what is {i}?")
        for i in range(number)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("Qwen3VLMoe", tmp_path_factory.mktemp("Qwen3VLMoe"))


def measured(folder: Path, case: Case) -> WorkingSet:
    return measure(folder, noise(3), case, prefix=1, residency=0.25)


def test_all_tokens_and_half_of_them(folder: Path) -> None:
    plain, half = measured(folder, Case("none", 1.0)), measured(folder, Case("affinity", 0.5))
    assert np.array_equal(plain.experts[:1], half.experts[:1])  # the prefix runs whole
    in_all, in_half = plain.loads["visual"].sum(axis=1), half.loads["visual"].sum(axis=1)
    assert in_all.tolist() == [3 * IMAGE_TOKENS * TOP_K] * NUM_LAYERS
    assert in_half.tolist() == [in_all[0], in_all[1] / 2, in_all[2] / 2]
    assert np.array_equal(plain.loads["text"].sum(axis=1), half.loads["text"].sum(axis=1))
    for each in (plain, half):
        assert 0 <= each.hit_rate < 1
        assert each.loads_a_prompt == pytest.approx((1 - each.hit_rate) * each.experts[1:].sum())
        assert np.all((each.experts >= TOP_K) & (each.experts <= NUM_EXPERTS))
        assert each.coverage()[-1] == pytest.approx(1)
        assert all(values.shape == (NUM_LAYERS - 1,) for values in each.foretold.values())
        assert all(np.all((values > 0) & (values <= 1)) for values in each.foretold.values())


def test_the_bench_writes_rows_and_a_picture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["vl_working_set", str(folder), "--pairs", f"{__name__}:noise", "--num", "1", "--prefix", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "new")])
    monkeypatch.setattr(vl_working_set, "import_module", lambda _name: sys.modules[__name__])
    vl_working_set.main()
    rows = {row.id: row for row in ResultFile.read(tmp_path / "new" / "vl_working_set.json").rows}
    assert {f"vl.hit_rate_{case.name}" for case in CASES} <= set(rows)
    ratio = rows["vl.working_set_ratio_50"]
    experts = rows["vl.experts_affinity_50"].value / rows["vl.experts_saliency_50"].value
    assert ratio.value == pytest.approx(experts)
    assert ratio.target == "<=1"
    assert "load entropy" in rows["vl.hit_rate_none_100"].note
    assert (tmp_path / "new" / "vl_working_set.png").stat().st_size > 10_000


def test_pairs_are_named_by_module_and_function() -> None:
    with pytest.raises(SystemExit, match=r"write it as package\.module:function"):
        load_pairs("somewhere", 1)
