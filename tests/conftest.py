"""Settings that every test starts from: seeded, offline, one thread."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    MPLBACKEND="Agg",
)  # before the libraries that read them at import

import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

TOY = """
from src.experiments.interfaces import RecipeConfig


class Config(RecipeConfig):
    seed: int
    rate: float = 0.5

    def checks(self, places):
        return []

    def run(self, run):
        return self.rate * self.seed
"""

# A shell that starts the tests in the background has SIGINT ignored, nohup SIGHUP, and so would every process that they
# start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


# Long files, mostly of trainings, come first, so that no worker is left with one of them at the end.
FIRST = [
    "core/training",
    "core/recipes",
    "systems",
    "core/models/test_lora_training.py",
    "core/models",
    "faults",
    "core/sweeps",
    "core/launch",
    "core/project",
    "core/operations",
    "data_prep",
    "results",
]

GROUPS = {
    "slurm": ["slurm"],
    "ray": ["ray"],
    "modes": [
        "core/training/checkpointing/test_full_disk.py",
        "core/training/checkpointing/test_world_sizes.py",
        "core/training/parallel/test_engine.py",
        "core/training/reading/test_origin.py",
        "core/training/stopping/test_stops.py",
    ],
    "s3": [
        "systems/interleaved/streaming/remote/test_remote_index.py",
        "systems/interleaved/streaming/remote/test_shard_files_s3.py",
        "systems/interleaved/streaming/remote/test_training_from_s3.py",
        "systems/interleaved/streaming/test_shard_lists.py",
    ],
    "deepspeed": ["core/training/whole/test_flagship.py", "core/project/test_readme_scripts.py"],
}
"""Files that share a server, runs trained once per session, or DeepSpeed's default port, and so run in one process."""


def pytest_configure() -> None:
    """Refuse a name in FIRST or GROUPS that has moved: its fixtures would no longer be shared."""
    names = [*FIRST, *(name for group in GROUPS.values() for name in group)]
    if missing := [name for name in names if not (ROOT / "tests" / name).exists()]:
        raise pytest.UsageError(f"tests/conftest.py: FIRST or GROUPS names {missing}, which do not exist; update them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by FIRST."""
    items.sort(key=lambda item: next((n for n, start in enumerate(FIRST) if _file(item).startswith(start)), len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As --dist loadfile, and the files of a group together. The groups of pytest-xdist 3.8 itself do nothing under
    pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0].removeprefix("tests/")
            return next((name for name, files in GROUPS.items() if file.startswith(tuple(files))), file)

    return ByGroup(config, log) if config.getoption("dist") == "loadfile" else None


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").as_posix()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from the same seeds, and leaves torch's global settings as they were. Tests without torch never
    load it."""
    random.seed(0)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(0)  # noqa: NPY002  libraries that we call draw from it
    if "torch" not in sys.modules:
        yield
        return
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    before = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    yield
    after = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    torch.set_default_dtype(before[0])
    torch.use_deterministic_algorithms(before[1])
    torch.set_grad_enabled(before[2])
    assert after == before, "a test changed torch's default dtype, determinism or gradient mode"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data named by TRAINVAL_DATA."""
    folder = os.environ.get("TRAINVAL_DATA")
    if not folder:
        pytest.skip("TRAINVAL_DATA is not set: it names a folder with real data sets")
    if not Path(folder).is_dir():
        pytest.fail(f"TRAINVAL_DATA={folder}: no such folder")
    return Path(folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not on PATH; .ci/browser installs it")
    with playwright.sync_playwright() as driver:
        chromium_browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield chromium_browser
        chromium_browser.close()


@pytest.fixture
def toy_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers a recipe "toy" of two fields, for tests that need a registered one and nothing that it does."""
    from src.experiments.registry import RECIPES

    (tmp_path / "toy_recipe_for_tests.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(RECIPES.modules, "toy", "toy_recipe_for_tests")  # type: ignore[arg-type]
