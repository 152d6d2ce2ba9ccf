"""Export a cross-attention model that transformers loads without this project: the model classes, and a folder with
their code.

The folder's code is a concatenation of modules of this project, without their imports from the project (`source`).
"""

import ast
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from src.systems.crossattn.model import encoder, kv_cache, layers
from src.systems.crossattn.model.families import Family, Plan
from src.systems.crossattn.model.kv_cache import Context
from src.systems.crossattn.model.layers import CrossAttentionLM

CODE = "modeling_cross_attention.py"


class CrossAttentionConfig(PretrainedConfig):
    """The config of the base, and the settings of the blocks."""

    model_type = "cross_attention_lm"

    def __init__(
        self,
        base: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        plan: Any = None,
        **kwargs: Any,
    ) -> None:
        self.base, self.settings, self.plan = base or {}, settings or {}, plan or {}
        super().__init__(**kwargs)


class CrossAttentionForCausalLM(PreTrainedModel):
    """A causal language model that reads a context separately from its prompt.

    Usage: `generate(input_ids, context=context_ids)`. A context is ids (B, S), or (B, C, S) for C chunks that are
    encoded separately; a pair of ids and mask, True on real tokens; or, for several questions, the result of
    `encode_context`. Without a context the model is its base.
    """

    config_class = CrossAttentionConfig
    base: Any
    _reader: Any

    def __init__(self, config: CrossAttentionConfig) -> None:
        super().__init__(config)
        plan = Plan(**{**config.plan, "family": Family(**config.plan["family"])})
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.base))
        reader = CrossAttentionLM(SimpleNamespace(**config.settings, cache_contexts=False), base, plan)  # type: ignore[arg-type]
        self.base, self.blocks = base, reader.blocks
        object.__setattr__(self, "_reader", reader)  # not a submodule, or each weight would have two names
        self.post_init()

    @torch.no_grad()
    def encode_context(self, context_ids: Tensor, context_mask: Tensor | None = None) -> "Context":
        """Encode ids (B, S) or (B, C, S), for use in several calls.
        context_mask: True on real tokens; None if all tokens are real."""
        ids = context_ids[:, None] if context_ids.dim() == 2 else context_ids
        mask = torch.ones_like(ids, dtype=torch.bool) if context_mask is None else context_mask.view_as(ids).bool()
        return self._reader.encode(ids, mask)

    def _context(self, context: Any) -> "Context | None":
        if context is None or isinstance(context, Context):
            return context
        return self.encode_context(*context) if isinstance(context, tuple) else self.encode_context(context)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, context: Any = None, **kwargs: Any
    ) -> CausalLMOutput:
        """Logits (B, T, vocabulary) of the tokens."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
        with self._reader.reading(self._context(context)):
            logits = self.base(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        return CausalLMOutput(logits=logits)

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, context: Any = None, **kwargs: Any
    ) -> Tensor:
        """Continue left-padded prompts (B, T). kwargs: for transformers' `generate`."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with self._reader.reading(self._context(context)):
            return self.base.generate(input_ids=input_ids, attention_mask=mask, **kwargs)


def save(model: CrossAttentionLM, folder: Path) -> None:
    """Write config, weights and code of `model` to `folder`."""
    settings = model.settings.model_dump(mode="json", exclude={"base", "weights", "cache_contexts"})
    plan = asdict(layers._plan_for(model.settings, model.base))
    base = {**model.base.config.to_dict(), "_name_or_path": "", "dtype": str(model.base.dtype).removeprefix("torch.")}
    config = CrossAttentionConfig(base=base, settings=settings, plan=plan)
    exported_model = CrossAttentionForCausalLM(config).to(model.base.dtype)
    exported_model.base.load_state_dict(model.base.state_dict())
    exported_model.blocks.load_state_dict(model.blocks.state_dict())
    exported_model.blocks.to(next(model.blocks.parameters()).dtype)
    exported_model.save_pretrained(folder)
    (folder / CODE).write_text(source(), encoding="utf-8")
    saved_config = CrossAttentionConfig.from_pretrained(folder)
    stem = CODE.removesuffix(".py")
    saved_config.auto_map = {
        "AutoConfig": f"{stem}.CrossAttentionConfig",
        "AutoModelForCausalLM": f"{stem}.CrossAttentionForCausalLM",
    }
    saved_config.architectures = ["CrossAttentionForCausalLM"]
    saved_config.save_pretrained(folder)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def source() -> str:
    """The code of the model classes in one module."""
    from src import errors
    from src.models import wrapper
    from src.systems.crossattn.model import families

    paths = [str(module.__file__) for module in (wrapper, kv_cache, encoder, layers)]
    body = "\n\n".join(_without_imports(Path(path).read_text(encoding="utf-8")) for path in [*paths, __file__])
    body = body[: body.index("\ndef save(")]
    header = [
        '"""A language model with cross-attention blocks that read a context: see the class at the end."""',
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        _definition(errors.__file__, "UserError"),
        _definition(errors.__file__, "ConfigError"),
        _definition(str(families.__file__), "Family"),
        _definition(str(families.__file__), "Plan"),
    ]
    return "\n\n".join([*header, body])


def _without_imports(code: str) -> str:
    """Remove the module's docstring and its imports from this project."""
    lines, tree = code.splitlines(), ast.parse(code)
    for node in ast.walk(tree):
        is_internal = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "src"
        types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if (is_internal or types or node is tree.body[0]) and isinstance(node, ast.stmt):
            for number in range(node.lineno - 1, (node.end_lineno or node.lineno)):
                lines[number] = ""
    return "\n".join(lines)


def _definition(path: str, name: str) -> str:
    """The source of a class, with its decorators."""
    code = Path(path).read_text(encoding="utf-8")
    (node,) = (node for node in ast.parse(code).body if isinstance(node, ast.ClassDef) and node.name == name)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(code.splitlines()[first - 1 : node.end_lineno])
