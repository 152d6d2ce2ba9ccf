"""The figures of docs/scaling.md: what a GPU would hold of trainings that this machine cannot run, and how long they would take.

    python -m benchmarks.on_paper

It is `trainval.py --dry-run --memory` of each, in a folder of its own with the published config.json of each base, and with tokenizers
that have as many tokens as the real ones: the plans need nothing else. Prints markdown, and the seconds and memory that it has taken.
"""

import json
import logging
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from exp_configs import EXP_GROUPS
from src.config import Places
from src.exp_groups.streaming import INTERLEAVED_TINY
from src.experiments.grid import override
from src.launch import memory_table
from src.runs import plan

GPT_BIGCODE = {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "n_embd": 2048, "n_head": 16, "n_layer": 24}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "max_position_embeddings": 4096}
BASES: dict[str, dict[str, Any]] = {
    "bigcode/starcoderbase-1b": {**GPT_BIGCODE, "n_inner": 8192, "n_positions": 8192, "vocab_size": 49152, "bos_token_id": 0, "eos_token_id": 0},
    "TabbyML/SantaCoder-1B": {**GPT_BIGCODE, "n_inner": 8192, "n_positions": 2048, "vocab_size": 49280, "bos_token_id": 0, "eos_token_id": 0},
    "openai-community/gpt2-xl": {
        **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1600, "n_head": 25, "n_layer": 48},
        **{"n_positions": 1024, "vocab_size": 50257},
    },
    "meta-llama/Llama-2-13b-hf": {
        **LLAMA,
        **{"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40},
        **{"num_attention_heads": 40, "num_key_value_heads": 40, "rms_norm_eps": 1e-5},
    },
}
"""As they are published."""
TOKENIZERS = {"t5_tokenizer": 32_100, "llama3_tokenizer": 128_256, "llama2_tokenizer": 32_000, "openai-community/gpt2-xl": 50_257}
# The sizes of IDEFICS-80B's decoder and encoder (Llama 65B, CLIP ViT-H/14) in the architecture that our recipe trains, which is another:
# image tokens stand in the row instead of being cross-attended.
VISION_80B = override(
    INTERLEAVED_TINY,
    {
        "model": {
            "name": "vision_language",
            "tokenizer": "llama2_tokenizer",
            "vision": {"frame_size": 224, "patch_size": 14, "hidden_size": 1280, "num_layers": 32, "num_heads": 16},
            "scale_factor": 2,
            "hidden_size": 8192,
            "num_layers": 74,
            "num_heads": 64,
            "max_positions": 2048,
        },
        "data.images": {"frame_size": 224, "image_tokens": 64, "max_size": 224},
        "data.sequence_tokens": 2048,
        "data.max_frames": 16,
        "loop.steps": 20_000,
        "loop.sequences_per_step": 2048,
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
    ("metadata_meco", EXP_GROUPS["metadata_meco"][1], {"gpus": 8, "gradient_checkpointing": True}),
    ("metadata_meco", EXP_GROUPS["metadata_meco"][1], {"gpus": 8, "gradient_checkpointing": True, "fsdp": True}),
    ("metadata_gpt2xl_v2", EXP_GROUPS["metadata_gpt2xl_v2"][0], {"gpus": 8, "gpu": "A100"}),
    ("crossattn_llama-13b", EXP_GROUPS["crossattn_llama-13b"][0], {"gpus": 8, "gradient_checkpointing": True}),
    ("crossattn_llama-13b", EXP_GROUPS["crossattn_llama-13b"][0], {"gpus": 8, "gradient_checkpointing": True, "fsdp": True}),
    ("vision-language, 80B-class", VISION_80B, {"gpus": 512, "gradient_checkpointing": True, "fsdp": True}),
    ("vision-language, 80B-class", VISION_80B, {"gpus": 2048, "gradient_checkpointing": True, "fsdp": True}),
]


def prepare(data: Path) -> None:
    """Write the configs and tokenizers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    for name, config in BASES.items():
        (data / name).mkdir(parents=True)
        (data / name / "config.json").write_text(json.dumps(config))
    for name, size in TOKENIZERS.items():
        words = Tokenizer(WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", bos_token="t2").save_pretrained(data / name)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        prepare(data)
        for name, exp, given in PLANS:
            machines = {"gpu": "H100", "fsdp": False, "deepspeed": None, "gradient_checkpointing": False, **given}
            before = time.perf_counter()
            lines, mistakes = memory_table.plan_all([plan.load(exp, name, name)], Places(data, Path(folder)), machines)
            print("\n".join([*lines, *(f"error: {text}" for text in mistakes), f"({time.perf_counter() - before:.1f} s)", ""]), flush=True)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(PLANS)} plans: {time.perf_counter() - began:.1f} s, {host:.2f} GiB of this machine's memory.")


if __name__ == "__main__":
    main()
