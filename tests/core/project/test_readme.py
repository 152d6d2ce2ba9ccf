"""Commands in the documents are understood, and the groups that they name exist.."""

import inspect
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

import exp_configs
import trainval
from src.launch import arguments
from src.support import documents

ROOT = Path(trainval.__file__).parent
PAGES = ["README.md", "AGENTS.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
NEEDS = re.compile(r"# needs (GPUs|the hub|GPUs and the hub|a cluster)$", re.MULTILINE)
"""The mark of commands, in their comment or at the top of their block, that no test can carry out here."""
ELSEWHERE = re.compile(
    r"hub:|google/|bigcode/|spiece|--nproc-per-node 8|-j (slurm|toolkit|ray)|^(accelerate|deepspeed|hf) "
)
"""What shows that a command needs such a thing."""


def commands(name: str, include_marked: bool = True) -> list[str]:
    """Each command of the document's bash blocks, with what the block exports filled in. marked: with those that bear a
    mark."""
    result = []
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
        variables: dict[str, str] = {}
        first, _, _ = block.partition("\n")
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            text = re.sub(
                r"\$(\w+)", lambda match, values=variables: values[match[1]], re.split("(?:^| +)#", line)[0].strip()
            )
            if text.startswith("export "):
                variables |= dict(word.split("=", 1) for word in shlex.split(text)[1:])
            elif text and (include_marked or (not NEEDS.search(line) and not NEEDS.match(first))):
                result.append(text)
    return result


EVERY = [line for name in PAGES for line in commands(name)]


@pytest.mark.parametrize(
    "line",
    sorted(
        {line for line in EVERY if "trainval.py" in line and not re.search(r" -e \W?(mine|talks)|--from-run", line)}
    ),
)
def test_commands_of_trainval_are_understood(line: str, capsys: pytest.CaptureFixture[str]):
    """Their flags are known, their groups are there, and what --set changes is valid.
    tests/core/project/test_tutorial.py carries out group `mine`, test_guides.py the groups `mine_…`, and
    tests/core/models/test_smollm2.py group `talks`. test_recorded_code.py carries out --from-run."""
    words = shlex.split(line)
    words = words[words.index("trainval.py") + 1 :]
    with documents.scope():
        args = arguments.parse(words, "", ROOT)
    assert {name.partition("[")[0] for name in args.exp_group} <= set(exp_configs.EXP_GROUPS)
    assert trainval.main([*words, "--list"]) == 0, capsys.readouterr().err


def test_commands_for_other_machines_are_marked():
    unmarked_lines = [line for name in PAGES for line in commands(name, include_marked=False)]
    assert not [line for line in unmarked_lines if ELSEWHERE.search(line)]
    assert len(unmarked_lines) < len(EVERY)


PROGRAMS = ("python", "torchrun", "accelerate", "deepspeed", "make", "hf", "source")


def test_every_command_starts_with_a_known_program():
    assert not [line for line in EVERY if line.split()[0] not in PROGRAMS and not line.startswith("for ")]


MODULES = sorted({line for line in EVERY if line.startswith("python -m ")})


def test_modules_are_shown():
    assert len(MODULES) >= 12


@pytest.mark.parametrize("line", MODULES)
def test_commands_of_modules_have_the_flags_shown(line: str, capsys: pytest.CaptureFixture[str]):
    module, *words = shlex.split(line)[2:]
    place = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    with pytest.raises(SystemExit, match=r"^0$"):
        import_module(place).main(["--help"])
    flags = set(re.findall(r"(?<![\w-])-{1,2}[a-z0-9][\w-]*", capsys.readouterr().out))
    assert {word for word in words if word.startswith("-")} <= flags


@pytest.mark.parametrize("launcher", ["local", "slurm", "ray", "toolkit"])
def test_launchers_have_the_methods_that_the_docs_show(launcher: str):
    text = (ROOT / "docs/dev/add_a_component.md").read_text()
    (row,) = re.findall(r"^\| launcher \|.*?`(submit\(.*?\))", text, re.MULTILINE)
    shown_methods = [row, *re.findall(r"`((?:states|kill|find)\(.*?\))`", text)]
    module = import_module(f"src.launch.{launcher}.launcher")
    methods = {
        name: list(inspect.signature(getattr(module.Config, name)).parameters)[1:]
        for name in ("submit", "states", "kill", "find")
    }
    assert {
        name: words.split(", ") for name, words in (re.findall(r"(\w+)\((.*)\)", verb)[0] for verb in shown_methods)
    } == methods
