"""Paired comparisons: against values known by hand, and scipy's where it is installed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hetero_runtime.cli import app
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.comparison import compare, summarise
from hetero_runtime.evaluation.results import Results, read_results
from hetero_runtime.evaluation.significance import half_width, holm, mcnemar, sign_flip


def results(label: str, **tasks: dict[str, list[tuple[float, ...]]]) -> Results:
    """`results("a", arc={"acc": [(1,), (0,)]})`: questions are numbered."""
    return Results(
        label,
        {
            task: {
                metric: {str(q): values for q, values in enumerate(each)} for metric, each in metrics.items()
            }
            for task, metrics in tasks.items()
        },
        {"routing": {"policy": label}},
    )


def binary(*values: int) -> list[tuple[float, ...]]:
    return [(float(value),) for value in values]


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (8, 2, 2 * (1 + 10 + 45) / 1024), (3, 3, 1.0)],
)
def test_mcnemar_is_the_exact_binomial(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p)
    assert mcnemar(second, first) == mcnemar(first, second)


def test_mcnemar_of_thousands_does_not_overflow() -> None:
    assert 0 < mcnemar(7300, 7000) < 0.02


def test_mcnemar_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for first, second in np.random.default_rng(0).integers(1, 60, (50, 2)).tolist():
        assert mcnemar(first, second) == pytest.approx(stats.binomtest(first, first + second).pvalue)


def test_sign_flip_enumerates_few_units() -> None:
    assert sign_flip([1, 1, 1]) == 2 / 8
    assert sign_flip([3, -1, 0, 0]) == 1.0 / 2 + 1.0 / 2  # |2| or |4|: every pattern is as far
    assert sign_flip([2, 2, -1]) == 4 / 8  # sums ±5, ±3, ±3, ±1: as far as 3
    assert sign_flip([]) == 1.0


def test_sign_flip_of_many_units_is_drawn_and_the_same_each_time() -> None:
    few = np.array([1.0] * 12 + [-1.0] * 4)
    many = np.concatenate([few, [1.0, -1.0]])
    exact = mcnemar(13, 5)
    assert sign_flip(many) == pytest.approx(exact, abs=0.005)
    assert sign_flip(many) == sign_flip(many)
    assert sign_flip(few) == pytest.approx(mcnemar(12, 4))


def test_sign_flip_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.array([0.5, -1.0, 2.0, 1.5, 3.0, -0.25, 1.0])
    theirs = stats.permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert sign_flip(values) == pytest.approx(theirs.pvalue)


def test_holm_steps_down_and_never_up() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("count", [1, 2, 7])
def test_holm_lies_between_no_correction_and_bonferroni(count: int) -> None:
    for p_values in np.random.default_rng(count).random((20, count)).tolist():
        for p, corrected in zip(p_values, holm(p_values), strict=True):
            assert p <= corrected <= min(1.0, count * p) + 1e-12


def test_one_value_a_question_takes_mcnemar() -> None:
    a = results("a", arc={"acc": binary(1, 0, 0, 0, 1, 0, 0, 0)})
    b = results("b", arc={"acc": binary(1, 1, 1, 1, 0, 1, 1, 0)})
    (one,) = compare(a, [b])
    assert (one.test, one.num_questions, one.only_label, one.only_reference) == ("mcnemar", 8, 5, 1)
    assert (one.reference_value, one.value) == (2 / 8, 6 / 8)
    differences = np.array([0, 1, 1, 1, -1, 1, 1, 0])
    assert one.difference == pytest.approx(differences.mean())
    assert one.standard_error == pytest.approx(differences.std(ddof=1) / np.sqrt(8))
    assert one.interval[1] - one.difference == pytest.approx(1.959964 * one.standard_error, rel=1e-5)
    assert one.p == one.p_holm == pytest.approx(mcnemar(5, 1))


def test_instructions_of_one_prompt_are_not_taken_for_independent() -> None:
    a = results("a", ifeval={"inst": [(0, 0, 0)] * 4 + [(1,)]})
    b = results("b", ifeval={"inst": [(1, 1, 1)] * 4 + [(0,)]})
    (one,) = compare(a, [b])
    assert one.test == "sign_flip"
    assert one.p == pytest.approx(4 / 32)  # ±13, ±11: as far as 11
    assert one.difference == pytest.approx(11 / 13)
    naive = np.array([1] * 12 + [-1]).std(ddof=1) / np.sqrt(13)
    residuals = np.array([3 - 3 * 11 / 13] * 4 + [-1 - 11 / 13])
    assert one.standard_error == pytest.approx(np.sqrt(5 / 4 * (residuals**2).sum()) / 13)
    assert one.standard_error != pytest.approx(naive)


def test_likelihoods_are_no_scores() -> None:
    a = results(
        "a", read={"word.nats": [(2.0,), (3.0,)]}, arc={"acc": binary(0, 1)}, gsm={"acc": binary(0, 1)}
    )
    b = results(
        "b", read={"word.nats": [(2.5,), (3.5,)]}, arc={"acc": binary(1, 1)}, gsm={"acc": binary(0, 1)}
    )
    family = compare(a, [b])
    assert [one.is_score for one in family] == [False, True, True]
    assert (family[0].test, family[0].difference) == ("sign_flip", 0.5)
    (summary,) = summarise(family)
    assert (summary.num_tasks, summary.difference) == (2, 0.25)


def test_all_tests_of_a_table_are_one_family() -> None:
    a = results("a", arc={"acc": binary(*[0] * 8)}, mmlu={"acc": binary(*[0, 1] * 4)})
    b = results("b", arc={"acc": binary(*[1] * 8)}, mmlu={"acc": binary(*[0, 1] * 4)})
    family = compare(a, [b, b])
    p = 2 / 256
    assert [one.p for one in family] == [p, 1.0, p, 1.0]
    assert [one.p_holm for one in family] == pytest.approx([4 * p, 1.0, 4 * p, 1.0])
    assert [one.is_significant for one in family] == [True, False, True, False]


def test_the_mean_over_tasks_takes_the_first_metric_of_each() -> None:
    a = results("a", arc={"acc": binary(0, 0, 1, 0), "norm": binary(0, 0, 0, 0)}, gsm={"match": binary(1, 0)})
    b = results("b", arc={"acc": binary(1, 0, 1, 0), "norm": binary(1, 1, 1, 1)}, gsm={"match": binary(0, 0)})
    family = compare(a, [b])
    (summary,) = summarise(family)
    errors = [one.standard_error for one in family if one.metric != "norm"]
    assert (summary.num_tasks, summary.difference) == (2, pytest.approx((0.25 - 0.5) / 2))
    assert summary.half_width == pytest.approx(half_width(np.hypot(*errors) / 2))
    assert summarise(compare(a, [b], metrics=["match"])) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (results("b", arc={"acc": binary(1, 0)}), "different questions"),
        (results("b", arc={"acc": [(1, 1), (0,), (1,)]}), "number of values for question '0'"),
        (results("b", mmlu={"acc": binary(1, 0, 1)}), "arc acc: in 'a' and not in 'b'"),
    ],
)
def test_what_cannot_be_paired_is_refused(other: Results, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        compare(results("a", arc={"acc": binary(1, 0, 1)}), [other])


def test_a_metric_that_nobody_has_is_refused() -> None:
    a = results("a", arc={"acc": binary(1, 0, 1)})
    with pytest.raises(RequestError, match="has no metric bleu; it has acc"):
        compare(a, [a], metrics=["bleu"])


def test_files_keep_everything(tmp_path: Path) -> None:
    written = results("a", ifeval={"inst": [(0, 1), (1,)]})
    written.write(tmp_path / "a.json")
    assert read_results(tmp_path / "a.json") == written


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ('{"rows": []}', "no file of results"),
        ('{"format": "hetero-runtime results of questions, 1"}', "damaged"),
    ],
)
def test_other_files_are_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(RequestError, match=said):
        read_results(tmp_path / "a.json")


def test_a_metric_without_values_is_damage(tmp_path: Path) -> None:
    results("a", arc={"acc": []}).write(tmp_path / "a.json")
    with pytest.raises(RequestError, match="a metric without values"):
        read_results(tmp_path / "a.json")


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    results("exact", arc={"acc": binary(*[0] * 8)}, mmlu={"acc": binary(0, 1)}).write(tmp_path / "a.json")
    results("psr 0.3", arc={"acc": binary(*[1] * 8)}, mmlu={"acc": binary(0, 1)}).write(tmp_path / "b.json")
    result = CliRunner().invoke(
        app, ["eval", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["comparisons"][0]["is_significant"]
    assert report["means"][0]["difference"] == 0.5
    for part in ("psr 0.3 against exact", "+100.00*", "mean difference over 2 tasks +50.00 ± 0.00 points"):
        assert part in result.stderr
    twin = tmp_path / "c.json"
    results("exact", arc={"acc": binary(*[1] * 8)}, mmlu={"acc": binary(0, 1)}).write(twin)
    apart = CliRunner().invoke(app, ["eval", "compare", str(tmp_path / "a.json"), str(twin)])
    assert "exact (c.json) against exact (a.json)" in apart.stdout
    refused = CliRunner().invoke(app, ["eval", "compare", str(tmp_path / "a.json"), "/nowhere.json"])
    assert (refused.exit_code, "/nowhere.json" in refused.stderr) == (2, True)
