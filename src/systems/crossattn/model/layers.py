"""Cross-attention blocks, attached to any decoder by hooks on its list of layers.

Shapes: B samples, T decoder tokens, C context chunks, S tokens of a chunk, P = C * S context positions, D hidden size
of the base, H heads, K key/value heads, d head size, R decoder rows per context (beams), so B * R rows of the decoder.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from src.errors import ConfigError
from src.models import architecture
from src.models.wrapper import Wrapper
from src.systems.crossattn.model import flops
from src.systems.crossattn.model.encoder import EncodedInMemory, encode, last_hidden
from src.systems.crossattn.model.families import FAMILIES, Plan
from src.systems.crossattn.model.kv_cache import ActiveContext, Context

if TYPE_CHECKING:
    from src.systems.crossattn.model.config import Config

_READING: ContextVar[Mapping[int, ActiveContext | None]] = ContextVar("reading", default={})  # noqa: B039  never changed in place
"""Active context of each model, by its id, in each thread, so that simultaneous requests have separate contexts."""


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864) in Llama's layout: pair i is (x[i], x[i + d / 2]).

    x: (B, T, H, d). positions: (B or 1, T). theta: the base of the wavelengths.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the context."""

    def __init__(self, config: "Config", base: Any, sizes: Plan) -> None:
        super().__init__()
        width = base.hidden_size
        self.heads, self.head_size = sizes.num_heads, sizes.hidden_size // sizes.num_heads
        bias = config.attention_bias or not sizes.family.gated
        self.q = nn.Linear(width, sizes.hidden_size, bias=bias)
        self.k = (
            None
            if config.shared_projections
            else nn.Linear(width, sizes.num_key_value_heads * self.head_size, bias=bias)
        )
        self.v = nn.Linear(width, sizes.num_key_value_heads * self.head_size, bias=bias)
        self.out = nn.Linear(sizes.hidden_size, width, bias=bias)
        self.theta = _rope_theta(base.rope_parameters) if sizes.family.gated else None
        self.attention_dropout = getattr(base, sizes.family.attention_dropout)
        self.residual_dropout = nn.Dropout(
            getattr(base, sizes.family.residual_dropout) if sizes.family.residual_dropout else 0.0
        )

    def project(self, context_BPD: Tensor, mask_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (B, K, P, d) each, of the encoded contexts. Positions count real tokens, so padding of
        chunks has no effect."""
        B, P, _ = context_BPD.shape
        k = (self.q if self.k is None else self.k)(context_BPD).view(B, P, -1, self.head_size)
        v = self.v(context_BPD).view(B, P, -1, self.head_size)
        if self.theta is not None:
            k = rotate(k, (mask_BP.long().cumsum(dim=-1) - 1).clamp(min=0), self.theta)
        return k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Attention output for the decoder states h (B * R, T, D), in the same shape;
        zero for a sample without a readable position.

        mask: (B, P) bool, True on readable positions; None if all are readable. positions: (B * R or 1, T), positions
        of the decoder tokens; None without rotary positions.
        """
        rows, T, _ = h.shape
        q = self.q(h).view(rows, T, self.heads, self.head_size)
        if self.theta is not None:
            assert positions is not None
            q = rotate(q, positions, self.theta)
        # Cross-attention is not causal, so the rows that share a context can be concatenated.
        q = q.reshape(len(keys), -1, self.heads, self.head_size).transpose(1, 2)
        readable = None if mask is None else mask.any(dim=-1)
        # An empty softmax gives NaN, and NaN gradients even if its result is discarded. So attend to all positions,
        # then discard the result.
        allowed = None if mask is None or readable is None else (mask | ~readable[:, None])[:, None, None, :]
        rate = self.attention_dropout if self.training else 0.0
        read = functional.scaled_dot_product_attention(
            q, keys, values, allowed, dropout_p=rate, enable_gqa=keys.shape[1] != self.heads
        )
        read = self.residual_dropout(self.out(read.transpose(1, 2).reshape(rows, T, -1)))
        if readable is None:
            return read
        return torch.where(readable.repeat_interleave(rows // len(keys))[:, None, None], read, torch.zeros_like(read))


class MLP(nn.Module):
    """Base width -> `feed_forward_size` -> base width; gated and without biases in Llama style."""

    def __init__(self, base: Any, sizes: Plan) -> None:
        super().__init__()
        gated, inner = sizes.family.gated, sizes.feed_forward_size
        self.gate = nn.Linear(base.hidden_size, inner, bias=False) if gated else None
        self.up = nn.Linear(base.hidden_size, inner, bias=not gated)
        self.down = nn.Linear(inner, base.hidden_size, bias=not gated)
        self.activation = ACT2FN[getattr(base, sizes.family.activation, sizes.family.activation)]
        self.dropout = nn.Dropout(
            getattr(base, sizes.family.residual_dropout) if sizes.family.residual_dropout else 0.0
        )

    def forward(self, h: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        inner = self.activation(self.up(h)) if self.gate is None else self.activation(self.gate(h)) * self.up(h)
        return self.dropout(self.down(inner))


class Block(nn.Module):
    """Pre-norm cross-attention and MLP. The weights are float32 for every base type, as they are trained."""

    def __init__(self, config: "Config", base: Any, sizes: Plan) -> None:
        super().__init__()
        norm = nn.RMSNorm if (config.norm or ("rms" if sizes.family.gated else "layer")) == "rms" else nn.LayerNorm
        eps = getattr(base, sizes.family.norm_eps) if isinstance(sizes.family.norm_eps, str) else sizes.family.norm_eps
        self.norm1 = norm(base.hidden_size, eps=eps)
        self.attention = CrossAttention(config, base, sizes)
        self.norm2 = norm(base.hidden_size, eps=eps)
        self.mlp = MLP(base, sizes)
        self.skip_connections = config.skip_connections
        self.context_dropout_rate = config.context_dropout_rate
        self.apply(partial(_initialize, std=base.init_std if hasattr(base, "init_std") else base.initializer_range))

    def project(self, context_BPD: Tensor, mask_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoded contexts, (B, K, P, d) each. mask_BP: True on real tokens."""
        return self.attention.project(context_BPD.to(self.norm1.weight.dtype), mask_BP)

    def forward(
        self, h: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, positions: Tensor | None = None
    ) -> Tensor:
        """Decoder states (B * R, T, D) in the type of `h`. For the arguments see `CrossAttention.forward`."""
        if self.training and self.context_dropout_rate:
            assert mask is not None
            mask = mask & (torch.rand(mask.shape, device=mask.device) >= self.context_dropout_rate)
        x = h.to(self.norm1.weight.dtype)
        y = x + self.attention(self.norm1(x), keys, values, mask, positions)
        y = y + self.mlp(self.norm2(y))
        return (x + y if self.skip_connections else y).to(h.dtype)


def _rope_theta(parameters: Mapping[str, Any]) -> float:
    """The base of the wavelengths. If it differs by layer type (Gemma 3), the one of the full-attention layers."""
    return parameters.get("full_attention", parameters)["rope_theta"]


def _initialize(module: nn.Module, std: float) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class CrossAttentionLM(Wrapper):
    """A causal language model with trained cross-attention blocks between its layers, which read a context.

    Without `train_all_params` the base is frozen: its weights have no gradients, and it stays in eval mode. It always
    encodes contexts in eval mode.
    """

    has_separate_base = True
    exporter: Callable[["CrossAttentionLM", Path, Any], None]
    """Writes an export; set by the config that builds the model."""

    def __init__(self, config: "Config", base: PreTrainedModel, plan: Plan | None = None) -> None:
        """Attach the blocks of `config` to `base`, as hooks that do nothing until a context is active.
        plan: None for the plan of `config`.

        Raises:
            ConfigError: the family of `base` is unknown, or the blocks do not fit it.
        """
        super().__init__()
        sizes = plan or _plan_for(config, base)
        layers = _decoder_layers(base, sizes.family.layers)
        self.base = base.requires_grad_(config.train_all_params)
        self.settings = config
        keys = ["shared"] if config.shared_weights else [str(i) for i in sizes.layer_indices]
        self.layer_indices = sizes.layer_indices
        """Indices of the decoder layers that have a block, from the top."""
        blocks = {key: Block(config, base.config.get_text_config(), sizes) for key in keys}
        self.blocks = nn.ModuleDict(blocks)
        """Blocks by the index of their decoder layer, or one shared block."""
        self.num_passes: Callable[[int], int] = lambda num_passes: num_passes
        """Maps the needed number of encoding passes to the number to make, so that ranks make equally many."""
        self._encode = EncodedInMemory().encode if config.cache_contexts else encode
        for i in sizes.layer_indices:
            block = blocks["shared" if config.shared_weights else str(i)]
            if config.final_layer:
                layers[i].register_forward_hook(partial(self._post_hook, block), with_kwargs=True)
            else:
                layers[i].register_forward_pre_hook(partial(self._pre_hook, block), with_kwargs=True)
        self.train()

    def export(self, folder: Path, request: Any) -> None:
        """Write the blocks in XC-Cache's layout, or the complete model with its code."""
        self.exporter(self, folder, request)

    def match_base_type(self) -> None:
        """Convert the blocks to the base's type."""
        self.blocks.to(self.base.dtype)

    def unique_blocks(self) -> list[Block]:
        """The blocks; a shared block once."""
        return cast(list[Block], list(self.blocks.values()))

    def train(self, mode: bool = True) -> "CrossAttentionLM":
        """Set the blocks to train or eval mode. The base follows if it is trained, else it stays in eval mode."""
        super().train(mode)
        self.base.train(mode and self.settings.train_all_params)
        return self

    def training_flops(self) -> Callable[[Mapping[str, Tensor]], int]:
        """A function from a batch to the FLOPs of one training pass over it."""
        return flops.training_flops(self)

    def encode(self, context_ids: Tensor, context_mask: Tensor) -> Context:
        """Encode (B, C, S) chunks separately, and concatenate a sample's chunks along the positions.

        context_mask: (B, C, S) bool, True on real tokens. Empty chunks are skipped.
        """
        B, C, S = context_ids.shape
        ids, mask = context_ids.reshape(B * C, S), context_mask.bool().reshape(B * C, S)
        training = self.base.training
        self.base.eval()
        with self.reading(None):
            hidden = self._encode(self.base, ids, mask, self.num_passes)
        self.base.train(training)
        return Context(hidden.view(B, C * S, -1), mask.reshape(B, C * S))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        context_ids: Tensor | None = None,
        context_mask: Tensor | None = None,
        loss_mask: Tensor | None = None,
        context_hidden: Tensor | None = None,
    ) -> Tensor:
        """Logits of the tokens (B, T), given their contexts from a ContextBatch or an EncodedBatch.
        Masks are True on real tokens; padding can be on either side.

        Returns (N, vocabulary) for the N tokens where loss_mask (B, T) is True, in row-major order, each predicted from
        the tokens before it. Without loss_mask returns (B, T, vocabulary), where each position predicts the next token.
        """
        with self._reading_batch(context_ids, context_mask, context_hidden):
            hidden = last_hidden(self.base, input_ids, attention_mask)
        if loss_mask is not None:
            hidden = hidden[:, :-1][loss_mask[:, 1:]]
        return output_logits(self.base, hidden)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        context_ids: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_hidden: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Continue left-padded prompts (B, T); returns prompts and continuations. kwargs: for transformers' `generate`.

        Without a context it reads the context of the enclosing `reading`. Call it in eval mode, as train mode drops
        context positions.

        Raises:
            ConfigError: there is no context.
        """
        with self._reading_batch(context_ids, context_mask, context_hidden):
            return self.base.generate(input_ids=input_ids, attention_mask=attention_mask.long(), **kwargs)

    def _reading_batch(
        self, context_ids: Tensor | None, context_mask: Tensor | None, context_hidden: Tensor | None
    ) -> AbstractContextManager[None]:
        """`reading` with the contexts of a batch; without contexts, the enclosing `reading` applies."""
        if context_mask is not None:
            return self.reading(self.make_context(context_ids, context_mask, context_hidden))
        if self._reading is None:
            raise ConfigError(
                "no context: pass context_ids and context_mask, or call it inside `with model.reading(context):`."
            )
        return nullcontext()

    def make_context(
        self, context_ids: Tensor | None, context_mask: Tensor, context_hidden: Tensor | None = None
    ) -> Context:
        """Encode (B, C, S) ids and mask, or wrap states (B, P, D) encoded in advance, with their mask (B, P)."""
        if context_hidden is not None:
            return Context(context_hidden, context_mask.bool())
        assert context_ids is not None
        return self.encode(context_ids, context_mask)

    @contextmanager
    def reading(self, context: Context | None) -> Iterator[None]:
        """Make every forward pass of the base read `context` inside the block, in this thread.
        Row b of the context is read by R consecutive rows. With None the base reads no context.

        Keys and values are computed at first use and cached, so weights must not change inside the block.
        """
        active = None if context is None else ActiveContext(context, self._mask_of(context))
        token = _READING.set({**_READING.get(), id(self): active})
        try:
            yield
        finally:
            _READING.reset(token)

    def _mask_of(self, context: Context) -> Tensor | None:
        """The mask of a context; None if all positions are real and context dropout is off."""
        drops = self.training and self.settings.context_dropout_rate
        return context.mask if drops or not context.mask.all() else None

    @property
    def _reading(self) -> ActiveContext | None:
        return _READING.get().get(id(self))

    def _apply_block(self, block: Block, h: Tensor, kwargs: dict[str, Any]) -> Tensor:
        assert self._reading is not None
        reading = self._reading
        if block not in reading.kv_cache:
            reading.kv_cache[block] = block.project(reading.context.hidden, reading.context.mask)
        return block(h, *reading.kv_cache[block], reading.mask, kwargs.get("position_ids"))

    def _pre_hook(self, block: Block, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook: pass the layer's input through the block."""
        if self._reading is None:
            return None
        return (self._apply_block(block, args[0], kwargs), *args[1:]), kwargs

    def _post_hook(
        self, block: Block, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Hook: pass the layer's output through the block."""
        if self._reading is None:
            return None
        if isinstance(output, tuple):
            return (self._apply_block(block, output[0], kwargs), *output[1:])
        return self._apply_block(block, output, kwargs)


def output_logits(base: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of states after the final norm, computed like the base's: scaled for Cohere and Granite, capped for Gemma
    2."""
    head, config = base.get_output_embeddings(), base.config.get_text_config()
    assert head is not None
    logits = head(hidden)
    if hasattr(config, "logit_scale") or hasattr(config, "logits_scaling"):
        logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _plan_for(config: "Config", base: PreTrainedModel) -> Plan:
    """The settings for this base."""
    sizes = architecture.from_dict(base.config.get_text_config().to_dict())
    if sizes is None or sizes.model_type not in FAMILIES:
        raise ConfigError(
            f"cross_attention: {type(base).__name__} is not of a known family: {', '.join(sorted(FAMILIES))}. "
            "Add a row to FAMILIES in src/systems/crossattn/model/families.py."
        )
    return config.plan(sizes)


def _decoder_layers(base: PreTrainedModel, path: str) -> nn.ModuleList:
    """The base's list of layers, which is at `path` in a text-only model."""
    try:
        return (
            attrgetter(path)(base)
            if base.config.get_text_config() is base.config
            else cast(Any, base.get_decoder()).layers
        )
    except AttributeError:
        raise ConfigError(
            f"cross_attention: {type(base).__name__} has no {path!r}. Use a plain causal language model as base."
        ) from None
