"""The documents are true: links lead somewhere, commands are understood, groups and targets exist."""

import inspect
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

import exp_configs
import trainval
from src.launch import arguments

ROOT = Path(trainval.__file__).parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_relative_links_lead_somewhere(name: str):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text())
    dead = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not dead


def commands(name: str) -> list[str]:
    """Each line of the document's bash blocks, with what the block exports filled in."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
        exported: dict[str, str] = {}
        for line in block.splitlines():
            text = re.sub(r"\$(\w+)", lambda match, known=exported: known[match[1]], line.split(" #")[0].strip())
            if text.startswith("export "):
                exported |= dict(word.split("=", 1) for word in shlex.split(text)[1:])
            elif text:
                found.append(text)
    return found


@pytest.mark.parametrize("line", [line for line in commands("README.md") if "trainval.py" in line])
def test_commands_of_the_readme_are_understood(line: str):
    words = shlex.split(line)
    args = arguments.parse(words[words.index("trainval.py") + 1 :], "", ROOT)
    assert set(args.exp_group) <= set(exp_configs.EXP_GROUPS)


MODULES = [line for line in commands("README.md") if line.startswith("python -m ")]


def test_modules_are_shown():
    assert len(MODULES) >= 12


@pytest.mark.parametrize("line", MODULES)
def test_commands_of_modules_have_the_flags_shown(line: str, capsys: pytest.CaptureFixture[str]):
    module, *words = shlex.split(line)[2:]
    place = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    with pytest.raises(SystemExit, match=r"^0$"):
        import_module(place).main(["--help"])
    known = set(re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", capsys.readouterr().out))
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("launcher", ["local", "slurm", "toolkit"])
def test_launchers_have_the_verbs_that_contributing_shows(launcher: str):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (row,) = re.findall(r"^\| launcher \|.*?`(submit\(.*?\))", text, re.MULTILINE)
    shown = [row, *re.findall(r"`((?:states|kill|find)\(.*?\))`", text)]
    module = import_module(f"src.launch.{launcher}.launcher")
    found = {name: list(inspect.signature(getattr(module.Config, name)).parameters)[1:] for name in ("submit", "states", "kill", "find")}
    assert {name: words.split(", ") for name, words in (re.findall(r"(\w+)\((.*)\)", verb)[0] for verb in shown)} == found


def test_the_make_targets_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for name in DOCUMENTS for word in re.findall(r"^make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def test_every_flag_of_the_command_line_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    flags = {"-e", "-sb", "-r", "-j", "--exp_id", "--set", "--steps", "--with-parents", "--list", "--dry-run", "--log_every", "--data_path"}
    assert not {flag for flag in flags if flag not in text}
