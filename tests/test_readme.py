"""The documents are true: links lead somewhere, commands are understood, groups and targets exist."""

import re
import shlex
from pathlib import Path

import pytest

import exp_configs
import trainval

ROOT = Path(trainval.__file__).parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_relative_links_lead_somewhere(name: str):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text())
    dead = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not dead


def commands(name: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("line", [line for line in commands("README.md") if "trainval.py" in line])
def test_commands_of_the_readme_are_understood(line: str):
    words = shlex.split(line)
    args = trainval.parse(words[words.index("trainval.py") + 1 :])
    assert set(args.exp_group) <= set(exp_configs.EXP_GROUPS)


def test_the_make_targets_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for name in DOCUMENTS for word in re.findall(r"^make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def test_every_flag_of_the_command_line_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    flags = {"-e", "-sb", "-r", "-j", "--exp_id", "--set", "--steps", "--with-parents", "--list", "--dry-run", "--log_every", "--data_path"}
    assert not {flag for flag in flags if flag not in text}
