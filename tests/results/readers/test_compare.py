"""Comparisons of experiments: intervals and verdicts by hand, how words select runs, and refusals."""

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from results import compare, progress
from src.errors import ConfigError
from src.runs import ledger
from src.runs.environment import evaluation_digest
from src.runs.run_dir import RunDir
from src.runs.store import VALIDATION
from src.tables import comparison, results
from src.tables.comparability import Family

BASE = [1.0, 1.1, 1.2]


def make(
    runs: Path,
    seed: int,
    rate: float,
    loss: float | None,
    *,
    nats: Sequence[float] = (),
    data: str = "d",
    code: str | None = None,
    group: str = "",
    commit: str = "a" * 40,
    higher: float = 0.0,
    state: Any = "done",
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> str:
    """A run whose last row has `loss`; returns its id."""
    exp = {"recipe": "toy", "seed": seed, "loop": {"learning_rate": rate}, "model": model or {"name": "m"}, **settings}
    facts = {"groups": [group or f"rate{rate}"], "evaluation_code": code or evaluation_digest(), "commit": commit}
    with RunDir.open(runs, exp, exp, facts=facts) as run:
        row = {"step": 4, "val_loss": math.nan if loss is None else loss, "em": higher + seed / 1000, "tokens": 100}
        run.scores.append(row)
        record = {
            "step": 4,
            "data": {"": data},
            "samples": len(nats) or 2,
            "nats": list(nats),
            "tokens": [1] * len(nats),
        }
        (run.path / VALIDATION).write_text(json.dumps(record if nats else {**record, "nats": [1, 1], "tokens": [1, 1]}))
        (run.path / "perf.jsonl").write_text(
            '{"step": 4, "seconds": 2.0, "steps_per_second": 2.0, "model_flops_per_second": 10.0}\n'
        )
        run.set_status(state)
    return run.path.name


def add(runs: Path, rate: float, losses: Sequence[float | None], first: int = 0, **more: Any) -> list[str]:
    return [make(runs, seed, rate, loss, **more) for seed, loss in enumerate(losses, first)]


def report(capsys: pytest.CaptureFixture[str], runs: Path, *words: str) -> dict[str, Any]:
    assert compare.main([*words, "--runs", str(runs), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def in_any_order(content: dict[str, Any]) -> dict[str, Any]:
    """The report with ids and seeds sorted: those that were selected are first."""
    sides = [content["base"], *content["candidates"]]
    for side in sides:
        side.update({name: sorted(side[name]) for name in ("exp_ids", "seeds")})
    return content


def refusal(capsys: pytest.CaptureFixture[str], runs: Path, *words: str) -> str:
    assert compare.main([*words, "--runs", str(runs)]) == 1
    return capsys.readouterr().err


def test_paired_t_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.8, 0.95, 1.0])
    content = report(capsys, tmp_path, "rate0.1", "rate0.2")
    (candidate,) = content["candidates"]
    differences = [-0.2, -0.15, -0.2]
    test = stats.ttest_1samp(differences, 0)
    assert candidate["difference"] == pytest.approx(np.mean(differences))
    assert candidate["t_interval"] == pytest.approx(list(test.confidence_interval()))
    assert candidate["p"] == pytest.approx(test[1])
    assert candidate["verdict"] == "better"
    assert (candidate["pairs"], candidate["is_paired"], candidate["samples"]) == (3, True, 0)
    assert content["base"]["mean"] == pytest.approx(1.1)
    assert candidate["differences"] == {"experiment": {"loop.learning_rate": [0.1, 0.2]}}
    assert candidate["cost"] == {"tokens": 300, "flops": 60.0, "seconds": 6.0}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_seed_selects_its_experiment(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The report names the run that was given, and its numbers are the same."""
    bases, candidates = add(tmp_path, 0.1, BASE), add(tmp_path, 0.2, [0.9, 1.15, 1.05])
    by_group, by_id = (
        report(capsys, tmp_path, *words) for words in (("rate0.1", "rate0.2"), (bases[seed], candidates[seed]))
    )
    (ours,), (theirs,) = by_id["candidates"], by_group["candidates"]
    assert (by_id["base"]["exp_ids"][0], ours["exp_ids"][0]) == (bases[seed], candidates[seed])
    for name in ("difference", "t_interval", "bootstrap_interval", "p"):
        assert ours[name] == theirs[name]


def test_misspelt_group_lists_only_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE, group="base_tiny")
    add(tmp_path, 0.2, BASE, group="other")
    message = refusal(capsys, tmp_path, "base_tinny", "other")
    assert "Did you mean 'base_tiny'" in message
    assert "val_loss" not in message


def test_seeds_without_a_common_one_use_welch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [1.4, 1.9, 1.6, 2.1], first=10)
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    test = stats.ttest_ind([1.4, 1.9, 1.6, 2.1], BASE, equal_var=False)
    assert candidate["p"] == pytest.approx(test[1])
    assert candidate["t_interval"] == pytest.approx(list(test.confidence_interval()))
    assert (candidate["pairs"], candidate["is_paired"], candidate["verdict"]) == (3, False, "worse")


def test_one_common_seed_makes_no_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Pairs are made only if they are all seeds of one side."""
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.5, 0.6, 0.4], first=10)
    for rate, loss in ((0.1, 1.3), (0.2, 0.7)):
        make(tmp_path, 13, rate, loss)
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    test = stats.ttest_ind([0.5, 0.6, 0.4, 0.7], [*BASE, 1.3], equal_var=False)
    assert (candidate["is_paired"], candidate["pairs"]) == (False, 4)
    assert candidate["t_interval"] == pytest.approx(list(test.confidence_interval()))


