"""PPO and GRPO: what they learn, what they report, kills, numbers of processes, and what they refuse."""

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from src.errors import ConfigError, RunError
from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import METRICS, MODELS, bind
from src.operations import interventions
from src.serving.pretrained import load_writer
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.rewards.reward_model import find_served
from src.systems.assistants.rl import scoring
from src.systems.assistants.rl.scoring import require_scores
from src.systems.assistants.rollouts import prompts
from src.systems.assistants.serving.conversation import Talk
from tests import toy
from tests.conftest import ROOT
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.serving.test_reward_server import serve
from tests.systems.assistants.train_assistants import REWARD, SFT, TALK, write_data
from tests.systems.assistants.train_policies import GRPO, PPO, rewards_of_tests

RECIPES = {"grpo": GRPO, "ppo": PPO}


@pytest.fixture(scope="module", autouse=True)
def _rewards_of_tests() -> Iterator[None]:
    with rewards_of_tests():
        yield


def project(folder: Path, exp: dict[str, Any]) -> Path:
    """A project whose group "x" is one experiment, and which knows the rewards of tests."""
    code = (
        "from src.experiments.registry import REWARDS\nREWARDS.modules['letters'] = "
        "'tests.systems.assistants.rl.letters'\n"
    )
    root = toy.project(folder, f"{code}EXP_GROUPS = {{'x': [{exp!r}]}}\n")
    (root / "tests").symlink_to(ROOT / "tests")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained: each recipe, and what both begin with."""
    folder = tmp_path_factory.mktemp("policies")
    write_data(folder / "data")
    groups = {"sft": [SFT], **{name: [exp] for name, exp in RECIPES.items()}}
    assert toy.main(["-e", *groups, "--save_every", "1", "--keep_last", "20"], groups, folder) == 0
    return folder


def run_of(folder: Path, exp: dict[str, Any]) -> Path:
    return folder / "runs" / exp_id(exp)


def weights(run: Path) -> bytes:
    return (max((run / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_says_what_rollouts_are_worth(folder: Path, name: str):
    row = toy.rows(folder, exp_id(RECIPES[name]))[-1]
    names = {
        "reward",
        "reward/letters",
        "answer_tokens",
        "ended",
        "entropy",
        "clipped",
        "em_mean@2",
        "em_mean@2_interval",
        "em_pass@2",
    }
    assert (
        names | ({"kl", "kl_weight", "explained_variance", "value_loss"} if name == "ppo" else {"equal_groups"})
        <= row.keys()
    )
    assert 0 <= row["reward"] <= 1
    assert 1 <= row["answer_tokens"] <= 4
    perf = [json.loads(line) for line in (run_of(folder, RECIPES[name]) / "perf.jsonl").read_text().splitlines()]
    assert {"generation_seconds", "rewards_seconds", "measuring_seconds"} <= perf[-1].keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_policy_answers_in_its_chat_template(folder: Path, name: str):
    """`src.serving.chat` with a policy continued the text of the question."""
    places = Places(folder / "data", folder / "runs")
    (policy, _), (start, _) = (load_writer(run_of(folder, exp), places) for exp in (RECIPES[name], SFT))
    assert isinstance(policy, Talk)
    assert isinstance(start, Talk)
    question = [Message("user", "1?")]
    assert policy.prompt_ids(question) == start.prompt_ids(question)
    policy.answer("1?", max_new_tokens=4, do_sample=False)
    assert [message.role for message in policy.messages] == ["user", "assistant"]


@pytest.mark.parametrize("name", RECIPES)
def test_each_iteration_is_recorded_once(folder: Path, name: str):
    samples = rollouts(run_of(folder, RECIPES[name]))
    steps = 4  # of an iteration: 2 passes over 16 rollouts, 8 at a time
    assert [(row["step"], row["iteration"]) for row in samples] == [(i * steps, i) for i in range(2) for _ in range(16)]
    if name == "grpo":
        assert all(len({row["prompt"] for row in samples[first : first + 8]}) == 1 for first in range(0, 32, 8)), (
            "groups of one prompt"
        )


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("step", [2, 4, 5])
def test_resume_from_any_step_of_an_iteration_is_bit_exact(folder: Path, tmp_path: Path, name: str, step: int):
    exp = RECIPES[name]
    world = tmp_path / "world"
    shutil.copytree(folder, world)
    run = run_of(world, exp)
    expected, samples = weights(run), rollouts(run)
    assert interventions.main(["rewind", str(run), "--to", str(step), "--why", "a test"]) == 0
    assert toy.main(["-e", "x"], {"x": [exp]}, world) == 0
    assert weights(run) == expected
    assert rollouts(run) == samples


def test_a_kl_of_the_reference_is_0_where_nothing_was_learned(folder: Path):
    first = toy.rows(folder, exp_id(PPO))[0]
    assert first["kl_weight"] == pytest.approx(0.1)
    assert abs(toy.rows(folder, exp_id(PPO))[-1]["kl"]) < 0.5


def test_skipped_steps_must_be_complete_iterations(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    world = tmp_path / "world"
    shutil.copytree(folder, world)
    run = run_of(world, GRPO)
    assert interventions.main(["rewind", str(run), "--to", "4", "--data", "skip:3", "--why", "a test"]) == 0
    assert toy.main(["-e", "x"], {"x": [GRPO]}, world) == 1
    assert "skip:3 from step 4 ends in the middle of an iteration of 4 steps" in capsys.readouterr().err
    assert interventions.main(["undo", str(run)]) == 0
    assert interventions.main(["rewind", str(run), "--to", "4", "--data", "skip:4", "--why", "a test"]) == 0
    assert toy.main(["-e", "x"], {"x": [GRPO]}, world) == 0
    assert [row["iteration"] for row in rollouts(run)] == [0] * 16 + [2] * 16


BAD = [
    (GRPO, {"data.group_size": 1}, "data.group_size: GRPO compares"),
    (GRPO, {"data.rollouts": 10}, "rollouts: expected a multiple of group_size = 8, got 10"),
    (GRPO, {"data": SFT["data"]}, "expected 'rollouts', got 'conversations'"),
    (GRPO, {"sampled": None}, "answers, sampled: both are missing"),
    (GRPO, {"rewards": []}, "rewards"),
    (GRPO, {"rewards": [{"name": "lenght"}]}, "Did you mean 'length'"),
    (GRPO, {"rewards": [{"name": "reward_model", "model": SFT["model"]}]}, "expected 'reward' around a decoder"),
    (GRPO, {"model": PPO["model"]}, "needs no values"),
    (GRPO, {"grpo": {"kl_weight": 0.1, "reference": "adapters_off"}}, "only model 'lora' has adapters"),
    (PPO, {"model": GRPO["model"]}, "expected 'with_values'"),
    (PPO, {"ppo.kl": None, "loop.divergence": {"max_kl": 1.0}}, "there is no KL without a reference"),
    (GRPO, {"loop.divergence": {"max_kl": 1.0}}, "there is no KL without a reference"),
    (
        GRPO,
        {"rewards": [{"name": "length", "free_tokens": 4, "worst_tokens": 4}]},
        "expected more than free_tokens = 4, got 4",
    ),
    (PPO, {"ppo.kl": {"reference": "adapters_off"}}, "only model 'lora' has adapters"),
]


@pytest.mark.parametrize(("exp", "change", "message"), BAD, ids=[message[:30] for *_, message in BAD])
def test_a_wrong_experiment_is_refused_in_one_line(exp: dict[str, Any], change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message.replace("(", "\\(")):
        load_experiment(override(exp, change), "here")


def test_a_value_head_on_an_encoder_decoder_is_refused():
    t5 = {"name": "t5", "path": "t5-small"}
    with pytest.raises(ConfigError, match="base: expected"):
        load_experiment(override(PPO, {"model.base": t5}), "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loop.sequences_per_step": 6}, "expected a multiple of loop.sequences_per_step"),
        (
            {"data.max_new_tokens": 90},
            "data.prompts.sequence_tokens: 154 tokens (64 + data.max_new_tokens 90) are more than the 96 positions",
        ),
        (
            {"sampled.max_new_tokens": 91},
            "data.prompts.sequence_tokens: 155 tokens (64 + sampled.max_new_tokens 91) are more than the 96 positions",
        ),
    ],
)
def test_mistake_is_refused_at_the_start(
    folder: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
):
    assert toy.main(["-e", "x", "--dry-run"], {"x": [override(GRPO, change)]}, folder) == 1
    assert message in capsys.readouterr().err


def test_a_missing_best_metric_is_reported_with_its_default(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Evaluations of policies have no loss, so the default is not one of their scores."""
    loop = {name: value for name, value in GRPO["loop"].items() if not name.startswith("best_")}
    assert toy.main(["-e", "x", "--dry-run"], {"x": [{**GRPO, "loop": loop}]}, folder) == 1
    message = capsys.readouterr().err
    assert "x[0]: loop.best_metric: missing, and its default 'val_loss' is not a score of this recipe." in message
    assert "loop.best_mode" in message
    assert "em_mean@2" in message
    for name in ("val_loss", "em_mean@2/typo"):
        exp = override(GRPO, {"loop.best_metric": name})
        assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, folder) == 1
        assert f"loop.best_metric: unknown score '{name}'." in capsys.readouterr().err


