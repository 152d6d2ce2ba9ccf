"""The divergence detector fires on what diverges or spikes, is quiet on what is only noisy, and decides alike after a
resume."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.training.divergence import Step, curves, detect, noisy
from src.errors import CheckpointError, ConfigError
from src.experiments.config import load
from src.training.divergence.detector import SEVERITY, Action, Config, Detector, Finding, severest

NAN, INF = float("nan"), float("inf")
HEALTHY = ("bert_h100_clean.json", "llmc_gpt2_124M_loss_gradnorm.csv", "quantizedfp4_noisy_19k.csv")


def config(**changes: Any) -> Config:
    """Without the rules of jumps and early climbs, which have their own tests."""
    return load(Config, {"jump_deviations": 1e18, "climb_ratio": 1e18, **changes}, "loop.divergence")


def seen(losses: Sequence[float], **changes: Any) -> list[tuple[str, int, int]]:
    """(kind, first step, step) of the findings on these losses."""
    return brief(detect([Step(i, loss) for i, loss in enumerate(losses, 1)], config(**changes)))


def brief(findings: Sequence[Finding]) -> list[tuple[str, int, int]]:
    return [(f.kind, f.first_step, f.step) for f in findings]


def wavy(count: int, level: float = 3.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level + noise * draw.gauss(0, 1) for _ in range(count)]


# --- what fires -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_fires_at_its_step_and_the_first_is_no_exception(bad: float):
    assert brief(Detector(config()).observe(1, bad)) == [("non_finite", 1, 1)]
    (finding,) = Detector(config()).observe(7, 2.0, bad)
    assert (finding.kind, finding.action, finding.message) == (
        "non_finite",
        "stop",
        f"step 7: the gradient norm is {bad}.",
    )
    assert len(Detector(config()).observe(7, bad, bad)) == 2


def test_an_overflow_that_the_loss_scaler_leaves_out_is_no_finding_but_its_loss_is_looked_at():
    assert Detector(config()).observe(1, 2.0, INF, skipped=True) == []
    assert brief(Detector(config()).observe(1, NAN, INF, skipped=True)) == [("non_finite", 1, 1)]


def test_non_finite_values_do_not_affect_later_limits():
    detector, other = Detector(config(on_non_finite="skip_batch")), Detector(config(on_non_finite="skip_batch"))
    for step, loss in enumerate(wavy(50), 1):
        detector.observe(step, loss, loss)
        other.observe(step, loss, loss)
    detector.observe(51, NAN, INF)
    assert {**detector.state(), "skips": []} == {**other.state(), "skips": []}


def test_a_spike_fires_at_its_mth_step_and_names_its_first():
    losses = [*wavy(200), 4.0, 4.2, 3.9, 3.8, *wavy(50, seed=1)]
    assert seen(losses) == [("loss_spike", 201, 203)]
    assert seen(losses, loss_steps=4) == [("loss_spike", 201, 204)]
    assert seen(losses, loss_steps=5) == []


def test_one_outlier_or_one_less_than_m_is_quiet_however_high():
    losses = wavy(300)
    losses[150] = 1e9
    losses[200:202] = [1e9, 1e9]
    assert seen(losses) == []


def test_a_rise_that_lasts_is_reported_once_and_another_after_a_calm_again():
    losses = [*wavy(200), *wavy(8, level=5.0), *wavy(100, seed=1), *wavy(8, level=5.0), *wavy(50, seed=2)]
    assert seen(losses) == [("loss_spike", 201, 203), ("loss_spike", 309, 311)]


def test_a_calm_step_within_a_rise_does_not_make_two_of_it():
    losses = [*wavy(200), 5.0, 5.0, 5.0, 3.0, 5.0, 5.0, 5.0, *wavy(100, seed=1)]
    assert seen(losses) == [("loss_spike", 201, 203)]


def test_outliers_that_make_no_rise_are_part_of_the_past_too():
    detector = Detector(config())
    for step, loss in enumerate(losses := [*wavy(200), 9.0, 9.0, 3.0], 1):
        assert detector.observe(step, loss) == []
    assert detector.state()["losses"]["values"] == losses[-100:]


def test_on_a_falling_curve_a_spike_is_measured_from_where_the_curve_is_now():
    """0.01 down a step, so the median of the whole window lies 0.5 above the loss, and that of its last quarter
    0.12."""
    losses = [10 - 0.01 * i + noise for i, noise in enumerate(wavy(400, level=0.0, noise=0.02))]
    losses[300:303] = [loss + 0.5 for loss in losses[300:303]]
    assert seen(losses) == [("loss_spike", 301, 303)]


def test_with_skip_batch_each_further_step_of_the_rise_is_reported_as_each_batch_is_to_be_skipped():
    losses = [*wavy(200), *wavy(6, level=5.0), *wavy(100, seed=1)]
    assert seen(losses, on_loss_spike="skip_batch") == [("loss_spike", 201, step) for step in (203, 204, 205, 206)]


def test_a_new_level_becomes_the_normal_one_so_that_not_all_batches_are_skipped_for_ever():
    findings = seen([*wavy(200), *wavy(300, level=5.0)], on_loss_spike="skip_batch", skipped_steps=100)
    assert 1 < len([f for f in findings if f[0] == "loss_spike"]) < 30


def test_a_jump_in_the_third_step_of_a_training_fires():
    """As in the first steps of the logged n16 run: 12.44, 12.45, 41.03, 43.06, 38.14, and slowly down."""
    assert seen([12.44, 12.45, 41.03, 43.06, 38.14, 33.69, 31.23, 25.64]) == [("loss_spike", 3, 5)]


def test_a_training_that_diverges_in_its_second_step_fires_though_there_is_but_one_value_to_judge_by():
    """As a tiny model does with learning rate 5. A first batch that happens to be easy is no divergence."""
    assert seen([3.656, 345.3, 685.0, 1185.3, 1279.1, 1214.9, 1385.1]) == [("loss_spike", 2, 4)]
    assert seen([1.0, 2.0, 2.1, 1.9, 2.0, 2.2, 2.0, 1.8, 2.1, 2.0]) == []


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_a_slow_divergence_fires(noise: float):
    """0.1 % a step: no step stands out from those before it."""
    losses = [loss * (1 if i < 400 else 1.001 ** (i - 400)) for i, loss in enumerate(wavy(1000, noise=3 * noise))]
    findings = [f for f in seen(losses) if f[2] > 400]
    assert "loss_drift" in {kind for kind, *_ in findings}


def test_a_drift_is_reported_again_only_when_it_has_gone_as_far_again():
    losses = [*wavy(200), *[3.0 + 0.001 * i for i in range(2000)]]
    steps = [step for kind, _, step in seen(losses) if kind == "loss_drift"]
    gaps = [b - a for a, b in pairwise(steps)]
    assert 2 <= len(steps) <= 60
    assert min(gaps) >= 0.8 * 2 * 0.005 * 3.0 * 1.21 / 0.001, "two floors of noise, at 0.001 a step"


def test_an_exploding_gradient_fires_at_once_and_a_large_one_when_it_stays():
    def norms(*values: float) -> list[tuple[str, int, int]]:
        past = wavy(200, level=1.0)
        return brief(detect([Step(i, 3.0, norm) for i, norm in enumerate([*past, *values, *past], 1)]))

    assert norms(100.0) == [("grad_norm", 201, 201)]
    assert norms(10.0, 10.0, 10.0, 10.0) == [("grad_norm", 201, 203)]
    assert norms(10.0, 10.0, 1.0, 10.0, 10.0) == []


def test_gradient_norms_that_nobody_measures_are_no_explosion():
    assert detect([Step(i, 3.0, 0.0) for i in range(1, 100)] + [Step(100, 3.0, 5.0)]) == []


def test_a_plateau_of_skipped_steps_fires_once_but_a_loss_scale_that_settles_does_not():
    def skips(*pattern: bool) -> list[tuple[str, int, int]]:
        return brief(detect([Step(i, None if skip else 3.0, None, skip) for i, skip in enumerate(pattern, 1)]))

    assert skips(*[True] * 18, *[False] * 200) == []
    assert skips(*[False] * 100, *[True] * 100) == [("skipped", 101, 125)]
    assert skips(*[False, True, True] * 30) == [("skipped", 2, 38)], "the 25th is the second of the 13th pair"
    assert skips(*[True] * 30, *[False, True] * 40, *[False] * 3, *[True] * 4) == [("skipped", 1, 25)], (
        "it hovers about 25"
    )
    assert skips(*[True] * 30, *[False] * 40, *[True] * 30) == [("skipped", 1, 25), ("skipped", 71, 95)]
    assert skips(*[True] * 30, *[False] * 60, *[True] * 30) == [("skipped", 1, 25), ("skipped", 91, 115)]


def test_batches_that_the_detector_itself_has_skipped_count_as_skipped_so_that_it_ends():
    findings = detect([Step(i, NAN if i > 100 else 3.0) for i in range(1, 200)], config(on_non_finite="skip_batch"))
    assert [f for f in findings if f.kind != "non_finite"] == [
        Finding("skipped", 125, findings[25].message, "stop", 101)
    ]
    assert findings[25].message == "step 125: 25 of the last 50 steps did not move the weights."


# --- what is quiet ----------------------------------------------------------------------------------------------------


def test_the_steep_fall_of_a_start_is_quiet_and_a_spike_in_it_fires():
    losses = [3 + 9 * math.exp(-i / 40) for i in range(400)]
    assert seen(losses) == []
    losses[60:64] = [12.0] * 4
    assert seen(losses) == [("loss_spike", 61, 63)]


@pytest.mark.parametrize(("noise", "tails"), [(0.01, 0.0), (0.05, 0.0), (0.2, 0.0), (0.05, 0.02)])
def test_noisy_falling_curves_are_quiet(noise: float, tails: float):
    """40 curves of 600 steps."""
    wrong = {seed: brief(findings) for seed in range(40) if (findings := detect(noisy(seed, 600, noise, 0.0, tails)))}
    assert len(wrong) <= 1, wrong


def test_a_loss_that_has_come_to_nothing_is_quiet_whatever_its_ratios():
    draw = random.Random(0)
    assert seen([*[math.exp(-i / 20) for i in range(200)], *[10 ** draw.uniform(-6, -3) for _ in range(500)]]) == []


# --- real curves ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs(shared_data: Path) -> dict[str, list[Step]]:
    return curves(shared_data / "logs")


def test_real_curves_that_only_look_noisy_are_quiet(logs: dict[str, list[Step]]):
    assert {name: brief(detect(logs[name])) for name in HEALTHY} == {name: [] for name in HEALTHY}


def test_real_spikes_fire(logs: dict[str, list[Step]]):
    """By the data's own description: Mixtral at 3850 and 4260; both GPT-2 runs in their first steps; and each says so
    within its length."""
    mixtral = [f.first_step for f in detect(logs["mixtral8x7b_h100_SPIKE.json"])]
    assert {3850, 4260} <= set(mixtral)
    assert len(mixtral) < 10
    assert [s.step for s in logs["mixtral8x7b_h100_SPIKE.json"]][-1] == 22685, "what was not recorded is not there"
    for kind in ("csv", "out"):
        assert brief(detect(logs[f"meg_ds_3d_gpt2_perf_n16-ds-on.{kind}"])) == [("loss_spike", 3, 5)]
        assert brief(detect(logs[f"meg_gpt2_base_n4_dp1_tp4_pp4-1809579.{kind}"])) == [("loss_spike", 22, 24)]


@pytest.mark.parametrize("name", HEALTHY)
def test_planted_faults_in_real_healthy_curves_fire(logs: dict[str, list[Step]], name: str):
    steps = logs[name][:3000]
    for at in (300, 1500, 2500):
        loss = steps[at].loss
        assert loss is not None

        def findings_with(changed: dict[int, float], at: int = at) -> list[tuple[str, int]]:
            part = [replace(s, loss=changed.get(i, s.loss)) for i, s in enumerate(steps[: at + 200])]
            number = {s.step: i for i, s in enumerate(part)}
            return [(f.kind, number[f.step] - at) for f in detect(part)]

        assert findings_with({at: NAN}) == [("non_finite", 0)]
        assert findings_with({at: 3 * loss}) == [("loss_jump", 0)]
        # The step before the spike may be high by itself, then the rise is a step older; never younger.
        *jumps, (kind, delay) = findings_with({at + i: 1.6 * loss for i in range(3)})
        assert kind == "loss_spike"
        assert {kind for kind, _ in jumps} <= {"loss_jump"}
        assert 0 <= delay <= 2
        assert any(
            kind in {"loss_drift", "loss_spike"}
            for kind, _ in findings_with({at + i: loss * (1 + 0.003 * i) for i in range(200)})
        )


# --- resume -----------------------------------------------------------------------------------------------------------


def troubled_curve(seed: int) -> list[Step]:
    """500 steps with something of everything."""
    draw, steps = random.Random(seed), noisy(seed, 500, 0.03, 0.2, 0.01)
    for at in (draw.randrange(20, 100), draw.randrange(150, 300)):
        for i in range(draw.randrange(2, 9)):
            steps[at + i] = replace(steps[at + i], loss=9.0, grad_norm=12.0)
    for at in draw.sample(range(500), 3):
        steps[at] = replace(steps[at], loss=draw.choice([NAN, INF]), grad_norm=draw.choice([NAN, 80.0]))
    for at in range(330, 330 + draw.randrange(20, 60)):
        steps[at] = replace(steps[at], grad_norm=INF, skipped=True)
    return [replace(s, loss=s.loss and s.loss * (1 + max(0, s.step - 400) / 100)) for s in steps]


@pytest.mark.parametrize("action", ["warn", "skip_batch"])
def test_a_restored_detector_makes_the_same_decisions(action: str):
    settings = config(on_loss_spike=action, on_grad_norm=action, on_non_finite="skip_batch", on_skipped="warn")
    kinds = set()
    for seed in range(6):
        steps = troubled_curve(seed)
        whole, detector = detect(steps, settings), Detector(settings)
        kinds |= {f.kind for f in whole}
        findings = []
        for s in steps:
            saved = json.dumps(detector.state(), allow_nan=False)
            detector = Detector(settings)
            detector.restore(json.loads(saved))
            findings += detector.observe(s.step, s.loss, s.grad_norm, s.skipped)
        assert findings == whole
    assert kinds == {"non_finite", "loss_spike", "loss_drift", "grad_norm", "skipped"}, "else the test is too easy"


def test_a_state_is_a_copy_and_an_empty_one_resets():
    detector = Detector(config())
    for step, loss in enumerate(wavy(50), 1):
        detector.observe(step, loss, loss)
    before = json.dumps(state := detector.state())
    detector.observe(51, 9.0, 9.0)
    assert json.dumps(state) == before
    other = Detector(config())
    other.restore(state)
    other.observe(51, 9.0, 9.0)
    assert json.dumps(state) == before
    other.restore({})
    assert other.state() == Detector(config()).state()


def test_a_state_of_another_version_is_refused():
    state = Detector(config()).state()
    for changed in ({**state, "more": 1}, {**state, "losses": {**state["losses"], "more": 1}}):
        with pytest.raises(CheckpointError, match="another version of this code"):
            Detector(config()).restore(changed)


# --- config and findings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windw": 100}, r"loop\.divergence: unknown key 'windw'\. Did you mean 'window'\?"),
        ({"window": 8}, r"loop\.divergence\.window: expected a number >= 16, got 8"),
        ({"loss_steps": 30}, r"loop\.divergence: loss_steps: 30 is more than a quarter of window = 100"),
        ({"on_loss_spike": "halt"}, (r"loop\.divergence\.on_loss_spike: unknown value 'halt'.*save_batch, skip_batch, "
                                    r"stop, warn")),
        ({"on_non_finite": "warn"}, (r"loop\.divergence\.on_non_finite: unknown value 'warn'.*Known: rewind, "
                                    r"skip_batch, stop")),
        ({"on_loss_drift": "skip_batch"}, r"loop\.divergence\.on_loss_drift: unknown value 'skip_batch'"),
    ],
)  # fmt: skip
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_of_several_findings_the_severest_counts():
    def of(*actions: Action) -> list[Finding]:
        return [Finding("loss_spike", 1, "", action, 1) for action in actions]

    assert set(SEVERITY) == set(get_args(Action))
    assert severest([]) is None
    assert severest(of("save_batch", "warn")) == "save_batch"
    assert severest(of("skip_batch", "stop", "rewind")) == "stop"


def test_the_suspects_are_the_steps_of_the_rise():
    assert list(Finding("loss_spike", 203, "", "warn", 201).suspects) == [201, 202, 203]
    assert list(Finding("loss_spike", 203, "", "warn", 1).suspects) == list(range(196, 204))
    assert list(Finding("loss_drift", 203, "", "warn", 100).suspects) == [203]


def falling(steps: int, seed: int = 0) -> list[float]:
    """A healthy curve from 11.6 down to about 6, with noise."""
    draw = random.Random(seed)
    return [(4 + 7.6 * (1 + step / 30) ** -0.5) * math.exp(0.02 * draw.gauss(0, 1)) for step in range(steps)]


def kinds_found(losses: list[float], **changes: Any) -> list[tuple[str, int]]:
    detector = Detector(Config(**changes))
    return [
        (finding.kind, finding.step)
        for step, loss in enumerate(losses, start=1)
        for finding in detector.observe(step, loss)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_an_early_climb_is_distinguished_from_its_healthy_twin(seed: int):
    """From 11.6 to 20.4 over 31 steps, at the very start."""
    draw = random.Random(seed)
    climbing = [(11.6 + 8.8 * step / 30) * math.exp(0.02 * draw.gauss(0, 1)) for step in range(31)]
    assert [kind for kind, _ in kinds_found(climbing) if kind != "loss_spike"] == ["loss_climb"]
    assert kinds_found(falling(90, seed)) == []


def test_a_climb_is_reported_once_and_a_restored_detector_knows_it():
    detector, losses = Detector(Config()), [11.6 + 0.3 * step for step in range(40)]
    assert not detector.state()["has_climbed"]
    assert [
        f.kind for step, loss in enumerate(losses, 1) for f in detector.observe(step, loss) if f.kind == "loss_climb"
    ] == ["loss_climb"]
    other = Detector(Config())
    other.restore(detector.state())
    assert other.state() == detector.state()
    assert other.has_climbed


@pytest.mark.parametrize("at", range(200, 560, 10))
def test_a_single_step_at_three_times_the_loss_is_found(at: int):
    losses = falling(600)
    losses[at] *= 3
    assert kinds_found(losses) == [("loss_jump", at + 1)]


def test_the_batches_of_a_jump_of_two_steps_can_be_skipped():
    losses = falling(600)
    losses[300], losses[301] = losses[300] * 3, losses[301] * 3
    detector = Detector(Config(on_loss_jump="skip_batch"))
    findings = [f for step, loss in enumerate(losses, start=1) for f in detector.observe(step, loss)]
    assert [(f.kind, f.step, f.action) for f in findings] == [
        ("loss_jump", 301, "skip_batch"),
        ("loss_jump", 302, "skip_batch"),
    ]
