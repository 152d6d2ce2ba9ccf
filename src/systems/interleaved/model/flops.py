"""FLOPs of vision-language models, by the rules of src/support/flops.py.
The lowest trained part is counted completely.

Shapes: B rows, T tokens, N frames, P patches per frame, L tokens per frame.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from src.support.flops import FORWARD, FROZEN, TRAINED, Passes, Stack, attention_flops, decoder_stack, head_weights

if TYPE_CHECKING:
    from torch import Tensor, nn


def parameters_by_part(model: Any) -> "dict[str, list[tuple[str, nn.Parameter]]]":
    """Names and weights of each `parts.Part`."""
    embedding_ids = {
        id(parameter)
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings())
        for parameter in embedding.parameters()
    }
    by_part: dict[str, list[tuple[str, Any]]] = {"vision": [], "connector": [], "embeddings": [], "text": []}
    for name, parameter in model.named_parameters():
        part = (
            "vision"
            if name.startswith("model.vision_model.")
            else "connector"
            if name.startswith("model.connector.")
            else "text"
        )
        by_part["embeddings" if id(parameter) in embedding_ids else part].append((name, parameter))
    return by_part


def training_flops(model: Any) -> "Callable[[Mapping[str, Tensor]], int]":
    """Return a function that counts the FLOPs of a training pass on an InterleavedBatch."""
    config = model.config
    vision, text = config.vision_config, config.text_config
    P = (vision.image_size // vision.patch_size) ** 2
    L = (
        config.perceiver_config.resampler_n_latents
        if hasattr(config, "perceiver_config")
        else P // config.scale_factor**2
    )
    passes, adapters = passes_by_part(model), _adapters(model, P, L)
    layer = 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size
    encoder = Stack(vision.num_hidden_layers, layer, vision.hidden_size)
    patches = 2 * P * 3 * vision.patch_size**2 * vision.hidden_size
    """FLOPs per frame of the patch embedding; its inputs need no gradients."""

    def count(batch: "Mapping[str, Tensor]") -> int:
        (B, T), N = batch["input_ids"].shape, max(1, len(batch["frames"]))
        frames = N * patches * min(passes["vision"].matrices, 2) + encoder.flops(N, P, passes["vision"])
        connector = N * _connector_flops(config, P, L, passes["connector"])
        read = decoder_stack(text).flops(B, T, passes["text"]) + passes[
            "embeddings"
        ].matrices * 2 * B * T * head_weights(text)
        return frames + connector + read + 2 * TRAINED.matrices * (N * adapters[0] + B * T * adapters[1])

    return count


def passes_by_part(model: Any) -> dict[str, Passes]:
    """FLOP multipliers of each part. Parts below the lowest trained weight have no backward pass."""
    passes, has_trained_below = dict[str, Passes](), False
    for part, parameters in parameters_by_part(model).items():
        trained = [name for name, parameter in parameters if parameter.requires_grad]
        is_fully_trained = any(".lora_" not in name for name in trained)
        has_trained_below = has_trained_below or bool(trained)
        passes[part] = TRAINED if is_fully_trained else FROZEN if has_trained_below else FORWARD
    if passes["embeddings"] is FORWARD:
        passes["embeddings"] = FROZEN  # the output projection: gradients pass through it
    return passes


def _connector_flops(config: Any, P: int, L: int, passes: Passes) -> int:
    """FLOPs of the connector per frame."""
    width, D = config.vision_config.hidden_size, config.text_config.hidden_size
    if not hasattr(config, "perceiver_config"):
        return passes.matrices * 2 * L * width * config.scale_factor**2 * D
    resampler, inner = config.perceiver_config, config.text_config.intermediate_size
    heads, keys = (
        count * resampler.resampler_head_dim for count in (resampler.resampler_n_heads, resampler.num_key_value_heads)
    )
    layer = L * (2 * D * heads + 12 * D * D) + (P + L) * 2 * D * keys
    matrices = P * (2 * width * inner + inner * D) + resampler.resampler_depth * layer
    return passes.matrices * 2 * matrices + passes.attention * resampler.resampler_depth * attention_flops(
        L, P + L, heads
    )


def _adapters(model: Any, P: int, L: int) -> tuple[int, int]:
    """Low-rank adapter weights times the tokens that they process: per frame, and per text token."""

    def read(name: str) -> int:
        if ".modality_projection." in name:
            return L if name.startswith("model.connector.modality_projection.proj.") else P
        return P + L if ".k_proj." in name or ".v_proj." in name else L

    adapters = {
        part: [
            (name, parameter.numel()) for name, parameter in parameters if ".lora_" in name and parameter.requires_grad
        ]
        for part, parameters in parameters_by_part(model).items()
    }
    frames = sum(P * count for _, count in adapters["vision"]) + sum(
        read(name) * count for name, count in adapters["connector"]
    )
    return frames, sum(count for _, count in adapters["text"])
