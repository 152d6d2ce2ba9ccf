"""Rollouts to read: which are shown, and a reward that is hacked is said to be."""

import json
from pathlib import Path

import pytest

from results import rollouts


def write(folder: Path, rewards: list[float], solved_shares: list[float]) -> Path:
    """A run of ten iterations whose reward and share of solved tasks go as said."""
    folder.mkdir()
    rows = [
        {
            "step": 2 * i,
            "iteration": i,
            "prompt": f"ask {k}",
            "answer": f"say {i} {k}",
            "reward": float(k),
            "reward/x": k / 2,
            "ended": 1.0,
        }
        for i in range(10)
        for k in range(6)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    score_rows = [
        {"step": i, "reward": one, "solved_mean@4": other, "solved_mean@4_interval": 0.05}
        for i, (one, other) in enumerate(zip(rewards, solved_shares, strict=True))
    ]
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in score_rows))
    return folder


def test_the_ends_of_some_iterations_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write(tmp_path / "run", [1.0, 2.0], [0.5, 0.7])
    assert rollouts.main([str(run), "--count", "2", "--iterations", "3"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[1].rstrip(",") for line in text.splitlines() if line.startswith("iteration")] == [
        "0",
        "4",
        "9",
    ]
    assert text.index("say 9 0") < text.index("say 9 1") < text.index("say 9 5") < text.index("say 9 4")
    assert "say 9 2" not in text
    assert "reward 2.5" in text
    assert "has risen while" not in text


def test_hacked_reward_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert rollouts.main([str(write(tmp_path / "run", [1.9, 3.5], [0.65, 0.1]))]) == 0
    assert "The reward has risen while solved_mean@4 fell" in capsys.readouterr().out


def test_each_answer_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write(tmp_path / "run", [1.0], [0.5])
    assert rollouts.main([str(run), "--count", "9", "--iterations", "1"]) == 0
    assert capsys.readouterr().out.count("say 0 3") == 1


def test_complete_answers_are_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What pays may stand at the end of a long answer."""
    run = write(tmp_path / "run", [1.0], [0.5])
    row = {"step": 0, "iteration": 0, "prompt": "ask", "answer": "word " * 50 + "\nthe end", "reward": 9.0}
    (run / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    for words, whole in (([], False), (["--full"], True)):
        assert rollouts.main([str(run), *words]) == 0
        assert ("\n      the end\n" in capsys.readouterr().out) == whole
