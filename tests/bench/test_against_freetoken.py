"""Both engines in processes of their own (made-up ones here): ratios, targets, and what a failure leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import against_freetoken
from bench.harness import ResultFile, Row

CHILD = """
import os, sys, argparse
sys.path.insert(0, {root!r})
from bench.figures import Figures
words = sys.argv[1:]
residency = float(words[words.index("--residency") + 1])
prompts = words[words.index("--prompts") + 1:] if "--prompts" in words else []
lengths = [int(word) for word in prompts if word.isdigit()]
assert ("--routing" in words) == (residency < 1)
is_peer = {is_peer}
if is_peer:
    import only_there
    assert "TRITON_CACHE_DIR" not in os.environ
    if residency == {failing}:
        raise SystemExit(1)
cache = os.environ.get("TRITON_CACHE_DIR", "")
start_s = None if is_peer else 0.5 if os.listdir(cache) else 9.0
if not is_peer:
    open(os.path.join(cache, "kernel"), "w").close()
tok_s = residency * (100 if is_peer else 150)
Figures(engine="FreeToken 0.1.3" if is_peer else "hetero_runtime", residency=residency, tok_s=tok_s,
        all_tok_s=(tok_s,), ttfts_ms={{n: n * (2.0 if is_peer else 0.5) for n in lengths}},
        hit_rate=None if residency == 1 else 0.8, slots=7, peak_vram_gib=1.0, load_s=1.0,
        start_s=start_s).print()
"""


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, routing: Path, *, failing: float
) -> tuple[int, dict[str, Row]]:
    """Run the bench with made-up engines; FreeToken's fails at residency `failing`."""
    root, site = str(Path(__file__).resolve().parents[2]), tmp_path / "site"
    site.mkdir()
    (site / "only_there.py").touch()
    for name, is_peer in (("made_up_ours", False), ("made_up_peer", True)):
        (tmp_path / f"{name}.py").write_text(CHILD.format(root=root, is_peer=is_peer, failing=failing))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(against_freetoken, "OURS", "made_up_ours")
    monkeypatch.setattr(against_freetoken, "PEER", "made_up_peer")
    words = ["--checkpoint", checkpoint, "--routing", routing, "--freetoken-site", site]
    num_failed = against_freetoken.main([str(word) for word in (*words, "--results", tmp_path)])
    return num_failed, {row.id: row for row in ResultFile.read(tmp_path / "against_freetoken.json").rows}


def test_rows_and_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, routing: Path
) -> None:
    num_failed, rows = run(tmp_path, monkeypatch, checkpoint, routing, failing=-1)
    assert num_failed == 0
    targets = {row_id: row.target for row_id, row in rows.items() if row.target}
    assert targets == {
        "graph.resident_vs_freetoken": ">=1.3",
        "graph.offload45_vs_freetoken": ">=1.3",
        "graph.offload25_vs_freetoken": ">=1.3",
        "graph.ttft128_vs_freetoken": "<=0.5",
        "graph.ttft1024_vs_freetoken": "<=0.5",
        "graph.start_s": "<=20",
    }
    assert rows["graph.offload25_vs_freetoken"].value == pytest.approx(1.5)
    assert rows["graph.ttft1024_vs_freetoken"].value == pytest.approx(0.25)
    assert rows["graph.ttft128_vs_freetoken"].reference == "FreeToken 0.1.3: 256 ms, same run"
    assert rows["graph.start_s"].value == 9.0
    assert "on the disk 0.5 s" in rows["graph.start_s"].note
    assert "load entropy" in rows["graph.offload45_vs_freetoken"].note
    assert "hits 80.0 % and 80.0 %; slots 7 and 7" in rows["graph.offload45_vs_freetoken"].note
    assert "their own routing" in rows["graph.resident_vs_freetoken"].note
    numbers = {"tok_s_all", "tok_s_45", "ttft128_ms_45", "hit_25", "slots_25"}
    assert {f"peer.{side}_{name}" for side in ("ours", "freetoken") for name in numbers} <= set(rows)


def test_engine_that_fails_leaves_out_its_own_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,
    routing: Path,
) -> None:
    num_failed, rows = run(tmp_path, monkeypatch, checkpoint, routing, failing=0.45)
    assert num_failed == 1
    assert "FAILED made_up_peer" in capsys.readouterr().out
    assert {"graph.resident_vs_freetoken", "graph.offload25_vs_freetoken"} <= set(rows)
    assert "peer.ours_tok_s_45" in rows
    assert not {"graph.offload45_vs_freetoken", "graph.ttft128_vs_freetoken", "peer.freetoken_tok_s_45"} & {
        *rows
    }
