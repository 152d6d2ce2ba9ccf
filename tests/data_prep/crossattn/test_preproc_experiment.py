"""Contexts encoded by a model that was trained here: named by its id, and known by its weights."""

import hashlib
import json

import pytest

from data_prep.crossattn import preproc_nq
from src.experiments.config import Places
from src.experiments.grid import ref
from src.experiments.registry import MODELS, bind
from src.systems.crossattn.data import encoded_store
from tests import toy

BASE = {**toy.BASE, "loop": {**toy.BASE["loop"], "steps": 2, "eval_every": 2}}
LOOP = {**toy.CROSSATTN["loop"], "steps": 2, "sequences_per_step": 2, "micro_batch": 2, "eval_every": 2}
CROSSATTN = {**toy.CROSSATTN, "model": {**toy.CROSSATTN["model"], "base": ref(BASE)}, "loop": LOOP}
ARGUMENTS = ["--maximum_input_length", "16", "--corpus", "toy_qa", "--devices", "cpu"]


@pytest.fixture
def world(tmp_path):
    """Toy data, and a base that was trained on them."""
    toy.write_data(tmp_path / "data")
    assert toy.main(["-e", "base"], {"base": [BASE]}, tmp_path) == 0
    return tmp_path


def encode(world, exp_id, capsys):
    places = ["--data_cache_path", str(world / "data"), "-sb", str(world / "runs")]
    code = preproc_nq.main(["--embedding_model", exp_id, *places, *ARGUMENTS])
    return code, capsys.readouterr()


def test_a_base_that_was_trained_here(world, capsys):
    (run,) = (world / "runs").iterdir()
    code, message = encode(world, run.name, capsys)
    assert (code, "64 distinct inputs, 64 encoded now" in message.out) == (0, True)
    groups = {"g": [{**CROSSATTN, "data": {**CROSSATTN["data"], "encoded_contexts": True}}], "base": [BASE]}
    (world / "data").rename(world / "prepared")
    (world / "data").symlink_to(world / "prepared" / "processed_data" / run.name)
    assert toy.main(["-e", "g"], groups, world) == 0
    _evaluates_and_encodes(world, run.name, groups["g"][0], capsys)

    places = Places(world / "data", world / "runs")
    part = bind(MODELS, {"name": "experiment", "exp_id": run.name})
    first = encoded_store.base_identity(part, places)
    manifest = next(run.glob("checkpoints/step-*2/manifest.json"))
    facts = json.loads(manifest.read_text())
    (manifest.parent / "model.safetensors").write_bytes(b"others")
    facts["files"]["model.safetensors"] = {"bytes": 6, "sha256": hashlib.sha256(b"others").hexdigest()}
    manifest.write_text(json.dumps(facts))
    assert not encoded_store.same_base(encoded_store.base_identity(part, places), first)
    assert toy.main(["-e", "g", "--dry-run"], {**groups, "g": [{**groups["g"][0], "seed": 1}]}, world) == 1
    assert f"got {run.name} (fingerprint" in capsys.readouterr().err


def _evaluates_and_encodes(world, base, crossattn, capsys):
    """What was trained on the states can be scored on them. It encodes nothing itself: its base does."""
    evaluation = {**crossattn, "model": ref(crossattn), "evaluation": {"micro_batch": 2}}
    del evaluation["loop"]
    assert toy.main(["-e", "scored"], {"scored": [evaluation]}, world) == 0, capsys.readouterr().err
    code, message = encode(world, ref(crossattn)["exp_id"], capsys)
    assert code == 1
    assert "error: --embedding_model: expected a decoder" in message.err
    assert f"of the kind 'cross_attention'. Use the decoder that encodes its contexts: {base}" in message.err


def test_a_base_that_is_not_trained_yet_is_refused(world, capsys):
    code, message = encode(world, "0" * 32, capsys)
    assert (code, "neither under" in message.err) == (1, True)