@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_no_verdict_with_a_failed_seed(rate: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.5, 0.6, 0.7])
    make(tmp_path, 3, rate, 0.6, state="failed")
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    assert (candidate["verdict"], candidate["failed_seeds"]) == ("not distinguishable", [3])
    assert candidate["p"] < 0.05
    assert compare.main(["rate0.1", "rate0.2", "--runs", str(tmp_path)]) == 0
    assert "seed 3 failed" in capsys.readouterr().out


def test_two_runs_of_one_seed_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Such as children of parents with different seeds."""
    parents = [make(tmp_path, seed, 0.5, 1.0, group="parents") for seed in (0, 1)]
    children = [make(tmp_path, 0, 0.1, 1.0, model={"name": "experiment", "exp_id": name}) for name in parents]
    add(tmp_path, 0.2, BASE)
    message = refusal(capsys, tmp_path, "rate0.1", "rate0.2")
    assert all(name in message for name in children)
    assert "seed 0" in message


def test_edited_data_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Data of another name can differ."""
    runs = [*add(tmp_path, 0.1, BASE), *add(tmp_path, 0.2, BASE)]
    for number, run in enumerate(runs):
        folder = tmp_path / run / "checkpoints" / "step-00000004"
        folder.mkdir(parents=True)
        inputs = {"content of x": "b" if number == 5 else "a"} | ({"content of y": "c"} if number < 3 else {})
        (folder / "state.json").write_text(json.dumps({"inputs": inputs}))
    message = refusal(capsys, tmp_path, "rate0.1", "rate0.2")
    assert runs[5] in message
    assert "the content of x differs" in message


def test_samples_without_text_have_no_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for rate, nats in ((0.1, [3.0, 1.0, 0.0]), (0.2, [2.0, 1.0, 0.0])):
        for run in add(tmp_path, rate, [sum(nats) / 2 + seed * 0 for seed in range(3)], nats=nats):
            record = json.loads((tmp_path / run / VALIDATION).read_text())
            (tmp_path / run / VALIDATION).write_text(json.dumps({**record, "tokens": [1, 1, 0]}))
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    assert candidate["samples"] == 2
    assert all(map(math.isfinite, candidate["bootstrap_interval"]))


def test_means_are_those_of_the_compared_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, BASE[:2])
    content = report(capsys, tmp_path, "rate0.1", "rate0.2")
    assert content["base"]["mean"] == pytest.approx(1.1)
    assert content["candidates"][0]["base_mean"] == pytest.approx(1.05)


