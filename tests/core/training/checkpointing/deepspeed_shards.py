"""Real ZeRO shards of a small model: run by torchrun, one folder per stage, with what DeepSpeed itself says of weights
and moments.

torchrun --nproc-per-node 2 tests/core/training/checkpointing/deepspeed_shards.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

STEPS = 3
CLIP = 1.0


def build() -> nn.Module:
    """Odd sizes, tied embeddings, a frozen layer, a buffer beside trained weights and two that are not."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "n_positions": 31, "n_embd": 36, "n_layer": 3, "n_head": 4, "n_inner": 50}
    model = GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
    for parameter in model.transformer.h[1].parameters():
        parameter.requires_grad_(requires_grad=False)
    model.transformer.ln_f.register_buffer("beside", torch.arange(5.0) / 3)
    model.transformer.h[0].register_buffer("separate_documents", torch.arange(3.0) / 7)
    model.transformer.h[1].ln_1.register_buffer("count", torch.tensor(7))
    return model.train()


def optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, as most recipes have them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def batch(step: int, rank: int) -> Tensor:
    """Token ids of one process, 1 x 24."""
    return torch.randint(0, 101, (1, 24), generator=torch.Generator().manual_seed(100 * step + rank))


def train(stage: int, out: Path) -> None:
    """STEPS steps, the shards, and one step more."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "overlap_comm": False} | ({"sub_group_size": 3000} if stage == 3 else {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    for step in range(STEPS + 1):
        if step == STEPS:
            engine.save_checkpoint(str(out), tag="zero")
            engine.save_checkpoint(str(out / "ours"), tag="zero", save_latest=False, exclude_frozen_parameters=True)
            tensors = engine_tensors(engine)
            dist.barrier()
            if dist.get_rank() == 0:
                save_file(tensors, out / "said.safetensors")
                whole = get_fp32_state_dict_from_zero_checkpoint(str(out), tag="zero")
                save_file({name: tensor.detach().clone() for name, tensor in whole.items()}, out / "fp32.safetensors")
        ids = batch(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    tensors = engine_tensors(engine)
    if dist.get_rank() == 0:
        save_file(tensors, out / "after.safetensors")


def engine_tensors(engine: Any) -> dict[str, Tensor]:
    """Weights and moments of trained parameters as DeepSpeed's own look-up gathers them. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # Stages 1 and 2 look where an optimizer's moments are before torch's AdamW has made any; here they look again.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    tensors = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            tensors[name] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}::{key}"] = safe_get_full_optimizer_state(parameter, key)
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def main() -> None:
    """Every stage, one after the other."""
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())
    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see ZeroEngine
    deepspeed.init_distributed("gloo")
    for stage in (1, 2, 3):
        train(stage, Path(sys.argv[1]) / f"stage{stage}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
