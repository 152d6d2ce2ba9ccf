"""What transformers' models of images and text lack for training on packed rows."""

from types import MethodType
from typing import Any

from torch import Tensor


def require_encoder_passes(model: Any) -> None:
    """Have the features of frames that no token stands for take part in the result with weight 0.

    A micro-batch without an image then reads one frame that nobody sees: where a model is shared, all processes must make the same passes.
    """
    inner = model.model
    merge = inner.inputs_merger

    def inputs_merger(self: Any, input_ids: Tensor, inputs_embeds: Tensor, image_hidden_states: Tensor) -> Tensor:
        if input_ids is not None and not (input_ids == self.config.image_token_id).any():
            return inputs_embeds + (image_hidden_states.sum() * 0).to(inputs_embeds.dtype)
        return merge(input_ids, inputs_embeds, image_hidden_states)

    inner.inputs_merger = MethodType(inputs_merger, inner)