def test_seeds_of_the_base_that_were_left_out_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The candidate has the three seeds with which the base was worst."""
    add(tmp_path, 0.1, [1.0, 1.0, 1.01, 1.5, 1.52, 1.55])
    add(tmp_path, 0.2, [1.2, 1.21, 1.24], first=3)
    content = report(capsys, tmp_path, "rate0.1", "rate0.2")
    (candidate,) = content["candidates"]
    test = stats.ttest_ind([1.2, 1.21, 1.24], [1.0, 1.0, 1.01, 1.5, 1.52, 1.55], equal_var=False)
    assert (candidate["pairs"], candidate["is_paired"], candidate["verdict"]) == (3, True, "not distinguishable")
    assert candidate["p"] == pytest.approx(test[1])
    assert candidate["difference"] == pytest.approx(-0.3067, abs=1e-4)
    assert compare.main(["rate0.1", "rate0.2", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert all(f"{candidate[name]:.4g}" in text for name in ("mean", "base_mean", "difference"))
    for seed in (6, 7, 8):
        make(tmp_path, seed, 0.1, 1.5 + seed / 100)
    assert report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"][0]["verdict"] == "not distinguishable"


def test_expressions_select_experiments_with_all_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.8, 0.9, 1.9])
    expected = in_any_order(report(capsys, tmp_path, "rate0.1", "rate0.2"))
    assert expected["candidates"][0]["verdict"] == "not distinguishable"
    for expression in ("val_loss < 1.0", "loop.learning_rate == 0.2 and seed < 2"):
        assert in_any_order(report(capsys, tmp_path, "rate0.1", expression)) == expected


@pytest.mark.parametrize("state", ["stopped", "running"])
def test_no_verdict_with_an_unfinished_seed(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.5, 0.6, 0.7])
    make(tmp_path, 3, 0.2, 0.6, state=state)
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    assert (candidate["verdict"], candidate["failed_seeds"]) == ("not distinguishable", [3])


@pytest.mark.parametrize(
    ("values", "step"), [((0.5, 0.6), 0.001), ((0.1, 0.2), 0.0), ((0.14, 0.52), 0.0), ((0.25, 0.5), 0.0)]
)
def test_seeds_without_an_effect_are_no_sample(
    values: tuple[float, float], step: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Also if the mean of equal numbers differs from them by rounding."""
    for rate, value in zip((0.1, 0.2), values, strict=True):
        for seed in range(3):
            make(tmp_path, seed, rate, 1.0, higher=value - seed * step)
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2", "--metric", "em")["candidates"]
    assert candidate["difference"] == pytest.approx(values[1] - values[0])
    assert (candidate["verdict"], candidate["p"]) == ("not distinguishable", 1.0)


def test_many_candidates_can_be_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    for number in range(60):
        add(tmp_path, 1.0 + number, [0.1, 0.2 + number / 10**4, 0.3], group="many")
    verdicts = [each["verdict"] for each in report(capsys, tmp_path, "rate0.1", "many")["candidates"]]
    assert verdicts.count("better") == 60


@pytest.mark.parametrize("effect", ["-1", "nan", "inf"])
def test_a_minimum_effect_is_at_least_0(effect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, BASE)
    assert f"got {float(effect)}" in refusal(capsys, tmp_path, "rate0.1", "rate0.2", f"--min-effect={effect}")
    with pytest.raises(ConfigError, match="--min-effect"):
        progress.find_steps(tmp_path, results.load_rows(tmp_path)[0], "val_loss", min_effect=float(effect))


def test_a_score_is_that_of_its_recorded_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [*add(tmp_path, 0.1, BASE), *add(tmp_path, 0.2, BASE)]
    for number, run in enumerate(runs):
        value = 2.0 + number % 3 / 10
        record = {"step": 4, "data": {"": "d"}, "samples": 2, "tokens": [1, 1], "bytes": [2, 2]}
        nats = [2 * value * math.log(2)] * 2
        (tmp_path / run / VALIDATION).write_text(json.dumps({**record, "nats": nats}))
        row = {"step": 4, "val_bits_per_byte": value - (number == 4), "tokens": 100}
        (tmp_path / run / "scores.jsonl").write_text(json.dumps(row) + "\n")
    message = refusal(capsys, tmp_path, "rate0.1", "rate0.2", "--metric", "val_bits_per_byte")
    assert runs[4] in message
    assert "1.1" in message
    assert "2.1" in message


