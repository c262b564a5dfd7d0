"""The commands as a user types them, on the bundled model and on tiny ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from hetero_runtime.cli import app
from hetero_runtime.cli.options import demo_config_of
from tests.architectures import build_checkpoint
from tests.deepseek_vl2_checkpoints import build_deepseek_vl2

CPU = ("--set", "device=cpu", "--set", "execution.max_length=256")


def run(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=stdin)


def last_json(result: Result) -> dict[str, Any]:
    """The last line of standard output."""
    parsed = json.loads(result.stdout.strip().splitlines()[-1])
    assert isinstance(parsed, dict)
    return parsed


def test_run_without_arguments_plans_streams_and_accounts() -> None:
    result = run("run", *CPU, "--max-tokens", "24", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert "25.0% resident" in result.stdout.replace("\n", " ")
    assert "Once upon a time there was" in result.stdout
    for row in ("tokens a second", "time to first token", "hit rate", "time stalled", "bytes moved"):
        assert row in result.stdout


def test_run_json_is_the_last_line_of_standard_output_and_repeats_with_a_seed() -> None:
    words = ("run", *CPU, "--max-tokens", "16", "--seed", "3", "--json")
    first, second = run(*words), run(*words)
    report = last_json(first)
    assert report["text"] == last_json(second)["text"]
    assert report["completion_tokens"] == 16
    assert report["finish_reason"] == "length"
    assert 0 < report["hit_rate"] < 1
    slots = report["stats"]["slots"]
    assert sum(slots.values()) == 128
    assert report["stats"]["active_rows"] == 0


def test_run_with_foresight_says_the_same_and_hits_more_than_lru() -> None:
    words = ("run", *CPU, "--max-tokens", "60", "--seed", "3", "--json")
    foreseen, plain = run(*words, "--set", "preset=seqmoe"), last_json(run(*words))
    assert "hit rate of LRU" in foreseen.stderr
    report = last_json(foreseen)
    assert report["text"] == plain["text"]
    assert report["hit_rate"] > report["lru_hit_rate"] + 0.08
    assert report["lru_hit_rate"] == pytest.approx(plain["hit_rate"], abs=0.02)
    assert plain["lru_hit_rate"] is None


def test_the_bundled_model_runs_with_forecasts_unless_something_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("memory: {residency: 0.5}\n")
    assert demo_config_of(None, None, None).preset == "seqmoe"
    assert demo_config_of(None, None, None).memory.residency == 0.25
    for words in (("a model", None, None), (None, file, None), (None, None, ["memory.slabs=64"])):
        assert demo_config_of(*words).preset == "lru"


def test_run_with_drafts_says_what_they_brought() -> None:
    words = ("run", *CPU, "-p", "The city of Paris", "--max-tokens", "48", "--json")
    result = run(*words, "--set", "speculation.drafter=prompt_lookup", "--temperature", "0")
    assert "tokens a pass" in result.stderr
    report = last_json(result)
    drafts, decode = report["stats"]["drafts"], report["stats"]["decode"]
    assert drafts["passes"] == decode["passes"]
    assert decode["tokens"] == drafts["passes"] + drafts["accepted"] == 47
    assert drafts["tokens_per_pass"] == pytest.approx(47 / drafts["passes"])
    assert 0 < drafts["accepted"] <= drafts["drafted"]


def test_run_and_verify_a_deepseek_vl2(tmp_path: Path) -> None:
    folder, picture = build_deepseek_vl2("tiny", tmp_path / "model"), tmp_path / "red.png"
    Image.new("RGB", (40, 30), "red").save(picture)
    report = last_json(run("run", str(folder), *CPU, "--image", str(picture), "--max-tokens", "4", "--json"))
    assert report["stats"]["prefill"]["tokens"] > 41
    assert last_json(run("verify", str(folder), *CPU, "--max-tokens", "4", "--json"))["tokens_equal"] is True


def test_run_with_an_image_says_how_much_of_it_was_kept(tmp_path: Path) -> None:
    folder, picture = build_checkpoint("Qwen3VLMoe", tmp_path / "model"), tmp_path / "picture.png"
    noise = np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8)
    Image.fromarray(noise).save(picture)
    words = ("run", str(folder), *CPU, "--image", str(picture), "--max-tokens", "4", "--json")
    result = run(*words, "--set", "vision.keep_ratio=0.5", "--set", "memory.pinned_prefix=1")
    compression = last_json(result)["stats"]["compression"]
    assert (compression["visual_tokens"], compression["kept_tokens"]) == (16, 8)
    assert len(compression["experts_before"]) == 1
    assert len(compression["experts_after"]) == 3
    assert compression["compress_ms"] > 0
    assert "image tokens kept" in result.stderr
    assert "8 of 16" in result.stderr


def test_run_as_chat_answers() -> None:
    result = run("run", *CPU, "--chat", "-p", "What is 12 plus 30?", "--temperature", "0", "--json")
    report = last_json(result)
    assert "42" in report["text"]
    assert report["finish_reason"] == "stop"


def test_chat_over_a_pipe_remembers_and_starts_anew() -> None:
    lines = "What is 7 plus 8?\n/new\nWhat is 20 plus 5?\n"
    result = run("chat", *CPU, "--temperature", "0", "--max-tokens", "100", "--json", stdin=lines)
    assert result.exit_code == 0, result.output
    messages = last_json(result)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert "15" in result.stdout
    assert "25" in messages[-1]["content"]


def test_chat_drops_the_oldest_turns_when_the_context_is_full() -> None:
    lines = "".join(f"What is {n} plus 8?\n" for n in range(7, 12))
    words = ("--set", "device=cpu", "--set", "execution.max_length=64", "--max-tokens", "24")
    result = run("chat", *words, "--temperature", "0", "--json", stdin=lines)
    assert result.exit_code == 0, result.output
    assert "19" in last_json(result)["messages"][-1]["content"]
    assert "no longer fits" in result.stderr


def test_verify_covers_three_residencies_and_says_equal(tmp_path: Path) -> None:
    folder = build_checkpoint("Qwen3Moe", tmp_path)
    result = run("verify", str(folder), *CPU, "--max-tokens", "12", "--json")
    assert result.exit_code == 0, result.output
    report = last_json(result)
    assert report["tokens_equal"] is True
    assert report["max_logit_error"] == 0.0
    assert [one["slabs"] for one in report["runs"]] == [4, 12, 48]


def test_verify_takes_the_residency_that_is_set(tmp_path: Path) -> None:
    folder = build_checkpoint("Mixtral", tmp_path)
    words = ("--set", "memory.residency=0.5", "--max-tokens", "4", "--json")
    report = last_json(run("verify", str(folder), *CPU, *words))
    assert [one["residency"] for one in report["runs"]] == [0.5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "/nowhere"), "/nowhere"),
        (("run", "--set", "memory.slab=4"), "memory.slabs"),
        (("run", "--set", "execution.compile=true"), "not in this version"),
        (("run", "--set", "device=cpu", "--set", "execution.mode=graph"), "needs a CUDA device"),
        (("run", "--set", "memory.slabs=1"), "4"),
        (("run", "--temperature", "-1"), "temperature"),
        (("run", "-p", ""), "empty"),
        (("run", "--max-tokens", "100000"), "--max-tokens 100000: prompt and answer share"),
        (("run", "--image", "/nowhere.png"), "/nowhere.png"),
        (("verify", "--set", "execution.compile=true"), "not in this version"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--set", "memory.slab=4"),
        ("run", "--max-tokens", "100000"),
        ("run", "--image", "/nowhere.png"),
        ("run", "--set", "preset=seqmoe", "--set", "prediction.path=/nowhere"),
        ("chat", "--max-tokens", "100000"),
        ("chat", "/nowhere"),
        ("verify", "/nowhere"),
        ("trace", "--prompts", "/nowhere.txt", "--out", "trace.safetensors"),
        ("trace", "--prompts", __file__, "--out", "/nowhere/trace.safetensors"),
        ("pack", "--out", "/nowhere/experts.safetensors"),
        ("calibrate", "routing", "--text", __file__, "--out", "/nowhere/calibration.safetensors"),
        ("calibrate", "lookahead", "--text", "/nowhere.txt"),
        ("calibrate", "prefix", "--text", "/nowhere.txt"),
        ("calibrate", "prefix", "--text", __file__, "--prefixes", "1,inf"),
        ("run", "--set", "cpu.threads=100000"),
        ("pack", "/nowhere", "--out", "experts.safetensors"),
        ("eval", "perplexity", "/nowhere", "--text", __file__),
        ("eval", "perplexity", "--text", "/nowhere.txt"),
        ("eval", "perplexity", "--text", __file__, "--out", "/nowhere/results.json"),
        ("eval", "kl", "--samples", __file__),
        ("eval", "kl", "--windows", "0"),
        ("eval", "frontier", "--text", "/nowhere.txt"),
        ("eval", "frontier", "--plot", "/nowhere/frontier.png"),
        ("eval", "tasks", "--tasks", "/nowhere"),
    ],
    ids=" ".join,
)
def test_bad_input_is_told_before_anything_heavy_is_imported(words: tuple[str, ...]) -> None:
    assert_refused_without_torch(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("chat",),
        ("verify",),
        ("trace", "--prompts", __file__, "--out", "trace.safetensors"),
        ("eval", "perplexity", "--text", __file__),
        ("eval", "kl"),
        ("eval", "tasks", "--task", "any"),
    ],
    ids=" ".join,
)
def test_a_model_without_tokenizer_is_told_before_anything_heavy_is_imported(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    folder = build_checkpoint("Qwen3Moe", tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert_refused_without_torch(*words, str(folder))


def assert_refused_without_torch(*words: str) -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from hetero_runtime.cli import app
from hetero_runtime.cli.options import demo_config_of
result = CliRunner().invoke(app, {list(words)!r})
print(result.exit_code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