def test_a_prompt_longer_than_its_room_is_refused_or_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(folder, tmp_path / "world")
    long = {"prompt": [{"role": "user", "content": "a" * 90}], "answer": "1"}
    short = {"prompt": [{"role": "user", "content": "b"}], "answer": "2"}
    talk.write_rows(tmp_path / "world/data/asked", {"train": [short, long, short], "val": [talk.row("1?", "one")] * 4})
    exp = override(GRPO, {"data.prompts": {**TALK, "corpus": "asked"}})
    for words in (["--dry-run"], []):
        assert toy.main(["-e", "x", *words], {"x": [exp]}, tmp_path / "world") == 1
        assert "train.jsonl:2: the prompt has" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "_NUM_CHECKED_ROWS", 1)  # the training reads all prompts before its first step
        assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, tmp_path / "world") == 0
        assert toy.main(["-e", "x"], {"x": [exp]}, tmp_path / "world") == 1
    assert "train.jsonl:2: the prompt has" in capsys.readouterr().err
    without = override(exp, {"data.long_prompts": "leave_out"})
    assert toy.main(["-e", "x"], {"x": [without]}, tmp_path / "world") == 0
    assert {row["prompt"] for row in rollouts(run_of(tmp_path / "world", without))} == {"b"}


def test_row_without_the_key_of_a_reward_is_refused_before_the_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(folder / "data", tmp_path / "data")
    shutil.copytree(folder / "runs", tmp_path / "runs")
    prompts_only = [
        {"prompt": [{"role": "user", "content": "1?"}], **more} for more in ({"answer": "one"}, {}, {"answer": "two"})
    ]
    talk.write_rows(tmp_path / "data/asked", {"train": prompts_only, "val": [talk.row("1?", "one")] * 4})
    exp = override(
        GRPO, {"data.prompts": {**TALK, "corpus": "asked"}, "rewards": [{"name": "letters", "reads": "answer"}]}
    )
    for words in (["--dry-run"], []):
        assert toy.main(["-e", "x", *words], {"x": [exp]}, tmp_path) == 1
        assert (
            "asked/train.jsonl:2: a reward reads 'answer', but the row has the keys 'prompt'."
            in capsys.readouterr().err
        )
    monkeypatch.setattr(prompts, "_NUM_CHECKED_ROWS", 1)  # a large file is looked through when it is opened
    assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, tmp_path) == 0
    assert toy.main(["-e", "x"], {"x": [exp]}, tmp_path) == 1
    assert "asked/train.jsonl:2: a reward reads 'answer'" in capsys.readouterr().err
    assert not (run_of(tmp_path, exp) / "rollouts.jsonl").exists()


