"""Memory of each process while FSDP2 builds a model, until each has its shard of the weights.

    python -m benchmarks.training.sharded_build

Builds models of 100 to 250 MB in 1, 2 and 4 processes, and prints markdown: the largest growth of a process's resident
memory after all imports, as a share of the bytes of all weights. The last column builds the complete model first. The
reference of PPO adds a sharded copy of the policy, whose bytes count too. On a CPU, with gloo.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from src.experiments.config import Places
from src.experiments.registry import MODELS, bind
from src.support import distributed
from src.support.deferred import build_deferred, copy_frozen
from src.training.parallel.choice import plain_accelerator
from src.training.parallel.fsdp import shard_model

SIZES = {"hidden_size": 512, "num_layers": 12, "num_heads": 8}
HF: dict[str, Any] = {"name": "hf", "path": "decoder"}
VISION = {"frame_size": 64, "patch_size": 16, "hidden_size": 512, "num_layers": 8, "num_heads": 8}
RANDOM_DECODER = {"name": "gpt_bigcode", "tokenizer": "decoder", "max_positions": 64, **SIZES}
T5 = {"tokenizer": "decoder", "hidden_size": 512, "feed_forward_size": 1024, "num_layers": 6, "num_heads": 8}
KINDS: dict[str, dict[str, Any]] = {
    "`gpt_bigcode`, random": RANDOM_DECODER,
    "`t5`, random": {"name": "t5", "random": T5},
    "`vision_language`, random": {
        "name": "vision_language",
        "tokenizer": "decoder",
        "vision": VISION,
        "max_positions": 64,
        **SIZES,
    },
    "`hf`": HF,
    "`hf`, new tokens": {**HF, "extra_tokens": ["<new>"]},
    "`lora` on `hf`": {"name": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj"], "base": HF},
    "`cross_attention` on `hf`": {"name": "cross_attention", "num_layers": 2, "stride": 2, "base": HF},
    "`reward` on `hf`": {"name": "reward", "base": HF},
    "`with_values`, critic, reference": {"name": "with_values", "base": HF, "critic": HF},
    "`vision_language_parts`": {"name": "vision_language_parts", "vision": VISION, "text": "decoder"},
}


def prepare(data: Path) -> None:
    """Write a pretrained decoder with a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(2000)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", bos_token="t2")
    tokenizer.save_pretrained(data / "decoder")
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
    }
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(data / "decoder")


def resident_bytes(field: str) -> int:
    """Resident memory of this process. field: VmRSS for the current value, VmHWM for the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(data: Path, kind: str, is_complete: bool) -> None:
    """Build and shard a model in this process, and write the bytes of its growth and of all weights."""
    config: Any = bind(MODELS, KINDS[kind])
    places = Places(data, data)
    with distributed.session():
        device = plain_accelerator("float32", "precision").device
        with torch.device("meta"):  # import libraries
            config.build(replace(places, on_paper=True))
        distributed.ensure_group()
        torch.distributed.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        start = resident_bytes("VmRSS")
        torch.manual_seed(0)
        model = config.build(places) if is_complete else build_deferred(lambda: config.build(places))
        modules = [model]
        if "reference" in kind and not is_complete:
            modules.append(copy_frozen(model.base, model))
        elif "reference" in kind:
            modules.append(config.base.build(places))
        num_bytes = sum(weight.nbytes for module in modules for weight in module.parameters())
        for module in reversed(modules):
            shard_model(module, device, bfloat16=False)
        growth = [resident_bytes("VmHWM") - start, num_bytes]
        (data / f"growth-{distributed.rank()}").write_text(json.dumps(growth))


def largest_share(data: Path, kind: str, processes: int, is_complete: bool = False) -> tuple[float, int]:
    """The largest growth of `processes` processes as a share of the weights, and the bytes of the weights."""
    command = ["torch.distributed.run", "--nproc-per-node", str(processes), "-m", "benchmarks.training.sharded_build"]
    arguments = ["--data", str(data), "--kind", kind, *(["--complete"] if is_complete else [])]
    subprocess.run([sys.executable, "-m", *command, *arguments], stdout=sys.stderr, check=True)
    growths = [json.loads((data / f"growth-{rank}").read_text()) for rank in range(processes)]
    return max(growth / num_bytes for growth, num_bytes in growths), growths[0][1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="set in the measured processes: folder of the pretrained decoder")
    parser.add_argument("--kind", help="with --data: the model to measure")
    parser.add_argument("--complete", action="store_true", help="with --data: build the complete model first")
    args = parser.parse_args(argv)
    if args.data:
        measure(args.data, args.kind, args.complete)
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        print("| model | MB | 1 process | 2 | 4 | 4, built complete |")
        print("|---|---|---|---|---|---|")
        for kind in KINDS:
            shares = [largest_share(Path(folder), kind, processes) for processes in (1, 2, 4)]
            shares.append(largest_share(Path(folder), kind, 4, is_complete=True))
            cells = " | ".join(f"{share:.2f}" for share, _ in shares)
            print(f"| {kind} | {shares[0][1] / 1e6:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
