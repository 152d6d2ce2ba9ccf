"""The command line: every recipe learns, groups run whole, and each mistake is one line with exit code 1."""

import copy
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from src.experiments.config import Places
from src.experiments.grid import ref, set_path
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import resolved_dict
from src.files import sha256
from src.launch.arguments import parse
from src.runs import plan
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from tests import toy
from tests.systems.assistants import train_assistants

Groups = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.write_data(tmp_path / "data")
    return tmp_path


def fails(arguments: list[str], groups: Groups, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run trainval, which must fail with one-line errors; returns them."""
    assert toy.main(arguments, groups, folder) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors
    return "\n".join(errors)


def changed(exp: dict[str, Any], **values: Any) -> dict[str, Any]:
    """`exp` with values at dotted paths, written with double underscores."""
    for path, value in values.items():
        exp = set_path(exp, path.replace("__", "."), value, must_exist=False)
    return exp


def rewritten(checkpoint: Path, weights: dict[str, torch.Tensor], *others: str) -> None:
    """Replace the weights of a checkpoint, and take them and `others` into its manifest as they are now."""
    save_file(weights, checkpoint / "model.safetensors")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in ("model.safetensors", *others):
        path = checkpoint / name
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


SHORT = changed(toy.BASE, loop__steps=4, loop__eval_every=2)


class TestTraining:
    def test_a_language_model_learns(self, folder: Path):
        exp = changed(toy.BASE, loop__steps=60, loop__eval_every=20)
        assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
        first, *_, last = toy.rows(folder, exp_id(exp))
        # A colour in four tokens cannot be known: log(8) / 4 = 0.52 nats a token, and the thing at the start of a
        # sentence.
        assert last["val_loss"] < 1.2 < first["train_loss"]

    @pytest.mark.slow
    def test_cross_attention_learns_to_read_its_context(self, folder: Path):
        exp = changed(
            toy.CROSSATTN, model__num_layers=2, loop__steps=200, loop__eval_every=100, loop__schedule="constant"
        )
        assert toy.main(["-e", "g", "--with-parents"], {"base": [toy.BASE], "g": [exp]}, folder) == 0
        first, last = (row for row in toy.rows(folder, exp_id(exp)) if "val_loss" in row)
        assert last["val_loss"] < last["val_loss_shuffled_context"] - 0.1
        assert last["val_loss"] < first["val_loss"]
        assert {"em", "f1", "precision", "recall"} <= last.keys()

    def test_a_group_runs_and_finished_experiments_are_skipped(self, folder: Path, caplog: pytest.LogCaptureFixture):
        caplog.set_level("INFO")
        group = [changed(SHORT, seed=seed) for seed in (0, 1)]
        assert toy.main(["-e", "g"], {"g": group}, folder) == 0
        assert caplog.text.count("done: ") == 2
        files = {exp_id(exp): (folder / "runs" / exp_id(exp) / "scores.jsonl").stat().st_mtime_ns for exp in group}
        assert toy.main(["-e", "g"], {"g": group}, folder) == 0
        assert {name: (folder / "runs" / name / "scores.jsonl").stat().st_mtime_ns for name in files} == files
        assert caplog.text.count("already done") == 2

    def test_reset_backs_up_and_starts_over(self, folder: Path):
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        before = (folder / "runs" / exp_id(SHORT) / "scores.jsonl").read_text()
        for _ in range(2):
            assert toy.main(["-e", "g", "-r", "1"], {"g": [SHORT]}, folder) == 0
        assert (folder / "runs" / exp_id(SHORT) / "scores.jsonl").read_text() == before, "the same numbers"
        assert len(list((folder / "runs" / "deleted").iterdir())) == 2

    def test_one_failing_experiment_does_not_stop_the_rest(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        wild = changed(SHORT, loop__learning_rate=1e30, loop__max_grad_norm=1e30)
        errors = fails(["-e", "g"], {"g": [wild, SHORT]}, folder, capsys)
        assert re.search(
            r"step \d: the (loss|gradient norm) is (nan|inf)\. .*The training stops before the update", errors
        )
        states = [json.loads((folder / "runs" / exp_id(e) / "status.json").read_text())["state"] for e in (wild, SHORT)]
        assert states == ["failed", "done"]

    def test_a_group_ends_with_its_failures(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        wild = changed(SHORT, loop__learning_rate=1e30, loop__max_grad_norm=1e30)
        *_, last = fails(["-e", "g"], {"g": [wild, SHORT]}, folder, capsys).splitlines()
        assert re.fullmatch(rf"error: 1 done, 1 failed: {exp_id(wild)} \(g\[0\]: .*step \d: the .*\)", last)
        assert "1 failed" not in fails(["-e", "g"], {"g": [wild]}, folder, capsys), "one error is enough"
        assert toy.main(["-e", "g"], {"g": [SHORT, changed(SHORT, seed=1)]}, folder) == 0
        assert "done" not in capsys.readouterr().err

    @pytest.mark.slow
    def test_a_failing_experiment_under_torchrun_does_not_stop_the_rest(self, folder: Path):
        wild = changed(SHORT, loop__learning_rate=1e30, loop__max_grad_norm=1e30)
        root = toy.project(folder, f"EXP_GROUPS = {{'g': [{wild!r}, {SHORT!r}]}}\n")
        done = toy.run(root, ["-e", "g"], folder, processes=2)
        assert done.returncode != 0
        assert "The training stops before the update" in done.stderr
        assert done.stderr.count("error: 1 done, 1 failed: ") == 1
        assert "Warning" not in done.stderr, "PyTorch's own, which Python's filters do not reach"
        states = [json.loads((folder / "runs" / exp_id(e) / "status.json").read_text())["state"] for e in (wild, SHORT)]
        assert states == ["failed", "done"]

    def test_an_evaluation_that_is_not_finite_is_never_the_best(self, folder: Path):
        exp = changed(SHORT, loop__best_metric="val_perplexity", loop__learning_rate=30.0, loop__max_grad_norm=1e9)
        assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
        assert any(row["val_perplexity"] is None for row in toy.rows(folder, exp_id(exp)))

    def test_early_stopping_ends_the_run(self, folder: Path):
        exp = changed(
            toy.BASE, loop__steps=50, loop__eval_every=1, loop__early_stopping={"patience": 2, "min_gain": 100.0}
        )
        assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
        assert toy.rows(folder, exp_id(exp))[-1]["step"] == 3

    def test_bfloat16_trains(self, folder: Path):
        assert toy.main(["-e", "g"], {"g": [changed(SHORT, loop__precision="bfloat16")]}, folder) == 0

    def test_the_micro_batch_changes_no_loss(self, folder: Path):
        group = [changed(SHORT, loop__micro_batch=size) for size in (1, 8)]
        assert toy.main(["-e", "g"], {"g": group}, folder) == 0
        one, eight = (toy.rows(folder, exp_id(exp)) for exp in group)
        for a, b in zip(one, eight, strict=True):
            assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)

    def test_checkpoints_rotate_and_the_best_stays(self, folder: Path):
        # The highest loss: so the first evaluation stays the best.
        exp = changed(toy.BASE, loop__steps=10, loop__eval_every=2, loop__best_metric="val_loss", loop__best_mode="max")
        assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
        steps = sorted(p.name for p in (folder / "runs" / exp_id(exp) / "checkpoints").glob("step-*"))
        assert steps == ["step-00000002", "step-00000008", "step-00000010"]
        assert json.loads((folder / "runs" / exp_id(exp) / "checkpoints" / "best.json").read_text()) == {"step": 2}

    def test_the_command_line_says_which_checkpoints_stay(self, folder: Path):
        exp = changed(toy.BASE, loop__steps=14, loop__eval_every=2, loop__best_metric="val_loss", loop__best_mode="max")
        rule = ["--log_every", "1", "--keep_last", "1", "--keep_every", "6", "--keep_best", "3"]
        assert toy.main(["-e", "g", *rule], {"g": [exp]}, folder) == 0
        steps = sorted(p.name for p in (folder / "runs" / exp_id(exp) / "checkpoints").glob("step-*"))
        evaluation_rows = [row for row in toy.rows(folder, exp_id(exp)) if "val_loss" in row]
        best = [row["step"] for row in sorted(evaluation_rows, key=lambda row: -row["val_loss"])[:3]]
        assert steps == [f"step-{step:08d}" for step in sorted({14, 6, 12, *best})]

    def test_the_rule_of_a_start_applies_from_its_first_step(self, folder: Path):
        """Also where a kill came between the last checkpoint and what it makes superfluous."""
        exp = changed(toy.BASE, loop__steps=8, loop__eval_every=2, loop__best_metric="val_loss", loop__best_mode="max")
        assert toy.main(["-e", "g", "--keep_last", "4"], {"g": [exp]}, folder) == 0
        run = folder / "runs" / exp_id(exp)
        assert len(list((run / "checkpoints").glob("step-*"))) == 4
        (run / "status.json").unlink()
        assert toy.main(["-e", "g", "--keep_last", "1"], {"g": [exp]}, folder) == 0
        best = json.loads((run / "checkpoints" / "best.json").read_text())["step"]
        assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == sorted(
            {f"step-{best:08d}", "step-00000008"}
        )

    def test_checkpoints_cannot_stay_where_none_is_written(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        refusal = fails(["-e", "g", "--keep_every", "3"], {"g": [changed(SHORT, loop__eval_every=2)]}, folder, capsys)
        assert "g[0]: --keep_every: checkpoints are written every 2 steps, not at each multiple of 3." in refusal

    @pytest.mark.slow
    def test_wandb_logs_to_files_unless_entity_and_project_are_given(self, folder: Path):
        root = toy.project(folder, f"EXP_GROUPS = {{'g': [{SHORT!r}]}}\n")
        done = toy.run(root, ["-e", "g", "--wandb_project_name", "p", "--wandb_log_gradients", "false"], folder)
        assert done.returncode == 0, done.stderr
        assert list((folder / "runs" / exp_id(SHORT) / "wandb").glob("offline-run-*/run-*.wandb"))

    def test_wandb_without_a_key_says_what_to_do(self, folder: Path):
        root = toy.project(folder, f"EXP_GROUPS = {{'g': [{SHORT!r}]}}\n")
        arguments = ["-e", "g", "--wandb_project_name", "p", "--wandb_entity_name", "e"]
        bare = {k: v for k, v in toy.environment().items() if not k.startswith("WANDB_")} | {"HOME": str(folder)}
        done = toy.run(root, arguments, folder, variables=bare)
        assert done.returncode == 1
        assert "error: g[0]: wandb: " in done.stderr
        assert "wandb login" in done.stderr
        assert "Traceback" not in done.stderr


class TestLineage:
    def test_the_child_starts_from_the_parent(self, folder: Path):
        child = changed(SHORT, model=ref(SHORT), loop__steps=1, loop__learning_rate=1e-30)
        assert toy.main(["-e", "child", "--with-parents"], {"base": [SHORT], "child": [child]}, folder) == 0
        parent, derived_exp = (
            load_file(folder / "runs" / exp_id(e) / "checkpoints" / s / "model.safetensors")
            for e, s in ((SHORT, "step-00000004"), (child, "step-00000001"))
        )
        assert parent.keys() == derived_exp.keys()
        assert all(torch.allclose(parent[name], derived_exp[name]) for name in parent)

    def test_a_changed_parent_is_another_child(self):
        assert exp_id(changed(SHORT, model=ref(SHORT))) != exp_id(changed(SHORT, model=ref(changed(SHORT, seed=1))))

    def test_a_missing_parent_is_named(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        errors = fails(["-e", "crossattn"], toy.GROUPS, folder, capsys)
        assert f"crossattn[0]: it starts from base[0] ({exp_id(toy.BASE)}), which has not been run" in errors
        assert "--with-parents" in errors

    def test_a_parent_that_nobody_knows_is_named(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert "neither" in fails(["-e", "crossattn", "--dry-run"], {"crossattn": [toy.CROSSATTN]}, folder, capsys)


class TestPlans:
    def test_list_and_dry_run_start_nothing(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert toy.main(["--list"], toy.GROUPS, folder) == 0
        assert toy.main(["-e", "crossattn", "--dry-run", "--with-parents"], toy.GROUPS, folder) == 0
        out = capsys.readouterr().out
        assert re.search(r"^base +1 +lm: gpt_bigcode on toy_text$", out, re.MULTILINE)
        assert re.search(r"^crossattn +1 +crossattn: base\[0\] on toy_qa$", out, re.MULTILINE)
        assert "2 experiments: 0 done, 2 to run." in out
        assert not (folder / "runs").exists()

    def test_the_list_of_a_group_says_what_differs_and_that_of_one_experiment_has_its_dict(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ):
        groups = {"g": [SHORT, SHORT | {"seed": 5}]}
        assert toy.main(["-e", "g", "--list"], groups, folder) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split() for line in lines] == [
            [exp_id(exp), f"g[{i}]", f"seed={exp['seed']}"] for i, exp in enumerate(groups["g"])
        ]
        assert toy.main(["--exp_id", exp_id(SHORT)[:10], "--list"], groups, folder) == 0
        name, _, exp = capsys.readouterr().out.split(maxsplit=2)
        assert (name, json.loads(exp)["loop"]) == (exp_id(SHORT), SHORT["loop"])

    def test_a_damaged_status_is_reported(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        (folder / "runs" / exp_id(SHORT) / "status.json").write_text("{")
        assert toy.main(["-e", "g", "--dry-run"], {"g": [SHORT]}, folder) == 1
        output = capsys.readouterr()
        assert "damaged" in output.out
        assert "status.json:1: not valid JSON" in output.err

    def test_set_and_steps_make_another_experiment(self, folder: Path):
        assert toy.main(["-e", "g", "--steps", "2", "--set", "loop.weight_decay=0"], {"g": [SHORT]}, folder) == 0
        exp = changed(SHORT, loop__steps=2, loop__weight_decay=0.0)
        assert (folder / "runs" / exp_id(exp) / "exp_dict.json").exists()

    def test_another_seed_of_a_run_is_in_its_groups(self, folder: Path):
        assert toy.main(["-e", "g", "h"], {"g": [SHORT], "h": [SHORT]}, folder) == 0
        assert toy.main(["--exp_id", exp_id(SHORT), "--set", "seed=7"], {}, folder) == 0
        assert SavedRun(folder / "runs" / exp_id(SHORT | {"seed": 7})).groups == ["g", "h"]

    def test_set_takes_several_values_as_sweep_agents_give_them(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        words = ["--set", "loop.steps=2", "loop.weight_decay=0.5", "--set", "seed=1", "--dry-run"]
        assert toy.main(["-e", "g", *words], {"g": [SHORT]}, folder) == 0
        assert exp_id(changed(SHORT, loop__steps=2, loop__weight_decay=0.5) | {"seed": 1}) in capsys.readouterr().out

    def test_several_values_make_a_grid_and_where_chooses_of_it(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        words = ["-e", "g", "--set", "seed=3,4,5", "--where", "seed > 3 and state == 'new'"]
        assert toy.main([*words, "--dry-run"], {"g": [SHORT]}, folder) == 0
        out = capsys.readouterr().out
        assert [line.split()[:3] for line in out.splitlines()[:-1]] == [
            [exp_id(SHORT | {"seed": seed}), "g[0]", f"seed={seed}"] for seed in (4, 5)
        ]
        assert toy.main([*words, "--job_option", "status"], {"g": [SHORT]}, folder) == 0
        head, *lines, last = capsys.readouterr().out.splitlines()
        assert "differs by" in head
        assert [re.split(" {2,}", line)[-1] for line in lines] == ["seed=4", "seed=5"]
        assert last == "2 experiments: 2 never"
        assert "--where: none of 1 experiments matches 'seed > 9'" in fails(
            ["-e", "g", "--where", "seed > 9"], {"g": [SHORT]}, folder, capsys
        )
        assert "unknown name 'sed'" in fails(["-e", "g", "--where", "sed > 9"], {"g": [SHORT]}, folder, capsys)

    @pytest.mark.parametrize(
        ("line", "endings"),
        [
            ("-e cross", ["crossattn"]),
            ("-j lo", ["local"]),
            ("--save_", ["--save_every"]),
            ("--job_option st", ["status"]),
        ],
    )
    def test_shell_completion_lists_endings(self, tmp_path: Path, line: str, endings: list[str]):
        root, line = toy.project(tmp_path, f"EXP_GROUPS = {toy.GROUPS!r}\n"), f"trainval.py {line}"
        requests = {
            "_ARGCOMPLETE": "1",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "told"),
        }
        subprocess.run([sys.executable, str(root / "trainval.py")], env=toy.environment() | requests, check=False)
        refusal = (tmp_path / "told").read_text().replace("\x0b", "\n").split()
        assert [word for word in refusal if word != "--savedir_base"] == endings

    def test_exp_id_runs_the_experiment_of_a_save_directory(self, folder: Path):
        assert toy.main(["-e", "g", "--steps", "2"], {"g": [SHORT]}, folder) == 0
        expected_id = exp_id(changed(SHORT, loop__steps=2))
        (folder / "runs" / expected_id / "status.json").unlink()
        assert toy.main(["--exp_id", expected_id], {}, folder) == 0

    def test_the_flags_of_the_seed_are_all_known(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        flags = [
            "-e",
            "g",
            "--steps",
            "25_000",
            "--log_every",
            "1_000",
            "--wandb_entity_name",
            "e",
            "--wandb_project_name",
            "p",
            "--wandb_run_name",
            "n",
            "--wandb_log_gradients",
            "false",
            "-r",
            "1",
            "--dry-run",
            "--j",
            "local",
        ]
        assert toy.main(flags, {"g": [SHORT]}, folder) == 0
        assert changed(SHORT, loop__steps=25_000)["loop"]["steps"] == 25_000

    @pytest.mark.filterwarnings("ignore")  # those of haven at import
    def test_every_flag_of_haven_is_known(self):
        from haven import haven_wizard

        source = inspect.getsource(haven_wizard.get_args)
        flags = set(re.findall(r"""["'](--?[a-z]\w*)["']""", source))
        assert {"-e", "-sb", "-r", "-j", "--exp_id"} <= flags
        for flag in flags:
            value = "1" if flag in ("-r", "--reset") else "x"
            parse([flag, value], "", toy.ROOT)

    @pytest.mark.slow
    def test_a_launcher_runs_each_experiment_in_a_process_of_its_own(self, folder: Path):
        root = toy.project(folder, f"EXP_GROUPS = {{'g': [{SHORT!r}, {changed(SHORT, seed=1)!r}]}}\n")
        done = toy.run_cold(root, ["-e", "g", "-j", "local", "--python_binary", f"true ; {sys.executable}"], folder)
        assert done.returncode == 0, done.stderr
        for seed in (0, 1):
            run = folder / "runs" / exp_id(changed(SHORT, seed=seed))
            assert json.loads((run / "status.json").read_text())["state"] == "done"


class TestBadInput:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"loop__stps": 4}, r"g\[0\]\.loop: unknown key 'stps'\. Did you mean 'steps'\?"),
            ({"loop__steps": "20_000"}, r"g\[0\]\.loop\.steps: expected int, got '20_000' \(str\)"),
            ({"loop__steps": True}, r"g\[0\]\.loop\.steps: expected int, got True \(bool\)"),
            ({"loop__steps": 0}, r"g\[0\]\.loop\.steps: expected a number > 0, got 0"),
            ({"recipe": "lmm"}, r"g\[0\]\.recipe: unknown recipe 'lmm'\. Did you mean 'lm'\?"),
            ({"model": {"name": "gpt_bigcod"}}, (r"g\[0\]\.model\.name: unknown model 'gpt_bigcod'\. Did you mean "
                                                r"'gpt_bigcode'\?")),
            ({"loop__schedule": "cosin"}, r"g\[0\]\.loop\.schedule: unknown value 'cosin'\. Did you mean 'cosine'\?"),
            ({"data__corpus": "nothing"}, r"nothing: no such data set"),
            ({"data__sequence_tokens": 65}, (r"data\.sequence_tokens: 65 tokens are more than the 64 positions of the "
                                            r"model")),
            ({"loop__best_metric": "val_los"}, (r"loop\.best_metric: unknown score 'val_los'\. Did you mean "
                                               r"'val_loss'\?")),
        ],
    )  # fmt: skip
    def test_a_mistake_in_the_dict(
        self, folder: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], message: str
    ):
        assert re.search(message, fails(["-e", "g", "--dry-run"], {"g": [changed(SHORT, **values)]}, folder, capsys))
        assert not (folder / "runs").exists()

    @pytest.mark.parametrize("values", [{"recipe": "l" * 5000}, {"recipe": ["lm"] * 5000}, {"loop__steps": "1" * 5000}])
    def test_a_long_value_does_not_drown_the_message(
        self, folder: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]
    ):
        refusal = fails(["-e", "g", "--dry-run"], {"g": [changed(SHORT, **values)]}, folder, capsys)
        assert "..." in refusal
        assert len(refusal) < 1000

    def test_more_questions_than_the_dict_has_samples(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        """Found without data: --dry-run on a laptop tells it."""
        exp = changed(toy.CROSSATTN, data__val_samples=3, data__corpus="nothing", answers__questions=4)
        errors = fails(["-e", "g", "--dry-run", "--with-parents"], {"base": [toy.BASE], "g": [exp]}, folder, capsys)
        assert "answers.questions: 4 requested, but data.val_samples is 3." in errors

    @pytest.mark.parametrize("name", ["answers", "sampled"])
    def test_more_questions_than_samples_are_refused(self, folder: Path, capsys: pytest.CaptureFixture[str], name: str):
        exp = changed(train_assistants.SFT, data__val_samples=3)
        more = {"samples": 2} if name == "sampled" else {}
        del exp["answers"]
        exp[name] = {"questions": 4, "max_new_tokens": 2, "metrics": [{"name": "squad"}], **more}
        assert f"{name}.questions: 4 requested, but data.val_samples is 3." in fails(
            ["-e", "g", "--dry-run"], {"g": [exp]}, folder, capsys
        )

    def test_every_mistake_of_a_group_is_reported_at_once(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        group = [changed(SHORT, loop__stps=4, loop__eval_every="2"), changed(SHORT, model__hiden_size=3)]
        errors = fails(["-e", "g"], {"g": group}, folder, capsys)
        assert "g[0].loop: unknown key 'stps'" in errors
        assert "g[0].loop.eval_every: expected int" in errors
        assert "g[1].model: unknown key 'hiden_size'" in errors

    @pytest.mark.parametrize(
        ("recipe", "values", "message"),
        [
            ("crossattn", {"data": SHORT["data"]}, "data: expected 'qa', got 'text'"),
            (
                "crossattn",
                {"model": SHORT["model"]},
                "expected 'cross_attention' around a decoder; got 'gpt_bigcode'",
            ),
            (
                "lm",
                {"data": toy.CROSSATTN["data"]},
                "data: 'qa' is for 'cross_attention' around a decoder; this recipe reads data for a decoder",
            ),
            (
                "lm",
                {"model": toy.CROSSATTN["model"]},
                "model: expected a decoder, such as 'hf' or 'gpt_bigcode'; got 'cross_attention'",
            ),
            ("lm", {"seed": 2**63}, "seed: expected a number < 9223372036854775808"),
        ],
    )
    def test_parts_that_do_not_belong_to_the_recipe(
        self, folder: Path, capsys: pytest.CaptureFixture[str], recipe: str, values: dict[str, Any], message: str
    ):
        exp = {**(SHORT if recipe == "lm" else toy.CROSSATTN), **values}
        assert message in fails(["-e", "g", "--dry-run"], {"g": [exp]}, folder, capsys)

    def test_a_checkpoint_of_another_version(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        run = folder / "runs" / exp_id(SHORT)
        (run / "status.json").unlink()
        for checkpoint in (run / "checkpoints").glob("step-*"):
            state = json.loads((checkpoint / "state.json").read_text())
            del state["inputs"]
            (checkpoint / "state.json").write_text(json.dumps(state))
            rewritten(checkpoint, load_file(checkpoint / "model.safetensors"), "state.json")
        assert "g[0]: " in (errors := fails(["-e", "g"], {"g": [SHORT]}, folder, capsys))
        assert "from another version of this code. Restart with -r 1" in errors

    def test_a_finished_run_without_status_has_its_step(self, folder: Path):
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        status = folder / "runs" / exp_id(SHORT) / "status.json"
        status.unlink()
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        assert json.loads(status.read_text())["step"] == 4, "children look for the checkpoint of this step"

    def test_unknown_group(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert "-e: unknown group 'bse'. Did you mean 'base'?" in fails(["-e", "bse"], toy.GROUPS, folder, capsys)

    def test_two_equal_experiments_in_a_group(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert "g[1] is the same experiment as g[0]" in fails(
            ["-e", "g"], {"g": [SHORT, copy.deepcopy(SHORT)]}, folder, capsys
        )

    def test_impossible_placement(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        exp = changed(toy.CROSSATTN, model__num_layers=2, model__stride=2)
        errors = fails(["-e", "g", "--dry-run", "--with-parents"], {"base": [toy.BASE], "g": [exp]}, folder, capsys)
        assert "3" in errors
        assert "stride" in errors

    def test_the_flagship_needs_only_its_base_model(self, tmp_path: Path):
        (tmp_path / "data" / "nq").mkdir(parents=True)
        done = toy.run_cold(toy.ROOT, ["-e", "crossattn_starcoderbase-3b", "--dry-run"], tmp_path)
        assert done.returncode == 1
        assert "hf download bigcode/starcoderbase-3b" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("EXP_GROUPS = {\n  'a': [}\n", r"exp_configs\.py:2: "),
            ("EXP_GROUPS = {'a': [UNDEFINED]}\n", r"exp_configs\.py:1: NameError: name 'UNDEFINED' is not defined"),
            ("EXP_GROUPS = [{'recipe': 'lm'}]\n", r"exp_configs\.py: expected a dict called EXP_GROUPS, got list"),
            (
                "from src.experiments.grid import override\nEXP_GROUPS = {'a': [override({'x': 1}, {'y.z': 1})]}\n",
                r"exp_configs\.py:2: .*'y'",
            ),
        ],
    )
    def test_exp_configs_that_does_not_run(self, tmp_path: Path, text: str, message: str):
        done = toy.run_cold(toy.project(tmp_path, text), ["--list"], tmp_path)
        assert done.returncode == 1
        assert re.search(message, done.stderr)
        assert "Traceback" not in done.stderr

    def test_malformed_data_names_file_line_and_field(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        path = folder / "data" / "toy_text" / "train.jsonl"
        lines = path.read_text().splitlines()
        lines[2] = lines[2].replace('"text"', '"txet"')
        path.write_text("\n".join(lines) + "\n")  # as long as before, so that only the reader can tell
        assert re.search(r"toy_text/train\.jsonl:3: field 'text'", fails(["-e", "g"], {"g": [SHORT]}, folder, capsys))

    def test_data_that_changed_since_the_start(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        (folder / "runs" / exp_id(SHORT) / "status.json").unlink()
        shutil.rmtree(folder / "data" / "toy_text")
        rows = [{"text": "the thing0 is red . " * 9, "source": "s"}] * 20
        with toy.new_directory(folder / "data" / "toy_text") as folder_of_data:
            for split in ("train", "val"):
                (folder_of_data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        message = f"g[0]: run {exp_id(SHORT)} has read other data: {folder / 'data' / 'toy_text'} changed"
        assert message in fails(["-e", "g"], {"g": [SHORT]}, folder, capsys)

    def test_a_tokenizer_that_changed_since_the_start(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        """Packed rows are cut by its tokens."""
        packed = {"name": "packed", "documents": {"name": "documents", "corpus": "toy_text"}, "sequence_tokens": 16}
        exp = changed(SHORT, data=packed)
        assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
        (folder / "runs" / exp_id(exp) / "status.json").unlink()
        path = folder / "data" / "toy_tokenizer" / "tokenizer.json"
        vocabulary = json.loads(path.read_text())["model"]["vocab"]
        ids = {word: f'"{word}": {vocabulary[word]}' for word in ("blue", "pink")}
        text = path.read_text()
        assert all(entry in text for entry in ids.values())
        path.write_text(
            text.replace(ids["blue"], f'"blue": {vocabulary["pink"]}').replace(
                ids["pink"], f'"pink": {vocabulary["blue"]}'
            )
        )
        assert "inputs changed since the start of the run: tokenizer." in fails(
            ["-e", "g"], {"g": [exp]}, folder, capsys
        )

    def test_a_parent_that_changed_since_the_start(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        child = changed(SHORT, model=ref(SHORT))
        groups = {"base": [SHORT], "child": [child]}
        assert toy.main(["-e", "child", "--with-parents"], groups, folder) == 0
        (folder / "runs" / exp_id(child) / "status.json").unlink()
        parent = folder / "runs" / exp_id(SHORT) / "checkpoints" / "step-00000004"
        weights = load_file(parent / "model.safetensors")
        rewritten(parent, {name: tensor + 1 for name, tensor in weights.items()})
        errors = fails(["-e", "child"], groups, folder, capsys)
        assert f"inputs changed since the start of the run: parent {exp_id(SHORT)}/last." in errors

    def test_a_held_save_directory(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        recipe = load_experiment(SHORT, "g")
        with RunDir.open(folder / "runs", SHORT, resolved_dict(recipe, key="recipe")):
            assert f"process {os.getpid()}" in fails(["-e", "g"], {"g": [SHORT]}, folder, capsys)

    def test_a_damaged_checkpoint_falls_back_to_the_one_before(self, folder: Path, caplog: pytest.LogCaptureFixture):
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        run = folder / "runs" / exp_id(SHORT)
        (run / "status.json").unlink()
        weights = run / "checkpoints" / "step-00000004" / "model.safetensors"
        good = weights.read_bytes()
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        assert re.search(r"step-00000004: damaged, so it is skipped", caplog.text)
        assert "continues from step 2." in (run / "logs" / "train.log").read_text()
        assert weights.read_bytes() == good, "trained again from step 2, to the same bits"

    def test_a_checkpoint_of_another_model(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        assert toy.main(["-e", "g"], {"g": [SHORT]}, folder) == 0
        run = folder / "runs" / exp_id(SHORT)
        (run / "status.json").unlink()
        for checkpoint in (run / "checkpoints").glob("step-*"):
            rewritten(checkpoint, {"x": torch.zeros(1)})
        assert "for a different model" in fails(["-e", "g"], {"g": [SHORT]}, folder, capsys)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "nothing to run"),
            (["-e", "g", "--python_binary", "x"], "--python_binary: only for launched jobs"),
            (
                ["-e", "g", "-j", "local", "--python_binary", "env A=hf_xyzzyxyzzy torchrun"],
                "--python_binary: contains",
            ),
            (["-e", "g", "--log_every", "0"], "--log_every: expected at least 1, got 0"),
            (["-e", "g", "--save_every", "0"], "--save_every: expected at least 1, got 0"),
            (["-e", "g", "--stop_after", "0"], "--stop_after: expected seconds above 0, got 0"),
            (["-e", "g", "--max_host_memory", "90"], "--max_host_memory: expected a share between 0 and 1, got 90"),
            (
                ["-e", "g", "--num_workers", "-1"],
                "--num_workers: expected at least 0, got -1",
            ),
            (
                ["-e", "g", "--statistics_every", "-1"],
                "--statistics_every: expected at least 0, got -1",
            ),
            (["-e", "g", "--fsdp", "--deepspeed", "x.json"], "--deepspeed and --fsdp: give one of them"),
            (["-e", "g", "--fsdp_replicas", "2"], "--fsdp_replicas: only for --fsdp"),
            (
                ["-e", "g", "--fsdp", "--fsdp_replicas", "2"],
                "--fsdp_replicas 2: 1 processes cannot be divided",
            ),
            (["-e", "g", "--fsdp_sharded_gradients"], "--fsdp_sharded_gradients: only for --fsdp"),
            (["-e", "g", "--keep_last", "0"], "--keep_last: expected at least 1, got 0"),
            (["-e", "g", "--keep_best", "0"], "--keep_best: expected at least 1, got 0"),
            (["-e", "g", "-j", "lokal", "--dry-run"], "-j: unknown job config 'lokal'. Did you mean 'local'?"),
            (["-e", "g", "--set", "loop.steps"], "--set: expected path=value"),
            (
                ["-e", "g", "--wandb_entity_name", "me"],
                "--wandb_entity_name: needs --wandb_project_name",
            ),
            (["--exp_id", "0" * 32], "not in exp_configs.py, and no run in"),
        ],
    )
    def test_a_mistake_on_the_command_line(
        self, folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
    ):
        assert message in fails(arguments, {"g": [SHORT]}, folder, capsys)

    @pytest.mark.parametrize("option", ["status", "kill"])
    def test_jobs_are_not_looked_after_by_every_rank(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
    ):
        monkeypatch.setenv("WORLD_SIZE", "2")
        message = (
            f"--job_option {option}: each process that torchrun started would do it. Start trainval.py with python."
        )
        assert message in fails(["-e", "g", "--job_option", option], {"g": [SHORT]}, folder, capsys)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_fp16_without_a_gpu(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        exp = changed(SHORT, loop__precision="float16")
        for words in ([], ["--dry-run"]):
            assert "'float16' needs a GPU" in fails(["-e", "g", *words], {"g": [exp]}, folder, capsys)
            assert not (folder / "runs" / exp_id(exp)).exists(), "said before anything is there"
        assert not plan.find_problems([plan.load(exp, "g", "g[0]")], Places(folder / "data", folder / "runs")), (
            "a job's machine may have one"
        )

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
    def test_a_full_disk_loses_nothing(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        runs = folder / "runs"
        runs.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(runs)], check=True)
        try:
            errors = fails(["-e", "g", "--steps", "40"], {"g": [SHORT]}, folder, capsys)
            assert "No space left on device" in errors
        finally:
            subprocess.run(["umount", str(runs)], check=True)
