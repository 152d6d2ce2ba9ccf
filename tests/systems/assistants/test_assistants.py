"""Supervised fine-tuning, reward models and preferences: what they learn, what they refuse, kills, and exports."""

import io
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.assistants import win_rate
from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import DATASETS, MODELS, bind
from src.models.export import main as export
from src.models.load import load
from src.models.prepared_tokenizer import end_ids
from src.serving import chat
from src.serving.pretrained import load_writer
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.serving.conversation import Talk
from src.systems.assistants.serving.sampling_report import Sampling
from src.training.validation import count_loss_tokens
from tests import toy
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.train_assistants import DPO, KTO, REPLIES, REWARD, SFT, TALK, write_data

CHAIN = {"sft": [SFT], "reward": [REWARD], "dpo": [DPO], "kto": [KTO]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistants")
    write_data(folder / "data")
    assert toy.main(["-e", *CHAIN], CHAIN, folder) == 0
    return folder


def data_of(folder: Path, config: dict[str, Any], split: str = "train") -> Any:
    return bind(DATASETS, config).build(Places(folder / "data", folder), talk.tokenizer(), split, 0)


def model_of(folder: Path, config: dict[str, Any] = SFT["model"]) -> Any:
    torch.manual_seed(0)
    return bind(MODELS, config).build(Places(folder / "data", folder / "runs"))


def test_each_link_of_the_chain_learns(folder: Path):
    rows = {name: toy.evaluations(folder, exp_id(group[0])) for name, group in CHAIN.items()}
    for name in CHAIN:
        assert rows[name][-1]["train_loss"] < rows[name][0]["train_loss"], name
    assert {"val_loss", "val_perplexity", "val_accuracy", "em", "f1"} <= rows["sft"][-1].keys()
    assert {"val_accuracy", "val_kendall", "val_spearman", "val_best_reward", "val_worst_reward", "accuracy"} <= rows[
        "reward"
    ][-1].keys()
    assert {"val_accuracy", "val_margin", "val_chosen_logratio", "margin"} <= rows["dpo"][-1].keys()
    assert not {"val_perplexity", "kendall"} & rows["reward"][-1].keys()


def test_win_rates_count_the_answers_that_differ(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    far, near = (override(DPO, {"loop.learning_rate": rate}) for rate in (0.1, 1e-9))
    assert toy.main(["-e", "far"], {"far": [far, near]}, folder) == 0
    monkeypatch.setattr(win_rate, "EXP_GROUPS", {**CHAIN, "far": [far, near, override(far, {"seed": 9})]})
    capsys.readouterr()
    places = Places(folder / "data", folder / "runs")
    words = ["reward", "replies", "far", "--prompts", "5", "--new_tokens", "4", "--lengths", "replies", "replies"]
    win_rate.main([*words, "--data_path", str(places.data), "-sb", str(places.runs)])
    lengths, first, *others, mean = capsys.readouterr().out.splitlines()
    # of 1 to 6, only to 2 the best reply ("two") is longer than the worst ("xx")
    assert lengths == "replies replies: the best reply is longer in 0.167 ± 0.000 of the rows"
    assert others == ["far[1]: no answer differs", "far[2]: not done"]

    prompts = [list(entry.messages) for entry in win_rate.ranked_rows(places.data / "replies")][:5]
    talks: Any = [load_writer(places.runs / exp_id(exp), places)[0] for exp in (far, SFT)]
    answers = [
        [each.generate(each.prompt_ids(prompt), max_new_tokens=4, do_sample=False)[0] for prompt in prompts]
        for each in talks
    ]
    pairs = [pair for pair in zip(prompts, *answers, strict=True) if pair[1] != pair[2]]
    judge = places.runs / exp_id(REWARD)
    share = win_rate.preferred_share(judge, places, pairs)
    longer = sum(len(mine) > len(other) for _, mine, other in pairs) / len(pairs)
    assert first == f"far[0]: preferred {share:.3f}, longer {longer:.3f} of {len(pairs)}"
    assert mean == f"far: preferred {share:.3f}, longer {longer:.3f}"
    rows = win_rate.ranked_rows(places.data / "replies")
    best_and_worst = [(row.messages, row.replies[0].content, row.replies[-1].content) for row in rows]
    accuracy = toy.evaluations(folder, exp_id(REWARD))[-1]["val_accuracy"]
    assert win_rate.preferred_share(judge, places, best_and_worst) == pytest.approx(accuracy)


def test_preferences_start_at_the_reference(folder: Path):
    """Before the first step no answer has gained anything, whatever its length: the loss is log 2."""
    from src.systems.assistants.preferences.reference import WithReference, reply_sums

    run = folder / "runs" / exp_id(DPO)
    logps = json.loads((run / "reference.json").read_text())["logps"]
    data = WithReference(data_of(folder, DPO["data"]), logps)
    batch: Any = data.collate([data.sample(0, i) for i in range(24)])
    model = model_of(folder, DPO["model"]).eval()
    with torch.no_grad():
        results = reply_sums(model, batch).logps
    assert torch.allclose(results, batch["reference_logps"], atol=1e-4)
    experiment: Any = load_experiment(DPO, "here")
    loss, named_sums = experiment.loss()(model, batch)
    assert loss.item() / experiment.count(batch) == pytest.approx(math.log(2), abs=1e-4)
    assert named_sums["margin"][0].item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("new_tokens", [False, True])
def test_adapters_switched_off_are_the_stored_reference(folder: Path, new_tokens: bool):
    """The same training both ways; with new tokens too, whose rows are learned beside the adapters."""
    base: dict[str, Any] = SFT["model"]
    if new_tokens:
        pretrained = model_of(folder)
        pretrained.save_pretrained(folder / "data" / "pretrained")
        talk.tokenizer(()).save_pretrained(folder / "data" / "pretrained")
        base = {"name": "hf", "path": "pretrained", "extra_tokens": talk.TOKENS}
    lora = {"name": "lora", "rank": 2, "alpha": 8.0, "target_modules": ["c_attn", "c_fc"], "base": base}
    with_stored = override(DPO, {"model": lora, "loop.steps": 16, "loop.learning_rate": 3e-2})
    with_adapters_off = override(with_stored, {"preference": {"reference": "adapters_off"}})
    assert toy.main(["-e", "both"], {"both": [with_stored, with_adapters_off]}, folder) == 0
    first, second = (toy.evaluations(folder, exp_id(exp))[-1] for exp in (with_stored, with_adapters_off))
    assert first["val_margin"] > 0.01
    assert {name: second[name] for name in first} == pytest.approx(first, rel=1e-4, abs=1e-5)
    assert not (folder / "runs" / exp_id(with_adapters_off) / "reference.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--fsdp"], ["--deepspeed", str(toy.ROOT / "resources" / "ds_config_zero3.json")]])