def change_record(runs: Path, run: str, **facts: Any) -> None:
    path = runs / run / VALIDATION
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


@pytest.mark.parametrize("facts", [{"code": "other"}, {"content": {"content of x": "b"}}])
def test_code_and_files_of_the_last_evaluation_are_compared(
    facts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = [*add(tmp_path, 0.1, BASE), *add(tmp_path, 0.2, BASE)]
    for run in runs:
        change_record(tmp_path, run, code=evaluation_digest(), content={"content of x": "a"})
    assert report(capsys, tmp_path, "rate0.1", "rate0.2")
    change_record(tmp_path, runs[4], **facts)
    assert runs[4] in refusal(capsys, tmp_path, "rate0.1", "rate0.2")


def test_several_versions_of_the_code_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    runs = [make(tmp_path, seed, 0.2, loss, commit=f"{seed}" * 40) for seed, loss in enumerate(BASE)]
    (warning,) = [line for line in report(capsys, tmp_path, "rate0.1", "rate0.2")["warnings"] if "versions" in line]
    assert warning.split(":")[0] in runs
    assert "3 versions" in warning


def test_missing_seeds_need_the_same_evaluation_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for rate, losses in ((0.1, BASE), (0.2, [1.0, 1.3, 1.1])):
        add(tmp_path, rate, losses, code="older")
    message = refusal(capsys, tmp_path, "rate0.1", "rate0.2", "--min-effect", "0.01", "--run-missing")
    assert "--run-missing" in message


def test_equal_experiments_are_not_distinguishable(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, BASE)
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    assert (candidate["verdict"], candidate["p"], candidate["difference"]) == ("not distinguishable", 1.0, 0.0)


def test_one_seed_has_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, [1.0])
    add(tmp_path, 0.2, [0.1])
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    assert (candidate["t_interval"], candidate["verdict"], candidate["more_seeds"]) == (None, "not distinguishable", 2)


def test_a_minimum_effect_is_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.8, 0.91, 1.0])
    for effect, verdict in (("0.15", "better"), ("0.25", "not distinguishable")):
        (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2", "--min-effect", effect)["candidates"]
        assert candidate["verdict"] == verdict
        if verdict == "better":
            assert candidate["p"] == pytest.approx(stats.ttest_1samp([-0.2, -0.19, -0.2], -float(effect))[1])


def test_number_of_missing_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Differences 0, 0.1, 0.2 have deviation 0.1: t(n - 1) * 0.1 / sqrt(n) <= 0.05 from n = 18."""
    base, other = add(tmp_path, 0.1, [1.0, 1.0, 1.0]), add(tmp_path, 0.2, [1.0, 1.1, 1.2])
    arguments = ("rate0.1", "rate0.2", "--min-effect", "0.05")
    (candidate,) = report(capsys, tmp_path, *arguments)["candidates"]
    assert 3 + candidate["more_seeds"] == next(
        n for n in range(3, 100) if stats.t.ppf(0.975, n - 1) * 0.1 / n**0.5 <= 0.05
    )
    assert compare.main([*arguments, "--runs", str(tmp_path), "--run-missing"]) == 0
    seeds = ",".join(map(str, range(3, 3 + candidate["more_seeds"])))
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 2
    for command, names in zip(commands, (base, other), strict=True):
        assert command.split()[3] in names
        assert command.endswith(f"--set seed={seeds} -sb {tmp_path} --data_path results/data")


def test_missing_seeds_are_first_those_of_the_other_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Seeds 0 to 2 of the base, 0 to 4 of the candidate: the base gets 3 and 4 before both get new ones."""
    base, other = add(tmp_path, 0.1, [1.0, 1.0, 1.0]), add(tmp_path, 0.2, [1.0, 1.1, 1.2, 1.1, 1.1])
    words = ["rate0.1", "rate0.2", "--runs", str(tmp_path), "--run-missing", "-d", "some data", "--min-effect"]
    for effect, of_base, of_other in (("0.11", [3, 4, 5], [5]), ("0.13", [3, 4], None)):
        assert compare.main([*words, effect, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        (candidate,) = content["candidates"]
        assert candidate["pairs"] + candidate["more_seeds"] == len([*range(3), *of_base])
        commands = [shlex.split(each) for each in content["commands"]]
        for command, ids, seeds in zip(commands, (base, other), (of_base, of_other), strict=False):
            assert command[3] in ids
            places = ["-sb", str(tmp_path), "--data_path", "some data"]
            assert command[4:] == ["--set", f"seed={','.join(map(str, seeds or []))}", *places]
        assert len(commands) == 1 + (of_other is not None)


def test_holm_corrects_for_several_candidates(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A p of 0.04 is enough for one candidate and not for two."""
    add(tmp_path, 0.1, [1.0, 1.0, 1.0])
    add(tmp_path, 0.2, [0.9, 0.87, 0.8])
    add(tmp_path, 0.3, [1.1, 0.9, 1.05])
    (alone,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    both = report(capsys, tmp_path, "rate0.1", "rate0.2", "rate0.3")["candidates"]
    assert both[0]["p"] == pytest.approx(2 * alone["p"])
    assert (alone["verdict"], both[0]["verdict"]) == ("better", "not distinguishable")


def test_samples_widen_the_bootstrap(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Equal differences of all seeds, from one of four samples: only the samples show how uncertain it is."""
    rows = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.2]]
    for rate, nats in zip((0.1, 0.2), rows, strict=True):
        add(tmp_path, rate, [float(np.mean(nats))] * 3, nats=nats)
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    assert candidate["samples"] == 4
    assert candidate["t_interval"] == pytest.approx([-0.2, -0.2])
    low, high = candidate["bootstrap_interval"]
    assert low < -0.2 < high == 0.0
    assert candidate["verdict"] == "not distinguishable"


def test_a_diverged_candidate_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.1, None, 0.1])
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2")["candidates"]
    assert (candidate["verdict"], candidate["diverged_seeds"], candidate["difference"]) == ("worse", [1], None)
    assert "rate0.2" not in refusal(capsys, tmp_path, "rate0.2", "rate0.1").split(":")[0]


