"""Tasks by lm-eval where it is installed; the adapter's contract, and the error, where it is not."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from hetero_runtime.cli import app
from hetero_runtime.errors import ConfigError
from hetero_runtime.evaluation.results import means, read_results
from hetero_runtime.evaluation.tasks import Answers, Likelihood, TaskSettings, run_tasks
from hetero_runtime.evaluation.tasks.run import collect

QUESTIONS = [
    {"text": "Once upon a", "choices": ["time", "zebra"], "answer": 0},
    {"text": "The sky is", "choices": ["seven", "blue"], "answer": 1},
    {"text": "It is good to", "choices": ["share", "xylophone"], "answer": 0},
]
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "say": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


class Scripted(Answers):
    """Likes the longer continuation, says the word `blue`, and finds a text as unlikely as it is long."""

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        return [Likelihood(float(len(continuation)) - 20, False) for _, continuation in pairs]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        return [-float(len(text)) for text in texts]

    def generate(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        assert all(settings["until"] == ["\n"] for _, settings in prompts)
        return ["blue" for _ in prompts]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        return "".join(each["content"] for each in messages) + ("!" if add_generation_prompt else "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Task files with their questions beside them."""
    lines = "\n".join(json.dumps(question) for question in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(lines)
    for name, fields in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}}}
        whole = {"task": name, **data, "test_split": "test", **fields}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    (tmp_path / "group.yaml").write_text('{"group": "both", "task": ["choose", "say"]}')
    return tmp_path


@pytest.fixture
def _lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'hetero-runtime[eval]'")
    datasets = importlib.import_module("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_lm_eval")
def test_every_kind_of_task_is_asked_and_scored(folder: Path) -> None:
    results = run_tasks(Scripted(), TaskSettings(folder), label="scripted", configuration={"a": 1})
    assert results.tasks == {
        "choose": {"acc": {"0": (0.0,), "1": (0.0,), "2": (0.0,)}},
        "read": {"word_perplexity.nats": {"0": (11 / 3,), "1": (10 / 3,), "2": (13 / 4,)}},
        "say": {"exact_match": {"0": (0.0,), "1": (1.0,), "2": (0.0,)}},
    }
    assert (results.label, results.configuration) == ("scripted", {"a": 1})


@pytest.mark.usefixtures("_lm_eval")
def test_a_group_is_one_task(folder: Path) -> None:
    results = run_tasks(
        Scripted(), TaskSettings(folder, names=("both",), limit=2), label="a", configuration={}
    )
    assert results.tasks["both"]["exact_match"] == {"say/0": (0.0,), "say/1": (1.0,)}
    assert set(results.tasks["both"]["acc"]) == {"choose/0", "choose/1"}


@pytest.mark.usefixtures("_lm_eval")
def test_a_chat_template_makes_the_prompts(folder: Path) -> None:
    settings = TaskSettings(folder, names=("say",), is_chat=True)
    results = run_tasks(Scripted(), settings, label="a", configuration={})
    assert means(results)["say"]["exact_match"].mean == pytest.approx(1 / 3)


@pytest.mark.usefixtures("_lm_eval")
def test_a_task_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"arc: .* has both, choose, read, say"):
        run_tasks(Scripted(), TaskSettings(folder, names=("arc",)), label="a", configuration={})


@pytest.mark.parametrize(
    ("folder", "said"), [(None, "no task is named"), (Path("/nowhere"), "/nowhere: is no folder")]
)
def test_without_tasks_nothing_is_run(folder: Path | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_tasks(Scripted(), TaskSettings(folder), label="a", configuration={})


@pytest.mark.usefixtures("_lm_eval")
def test_the_command_on_the_bundled_model(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    words = ["--tasks", folder, "--task", "both", "--out", out, "--label", "as it is", "--json"]
    cpu = ["--set", "device=cpu", "--set", "execution.max_length=64"]
    result = CliRunner().invoke(app, ["eval", "tasks", *map(str, words), *cpu])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["tasks"]["both"]["acc"]["mean"] == 1.0
    assert read_results(out).label == "as it is"
    assert "exact_match" in result.stderr


def test_without_lm_eval_the_fix_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'hetero-runtime\[eval\]'"):
        run_tasks(Scripted(), TaskSettings(tmp_path), label="a", configuration={})


class Asked(NamedTuple):
    """As much of lm-eval's Instance as an adapter sees."""

    args: tuple[Any, ...]


def test_the_adapter_needs_of_lm_eval_a_base_class_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hetero_runtime.evaluation.tasks.lm"
    for module in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    sys.modules["lm_eval.api.model"].LM = object  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, name, raising=False)
    lm = importlib.import_module(name).ServedLM(Scripted(), name="scripted")
    monkeypatch.delitem(sys.modules, name)
    assert lm.loglikelihood([Asked(("a", "bc")), Asked(("a", "b"))]) == [(-18.0, False), (-19.0, False)]
    assert lm.loglikelihood_rolling([Asked(("abc",))]) == [-3.0]
    assert lm.generate_until([Asked(("a", {"until": ["\n"]}))]) == ["blue"]
    assert lm.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"
    assert lm.tokenizer_name == "scripted"


def test_instructions_filters_and_texts_of_a_report(caplog: pytest.LogCaptureFixture) -> None:
    def sample(question: int, filter_name: str, **metrics: object) -> dict[str, object]:
        return {"doc_id": question, "filter": filter_name, "metrics": list(metrics), **metrics}

    report = {
        "samples": {
            "ifeval": [sample(0, "none", inst=[True, False]), sample(1, "none", inst=[True])],
            "gsm": [sample(0, "strict", match=1.0), sample(0, "flexible", match=0.0)],
            "mt": [sample(0, "none", bleu=("said", "meant"))],
        }
    }
    assert collect(["ifeval", "gsm", "mt"], report) == {
        "ifeval": {"inst": {"0": (1.0, 0.0), "1": (1.0,)}},
        "gsm": {"match,strict": {"0": (1.0,)}, "match,flexible": {"0": (0.0,)}},
        "mt": {},
    }
    assert "mt: bleu has no value of single questions" in caplog.text