def test_adapters_are_switched_off_in_shards_too(folder: Path, tmp_path: Path, words: list[str]):
    lora = {"name": "lora", "rank": 2, "alpha": 8.0, "target_modules": ["c_attn", "c_fc"], "base": SFT["model"]}
    with_adapters_off = override(
        DPO, {"model": lora, "loop.learning_rate": 3e-2, "preference": {"reference": "adapters_off"}}
    )
    with_stored = override(with_adapters_off, {"preference": {"reference": "stored"}})
    assert toy.main(["-e", "stored"], {"stored": [with_stored]}, folder) == 0
    write_data(tmp_path / "data")
    shutil.copytree(folder / "runs" / exp_id(SFT), tmp_path / "runs" / exp_id(SFT))
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'switched': [{with_adapters_off!r}]}}\n")
    done = toy.run(root, ["-e", "switched", *words], tmp_path, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    expected, results = (
        toy.evaluations(folder, exp_id(with_stored))[-1],
        toy.evaluations(tmp_path, exp_id(with_adapters_off))[-1],
    )
    assert {name: results[name] for name in expected if "val_" in name} == pytest.approx(
        {name: value for name, value in expected.items() if "val_" in name}, rel=1e-3, abs=1e-5
    )


@pytest.mark.slow
def test_references_of_a_sharded_model_are_equal(folder: Path, tmp_path: Path):
    dpo = override(DPO, {"preference": {"reference": "stored"}})
    logps = {}
    for mode, words in (("replicated", []), ("fsdp", ["--fsdp"])):
        world = tmp_path / mode
        write_data(world / "data")
        shutil.copytree(folder / "runs" / exp_id(SFT), world / "runs" / exp_id(SFT))
        root = toy.project(world, f"EXP_GROUPS = {{'x': [{dpo!r}]}}\n")
        done = toy.run(root, ["-e", "x", *words], world, processes=2)
        assert done.returncode == 0, done.stderr[-3000:]
        run = world / "runs" / exp_id(dpo)
        logps[mode] = json.loads((run / "reference.json").read_text())["logps"], toy.rows(world, exp_id(dpo))
        log = (run / "logs" / "train.log").read_text()
        assert log.count("each process loads its shard of these weights") == (2 if mode == "fsdp" else 0)
    assert logps["fsdp"] == logps["replicated"]


def test_adapters_come_back_as_they_were(folder: Path):
    """Also where something fails while they are off."""
    from src.systems.assistants.preferences.reference import adapters_off

    lora = {
        "name": "lora",
        "rank": 2,
        "alpha": 8.0,
        "target_modules": ["c_attn"],
        "base": SFT["model"],
        "dropout_rate": 0.5,
    }
    model = model_of(folder, lora).train()
    trained_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    with adapters_off(model):
        assert not model.training
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert model.training
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained_names
    ids = torch.arange(8)[None]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    model.eval()
    with adapters_off(model):
        without = model(input_ids=ids).logits
    assert not torch.allclose(model(input_ids=ids).logits, without)
    assert torch.equal(model_of(folder).eval()(input_ids=ids).logits, without)


@pytest.mark.parametrize("recipe", ["sft", "reward", "dpo", "kto"])
@pytest.mark.parametrize("cuts", [(6, 0), (1, 5), (2, 2, 2)])
def test_a_gradient_does_not_depend_on_how_its_batch_is_cut(folder: Path, recipe: str, cuts: tuple[int, ...]):
    exp: Any = load_experiment(CHAIN[recipe][0], "here")
    data = data_of(folder, CHAIN[recipe][0]["data"])
    if recipe in ("dpo", "kto"):
        from src.systems.assistants.preferences.reference import WithReference

        run = folder / "runs" / exp_id(CHAIN[recipe][0])
        logps = json.loads((run / "reference.json").read_text())["logps"]
        data = WithReference(data, {name: [1.2 * value for value in values] for name, values in logps.items()})
    model = model_of(folder, CHAIN[recipe][0]["model"]).eval()
    gradients = []
    for parts in ((6,), cuts):
        model.zero_grad()
        first, count = 0, 0.0
        for size in filter(None, parts):
            batch: Any = data.collate([data.sample(0, i) for i in range(first, first + size)])
            loss = exp.training_loss()(model, batch)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
            first, count = first + size, count + getattr(exp, "count", count_loss_tokens)(batch)
        gradients.append(torch.cat([p.grad.flatten() / count for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients, atol=1e-6)


def test_packed_conversations_give_the_loss_of_padded_ones(folder: Path):
    """And the gradients: no conversation reads another. (Samples that the reference mixed into one raised, and would
    have, B3.)"""
    exp: Any = load_experiment(SFT, "here")
    packed = data_of(folder, {"name": "packed", "documents": TALK, "sequence_tokens": 96, "too_long": "drop"}, "val")
    padded = data_of(folder, TALK, "val")
    results = []
    for data in (packed, padded):
        model = model_of(folder).eval()
        batch: Any = data.collate([data.sample(0, i) for i in range(len(data))])
        loss = exp.training_loss()(model, batch)
        loss.backward()
        results.append(
            (loss.detach(), count_loss_tokens(batch), torch.cat([p.grad.flatten() for p in model.parameters()]))
        )
    assert results[0][1] == results[1][1]
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-6)
    assert torch.allclose(results[0][2], results[1][2], atol=1e-5)


def test_ranked_replies_are_rows_of_one_conversation(folder: Path):
    data = data_of(folder, {**REPLIES, "max_replies": 3})
    words = talk.tokenizer()
    batch: Any = data.collate([data.sample(0, i) for i in range(5)])
    assert batch["sample_of_row"].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4]
    learned_texts = [words.decode(ids[mask]) for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True)]
    assert learned_texts[:2] == ["one<end>", "two<end>"]
    assert learned_texts[5] == "three<end>"
    assert learned_texts[7] == "none of none of <end>", "of more replies than are read the best and the worst are kept"
    assert words.decode(batch["input_ids"][0][batch["attention_mask"][0]]) == "<|prompter|>1?<end><|assistant|>one<end>"