def test_a_training_that_stopped_because_it_diverged_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As it failed, it has no scores of an evaluation, and no record of one."""
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.1, 0.2])
    run = tmp_path / make(tmp_path, 2, 0.2, 0.3, state="failed")
    (run / VALIDATION).unlink()
    arguments = ("rate0.1", "rate0.2")
    assert report(capsys, tmp_path, *arguments)["candidates"][0]["failed_seeds"] == [2]
    ledger.append(run, ledger.event("divergence", action="warn", attempt=1))
    assert report(capsys, tmp_path, *arguments)["candidates"][0]["verdict"] == "not distinguishable"
    ledger.append(run, ledger.event("divergence", action="stop", attempt=1))
    (candidate,) = report(capsys, tmp_path, *arguments)["candidates"]
    assert (candidate["verdict"], candidate["diverged_seeds"]) == ("worse", [2])


def test_words_select_groups_runs_ids_and_expressions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base, other = add(tmp_path, 0.1, BASE), add(tmp_path, 0.2, [0.8, 0.9, 1.0], higher=0.5)
    expected = in_any_order(report(capsys, tmp_path, "rate0.1", "rate0.2"))
    for word in (other[1], other[2][:10], str(tmp_path / other[0]), "loop.learning_rate > 0.1"):
        assert in_any_order(report(capsys, tmp_path, base[1], word)) == expected
    assert in_any_order(report(capsys, tmp_path, base[1], "recipe == 'toy'")) == expected  # the base is not a candidate
    for number, run in enumerate(other):
        row = {"step": 4, "val_loss": 1.0, "em": 0.5 + number / 100, "tokens": 100}
        (tmp_path / run / "scores.jsonl").write_text(json.dumps(row) + "\n")
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2", "--metric", "em")["candidates"]
    assert candidate["verdict"] == "better"
    (candidate,) = report(capsys, tmp_path, "rate0.1", "rate0.2", "--metric", "em", "--lower")["candidates"]
    assert candidate["verdict"] == "worse"


def test_parents_of_each_seed_are_one_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parents = add(tmp_path, 0.1, BASE)
    for rate in (0.3, 0.4):
        for seed, parent in enumerate(parents):
            make(tmp_path, seed, rate, 1 + rate * seed, model={"name": "experiment", "exp_id": parent})
    content = report(capsys, tmp_path, "rate0.3", "rate0.4")
    assert content["candidates"][0]["pairs"] == 3
    arguments = ["rate0.3", "rate0.4", "--runs", str(tmp_path), "--min-effect", "0.01", "--run-missing"]
    assert compare.main(arguments) == 1
    assert "parent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"data": "other"}, "validation data"),
        ({"code": "other"}, "evaluation code"),
        ({"data_settings": {"val_samples": 3}}, "settings of the evaluation"),
        ({"nats": [1.0] * 9}, "amount of validation text"),
    ],
)
def test_other_evaluations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], fact: str
):
    base, other = add(tmp_path, 0.1, BASE), add(tmp_path, 0.2, [0.8, 0.9, 1.0], **change)
    message = refusal(capsys, tmp_path, "rate0.1", "rate0.2")
    assert fact in message
    assert sum(name in message for name in [*base, *other]) == 2


def test_settings_of_answers_concern_scores_of_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.8, 0.9, 1.0], inference={"metrics": ["em"]})
    add(tmp_path, 0.3, [0.8, 0.9, 1.0], harness={"limit": 10})
    for group in ("rate0.2", "rate0.3"):
        assert report(capsys, tmp_path, "rate0.1", group)["candidates"][0]["verdict"] == "better"
        assert "settings of the evaluation" in refusal(capsys, tmp_path, "rate0.1", group, "--metric", "em")


@pytest.mark.parametrize("words", [("rate0.9", "rate0.1"), ("recipe == 'toy'", "rate0.1"), ("rate0.1", "rate0.1")])
def test_words_that_select_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, BASE)
    assert refusal(capsys, tmp_path, *words)


def test_text_names_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    add(tmp_path, 0.1, BASE)
    add(tmp_path, 0.2, [0.8, 0.95, 1.0])
    assert compare.main(["rate0.1", "rate0.2", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in ("-0.1833", "better", "loop.learning_rate: 0.1 -> 0.2"):
        assert part in text


def family(seeds: Sequence[int], losses: "np.ndarray", tokens: "np.ndarray") -> Family:
    """Runs with the `losses` (seeds, samples) of validation samples with these numbers of `tokens`."""
    rows, records = [], {}
    for seed, nats in zip(seeds, losses * tokens, strict=True):
        row = {"exp_id": f"{seed} {nats[0]}", "seed": seed, "state": "done", "step": 4}
        row["val_loss"] = nats.sum() / tokens.sum()
        rows.append(row)
        records[row["exp_id"]] = {"step": 4, "nats": nats.tolist(), "tokens": tokens.tolist()}
    runs = Family(rows, Path("none"))
    runs.records = records
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("number", [1, 4])
def test_error_rate_of_the_verdict(number: int, is_paired: bool):
    """Useless candidates, `number` at a time, with 3 seeds and 12 samples: a verdict in at most 5 % of the repetitions,
    and "better" in 2.5 %, up to two standard deviations. A real improvement is found."""
    random, repetitions = np.random.default_rng(0), 300
    wrong = wrong_better = right = 0

    def make_family(first: int, gain: float = 0.0) -> Family:
        losses = 3 + samples + random.normal(0, 0.1, (3, 1)) + random.normal(0, 0.05, (3, 12))
        return family(range(first, first + 3), losses - gain, tokens)

    for _ in range(repetitions):
        tokens, samples = random.integers(50, 100, 12), random.normal(0, 0.5, 12)
        base = make_family(0)
        starts = [0 if is_paired else 3 * i for i in range(1, number + 1)]
        verdicts = [each.verdict for each in comparison.compare(base, [*map(make_family, starts)], "val_loss")]
        wrong += any(verdict != comparison.SAME for verdict in verdicts)
        wrong_better += comparison.BETTER in verdicts
        (result,) = comparison.compare(base, [make_family(starts[0], 1.0)], "val_loss")
        right += result.verdict == comparison.BETTER
        assert (result.is_paired, result.samples) == (is_paired, 12)
    for count, rate in ((wrong, comparison.LEVEL), (wrong_better, comparison.LEVEL / 2)):
        assert count <= repetitions * rate + 2 * (repetitions * rate * (1 - rate)) ** 0.5
    assert right > 0.8 * repetitions
