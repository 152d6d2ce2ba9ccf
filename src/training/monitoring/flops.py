"""Model FLOPs per batch, and MFU. The formulas are in src/support/flops.py and in custom models."""

import logging
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from src.support.flops import KNOWN_FAMILIES, adapter_weights, training_flops

log = logging.getLogger(__name__)
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 6000 Ada": 364.2e12,
    "RTX A6000": 154.8e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Peak dense FLOP/s in bfloat16, or in float16 on V100 and T4, by part of the device's name. The first match counts.

From NVIDIA's data sheets, nvidia.com/en-us/data-center/<product>; half of rates with sparsity. GB200: half of 1/72 of
the 360 petaflops with sparsity of the NVL72. A10G: NVIDIA's data sheet for AWS. RTX: with float32 accumulation, from
the appendices of the white papers of GA102 (3090, A6000), Ada (4090, 6000 Ada) and RTX Blackwell (5090). The values of
GB200, A10G and RTX are not verified against the sources; `benchmarks.gpu` measures a device's actual rate.
"""
_WITHOUT_BFLOAT16 = ("v100", "t4")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a device in "bfloat16" or "float16"; None for another precision or an unknown device."""
    if precision not in ("bfloat16", "float16"):
        return None
    words = device_name.lower().replace("-", " ").split()
    for name, rate in PEAKS.items():
        parts = name.lower().replace("-", " ").split()
        if all(part in words for part in parts):
            return None if precision == "bfloat16" and parts[0] in _WITHOUT_BFLOAT16 else rate
    return None


def mfu(flops_per_second: float, peak_per_device: float, num_devices: int) -> float:
    """Model FLOPs utilization (PaLM, appendix B): model FLOP/s as a share of the peak of all devices."""
    return flops_per_second / (peak_per_device * num_devices)


def batch_flops(model: nn.Module) -> Callable[[Mapping[str, Tensor]], int] | None:
    """Return a function from a batch to the FLOPs of a training pass, with padding and without recomputation.

    Custom models can define `training_flops`. Returns None, and logs it, for unknown models and for partly frozen
    models without adapters.
    """
    config = getattr(model, "config", None)
    is_known = getattr(config, "model_type", None) in KNOWN_FAMILIES
    if is_known and hasattr(model, "training_flops"):
        return model.training_flops()  # type: ignore[operator]  a method, not a module
    if not is_known or not type(model).__module__.startswith("transformers."):
        log.info("%s: FLOPs unknown, so MFU is not reported.", type(model).__name__)
        return None
    adapters = adapter_weights(model)
    if adapters is None:
        log.info("%s: partly frozen, so MFU is not reported.", type(model).__name__)
        return None
    return lambda batch: training_flops(config, *_lengths(batch), adapters=adapters)


def _lengths(batch: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """Number of samples, tokens, and decoder tokens of an encoder-decoder (else 0)."""
    B, T = batch["input_ids"].shape
    decoder = next((batch[name].shape[1] for name in ("decoder_input_ids", "labels") if name in batch), 0)
    return B, T, decoder