def write_one(folder: Path, prompt: str, replies: list[str]) -> None:
    replies_with_ranks = [{"content": text, "rank": rank} for rank, text in enumerate(replies)]
    rows = [{"messages": [{"role": "user", "content": prompt}], "replies": replies_with_ranks}]
    talk.write_rows(folder / "data" / "replies", {"train": rows, "val": rows})


@pytest.mark.parametrize(
    ("prompt", "reply", "least", "counts"),
    [
        ("p" * 10, "r" * 80, 32, (13, 51)),  # B5: a short prompt leaves the reply all the rest
        ("p" * 100, "r" * 10, 32, (53, 11)),  # a long prompt loses its beginning
        ("p" * 100, "r" * 80, 32, (32, 32)),  # both
        ("p" * 100, "r" * 80, 256, (32, 32)),  # B6: never longer than the whole, and the reply is not emptied
    ],
)
def test_long_prompts_are_cut_at_the_start_and_long_replies_at_the_end(
    tmp_path: Path, prompt: str, reply: str, least: int, counts: tuple[int, int]
):
    write_one(tmp_path, prompt, [reply, reply[1:]])
    results = data_of(tmp_path, {**REPLIES, "min_prompt_tokens": least}).sample(0, 0)
    ids, mask = results["input_ids"][0], results["loss_mask"][0]
    assert (mask.count(False), mask.count(True)) == counts
    assert mask == sorted(mask), "the reply is at the end"
    assert len(ids) <= 64