def test_values_can_come_from_a_separate_model(folder: Path, tmp_path: Path):
    """It learns beside the policy, and a training that goes on in the middle of an iteration ends with the same
    bits."""
    shutil.copytree(folder, tmp_path / "world")
    exp = override(PPO, {"model.critic": ref(SFT)})
    assert toy.main(["-e", "x", "--save_every", "1", "--keep_last", "20"], {"x": [exp]}, tmp_path / "world") == 0
    run = run_of(tmp_path / "world", exp)
    before, after = (
        load_file(max((r / "checkpoints").glob("step-*")) / "model.safetensors") for r in (run_of(folder, SFT), run)
    )
    name = "transformer.h.0.attn.c_attn.weight"
    policy, critic = after[f"base.{name}"], after[f"critic.{name.removeprefix('transformer.')}"]
    assert not torch.equal(policy, before[name])
    assert not torch.equal(critic, before[name])
    assert not torch.equal(policy, critic)
    expected = weights(run)
    assert interventions.main(["rewind", str(run), "--to", "6", "--why", "a test"]) == 0
    assert toy.main(["-e", "x"], {"x": [exp]}, tmp_path / "world") == 0
    assert weights(run) == expected


@pytest.mark.slow
def test_answers_of_continuous_batches_are_learned_from(folder: Path, tmp_path: Path):
    """All prompts are answered; a model that processes share is refused. One call takes 12 seconds, whatever it
    generates."""
    exp = override(
        GRPO,
        {
            "data.sampling": {"batching": "continuous"},
            "data.generation_batch": 16,
            "loop.steps": 1,
            "loop.eval_every": 1,
        },
    )
    shutil.copytree(folder, tmp_path / "world")
    assert toy.main(["-e", "x"], {"x": [exp]}, tmp_path / "world") == 0
    samples = rollouts(run_of(tmp_path / "world", exp))
    assert len(samples) == 16
    assert len({row["answer"] for row in samples}) > 4
    assert all(1 <= row["answer_tokens"] <= 4 for row in samples)
    shutil.copytree(folder, tmp_path / "shared")
    done = toy.run(project(tmp_path / "shared", exp), ["-e", "x", "--fsdp"], tmp_path / "shared", processes=2)
    assert done.returncode == 1
    assert "data.sampling.batching: continuous batching does not support sharded models" in done.stderr


