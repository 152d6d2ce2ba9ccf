"""Each guide's own experiment is checked as it is written there, on the data that the page's commands make.

The data are smaller than those of the commands: some modules of the standard library, and 100 pages of digits. The slow
test trains the experiments.
"""

import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants import doctest_examples, stdlib_conversations
from data_prep.crossattn import stdlib_qa
from data_prep.interleaved import digit_pages
from data_prep.metadata import stdlib_pages
from data_prep.t5 import prepare_task, t5_tokenizer
from src.experiments import grid
from tests import toy
from tests.core.project.test_readme import commands

ELSEWHERE = {
    "extending": "test_extending.py",
    "pretrained_model": "tests/core/models/test_smollm2.py",
    "tutorial": "test_tutorial.py",
}
"""Pages whose experiments have a test of their own."""
GUIDES = ("assistants", "crossattn", "metadata", "policies", "streaming", "t5")
MODULES = ("argparse", "ast", "asyncio", "datetime", "decimal", "logging", "tarfile", "typing")
"""Modules with pages."""
FUNCTIONS = ("grid", "override", "ref", "seeds", "zip_axes")
"""What exp_configs.py imports."""


def experiment_blocks(page: str) -> list[str]:
    """The Python blocks of a page that have an experiment."""
    blocks = re.findall(r"```python\n(.*?)```", (toy.ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    return [block for block in blocks if '"recipe"' in block]


def groups_of(page: str) -> dict[str, Any]:
    """EXP_GROUPS after the blocks of the page at the end of exp_configs.py."""
    namespace: dict[str, Any] = {"EXP_GROUPS": {}, **{name: getattr(grid, name) for name in FUNCTIONS}}
    for block in experiment_blocks(page):
        exec(block, namespace)
    return namespace["EXP_GROUPS"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of all guides in data/."""
    folder = tmp_path_factory.mktemp("guides")
    data = folder / "data"
    stdlib = folder / "stdlib"
    stdlib.mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).iterdir()):
        if path.suffix == ".py" and path.name < "s":
            (stdlib / path.name).symlink_to(path)
    stdlib_qa.prepare(data, vocab_size=1024, stdlib=stdlib)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctest_examples, "examples", lambda: [(f"{i} + 1", f"{i + 1}") for i in range(40)])
        stdlib_conversations.prepare(data)
        patch.setattr(stdlib_pages, "modules", lambda: list(MODULES))
        stdlib_pages.prepare(data)
    digit_pages.prepare(data, pages=60, val_pages=40)
    place = ["--data_path", str(data)]
    name = ["--from", "stdlib_tokenizer", "--name", "stdlib_t5_tokenizer", "--sentences", "20"]
    assert t5_tokenizer.main([*place, *name]) == 0
    rows = [word for split in ("train", "val") for word in (f"--{split}", str(data / f"stdlib_qa/{split}.jsonl"))]
    assert prepare_task.main([*place, "--task", "codename", *rows]) == 0
    return folder


def test_every_page_with_an_experiment_is_tested():
    pages = {path.stem for path in (toy.ROOT / "docs").glob("*.md") if experiment_blocks(path.stem)}
    assert pages == {*GUIDES, *ELSEWHERE}


@pytest.mark.parametrize("page", GUIDES)
def test_the_experiment_of_a_guide_passes_a_dry_run(page: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    """And the page has the commands that check and train it, for its first group."""
    groups = groups_of(page)
    group = next(iter(groups))
    lines = commands(f"docs/{page}.md")
    assert {f"python trainval.py -e {group} --dry-run", f"python trainval.py -e {group}"} <= set(lines)
    assert toy.main(["-e", *groups, "--dry-run"], groups, folder) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES)
def test_the_experiment_of_a_guide_trains(page: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    groups = groups_of(page)
    assert toy.main(["-e", *groups], groups, folder) == 0, capsys.readouterr().err
