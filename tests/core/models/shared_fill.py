"""Has FSDP2 fill models around a pretrained base, and compares them with those that are built whole. For torchrun;
test_unfilled.py asks.

python tests/core/models/shared_fill.py DATA MODEL      a model as in an experiment, as JSON

Each process puts into DATA/grown-RANK the bytes by which its memory has grown at most until the model was filled, and
those of the model.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from src.experiments.config import Places
from src.experiments.registry import MODELS, bind
from src.support import distributed
from src.support.deferred import build_deferred
from src.training.parallel.choice import plain_accelerator
from src.training.parallel.fsdp import FSDPEngine
from tests.core.training.checkpointing.shared_store import kilobytes
from tests.core.training.parallel.kept_memory import LOOP


def main(data: Path, model: dict[str, Any]) -> None:
    config: Any = bind(MODELS, model)
    places = Places(data, data)
    with distributed.session():
        accelerator = plain_accelerator("bfloat16", "precision")
        distributed.ensure_group()
        with torch.device("meta"):
            config.build(replace(places, on_paper=True))  # loads libraries
        torch.manual_seed(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start = kilobytes("VmRSS")
        cut = FSDPEngine(accelerator, build_deferred(lambda: config.build(places)), LOOP).module
        peak_bytes = 1024 * (kilobytes("VmHWM") - start)
        torch.manual_seed(0)
        whole = config.build(places)
        (data / f"grown-{distributed.rank()}").write_text(
            json.dumps([peak_bytes, sum(weight.nbytes for weight in whole.parameters())])
        )
        state = cut.state_dict()
        assert state.keys() == whole.state_dict().keys()
        for name, tensor in whole.state_dict().items():
            assert torch.equal(
                state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name], tensor
            ), name
        for (name, one), (other, two) in zip(cut.named_buffers(), whole.named_buffers(), strict=True):
            assert name == other
            assert torch.equal(one, two), name
        for (name, one), (other, two) in zip(cut.named_parameters(), whole.named_parameters(), strict=True):
            assert name == other
            assert (one.requires_grad, one.dtype) == (two.requires_grad, two.dtype), name


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