def test_only_ties_are_an_error(tmp_path: Path, folder: Path):
    replies = [{"content": text, "rank": 1} for text in ("a", "b")]
    rows = [{"messages": [{"role": "user", "content": "x"}], "replies": replies}]
    talk.write_rows(tmp_path / "data" / "replies", {"train": rows, "val": rows})
    with pytest.raises(DataError, match="no conversation has replies of different ranks"):
        data_of(tmp_path, REPLIES)


def test_shuffled_ranks_affect_only_the_training_split(folder: Path):
    plain, shuffled = data_of(folder, REPLIES), data_of(folder, {**REPLIES, "shuffled_ranks": True})
    ranks = [(plain.sample(0, i)["ranks"], shuffled.sample(0, i)["ranks"]) for i in range(24)]
    assert all(sorted(plain_ranks) == sorted(other) for plain_ranks, other in ranks)
    assert any(plain_ranks != other for plain_ranks, other in ranks)
    assert all(shuffled.sample(3, i)["ranks"] == other for i, (_, other) in enumerate(ranks)), "the same in every epoch"
    val = data_of(folder, {**REPLIES, "shuffled_ranks": True}, "val")
    assert [val.sample(0, i)["ranks"] for i in range(6)] == [
        data_of(folder, REPLIES, "val").sample(0, i)["ranks"] for i in range(6)
    ]


