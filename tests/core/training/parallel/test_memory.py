"""Layers computed again and tensors kept on the host give the gradients of a plain pass, bit for bit, and do save
memory."""

import contextlib
import copy
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import T5Config, T5ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.experiments.registry import MODELS, bind
from src.models.lora import Config as Lora
from src.systems.crossattn.model.config import Config
from src.systems.crossattn.model.layers import CrossAttentionLM
from src.training.parallel import memory, zero
from src.training.parallel.compilation import Compiled, layers
from src.training.parallel.live_storages import LiveStorages
from tests import warm
from tests.core.models.conftest import PLACEHOLDER, make_base
from tests.core.training.parallel import kept_memory, zero_memory
from tests.toy import ROOT, environment

IDS = torch.arange(3, 19).view(2, 8)
CONTEXT = {"context_ids": IDS[:, None, :6], "context_mask": torch.ones(2, 1, 6, dtype=torch.bool)}
DROPOUT = {
    "gpt_bigcode": {"attn_pdrop": 0.1, "resid_pdrop": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama": {"attention_dropout": 0.1},
}


def model_with_adapters() -> nn.Module:
    config = Lora(
        rank=2, alpha=4.0, target_modules=["c_attn", "c_proj"], dropout_rate=0.1, base=bind(MODELS, PLACEHOLDER)
    )
    base = make_base("gpt_bigcode", **DROPOUT["gpt_bigcode"])

    class FixedModel(ModelConfig):
        def build(self, places: Places) -> nn.Module:
            return base

    return config.model_copy(update={"base": FixedModel()}).build(Places(None, None))  # type: ignore[arg-type]  no file is read


def crossing() -> nn.Module:
    config = Config(num_layers=2, stride=2, context_dropout_rate=0.3, base=bind(MODELS, PLACEHOLDER))
    base = make_base("gpt_bigcode", **DROPOUT["gpt_bigcode"])
    return CrossAttentionLM(config, base)


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.1}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


MODELS_BY_NAME: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda name=name, rates=rates: make_base(name, **rates)) for name, rates in DROPOUT.items()},
    "lora": model_with_adapters,
    "cross_attention": crossing,
    "t5": t5,
}


def loss(model: nn.Module) -> Tensor:
    if isinstance(model, CrossAttentionLM):
        return model(IDS, torch.ones_like(IDS), **CONTEXT).log_softmax(-1).square().mean()
    more = {"decoder_input_ids": IDS} if isinstance(model, T5ForConditionalGeneration) else {}
    return (
        model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False, **more)
        .logits.log_softmax(-1)
        .square()
        .mean()
    )


