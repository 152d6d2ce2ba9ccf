"""A pretrained causal language model from a folder or from the local Hugging Face cache. Never downloads."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from src.errors import CheckpointError, ConfigError
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.interfaces import Architecture, ModelConfig
from src.files import read_json, sample_digest, sha256
from src.models import hub_files, kv_cache_size, prepared_tokenizer
from src.models.architecture import from_dict
from src.support.call_once import call_once
from src.support.torch_settings import speed_up_bfloat16

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
BITSANDBYTES = "requirements/bitsandbytes.txt"
WITHOUT = {
    "sdpa": ("bloom", "gpt_neo"),
    "flash_attention_2": ("bloom", "mt5", "t5"),
    "flex_attention": ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo"),
}
"""Families in use here without this implementation of attention in transformers 5.23."""
ON_GPU = ("flash_attention_2", "flex_attention")


class RotaryScaling(StrictConfig):
    """Scaling of rotary positions, to read more tokens than in training. `save_pretrained` saves it in the model's
    config."""

    kind: Literal["linear", "dynamic", "yarn", "ntk"]
    """linear: positions are divided by `factor` (Chen et al. 2023, arXiv 2306.15595). ntk: the base of the frequencies
    is multiplied by factor^(d / (d - 2)), d being the rotated width of a head. dynamic: the same, growing with the
    length. yarn: arXiv 2309.00071."""
    factor: float = Field(gt=1)
    """Factor by which the maximum number of tokens grows."""

    def apply(self, config: Any) -> None:
        """Scale the rotary positions in a transformers config.

        Raises:
            ConfigError: the family has no rotary positions, or they are already scaled.
        """
        parameters = getattr(config, "rope_parameters", None)
        if not isinstance(parameters, dict) or "rope_theta" not in parameters:
            raise ConfigError(
                f"model.rope: the family {config.model_type!r} has no single kind of rotary positions. Remove it."
            )
        if parameters.get("rope_type", "default") != "default":
            raise ConfigError(
                f"model.rope: rotary positions are already scaled ({parameters['rope_type']}). Remove it."
            )
        if self.kind == "ntk":
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            width = int(head * parameters.get("partial_rotary_factor", 1.0))
            config.rope_parameters = {
                **parameters,
                "rope_theta": parameters["rope_theta"] * self.factor ** (width / (width - 2)),
            }
            config.max_position_embeddings = int(config.max_position_embeddings * self.factor)
        else:
            config.rope_parameters = {**parameters, "rope_type": self.kind, "factor": self.factor}


class Config(ModelConfig):
    """The pretrained model, and the type of its weights in memory."""

    path: str = Field(min_length=1)
    """Hub id such as "bigcode/starcoderbase-1b", or a save_pretrained folder: below `--data_path`, or a path."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory."""
    revision: str | None = None
    """Branch, tag or commit of the hub id; None for main."""
    quantization: Literal["8bit", "4bit"] | None = None
    """Quantize matrices to 8 bits (LLM.int8(), arXiv 2208.07339) or 4 bits (NF4, arXiv 2305.14314) with bitsandbytes;
    for a frozen base."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] | None = None
    """Transformers' implementation of attention; None: its default, sdpa if the family supports it."""
    extra_tokens: list[str] | None = None
    """Control tokens to add to the vocabulary."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """Folder below `--data_path` of a prepared tokenizer with the model's tokens and new ones; None: the model's own
    tokenizer."""
    rope: RotaryScaling | None = None
    """None: as in config.json."""

    @model_validator(mode="after")
    def _new_tokens_are_learned(self) -> "Config":
        for field in ("extra_tokens", "tokenizer"):
            if getattr(self, field) and self.quantization:
                raise ValueError(f"{field}: a quantized model cannot learn new tokens. Remove {field} or quantization.")
        return self

    def build(self, places: Places) -> "PreTrainedModel":
        """Build the model with its weights, ready to train or to freeze.

        Raises:
            ConfigError: it is not on this machine, or transformers cannot build a causal language model from its
                config.json.
            CheckpointError: the weights are incomplete or damaged.
        """
        self.check(places)
        return self.load(places, "AutoModelForCausalLM")

    def load(self, places: Places, kind: str) -> "PreTrainedModel":
        """Load the model as transformers' class `kind`. In a `Recording`, its weights are read later if possible.

        Raises:
            UserError: see `build`.
        """
        import transformers

        from src.support.deferred import Recording, building_like

        self.require_files(places)
        if places.on_paper:
            load = self._build_on_paper
        else:
            self.check_device()
            if self.dtype == "bfloat16":
                speed_up_bfloat16()
            load = partial(self._read_later, Recording.active) if Recording.active else self._load_pretrained
        model: Any = load(places, getattr(transformers, kind))
        if self.extra_tokens or self.tokenizer:
            model.name_or_path = str(self.tokenizer_folder(places))
            with building_like(model):
                prepared_tokenizer.grow_embeddings(model, Path(model.name_or_path), self.extra_tokens or ())
        if self.quantization is None:
            return model
        for module in model.modules():
            # With AVX512-BF16 a pass without gradients packs the weights, and later passes get no gradients (0.50.2).
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return model.requires_grad_(False)

    def _load_pretrained(self, places: Places, made_by: Any) -> "PreTrainedModel":
        """Load the model with its weights. made_by: transformers' class."""
        import pickle

        import torch
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError

        folder = self.folder(places)
        try:
            loaded: Any = made_by.from_pretrained(
                folder,
                dtype=getattr(torch, self.dtype),
                local_files_only=True,
                output_loading_info=True,
                quantization_config=self._quantization_config(),
                attn_implementation=self.attention,
                **({"config": self._scaled_config(places)} if self.rope else {}),
            )
        except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise CheckpointError(
                f"{hub_files.find_weights(folder)}: damaged, or weights of another model ({_first_line(error)}). "
                "Download it again."
            ) from error
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            ArithmeticError,
            OSError,
            ImportError,
            StrictDataclassError,
        ) as error:
            # Raised for an invalid value in config.json.
            raise _unusable(folder / "config.json", error) from error
        model, report = loaded
        if report["missing_keys"]:
            # transformers would initialize them randomly.
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise CheckpointError(
                f"{hub_files.find_weights(folder)}: incomplete: {missing} missing. Download it again."
            )
        return model

    def _read_later(self, recording: Any, places: Places, made_by: Any) -> "PreTrainedModel":
        """Build the model without weights if they can be read later from safetensors files, else load it."""
        import torch

        from src.models import unfilled

        folder = self.folder(places)
        weights = None if self.quantization else hub_files.find_weights(folder)
        more = {"attn_implementation": self.attention} if self.attention else {}
        make = partial(_maker(made_by), dtype=getattr(torch, self.dtype), **more)
        with contextlib.suppress(Exception):  # `_load_pretrained` reports the error
            files = hub_files.weight_files(weights) if weights else []
            return unfilled.read_later(recording, lambda: make(self._scaled_config(places)), folder, files)
        log.info("%s: each process loads all of these weights before it shards them.", folder)
        with recording.pause():
            return self._load_pretrained(places, made_by)

    def _build_on_paper(self, places: Places, made_by: Any) -> Any:
        """Build the model without weights. made_by: transformers' class."""
        import torch

        if self.quantization:
            raise ConfigError(
                f"model.quantization: cannot plan the memory of {self.quantization!r} weights. Remove it with --set."
            )
        # Other implementations save the same tensors as sdpa.
        attention = {"attn_implementation": "eager"} if self.attention == "eager" else {}
        return _maker(made_by)(self._scaled_config(places), dtype=getattr(torch, self.dtype), **attention)

    def _scaled_config(self, places: Places) -> Any:
        config = self.load_config(places)
        if self.rope:
            self.rope.apply(config)
        return config

    def _quantization_config(self) -> Any:
        """The quantization setting for transformers."""
        import torch
        from transformers import BitsAndBytesConfig

        if self.quantization is None:
            return None
        if self.quantization == "8bit":
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, self.dtype)
        )

    def is_frozen(self) -> bool:
        """Whether the model's own weights cannot be trained."""
        return self.quantization is not None

    def check(self, places: Places) -> None:
        self.require_files(places)
        path = self.folder(places) / "config.json"
        if read_json(path, ConfigError).get("is_encoder_decoder") is True:
            raise ConfigError(f"{path}: is an encoder-decoder, but 'hf' loads decoders. Use 't5' for a T5.")

    def require_files(self, places: Places) -> None:
        """Like `check`, for a model of any kind."""
        self.architecture(places)
        folder = self.folder(places)
        if self.quantization is not None and find_spec("bitsandbytes") is None:
            raise ConfigError(
                f"model.quantization: {self.quantization!r} needs a missing package: pip install -r {BITSANDBYTES}"
            )
        self._check_attention(places)
        if self.tokenizer:
            prepared_tokenizer.require(places.data / self.tokenizer)
        if self.rope:
            self._scaled_config(places)
        if self._local_folder(places) is not None and self.revision is not None:
            raise ConfigError(
                f"model.revision: {self.revision!r} is ignored, as path {self.path!r} is a folder. Remove it."
            )
        if places.on_paper:
            return
        weights = hub_files.find_weights(folder)
        if weights is None:
            raise CheckpointError(f"{folder}: no weights. Expected {' or '.join(hub_files.WEIGHTS)} in this folder.")
        for path in hub_files.weight_files(weights):
            if not os.path.isfile(path):
                raise CheckpointError(f"{path}: missing, but listed in {weights.name}. Download it again.")

    def _check_attention(self, places: Places) -> None:
        """Raise ConfigError if the attention implementation is not installed or not supported by the family."""
        if self.attention == "flash_attention_2" and find_spec("flash_attn") is None:
            raise ConfigError(
                f"model.attention: {self.attention!r} needs a package that is not installed: pip install flash-attn"
            )
        sizes = call_once(self.architecture, places)
        if sizes and sizes.model_type in WITHOUT.get(self.attention or "", ()):
            instead = "eager" if self.attention == "sdpa" or sizes.model_type in WITHOUT["sdpa"] else "sdpa"
            raise ConfigError(
                f"model.attention: the family {sizes.model_type!r} does not support {self.attention!r}. "
                f"Use {instead!r}."
            )

    def check_device(self) -> None:
        import torch

        if self.attention in ON_GPU and not torch.cuda.is_available():
            raise ConfigError(f"model.attention: {self.attention!r} needs a GPU. Use 'sdpa'.")

    def tokenizer_folder(self, places: Places) -> Path:
        return places.data / self.tokenizer if self.tokenizer else self.folder(places)

    def new_token_ids(self, places: Places) -> list[int]:
        if not (self.extra_tokens or self.tokenizer):
            return []
        folder = self.folder(places)
        base_vocabulary = prepared_tokenizer.load(folder).get_vocab()
        vocabulary = prepared_tokenizer.load(self.tokenizer_folder(places), self.extra_tokens or ()).get_vocab()
        return sorted(number for token, number in vocabulary.items() if token not in base_vocabulary)

    def read_config(self, places: Places) -> dict[str, Any]:
        """Read config.json.

        Raises:
            ConfigError: it is missing, or save_pretrained did not write it.
        """
        path = self.folder(places) / "config.json"
        raw = read_json(path, ConfigError)
        if not isinstance(raw, dict):
            raise ConfigError(
                f"{path}: expected a dict, got {type(raw).__name__}. Use a folder that save_pretrained wrote."
            )
        if "model_type" not in raw:
            raise ConfigError(f'{path}: "model_type" is missing. Use a folder that save_pretrained wrote.')
        return raw

    def load_config(self, places: Places) -> Any:
        """Read config.json with transformers, which adds defaults for missing values.

        Raises:
            ConfigError: see `read_config`; or transformers cannot read it.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        self.read_config(places)
        try:
            return AutoConfig.from_pretrained(self.folder(places), local_files_only=True)
        except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
            raise _unusable(self.folder(places) / "config.json", error) from error

    def architecture(self, places: Places) -> Architecture | None:
        try:
            sizes = from_dict(self.read_config(places))
        except ValueError as error:
            raise ConfigError(f"{self.folder(places) / 'config.json'}: {error}") from None
        if sizes and self.rope and sizes.max_positions:
            sizes = replace(sizes, max_positions=int(sizes.max_positions * self.rope.factor))
        return sizes and replace(sizes, attention=self.attention)

    def cache_bytes(self, places: Places, value_bytes: int) -> dict[str, int] | None:
        return kv_cache_size.decoder_bytes(self.architecture(places), value_bytes)

    def fingerprint(self, places: Places) -> str:
        """sha256 of config.json and the weight files that `build` loads; the same for a hub id and a copy of its files.

        A weight file is represented by name, size and `files.sample_digest`, which reads at most 6 MiB of many
        gigabytes. Further training or merged adapters are detected; a change of a few bytes can go unnoticed.

        Raises:
            UserError: see `check`.
        """
        self.require_files(places)
        folder = self.folder(places)
        weights = hub_files.find_weights(folder)
        assert weights, "check found them"
        weight_digests = {
            path.name: [path.stat().st_size, sample_digest(path)] for path in hub_files.weight_files(weights)
        }
        return hashlib.sha256(
            json.dumps([sha256(folder / "config.json"), weight_digests], sort_keys=True).encode()
        ).hexdigest()

    def folder(self, places: Places) -> Path:
        """The folder with the model's config.json."""
        local_folder = self._local_folder(places)
        if local_folder is None:
            return hub_files.find_snapshot(self.path, self.revision, places.data)
        if not (local_folder / "config.json").is_file():
            raise ConfigError(f"{self.path!r}: the folder has no config.json. Use a folder that save_pretrained wrote.")
        return local_folder

    def _local_folder(self, places: Places) -> Path | None:
        """The folder `path`, below the prepared data or as given; None for a hub id."""
        candidates = (places.data / self.path, Path(self.path))
        # Unlike Path.is_dir, False for a name that is too long.
        return next((path for path in candidates if os.path.isdir(path)), None)


def _maker(made_by: Any) -> Callable[..., Any]:
    """The function that builds a model from a config. made_by: transformers' class."""
    return getattr(made_by, "from_config", None) or made_by._from_config


def _unusable(path: Path, error: Exception) -> ConfigError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"{path}: cannot build a model from it ({reason[:300]}). Correct it, or download it again.")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
