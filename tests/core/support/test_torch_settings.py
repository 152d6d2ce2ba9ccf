"""Settings of torch: made in one place, kept where the user has set them, recorded, and without a trace in a training
on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.errors import ConfigError
from src.experiments.identity import exp_id
from src.support import torch_settings
from tests import toy
from tests.core.models.conftest import make_base


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in torch_settings.VARIABLES:
        os.environ.pop(name, None)
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def test_float32_is_float32_and_it_is_recorded():
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    torch_settings.make()
    settings = json.loads(json.dumps(torch_settings.describe()))
    assert (settings["float32_matmul"], settings["cudnn_tf32"], settings["cudnn_benchmark"]) == (
        "highest",
        False,
        False,
    )
    assert not settings["deterministic"]
    torch_settings.make(deterministic=True)
    assert torch_settings.describe()["deterministic"]


@pytest.mark.slow
def test_settings_import_no_compiler_unless_deterministic():
    code = (
        "import sys; from src.support import torch_settings; torch_settings.make(); print('torch._inductor' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=toy.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    torch.use_deterministic_algorithms(True)
    torch_settings.make()
    assert not torch.are_deterministic_algorithms_enabled()


_PRODUCTS = """
import torch
import warnings
from src.support import torch_settings

def results(kind, rows):
    torch.manual_seed(0)
    a, b, bias = (torch.randn(size).to(kind) for size in ((3, rows, 160), (3, 160, 7), (7,)))
    layer = torch.nn.Linear(160, 7).to(kind)
    inputs = a.clone().requires_grad_()
    layer(inputs).square().sum().backward()
    tensors = [a[0] @ b[0], torch.addmm(bias, a[0], b[0], beta=0.5, alpha=2), a @ b, torch.baddbmm(bias, a, b, beta=3)]
    return [*tensors, layer(inputs).detach(), layer.weight.grad, inputs.grad]

cases = [(kind, rows) for kind in (torch.float32, torch.float64, torch.bfloat16) for rows in (5, 70)]
before = {case: results(*case) for case in cases}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    torch_settings._float32_products()
for (kind, rows), tensors in before.items():
    for ours, theirs in zip(results(kind, rows), tensors, strict=True):
        if kind == torch.bfloat16:  # one rounding, of other sums
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)
        else:
            assert torch.equal(ours, theirs)
torch.manual_seed(0)
a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 8).bfloat16()
assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
for rows, converts in ((63, False), (64, True)):
    with torch.profiler.profile() as profile:
        torch.mm(a[:rows], b)
    assert ("aten::_to_copy" in {each.key for each in profile.key_averages()}) == converts
for mixed in ((a, b.float()), (a.float(), b)):
    try:
        torch.mm(*mixed)
    except RuntimeError:
        continue
    raise AssertionError(mixed)
"""


_USERS = """
import sys
from pathlib import Path
from src.experiments.config import Places
from src.models import hf
from src.support import torch_settings
from src.training.parallel.choice import plain_accelerator

folder = Path(sys.argv[1])
is_slow = not torch_settings._onednn_has_bfloat16()  # as ONEDNN_MAX_CPU_ISA says, if torch asks oneDNN
uses = (
    lambda kind: plain_accelerator(kind, ""),
    lambda kind: hf.Config(path="tiny", dtype=kind).build(Places(folder, folder)),
)
for use in uses:
    for kind in ("float32", "bfloat16"):
        use(kind)
        assert torch_settings._float32_products.cache_info().currsize == (kind == "bfloat16" and is_slow), kind
    torch_settings._float32_products()._destroy()
    torch_settings._float32_products.cache_clear()
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [_PRODUCTS, _USERS], ids=["products", "users"])
def test_large_products_in_bfloat16_round_once_and_no_other_product_changes(tmp_path: Path, code: str):
    make_base("llama").save_pretrained(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=toy.ROOT,
        env={**toy.environment(), "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", torch_settings.ALLOCATOR)
def test_an_allocator_set_by_the_user_stays(name: str):
    os.environ[name] = "max_split_size_mb:64"
    torch_settings.make()
    assert {each: os.environ.get(each) for each in torch_settings.ALLOCATOR if each in os.environ} == {
        name: "max_split_size_mb:64"
    }


def test_variables_that_nobody_has_set_are_set_and_recorded():
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"
    torch_settings.make()
    assert torch_settings.describe()["variables"] == {
        **torch_settings.ENVIRONMENT,
        "TORCH_FR_BUFFER_SIZE": "7",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_the_flight_recorder_writes_into_each_run_and_leaves_no_variable(tmp_path: Path):
    for name in ("one", "other"):
        with torch_settings.flight_recorder_in(tmp_path / name):
            assert os.environ[torch_settings.DUMP] == str(tmp_path / name / "flight_recorder_")
        assert torch_settings.DUMP not in os.environ
    with pytest.raises(ConfigError), torch_settings.flight_recorder_in(tmp_path / "one"):
        raise ConfigError("a mistake")
    assert torch_settings.DUMP not in os.environ


def test_the_flight_recorder_writes_where_the_user_says(tmp_path: Path):
    os.environ[torch_settings.DUMP] = "/tmp/dumps_"
    with torch_settings.flight_recorder_in(tmp_path / "one"):
        assert os.environ[torch_settings.DUMP] == "/tmp/dumps_"
    assert os.environ[torch_settings.DUMP] == "/tmp/dumps_"


def test_the_dump_of_a_failed_collective_goes_to_its_run(tmp_path: Path):
    """torch's watchdog can write it while the error already ends the process."""
    with pytest.raises(RuntimeError), torch_settings.flight_recorder_in(tmp_path / "one"):
        raise RuntimeError("NCCL error")
    assert os.environ[torch_settings.DUMP] == str(tmp_path / "one" / "flight_recorder_")


def test_a_second_run_in_a_process_records_the_same_variables(tmp_path: Path):
    toy.write_data(tmp_path / "data")
    experiments = [toy.BASE, {**toy.BASE, "seed": 1}]
    assert toy.main(["-e", "two"], {"two": experiments}, tmp_path) == 0
    first, second = (
        json.loads((tmp_path / "runs" / exp_id(exp) / "env.json").read_text())["torch"]["variables"]
        for exp in experiments
    )
    assert first == second
    assert torch_settings.DUMP not in first


def test_a_training_that_must_be_deterministic_ends_with_the_bits_of_any_other(tmp_path: Path):
    weights, recorded_settings = [], []
    for options in ([], ["--deterministic"]):
        folder = tmp_path / str(len(options))
        toy.write_data(folder / "data")
        assert toy.main(["-e", "base", *options], {"base": [toy.BASE]}, folder) == 0
        run = folder / "runs" / exp_id(toy.BASE)
        weights.append((run / "checkpoints" / "step-00000012" / "model.safetensors").read_bytes())
        recorded_settings.append(json.loads((run / "env.json").read_text())["torch"]["deterministic"])
    assert weights[0] == weights[1]
    assert recorded_settings == [False, True]
