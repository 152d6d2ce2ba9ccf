"""Gradients of models whose matrices are cut between two processes, against those of whole ones; run by torchrun."""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from src import distributed
from src.training.parallel import choice
from src.training.parallel.fsdp import FSDPEngine
from tests.training.parallel.kept_memory import LOOP

IDS = torch.arange(24).view(2, 12)
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True},
    "Mistral": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "GPTNeoX": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "Phi": {},
}
LIMITS = {"float32": 1e-5, "bfloat16": 0.05}
"""How far a gradient may be from that of the whole model, by its norm."""


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    found: dict[str, nn.Module] = {}
    for name, own in DECODERS.items():
        config = getattr(transformers, f"{name}Config")(**SIZES, **own)
        found[name] = getattr(transformers, f"{name}ForCausalLM")(config)
    text = {**SIZES, "num_key_value_heads": 2, "model_type": "llama", "pad_token_id": 0}
    config = transformers.Idefics3Config(vision_config=EYES, text_config=text, image_token_id=5, scale_factor=2)
    found["images"] = transformers.Idefics3ForConditionalGeneration(config)
    return found


def batch(name: str) -> dict[str, Tensor]:
    """Two rows, of which one image each takes four tokens."""
    if name != "images":
        return {"input_ids": IDS, "labels": IDS}
    ids = IDS.clone()
    ids[:, 2:6] = 5
    return {
        "input_ids": ids,
        "labels": ids,
        "pixel_values": torch.rand(2, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
    }


def require_equal_copies(engine: FSDPEngine, given: dict[str, Tensor]) -> None:
    """That gradients of what both processes have are the same in both, also where one computes a little more, as
    kernels of GPUs may."""
    engine.skip_step()
    with engine.accumulation_context(True), engine.accelerator.autocast():
        loss = engine.model(**given).loss * (1 + distributed.rank() / 100)
    engine.backward(loss, True)
    copies = [
        distributed.all_gather_list([distributed.is_copy(parameter.grad)]) for parameter in engine.module.parameters()
    ]
    both = [distributed.all_gather_list([gradient]) for gradient in engine.gradients()]
    equal = [torch.equal(*pair) for copy, pair in zip(copies, both, strict=True) if any(copy)]
    assert equal
    assert all(equal)


def main(precision: str) -> None:
    distributed.share_data(2)
    with distributed.session():
        for name, model in models().items():
            accelerator = choice.plain_accelerator(precision, "precision")
            whole, given = copy.deepcopy(model), batch(name)
            engine = FSDPEngine(accelerator, model, LOOP, tensor_parallel=2)
            with engine.accumulation_context(True), accelerator.autocast():
                loss = engine.model(**given).loss
            engine.backward(loss, True)
            with accelerator.autocast():
                wanted = whole(**given).loss
            wanted.backward()
            torch.testing.assert_close(
                loss, wanted, rtol=LIMITS[precision], atol=0, msg=lambda said, name=name: f"{name}: {said}"
            )
            norms = [parameter.grad.norm() for parameter in whole.parameters() if parameter.grad is not None]
            assert abs(engine.norm() / float(torch.stack(norms).norm()) - 1) < LIMITS[precision], name
            for (label, cut), plain in zip(model.named_parameters(), whole.parameters(), strict=True):
                if plain.grad is None:
                    continue
                assert cut.grad is not None, label
                far = float((cut.grad.full_tensor() - plain.grad).norm() / plain.grad.norm())
                assert far < LIMITS[precision] or plain.grad.norm() < 1e-6, (name, label, far)
            require_equal_copies(engine, given)


if __name__ == "__main__":
    main(sys.argv[1])