def gradients(model: nn.Module, offload: bool = False) -> dict[str, Tensor]:
    """Of a pass in train mode with fixed draws, and the loss itself."""
    model.train()
    torch.manual_seed(5)
    with memory.offload_activations(model, least_bytes=1) if offload else contextlib.nullcontext():
        value = loss(model)
    value.backward()
    return {"loss": value.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def saved_bytes(model: nn.Module) -> int:
    """What a forward pass keeps for its backward pass, weights left out, each storage once."""
    storages = {}
    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = loss(model.train())
    assert output.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("kind", MODELS_BY_NAME)
@pytest.mark.parametrize("way", ["again", "selective", "host", "both"])
def test_gradients_have_the_same_bits(kind: str, way: str):
    expected = gradients(MODELS_BY_NAME[kind]())
    model = MODELS_BY_NAME[kind]()
    names = list(model.state_dict())
    if way != "host":
        assert memory.checkpoint_layers(model, "selective" if way == "selective" else "full") == (
            6 if kind == "cross_attention" else 4
        )
    result = gradients(model, offload=way in ("host", "both"))
    assert list(model.state_dict()) == names
    assert result.keys() == expected.keys()
    assert len(result) > 1
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", MODELS_BY_NAME)
def test_dropout_is_at_work(kind: str):
    """Else the test above would show nothing of the draws."""
    model = MODELS_BY_NAME[kind]().train()
    torch.manual_seed(0)
    assert not torch.equal(loss(model), loss(model))


@pytest.mark.parametrize("kind", MODELS_BY_NAME)
def test_a_checkpointed_layer_saves_little(kind: str):
    model = MODELS_BY_NAME[kind]()
    whole = saved_bytes(model)
    memory.checkpoint_layers(model)
    assert saved_bytes(model) < whole / 2


class Products(TorchDispatchMode):
    """Counts products with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MODELS_BY_NAME)
def test_selective_checkpointing_saves_memory_and_repeats_no_product(kind: str):
    num_bytes, products = {}, {}
    for how in ("none", "selective", "full"):
        model = MODELS_BY_NAME[kind]()
        if how != "none":
            memory.checkpoint_layers(model, how)
        with LiveStorages() as storages:
            for weight in [*model.parameters(), *model.buffers()]:
                storages.hold(weight, "weights")
            output = loss(model.train())
            num_bytes[how] = storages.live["activations"]
        assert output.requires_grad
        with Products() as counter:
            gradients(model)
        products[how] = counter.count
    assert num_bytes["full"] < num_bytes["selective"] < 0.8 * num_bytes["none"]
    assert products["selective"] == products["none"] < products["full"]


@pytest.mark.parametrize(("dropout", "saved"), [(0.0, True), (0.1, False)])
def test_fused_attention_is_saved_unless_it_draws(dropout: float, saved: bool):
    states = torch.ones(1, 1, 2, 4)
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert memory._is_expensive(attention, (states, states, states, dropout), {}) is saved
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert memory._is_expensive(efficient, (states, states, states, None, True), {"dropout_p": dropout}) is saved


def test_compiled_layers_reject_selective_checkpointing():
    model: Any = make_base("llama")
    model.model.layers[0].forward = Compiled(model.model.layers[0], lambda x: x, lambda _, x: x)
    with pytest.raises(ConfigError, match=r"^--gradient_checkpointing selective: not supported with compiled layers\."):
        memory.checkpoint_layers(model, "selective")
    assert memory.checkpoint_layers(model) == 4


def test_a_layer_is_recomputed_only_in_the_backward_pass():
    model: Any = make_base("gpt_bigcode").train()
    calls = []
    model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    memory.checkpoint_layers(model)
    value = loss(model)
    assert calls == [True]
    value.backward()
    assert calls == [True, True]
    with torch.no_grad():
        loss(model)
        model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert calls[2:] == [False] * 3


def test_lists_within_a_layer_are_part_of_it():
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    layer = nn.Module()
    layer.experts = nn.ModuleList([block(), block()])
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    model.beside = nn.ModuleDict({"one": block(), "matrix": nn.Linear(4, 4)})
    assert layers(model) == [layer, model.beside["one"]]


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigError, match=r"--gradient_checkpointing: Linear has no layers\. Leave it out\."):
        memory.checkpoint_layers(nn.Linear(2, 2))


def test_all_but_weights_and_small_tensors_leave_and_come_back():
    model = make_base("llama").train()
    sizes: list[int] = []
    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model)
    assert sizes
    for least in (1, 512):
        with memory.offload_activations(model, least) as offload:
            value = loss(model)
        large = [size for size in sizes if size >= least]
        assert offload.num_bytes == sum(large), "none of these tensors has gaps or repeats its numbers"
        assert offload.num_returned == 0
        value.backward()
        assert offload.num_returned == len(large)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x, id="dense"),
        pytest.param(lambda x: x.transpose(0, 2), id="transposed"),
        pytest.param(lambda x: x[:, :, 1:3], id="part of each row"),
        pytest.param(lambda x: x[1:], id="from the middle on"),
        pytest.param(lambda x: x[:, :1].expand(-1, 7, -1), id="repeated"),
        pytest.param(lambda x: x[::2, 1::2], id="every other"),
        pytest.param(lambda x: x[0, 0, 0], id="single number"),
    ],
)
def test_a_tensor_comes_back_laid_out_as_it_was(view: Callable[[Tensor], Tensor]):
    offload = memory.Offload(nn.Identity(), least_bytes=1)
    source = view(torch.randn(4, 5, 6))
    packed = offload.pack(source)
    assert not isinstance(packed, Tensor)
    back, expected = offload.unpack(packed), source.clone()
    source.zero_()
    assert torch.equal(back, expected), "it is a copy"
    assert (back.shape, back.stride(), back.dtype) == (source.shape, source.stride(), source.dtype)
    assert offload.num_bytes <= source.numel() * 4


def test_ids_and_masks_and_empty_tensors_pass_too():
    offload = memory.Offload(nn.Identity(), least_bytes=1)
    for tensor in (IDS, IDS > 4, torch.randn(3, 4).bfloat16()):
        assert torch.equal(offload.unpack(offload.pack(tensor)), tensor)
    empty = torch.empty(0, 3)
    assert offload.pack(empty) is empty


@pytest.mark.gpu
def test_on_a_gpu_the_room_is_free_between_the_passes():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = make_base("llama", hidden_size=256).cuda().train()
    ids = torch.randint(3, 20, (8, 64), device="cuda")
    memory_use = []
    for least in (2**40, 1):
        before = torch.cuda.memory_allocated()
        with memory.offload_activations(model, least):
            value = model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean()
        torch.cuda.synchronize()
        memory_use.append(torch.cuda.memory_allocated() - before)
        value.backward()
        model.zero_grad(set_to_none=True)
        del value
    assert memory_use[1] < memory_use[0] / 2


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGES = HUGE.read_text() if HUGE.exists() else ""
PAGES = """
import resource
import sys
import torch
from src.training.parallel import memory
if sys.argv[1] == "kept":
    memory.reuse_freed_memory()
def passes():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [torch.ones(20 * 2**18) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
passes()
print(passes())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif("[always]" in HUGE_PAGES, reason="a fault takes a huge page, whether it is kept or not")
def test_freed_memory_is_not_taken_from_the_kernel_again():
    """160 MiB in each pass."""
    command = [sys.executable, "-c", PAGES]
    new_pages, reused_pages = (
        int(subprocess.run([*command, how], capture_output=True, check=True, cwd=ROOT).stdout)
        for how in ("as it comes", "kept")
    )
    if not new_pages:
        pytest.skip("this kernel counts no faults")
    assert reused_pages < new_pages / 100


@pytest.mark.slow
def test_a_sharded_model_in_bfloat16_saves_no_second_copy_of_its_weights():
    """Autocast's copies of them would be half of their bytes: as long as autograd keeps them, nothing is sharded. The
    bits are the same."""
    command = [sys.executable, "-m", "tests.core.training.parallel.kept_memory"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, *_ in results] == ["llama", "gpt2", "t5", "llama in chunks", "gpt2 in chunks"]
    for name, size, saved_bytes, sharded, whole, between in results:
        assert saved_bytes < 0.1 * size, name
        assert between == [0, size], (
            f"{name}: between two passes gradients are whole, unless they are shared out after each"
        )
        assert sharded == whole, name


@pytest.mark.slow
def test_zero_3_in_bfloat16_saves_no_gathered_weights_for_the_backward_pass(tmp_path: Path):
    """Of all that a forward pass makes: what autograd and autocast keep. The transposed products of GPT-2 are ours and
    lose no bit."""
    assert warm.torchrun(Path(zero_memory.__file__), [str(tmp_path)], 2, tmp_path / "log") == ""
    results = json.loads((tmp_path / "kept.json").read_text())
    assert [name for name, *_ in results] == ["llama", "gpt2", "t5", "llama in chunks", "gpt2 in chunks"]
    for name, size, saved_bytes, sharded, whole in results:
        assert saved_bytes < 0.1 * size, name
        if name.startswith("gpt2"):
            assert sharded == whole, name
        assert sharded == pytest.approx(whole, rel=1e-3), (
            name
        )  # not the same bits: see docs/long_trainings.md, "every mode"


@pytest.mark.parametrize("frozen", [False, True])
def test_released_conv1d_weights_give_the_same_bits_and_save_less(frozen: bool):
    """Of GPT-2: no copies of weights, no inputs of frozen ones, and the parameter itself is no tensor to be moved to
    the host."""
    plain = kept_memory.models()["gpt2"]
    for name, parameter in plain.named_parameters():
        parameter.requires_grad = not frozen or "wte" in name
    released_model = copy.deepcopy(plain)
    zero.release_conv1d_weights(released_model)
    ids, results = torch.randint(64, (2, 64)), []
    for model in (plain, released_model):
        with memory.offload_activations(model, 0) as offload, torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append(
            (offload.num_bytes, [parameter.grad for parameter in model.parameters() if parameter.requires_grad])
        )
    (moved_plain, expected), (moved_released, gradients) = results
    assert all(map(torch.equal, gradients, expected))
    matrices = sum(module.weight.numel() * 2 for module in plain.modules() if isinstance(module, Conv1D))
    assert moved_plain - moved_released >= matrices
