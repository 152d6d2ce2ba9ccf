"""The figures of docs/scaling.md: predicted GPU memory and duration of trainings that are too large for this machine.

    python -m benchmarks.training.on_paper

Runs `trainval.py --dry-run --memory` for each in a new folder with the published config.json of each base model, and
tokenizers with as many tokens as the real ones; the plans need nothing else. Prints markdown, and the seconds and
memory that the command used.
"""

import json
import logging
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from exp_configs import EXP_GROUPS
from src.experiments.config import Places
from src.experiments.grid import override
from src.launch import memory_table
from src.runs import plan
from src.systems.interleaved.groups import INTERLEAVED_TINY

CODE = {
    "model_type": "gpt_bigcode",
    "n_embd": 2048,
    "n_head": 16,
    "n_inner": 8192,
    "n_layer": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BASES: dict[str, dict[str, Any]] = {
    "bigcode/starcoderbase-1b": {**CODE, "n_positions": 8192, "vocab_size": 49152},
    "TabbyML/SantaCoder-1B": {**CODE, "n_positions": 2048, "vocab_size": 49280},
    "openai-community/gpt2-xl": {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_head": 25,
        "n_layer": 48,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "meta-llama/Llama-2-13b-hf": {
        "model_type": "llama",
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "llama-65b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
    },
    "siglip-so400m": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    },
}
"""As they are published."""
TOKENIZERS = {
    "t5_tokenizer": 32_100,
    "llama3_tokenizer": 128_256,
    "llama-65b": 32_000,
    "openai-community/gpt2-xl": 50_257,
}
# The decoder of IDEFICS-80B (Llama 65B) in the model that our recipe trains: image tokens are part of the row, and no
# layers are added.
ASSEMBLED_65B = override(
    INTERLEAVED_TINY,
    {
        "model": {
            "name": "vision_language_parts",
            "vision": "siglip-so400m",
            "text": "llama-65b",
            "scale_factor": 3,
            "dtype": "bfloat16",
        },
        "data.images": {"frame_size": 384, "image_tokens": 81, "max_size": 384},
        "data.sequence_tokens": 2048,
        "data.max_frames": 8,
        "loop.steps": 20_000,
        "loop.sequences_per_step": 1024,
        "loop.micro_batch": 1,
        "loop.precision": "bfloat16",
        "answers": None,
    },
)
PLANS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("crossattn_starcoderbase-1b", EXP_GROUPS["crossattn_starcoderbase-1b"][0], {"gpus": 1}),
    ("crossattn_santacoder", EXP_GROUPS["crossattn_santacoder"][0], {"gpus": 8}),
    ("t5_v1_1_base", EXP_GROUPS["t5_v1_1_base"][0], {"gpus": 1, "gpu": "A100"}),
    ("t5_v1_1_base", override(EXP_GROUPS["t5_v1_1_base"][0], {"loop.micro_batch": 16}), {"gpus": 8}),
    ("metadata_meco", EXP_GROUPS["metadata_meco"][1], {"gpus": 8, "gradient_checkpointing": "full"}),
    ("metadata_meco", EXP_GROUPS["metadata_meco"][1], {"gpus": 8, "gradient_checkpointing": "full", "fsdp": True}),
    ("metadata_gpt2xl_v2", EXP_GROUPS["metadata_gpt2xl_v2"][0], {"gpus": 8}),
    ("crossattn_llama-13b", EXP_GROUPS["crossattn_llama-13b"][0], {"gpus": 8, "gradient_checkpointing": "full"}),
    (
        "crossattn_llama-13b",
        EXP_GROUPS["crossattn_llama-13b"][0],
        {"gpus": 8, "gradient_checkpointing": "full", "fsdp": True},
    ),
    (
        "vision-language, 65B decoder, weights in float32",
        override(ASSEMBLED_65B, {"model.dtype": "float32"}),
        {"gpus": 1024, "gradient_checkpointing": "full", "fsdp": True},
    ),
    (
        "vision-language, 65B decoder, weights in bfloat16",
        ASSEMBLED_65B,
        {"gpus": 1024, "gradient_checkpointing": "full", "fsdp": True},
    ),
    (
        "vision-language, 65B decoder frozen",
        override(ASSEMBLED_65B, {"model.frozen": ["text"]}),
        {"gpus": 64, "gradient_checkpointing": "full", "fsdp": True},
    ),
]


def prepare(data: Path) -> None:
    """Write the configs and tokenizers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    for name, config in BASES.items():
        (data / name).mkdir(parents=True, exist_ok=True)
        (data / name / "config.json").write_text(json.dumps(config))
    for name, size in TOKENIZERS.items():
        words = Tokenizer(WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", bos_token="t2").save_pretrained(
            data / name
        )


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        prepare(data)
        for name, exp, overrides in PLANS:
            machines = {"gpu": "H100", "fsdp": False, "deepspeed": None, "gradient_checkpointing": None, **overrides}
            before = time.perf_counter()
            plans, mistakes = memory_table.plan_all([plan.load(exp, name, name)], Places(data, Path(folder)), machines)
            lines = memory_table.table(plans, machines)
            print(
                "\n".join(
                    [*lines, *(f"error: {text}" for text in mistakes), f"({time.perf_counter() - before:.1f} s)", ""]
                ),
                flush=True,
            )
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(PLANS)} plans: {time.perf_counter() - began:.1f} s, {host:.2f} GiB of this machine's memory.")


if __name__ == "__main__":
    main()
