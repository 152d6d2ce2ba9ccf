"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) in a frozen model: config, injection and merging.

A matrix W of the base becomes W + alpha / rank * B A. Only A and B are trained and saved. B starts at zero, so that the
initial output is that of the base.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src.errors import ConfigError
from src.experiments.config import Places, unknown_text
from src.experiments.interfaces import ModelField, WrapperConfig
from src.experiments.kinds import CROSS_ATTENTION
from src.support.call_once import call_once

if TYPE_CHECKING:
    from torch import nn

logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
"""peft imports bitsandbytes if installed, which warns about 4 bits on a CPU even if unused."""
_GPT = ("c_attn", "c_fc", "c_proj")
_T5 = ("k", "o", "q", "v", "wi", "wi_0", "wi_1", "wo")
_LLAMA = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
MATRICES = {
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": ("dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "longt5": _T5,
    "t5": _T5,
}
"""Names of the matrices in the layers of a family, by `model_type`, for checks before a model is loaded."""


class Config(WrapperConfig):
    """The matrices that get an adapter, and its size."""

    rank: int = Field(gt=0)
    """Rows of A and columns of B."""
    alpha: float = Field(gt=0)
    """The adapters' output is multiplied by alpha / rank."""
    target_modules: list[str] = Field(min_length=1)
    """Names of the matrices, such as "q_proj", in all layers."""
    base: ModelField
    """The frozen model; only embeddings of new tokens are trained. In a cross-attention model the decoder gets the
    adapters, and the blocks are trained as usual."""
    dropout_rate: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of an adapter's inputs in training."""

    @model_validator(mode="after")
    def _each_adapter_once(self) -> "Config":
        if self.base.name == "lora":
            raise ValueError(
                "base: adapters cannot be nested. Use one adapter of a higher rank with all target_modules."
            )
        if getattr(self.base, "train_all_params", False):
            raise ValueError(
                "base: train_all_params has no effect with adapters, which freeze the base. "
                "Remove train_all_params or the adapters."
            )
        if getattr(self.base, "cache_contexts", False):
            raise ValueError(
                "base: cannot use cache_contexts, "
                "as adapters change the decoder's states of a context. Remove cache_contexts."
            )
        if self.dropout_rate and self.base.kind(None) == CROSS_ATTENTION:
            raise ValueError("dropout_rate: ignored in the decoder of a cross-attention model. Remove it.")
        return self

    def build(self, places: Places) -> "nn.Module":
        """Build the frozen base with adapters. A is drawn from torch's global generator after the base's weights; B is
        zero.

        Adapters of an earlier training of the base are merged into its weights first.

        Raises:
            ConfigError: no matrix has a name of `target_modules`.
            UserError: the base cannot be built.
        """
        return self._adapt(self.base.build(places), places)

    def trained_type(self, places: Places) -> str:
        return "float32"

    def _adapt(self, model: "nn.Module", places: Places) -> "nn.Module":
        """Add adapters to the base `model` in place."""
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D

        from src.support.deferred import building_like
        from src.support.weights import is_unfilled

        merge(model)
        decoder = _decoder(model)
        matrices = dict(_matrices(decoder))
        _require_known(self.target_modules, {name.rpartition(".")[2] for name in matrices})
        selected_matrices = {
            name: matrix for name, matrix in matrices.items() if name.rpartition(".")[2] in self.target_modules
        }
        transposed = isinstance(
            next(iter(selected_matrices.values())), Conv1D
        )  # either all matrices of a model or none
        settings = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  declared int, used as a factor
            lora_dropout=self.dropout_rate,
            target_modules=sorted(selected_matrices),
            fan_in_fan_out=transposed,
            trainable_token_indices=self._new_rows(places, decoder),
        )
        is_deferred = is_unfilled(decoder)
        with building_like(decoder):
            inject_adapter_in_model(settings, decoder)  # freezes the rest of the decoder
        for parameter in decoder.parameters():
            if parameter.requires_grad:  # in float32 for any type of the base, as rounding would lose small updates
                if is_deferred:  # as peft does, but not on the meta device
                    parameter.data = parameter.data.to(decoder.dtype)
                parameter.data = parameter.data.float()
        return model

    def _new_rows(self, places: Places, decoder: Any) -> dict[str, list[int]] | None:
        """Ids of the base's new tokens. Their rows of the embedding, and of the output matrix if not tied, are
        trained."""
        from torch import nn
        from torch.utils import swap_tensors

        from src.support.deferred import Recording

        ids = [*self.base.new_token_ids(places)]
        if not ids:
            return None
        inputs, outputs = decoder.get_input_embeddings(), decoder.get_output_embeddings()
        tables = [inputs] if outputs is None or outputs.weight is inputs.weight else [inputs, outputs]
        if Recording.active:  # peft's lists of row numbers have no values on the meta device
            for table in tables:
                values = nn.Parameter(Recording.active.compute(table.weight), table.weight.requires_grad)
                swap_tensors(table.weight, values)
        return {name: ids for name, module in decoder.named_modules() if any(module is table for table in tables)}

    def check(self, places: Places) -> None:
        call_once(self.base.check, places)
        model_type = self.architecture(places)
        if model_type and model_type.model_type in MATRICES:
            _require_known(self.target_modules, MATRICES[model_type.model_type])

    def kind(self, places: Places | None) -> str | None:
        return self.base.kind(places)

    def is_frozen(self) -> bool:
        return False


def merge(model: "nn.Module") -> int:
    """Merge the adapters in `model` into their matrices, in place. Returns the number of adapters."""
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import TrainableTokensWrapper

    for name, wrapped in [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, TrainableTokensWrapper)
    ]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, wrapped.unload_and_optionally_merge_module(True, True, None))
    adapter_layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
    with torch.no_grad():
        for name, layer in adapter_layers:
            layer.merge(safe_merge=True)  # type: ignore[operator]  all layer classes have it, but not their base class
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    if adapter_layers:
        del _decoder(model).peft_config
    return len(adapter_layers)


def _decoder(model: "nn.Module") -> Any:
    """The transformers model: `model` itself, or the one inside a cross-attention or Fusion-in-Decoder model."""
    from transformers import PreTrainedModel

    return model if isinstance(model, PreTrainedModel) else model.base


def _matrices(decoder: Any) -> Iterator[tuple[str, "nn.Module"]]:
    """(dotted name, module) of the matrices that can be adapted:
    all except the output matrix, which can be tied to the embedding."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = decoder.get_output_embeddings()
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            yield name, module


def _require_known(names: Iterable[str], there: Iterable[str]) -> None:
    there = set(there)
    for name in names:
        if name not in there:
            raise ConfigError(f"model.target_modules: {unknown_text('matrix of the base', name, there)}")
