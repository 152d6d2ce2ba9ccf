"""A folder that transformers loads without this project: the same logits and the same answers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from src.systems.crossattn.model import standalone

READ = """
import sys, torch
from transformers import AutoModelForCausalLM
try:
    import src
    raise SystemExit("the project can be imported, so this shows nothing")
except ImportError:
    pass
folder, given = sys.argv[1], torch.load(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
ids, mask = given["input_ids"], given["attention_mask"]
context = given["context_ids"], given["context_mask"]
with torch.no_grad():
    found = {"logits": model(ids, mask, context=context).logits, "alone": model(ids, mask).logits}
prompt = ids[:, :3]
options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
found["answers"] = model.generate(prompt, context=context, **options)
found["encoded"] = model.generate(prompt, context=model.encode_context(*context), **options)
found["whole"] = model.generate(prompt, context=context[0], **options)
assert not any(name.split(".")[0] == "src" for name in sys.modules)
torch.save(found, sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt_bigcode", {}),
        pytest.param(
            "gpt_bigcode",
            {"shared_weights": True, "final_layer": True, "hidden_size": 8, "num_heads": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama", {"skip_connections": True, "norm": "layer", "num_key_value_heads": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            "llama",
            {"shared_projections": True, "num_key_value_heads": 4, "feed_forward_size": 24},
            marks=pytest.mark.slow,
        ),
    ],
)
@torch.no_grad()
def test_transformers_loads_it_without_this_project(
    make: Any, batch: dict[str, torch.Tensor], tmp_path: Path, model_type: str, settings: dict[str, Any]
):
    model = make(model_type, **settings)
    standalone.save(model, tmp_path / "model")
    torch.save(batch, tmp_path / "given.pt")
    program = [
        sys.executable,
        "-P",
        "-c",
        READ,
        str(tmp_path / "model"),
        str(tmp_path / "given.pt"),
        str(tmp_path / "found.pt"),
    ]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    done = subprocess.run(
        program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "newly initialized" not in done.stderr
    outputs = torch.load(tmp_path / "found.pt")
    real = batch["attention_mask"]
    torch.testing.assert_close(outputs["logits"][real], model(**batch)[real], rtol=1e-5, atol=1e-5)
    alone = model.base(input_ids=batch["input_ids"], attention_mask=real.long()).logits
    torch.testing.assert_close(outputs["alone"][real], alone[real], rtol=1e-5, atol=1e-5)
    prompt = batch["input_ids"][:, :3]
    contexts = {"context_ids": batch["context_ids"], "context_mask": batch["context_mask"]}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    answers = model.generate(prompt, torch.ones_like(prompt), **contexts, **options)
    assert torch.equal(outputs["answers"], answers)
    assert torch.equal(outputs["encoded"], answers)
    contexts["context_mask"] = torch.ones_like(batch["context_mask"])
    assert torch.equal(outputs["whole"], model.generate(prompt, torch.ones_like(prompt), **contexts, **options))