def test_draws_of_an_evaluation_do_not_depend_on_the_micro_batch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(METRICS.modules, "digest", "tests.systems.assistants.rl.digest")
    shutil.copytree(folder, tmp_path / "world")
    sampled = {**GRPO["sampled"], "samples": 2, "metrics": [{"name": "digest"}]}
    exps = [{**SFT, "model": ref(SFT), "evaluation": {"micro_batch": size}, "sampled": sampled} for size in (2, 4, 8)]
    exps = [{key: value for key, value in exp.items() if key != "loop"} for exp in exps]
    assert toy.main(["-e", "x"], {"x": exps}, tmp_path / "world") == 0
    samples = [toy.rows(tmp_path / "world", exp_id(exp))[-1] for exp in exps]
    assert 0 < samples[0]["digest_mean@2"] < 1
    assert [row["digest_mean@2"] for row in samples] == [samples[0]["digest_mean@2"]] * 3


def test_a_reward_model_with_another_vocabulary_needs_a_template(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(folder, tmp_path / "world")
    talk.tokenizer([*talk.TOKENS, "<|new|>"]).save_pretrained(tmp_path / "world/data/other_tokenizer")
    judge = {"name": "reward", "base": {**SFT["model"], "tokenizer": "other_tokenizer"}}
    exp = override(GRPO, {"rewards": [{"name": "reward_model", "model": judge}]})
    assert toy.main(["-e", "x"], {"x": [exp]}, tmp_path / "world") == 1
    assert "another vocabulary than the policy" in capsys.readouterr().err
    exp_on_text = override(exp, {"rewards": [{"name": "reward_model", "model": judge, "template": "oasst"}]})
    assert toy.main(["-e", "x"], {"x": [exp_on_text]}, tmp_path / "world") == 0


def test_a_reward_model_reads_the_longest_rollout(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Told before the training, which would meet such a rollout at any time."""
    short = override(SFT["model"], {"max_positions": 20})
    judge = {"name": "reward_model", "model": {"name": "reward", "base": short}}
    exp = override(GRPO, {"rewards": [judge]})
    assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, folder) == 1
    assert (
        "reads at most 20 tokens, but a rollout can have 68: data.prompts.sequence_tokens 64 + data.max_new_tokens 4."
        in capsys.readouterr().err
    )
    exp = override(GRPO, {"rewards": [{**judge, "template": "oasst"}]})
    assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, folder) == 0


@pytest.mark.parametrize("variable", ["TRITON_HOST_RM", "TRITON_HOST_REF"])
def test_run_without_its_server_stops_with_code_75(
    folder: Path, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(folder, tmp_path / "world")
    assert toy.main(["-e", "x"], {"x": [REWARD]}, tmp_path / "world") == 0
    monkeypatch.setenv(variable, "http://127.0.0.1:9/nobody")
    monkeypatch.setattr(scoring, "MAX_WAIT_SECONDS", 0.0)
    assert toy.main(["-e", "x"], {"x": [PPO_WITH_REWARD_MODEL]}, tmp_path / "world") == 75
    assert "waited 0 s for" in (run_of(tmp_path / "world", PPO_WITH_REWARD_MODEL) / "ledger.jsonl").read_text()
    monkeypatch.delenv(variable)
    assert toy.main(["-e", "x"], {"x": [PPO_WITH_REWARD_MODEL]}, tmp_path / "world") == 0


def test_server_is_refused_for_a_model_of_no_experiment(folder: Path, tmp_path: Path):
    """Its weights could be any, so their digest says nothing about the server."""
    places = Places(folder / "data", folder / "runs")
    pretrained: Any = bind(MODELS, SFT["model"]).build(places)
    pretrained.save_pretrained(tmp_path / "pretrained")
    talk.tokenizer().save_pretrained(tmp_path / "pretrained")
    setting: Any = SimpleNamespace(places=places, wait=None)
    model = bind(MODELS, {"name": "reward", "base": {"name": "hf", "path": str(tmp_path / "pretrained")}})
    with pytest.raises(ConfigError, match="servers only have models of experiments, and x is not one"):
        find_served("TRITON_HOST_RM", "x", model, setting)


@pytest.mark.parametrize(
    "samples", [[1.0], [1.0, math.nan], [1.0, "2"], "12", None, [True, 1.0], [1.0, math.inf], [1.0, 10**400]]
)
def test_a_reward_that_gives_no_numbers_is_named(samples: object):
    with pytest.raises(RunError, match="reward 'mine'"):
        require_scores("mine", samples, 2)


LEARNING = {"loop.learning_rate": 1e-2, "data.rollouts": 64, "data.generation_batch": 64, "loop.sequences_per_step": 64}
LEARNING |= {"loop.micro_batch": 64, "data.max_new_tokens": 2, "data.passes": 1}


def begin_anew(exp: dict[str, Any], reward: str, seed: int, steps: int) -> dict[str, Any]:
    """From random weights, which nothing is kept near."""
    model = SFT["model"] if exp is GRPO else {"name": "with_values", "base": SFT["model"]}
    free = {"ppo": {"kl": None}} if exp is PPO else {}
    return override(
        exp,
        {
            **LEARNING,
            **free,
            "model": model,
            "rewards": [{"name": reward}],
            "seed": seed,
            "loop.steps": steps,
            "loop.eval_every": steps,
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_known_optimum_is_reached_and_noise_moves_nothing(folder: Path, tmp_path: Path, name: str):
    shutil.copytree(folder / "data", tmp_path / "data")
    letter_runs = [begin_anew(RECIPES[name], "letters", seed, 120) for seed in (1, 2, 3)]
    noisy = begin_anew(RECIPES[name], "noise", 1, 120)
    assert toy.main(["-e", "x"], {"x": [*letter_runs, noisy]}, tmp_path) == 0

    def share(exp: dict[str, Any], last: bool) -> float:
        samples = rollouts(run_of(tmp_path, exp))
        iteration = (max if last else min)(row["iteration"] for row in samples)
        texts = [row["answer"] for row in samples if row["iteration"] == iteration]
        return sum("a" <= text[:1] <= "z" for text in texts) / len(texts)

    for exp in letter_runs:
        assert share(exp, last=False) < 0.4
        assert share(exp, last=True) >= 0.95
    assert abs(share(noisy, last=True) - share(noisy, last=False)) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_that_is_killed_ends_with_the_same_bits(folder: Path, tmp_path: Path, name: str):
    from tests.faults import harness

    exp = override(RECIPES[name], {"loop.steps": 60, "loop.eval_every": 20})
    world = tmp_path / "world"
    shutil.copytree(folder, world)
    root = project(tmp_path, exp)
    command = toy.command(root, ["-e", "x", "--log_every", "4"], world, processes=2)
    training = harness.Training(command, world / "runs" / exp_id(exp), toy.environment(), warm=True)
    report = harness.disturb(training, 4, random.Random(7), tmp_path / "log", 2)
    assert len(report.faults) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_any_number_of_processes_draws_the_same_rollouts(folder: Path, tmp_path: Path, name: str):
    samples = {}
    exp = override(
        RECIPES[name], {"loop.steps": 1, "loop.eval_every": 1, "data.generation_batch": 6}
    )  # three batches: some only keep step
    for processes in (1, 2, 4):
        world = tmp_path / str(processes)
        shutil.copytree(folder, world)
        done = toy.run(project(world, exp), ["-e", "x"], world, processes)
        assert done.returncode == 0, done.stderr
        samples[processes] = rollouts(run_of(world, exp))
    for processes in (2, 4):
        for one, other in zip(samples[1], samples[processes], strict=True):
            assert (one["prompt"], one["answer"]) == (other["prompt"], other["answer"])
            assert {k: v for k, v in other.items() if isinstance(v, float)} == pytest.approx(
                {k: v for k, v in one.items() if isinstance(v, float)}, abs=1e-6
            )


def test_a_step_on_all_rollouts_needs_no_other_log_probabilities(folder: Path):
    """Of one step an iteration the ratios are 1: the same losses as with those of the policy that has sampled, to
    rounding."""
    from src.systems.assistants import grpo

    exp = override(
        GRPO,
        {"data.passes": 1, "loop.sequences_per_step": 16, "loop.micro_batch": 4, "loop.steps": 3, "loop.eval_every": 3},
    )
    assert toy.main(["-e", "x", "--log_every", "1"], {"x": [exp]}, folder) == 0
    short = toy.rows(folder, exp_id(exp))
    other = override(exp, {"loop.max_grad_norm": 1.0000001})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo.Config, "needs_sampled_logps", property(lambda _: True))
        assert toy.main(["-e", "x", "--log_every", "1"], {"x": [other]}, folder) == 0
    whole = toy.rows(folder, exp_id(other))
    assert [row["grad_norm"] for row in short] == pytest.approx([row["grad_norm"] for row in whole], rel=1e-4)
    assert short[0]["grad_norm"] > 0


MODES = {
    "replicated": [],
    "fsdp": ["--fsdp"],
    "zero2": ["--deepspeed", str(ROOT / "resources" / "ds_config_zero2.json")],
    "zero3": ["--deepspeed", str(ROOT / "resources" / "ds_config_zero3.json")],
}
LORA = {"name": "lora", "rank": 2, "alpha": 8.0, "target_modules": ["c_attn", "c_fc"], "base": ref(SFT)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_mode_of_two_processes_makes_the_same_rollouts(folder: Path, tmp_path: Path, name: str):
    """With adapters, which are switched off for the reference: the rollouts of the first iteration, and the loss of its
    first steps."""
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    off = {"reference": "adapters_off"}
    changes = (
        {"model.base": LORA, "ppo.kl": off} if name == "ppo" else {"model": LORA, "grpo": {"kl_weight": 0.1, **off}}
    )
    exp = override(RECIPES[name], changes)
    samples, rows = {}, {}
    for mode, words in MODES.items():
        world = tmp_path / mode
        shutil.copytree(folder, world)
        done = toy.run(project(world, exp), ["-e", "x", *words], world, processes=2)
        assert done.returncode == 0, (mode, done.stderr[-3000:])
        samples[mode] = [
            (row["prompt"], row["answer"]) for row in rollouts(run_of(world, exp)) if row["iteration"] == 0
        ]
        rows[mode] = toy.rows(world, exp_id(exp))[0]
    for mode in MODES:
        assert samples[mode] == samples["replicated"], mode
        assert rows[mode]["train_loss"] == pytest.approx(rows["replicated"]["train_loss"], rel=1e-3, abs=1e-4), mode


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_sharded_reference_changes_nothing(folder: Path, tmp_path: Path, name: str):
    """The policy, the copy for the KL, and PPO's critic are those of another experiment, and never built whole."""
    kl = {"weight": 0.1, "reference": "copy"}
    changes = {"ppo.kl": kl, "model.critic": ref(SFT)} if name == "ppo" else {"grpo": {"kl_weight": 0.1}}
    exp = override(RECIPES[name], changes)
    rows = {}
    for mode in ("replicated", "fsdp"):
        world = tmp_path / mode
        shutil.copytree(folder, world)
        done = toy.run(project(world, exp), ["-e", "x", *MODES[mode]], world, processes=2)
        assert done.returncode == 0, (mode, done.stderr[-3000:])
        rows[mode] = toy.rows(world, exp_id(exp))
        log = (run_of(world, exp) / "logs" / "train.log").read_text()
        assert log.count("each process loads its shard of these weights") == (2 if mode == "fsdp" else 0)
    for actual, expected in zip(rows["fsdp"], rows["replicated"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_policy_that_runs_away_is_stopped(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(folder, tmp_path / "world")
    exp = override(PPO, {"loop.divergence": {"max_kl": 1e-9}, "loop.learning_rate": 1e-2, "ppo.kl.estimate": "k3"})
    assert toy.main(["-e", "x"], {"x": [exp]}, tmp_path / "world") == 1
    assert "nats per token" in capsys.readouterr().err


@pytest.mark.slow
def test_a_policy_that_runs_away_is_taken_back_to_where_it_was_near(folder: Path, tmp_path: Path):
    """Before the iteration whose steps have moved it too far, over whole iterations: from there it is near again."""
    shutil.copytree(folder, tmp_path / "world")
    changes = {
        "loop.learning_rate": 3e-2,
        "loop.steps": 24,
        "loop.warmup_rate": 0.9,
        "ppo.kl": {"weight": 0.0, "estimate": "k3"},
    }
    free = override(PPO, changes)
    assert toy.main(["-e", "x", "--log_every", "1"], {"x": [free]}, tmp_path / "world") == 0
    kls = {row["step"]: row["kl"] for row in toy.rows(tmp_path / "world", exp_id(free)) if "kl" in row}
    limit = (kls[12] + kls[13]) / 2
    assert kls[12] < limit < kls[13], "steps 9 to 12 move it so far"
    exp = override(free, {"loop.divergence": {"max_kl": limit, "on_kl": "rewind", "max_rewinds": 1}})
    assert toy.main(["-e", "x", "--save_every", "1", "--keep_last", "30"], {"x": [exp]}, tmp_path / "world") == 75
    (branch,) = json.loads((run_of(tmp_path / "world", exp) / "branch.json").read_text())["branches"]
    assert branch["from_step"] == 8
    assert (8 + int(branch["data"].removeprefix("skip:"))) % 4 == 0


PPO_WITH_REWARD_MODEL = override(
    PPO, {"rewards": [{"name": "reward_model", "model": ref(REWARD), "squash": 2.0}], "ppo.kl": {"weight": 0.5}}
)


@pytest.mark.slow
def test_models_on_servers_give_the_same_numbers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Where a model runs is no part of an experiment: rollouts, losses and weights are the same to rounding."""
    for world in ("here", "there", "incorrect"):
        shutil.copytree(folder, tmp_path / world)
        assert toy.main(["-e", "x"], {"x": [REWARD]}, tmp_path / world) == 0
    assert toy.main(["-e", "x"], {"x": [PPO_WITH_REWARD_MODEL]}, tmp_path / "here") == 0
    places = Places(tmp_path / "there/data", tmp_path / "there/runs")
    with serve(places.runs / exp_id(REWARD), places) as judge, serve(places.runs / exp_id(SFT), places) as reference:
        monkeypatch.setenv("TRITON_HOST_RM", judge)
        monkeypatch.setenv("TRITON_HOST_REF", reference)
        assert toy.main(["-e", "x"], {"x": [PPO_WITH_REWARD_MODEL]}, tmp_path / "there") == 0
        monkeypatch.setenv("TRITON_HOST_RM", reference)
        capsys.readouterr()
        assert toy.main(["-e", "x"], {"x": [PPO_WITH_REWARD_MODEL]}, tmp_path / "incorrect") == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")
    here, there = (toy.rows(tmp_path / world, exp_id(PPO_WITH_REWARD_MODEL)) for world in ("here", "there"))
    assert [row.keys() for row in here] == [row.keys() for row in there]
    for one, other in zip(here, there, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert here[-1]["reward/reward_model"] != 0


def test_an_entropy_bonus_has_a_gradient_and_its_absence_none():
    from src.systems.assistants.rl.policy import score_tokens

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(5, 5))

        def forward(self, input_ids: Any, **_: Any) -> Any:
            return type("Found", (), {"logits": self.table[input_ids]})()

    batch = {"input_ids": torch.tensor([[0, 1, 2]]), "attention_mask": torch.ones(1, 3, dtype=torch.bool)}
    model = Model()
    assert not score_tokens(model, batch).entropies.requires_grad
    samples = score_tokens(model, batch, temperature=2.0, entropy_gradient=True)
    assert samples.entropies.requires_grad
    halved_logits = torch.distributions.Categorical(logits=model.table[torch.tensor([0, 1])] / 2)
    assert torch.allclose(samples.entropies[0, 1:], halved_logits.entropy())
    assert torch.allclose(samples.logps[0, 1:], halved_logits.log_prob(torch.tensor([1, 2])))
    assert samples.logps[0, 0] == 0
