"""`python -m tests.core.training.parallel.kept_memory`: what autograd keeps of sharded models in bfloat16. Started by
test_memory.py.

Prints a JSON list: of each model its name, its bytes, those that the backward pass keeps besides its weights, and the
norms of the gradients, sharded and of a whole copy, and the bytes of sharded gradients between two passes of a step, as
it comes and where they are shared out after each pass.
"""

import copy
import json

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from src.training.config import LoopConfig
from src.training.loss import causal_lm_loss
from src.training.parallel import choice
from src.training.parallel.engine import DDPEngine, Engine
from src.training.parallel.fsdp import FSDPEngine
from src.training.parallel.linear_cross_entropy import chunks_of

LOOP = LoopConfig.model_validate(
    {
        "steps": 1,
        "sequences_per_step": 1,
        "micro_batch": 1,
        "learning_rate": 1e-3,
        "eval_every": 1,
        "best_metric": "val_loss",
        "best_mode": "min",
        "precision": "bfloat16",
    }
)
IDS = torch.arange(8)[None]


def models() -> dict[str, nn.Module]:
    llama = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    t5 = {
        "d_model": 128,
        "d_ff": 512,
        "d_kv": 32,
        "num_heads": 4,
        "num_layers": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }
    gpt2 = {"n_embd": 128, "n_layer": 8, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    return {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **llama)),
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **gpt2)),
        "t5": transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **t5)),
    }


def measure(engine: Engine, chunk: int) -> tuple[int, float]:
    """Bytes that a backward pass keeps besides the weights, and the norm of the gradients. chunk: tokens whose logits
    are made at a time; 0: all.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(engine, chunk)
    weights = {local(weight).untyped_storage().data_ptr() for weight in engine.module.parameters()}
    num_bytes = sum(storage.nbytes() for storage in storages.values() if storage.data_ptr() not in weights)
    engine.backward(loss, True)
    return num_bytes, engine.norm()


def loss_of(engine: Engine, chunk: int) -> Tensor:
    """Of the tokens of `IDS`. chunk: as for `measure`."""
    with engine.accelerator.autocast():
        if not chunk:
            return engine.model(input_ids=IDS, labels=IDS).loss
        with chunks_of(chunk):
            batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "loss_mask": torch.ones_like(IDS).bool()}
            return causal_lm_loss(engine.model, batch)


def held_between_passes(engine: Engine) -> int:
    """Bytes of the process's shards of the gradients when one pass of a step is made and another is to come."""
    with engine.accumulation_context(False), engine.accelerator.autocast():
        engine.backward(engine.model(input_ids=IDS, labels=IDS).loss, False)
    return sum(gradient.nbytes for gradient in engine.gradients())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    results = []
    decoders = {f"{name} in chunks": model for name, model in models().items() if name != "t5"}
    for name, model in (models() | decoders).items():
        accelerator = choice.plain_accelerator("bfloat16", "precision")
        size = sum(weight.nbytes for weight in model.parameters())
        chunk = 3 if name in decoders else 0
        _, whole = measure(DDPEngine(accelerator, copy.deepcopy(model), LOOP), chunk)
        between = [
            held_between_passes(FSDPEngine(accelerator, copy.deepcopy(model), LOOP, 1, each)) for each in (False, True)
        ]
        saved_bytes, sharded = measure(FSDPEngine(accelerator, model, LOOP), chunk)
        results.append([name, size, saved_bytes, sharded, whole, between])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
