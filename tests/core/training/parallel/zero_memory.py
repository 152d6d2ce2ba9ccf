"""What a forward pass of ZeRO-3 in bfloat16 leaves alive, of models in two processes; run by torchrun from
test_memory.py.

Writes kept.json to the folder that it is given, a list: of each model its name, the bytes of its weights, those that
stay until the backward pass, and the norms of the gradients, sharded and of a whole copy.
"""

import copy
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from src.support import distributed
from src.training.parallel import choice
from src.training.parallel.engine import DDPEngine
from src.training.parallel.live_storages import LiveStorages
from src.training.parallel.zero import ZeroEngine
from tests.core.training.parallel.kept_memory import LOOP, loss_of, models

AT_ONCE = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
"""As it comes DeepSpeed keeps whole what is small or soon needed again, which is all of a small model."""


def main() -> None:
    settings = Path(sys.argv[1]) / f"zero-{distributed.rank()}.json"
    settings.write_text(json.dumps({"zero_optimization": AT_ONCE}))
    accelerator = choice.plain_accelerator("bfloat16", "precision")
    results = []
    decoders = {f"{name} in chunks": model for name, model in models().items() if name != "t5"}
    for name, model in (models() | decoders).items():
        size = sum(weight.nbytes for weight in model.parameters())
        chunk = 3 if name in decoders else 0
        whole = DDPEngine(accelerator, copy.deepcopy(model), LOOP)
        whole.backward(loss_of(whole, chunk), True)
        engine = ZeroEngine(accelerator, model, LOOP, settings)
        engine.backward(loss_of(engine, chunk), True)
        norms = engine.norm(), whole.norm()
        engine.step()  # it learns the order of the layers in the first pass
        with LiveStorages() as storages, accelerator.autocast():
            loss = loss_of(engine, chunk)
            saved_bytes = sum(storages.live.values())  # autocast's own copies, too
        engine.backward(loss, True)
        results.append([name, size, saved_bytes, *norms])
    if distributed.is_main():
        (Path(sys.argv[1]) / "kept.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