@pytest.mark.parametrize(
    ("exp", "changes", "match"),
    [
        (DPO, {"data": REPLIES}, "this recipe needs pairs: use 'ranked_replies' with max_replies 2"),
        (DPO, {"data": TALK}, "data: 'conversations' is for a decoder"),
        (
            DPO,
            {"data.writing": {"tags": {"dropout": 0.5}}},
            "stored references need the same text in each epoch",
        ),
        (DPO, {"preference": {"kind": "ipo", "label_flip_rate": 0.1}}, "'ipo' has no such setting"),
        (DPO, {"preference": {"kind": "hinge", "margin": 0.1}}, "margin: 'hinge' has no such setting"),
        (DPO, {"preference": {"kind": "apo_zero", "label_flip_rate": 0.1}}, "'apo_zero' has no such setting"),
        (DPO, {"preference": {"kind": "sigmoidal"}}, "preference.kind"),
        (DPO, {"preference": {"reference": "adapters_off"}}, "only model 'lora' has adapters to switch off"),
        (DPO, {"model": REWARD["model"]}, "expected a decoder"),
        (REWARD, {"model": SFT["model"]}, "model: expected 'reward' around a decoder"),
        (REWARD, {"data": TALK}, "data: 'conversations' is for a decoder"),
        (SFT, {"data": REPLIES}, "data: 'ranked_replies' is for 'reward' around a decoder"),
        (SFT, {"data.writing": {"template": "oassst"}}, "data.writing.template"),
    ],
)
def test_untrainable_experiments_are_refused(exp: dict[str, Any], changes: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        load_experiment(override(exp, changes), "here")


def test_answers_must_fit_after_their_prompts(folder: Path, capsys: pytest.CaptureFixture[str]):
    long = override(SFT, {"answers.max_new_tokens": 60})
    assert toy.main(["-e", "long", "--dry-run"], {"long": [long]}, folder) == 1
    assert (
        "data.sequence_tokens: 124 tokens (64 + answers.max_new_tokens 60) are more than the 96 positions of the model."
        in capsys.readouterr().err
    )


def test_a_reward_model_is_exported_with_its_rewards(folder: Path, tmp_path: Path):
    """A padding token of its exported: here the tokenizer's. Transformers would take another for the end."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = folder / "runs" / exp_id(REWARD)
    assert (
        export([str(run), str(tmp_path / "out"), "--data_path", str(folder / "data"), "-sb", str(folder / "runs")]) == 0
    )
    model, _ = load(run, Places(folder / "data", folder / "runs"))
    theirs, exported_rewards = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    assert theirs.config.pad_token_id == exported_rewards.pad_token_id != exported_rewards.eos_token_id
    texts = ["<|prompter|>1?<end><|assistant|>one<end>", "<|prompter|>2?<end><|assistant|>none of none of <end>"]
    batch = exported_rewards(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        results = theirs(**batch).logits[:, 0]
        expected = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].bool())
    assert torch.allclose(results, expected, atol=1e-5)
    assert len({round(value, 4) for value in expected.tolist()}) == 2


@pytest.mark.parametrize("template", ["oasst", "chatml"])
def test_an_exported_chat_model_writes_as_it_was_trained(folder: Path, tmp_path: Path, template: str):
    """Its tokenizer has the template: other programs make the ids that were learned."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exp = override(SFT, {"data.writing": {"template": template}, "loop.steps": 4})
    assert toy.main(["-e", "x"], {"x": [exp]}, folder) == 0
    run = folder / "runs" / exp_id(exp)
    assert (
        export([str(run), str(tmp_path / "out"), "--data_path", str(folder / "data"), "-sb", str(folder / "runs")]) == 0
    )
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    )
    data = data_of(folder, exp["data"])
    row = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}
    prompt_ids = tokenizer.apply_chat_template([row[0]], add_generation_prompt=True, return_dict=False)
    assert data.sample(0, 1)["input_ids"] == tokenizer.apply_chat_template(list(row), return_dict=False)
    assert data.prompt(1)["input_ids"] == prompt_ids
    ours, _ = load(run, Places(folder / "data", folder / "runs"))
    with torch.no_grad():
        assert torch.equal(
            model(input_ids=torch.tensor([prompt_ids])).logits, ours(input_ids=torch.tensor([prompt_ids])).logits
        )
    ends = ["<end>"] if template == "oasst" else ["<end>", "<|im_end|>"]
    assert end_ids(tokenizer) == Talk(ours, tokenizer, load_experiment(exp, "here").data)._ends[-len(ends) :]  # type: ignore[attr-defined]
    results = model.generation_config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(results if isinstance(results, list) else [results]) == ends
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_conversation_continues_until_it_is_reset(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """From the keyboard, or a file in its place."""
    run, where = str(folder / "runs" / exp_id(SFT)), ["--data_path", str(folder / "data"), "-sb", str(folder / "runs")]
    options = ["--temperature", "0", "--max_new_tokens", "4", "--device", "cpu"]
    assert chat.main([run, "2?", *options, *where]) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("2?\n3?\n!reset\n2?\n"))
    assert chat.main([run, *options, *where]) == 0
    assert [line + "\n" for line in capsys.readouterr().out.split("\n")][::2][:2] == [first, first]
    talk_with = Talk(*load(Path(run), Places(folder / "data", folder / "runs")), load_experiment(SFT, "here").data)  # type: ignore[attr-defined]
    talk_with.answer("2?", max_new_tokens=4, do_sample=False)
    talk_with.answer("3?", max_new_tokens=4, do_sample=False)
    assert [message.role for message in talk_with.messages] == ["user", "assistant"] * 2
    with pytest.raises(ConfigError, match=r"exceed the 96 positions of the model\..* lower --max_new_tokens\.$"):
        talk_with.answer("x" * 90, max_new_tokens=4)
    assert len(talk_with.messages) == 4, "nothing is lost"
    talk_with.answer("!reset", max_new_tokens=4)
    assert talk_with.messages == []
    for exp, words, message in ((REWARD, [], "a reward model "), (SFT, ["--metadata", "a=b"], "--metadata: ")):
        assert chat.main([str(folder / "runs" / exp_id(exp)), "2?", *words, *where]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("template", ["oasst", "chatml"])
def test_prompt_is_a_prefix_of_the_trained_sequence(folder: Path, template: str):
    """The reference's chat dropped the conversation where a system message was given (B15), wrote another form than its
    training (B29); and a report of samples lost the system message where a text stood before the prompts (B23)."""
    writing = {"template": template, "system": "Be kind."}
    recipe: Any = load_experiment(override(SFT, {"data.writing": writing}), "here")
    dialogue = [
        Message("user", "2?"),
        Message("assistant", "two"),
        Message("user", "Say: 3?"),
        Message("assistant", "three"),
    ]
    data = data_of(folder, {**TALK, "writing": writing})
    trained = data.renderer.render([Message("system", "Be kind."), *dialogue])
    talk_with = Talk(model_of(folder), talk.tokenizer(), recipe.data)
    talk_with.messages += dialogue[:3]
    prompt_ids = talk_with.prompt()
    assert prompt_ids == trained.ids[: trained.last_answer().start]
    assert all(text in talk.tokenizer().decode(prompt_ids) for text in ("Be kind.", "2?", "two", "Say: 3?"))
    sampling = Sampling(name="greedy", generate_args={"max_new_tokens": 4}, pre_text="Say: ", system_profile="Be kind.")
    once = data.renderer.render([Message("system", "Be kind."), *dialogue[2:]])
    assert talk_with.prompt_ids(sampling.messages("3?")) == once.ids[: once.last_answer().start]


def test_a_tokenizer_without_padding_gets_one(folder: Path, tmp_path: Path):
    from src.systems.assistants.model.classifier import save

    words = talk.tokenizer()
    words.pad_token = words.eos_token
    words.save_pretrained(tmp_path)
    model, _ = load(folder / "runs" / exp_id(REWARD), Places(folder / "data", folder / "runs"))
    before = model.base.get_input_embeddings().num_embeddings
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["pad_token_id"] == len(talk.tokenizer())
    assert config["vocab_size"] == max(before, len(talk.tokenizer()) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAIN)
def test_a_training_that_is_killed_ends_with_the_same_bits(folder: Path, tmp_path: Path, name: str):
    import random

    from tests.faults import harness

    exp = override(CHAIN[name][0], {"loop.steps": 60})
    exp.pop("answers", None)
    world = tmp_path / "world"
    shutil.copytree(folder, world)
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'x': [{exp!r}]}}\n")
    command = toy.command(root, ["-e", "x", "--log_every", "4"], world, processes=2)
    training = harness.Training(command, world / "runs" / exp_id(exp), toy.environment(), warm=True)
    report = harness.disturb(training, 4, random.Random(5), tmp_path / "log", 2)
    assert len(report.faults) == 4


def test_references_are_complete_and_of_their_data(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(folder, tmp_path / "world")
    run = tmp_path / "world" / "runs" / exp_id(DPO)
    whole = (run / "reference.json").read_text()
    more = override(DPO, {"loop.steps": 12})
    assert toy.main(["-e", "x"], {"x": [more]}, tmp_path / "world") == 0
    assert (tmp_path / "world" / "runs" / exp_id(more) / "reference.json").read_text() == whole
    (run / "reference.json").write_text('{"of": {}, "logps": {}}')
    (run / "status.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    assert toy.main(["-e", "x"], {"x": [DPO]}, tmp_path / "world") == 1
    assert "reference.json: belongs to other data. Delete it" in capsys.readouterr().err
    (run / "reference.json").unlink()
    assert toy.main(["-e", "x"], {"x": [DPO]}, tmp_path / "world") == 0
    assert (run / "reference.json").read_text() == whole, "made by the model that the training began with"
