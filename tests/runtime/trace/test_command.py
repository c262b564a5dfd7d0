"""The command as a user types it, on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from hetero_runtime.cli.trace import trace_command
from hetero_runtime.trace import read_trace
from hetero_runtime.trace.recorder import _Recorder

CPU = ("--set", "device=cpu", "--set", "memory.residency=0.25", "--set", "execution.max_length=256")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\n\nWhat is 12 plus 30?")
    return file


def run(*words: object) -> Result:
    app = typer.Typer()
    app.command()(trace_command)
    return CliRunner().invoke(app, [*map(str, words), *CPU])


def test_two_documents_of_the_bundled_model(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = run("--prompts", prompts, "--out", out, "--max-tokens", 12, "--seed", 1, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    trace, info = read_trace(out)
    assert (report["documents"], report["tokens"]) == (2, trace.num_tokens)
    assert (report["num_layers"], report["num_experts"], report["top_k"]) == (8, 64, 4)
    assert (report["decoding"], report["temperature"], report["seed"]) == ("sampled", 0.8, 1)
    assert report["by_chance"] < report["persistence"] < 1
    assert 0 < report["load_entropy"] < 1
    assert info.architecture == "Qwen3MoeForCausalLM"
    for row in ("tokens", "documents", "load entropy", "same expert again", "sampled at 0.8"):
        assert row in result.stderr


def test_teacher_forced_prints_a_table(prompts: Path, tmp_path: Path) -> None:
    result = run("--prompts", prompts, "--out", tmp_path / "out.safetensors", "--teacher-forced")
    assert result.exit_code == 0, result.output
    assert "teacher-forced" in result.stdout
    assert "8 × 64 experts, top-4" in result.stdout


def test_ctrl_c_keeps_what_is_done(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, record = tmp_path / "out.safetensors", _Recorder.record

    def interrupted(self: _Recorder, index: int, ids: tuple[int, ...]) -> object:
        if index == 1:
            raise KeyboardInterrupt
        return record(self, index, ids)

    monkeypatch.setattr(_Recorder, "record", interrupted)
    result = run("--prompts", prompts, "--out", out, "--teacher-forced")
    assert result.exit_code == 130
    assert "documents that are done are kept" in result.stderr
    assert [path.name for path in (tmp_path / "out.safetensors.parts").iterdir()] == ["00000.safetensors"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompts", "/nowhere.txt"), "/nowhere.txt"),
        (("--temperature", "-1"), "temperature"),
        (("--cut", "0"), "cut is 0"),
        (("--max-tokens", "1000"), "execution.max_length"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: tuple[str, ...], said: str, prompts: Path, tmp_path: Path
) -> None:
    result = run("--prompts", prompts, "--out", tmp_path / "out.safetensors", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
