"""The documentation site: complete, built without a warning, and usable without a network."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.browsing import open_page
from tests.toy import ROOT


def load_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()


def sections(text: str) -> list[str]:
    return re.split(r"^## ", text, flags=re.MULTILINE)[1:]


def documented_fields(text: str) -> dict[str, set[str]]:
    """{module path: fields of the tables below headings of that module}."""
    fields: dict[str, set[str]] = {}
    for section in sections(text):
        (path,) = re.findall(r"^Code: `(\S+)`$", section, re.MULTILINE)
        fields.setdefault(path, set()).update(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    return fields


def test_every_field_of_an_experiment_is_in_the_reference():
    fields_by_path: dict[str, set[str]] = {}
    for text in reference.component_pages().values():
        for path, names in documented_fields(text).items():
            fields_by_path.setdefault(path, set()).update(names)
    keys = json.loads((ROOT / "tests" / "golden" / "config_fields.json").read_text())
    missing = {
        name: sorted(fields)
        for name, entry in keys.items()
        if (
            fields := {*entry["original"], *entry.get("added", {})}
            - fields_by_path[f"{name.rpartition('.')[0].replace('.', '/')}.py"]
        )
    }
    assert not missing


@pytest.mark.slow
def test_every_field_has_a_description():
    missing_descriptions = [
        f"{path} {line}"
        for path, text in reference.component_pages().items()
        for line in re.findall(r"^\| `(\w+)` \|.*\|  \|$", text, re.MULTILINE)
    ]
    assert not missing_descriptions


@pytest.mark.slow
def test_every_flag_is_in_the_section_of_its_command():
    """Flags of each parser, which `--help` prints; and every command of the tree has a parser."""
    by_title = {section.partition("\n")[0]: section for section in sections(reference.commands_page())}
    parsers = reference.commands()
    assert by_title.keys() == parsers.keys()
    missing = {
        line: flags
        for line, parser in parsers.items()
        if (
            flags := [
                flag
                for flag in re.findall(r"(?<![\w-])--[\w-]+", parser.format_usage())
                if f"`{flag}`" not in by_title[line]
            ]
        )
    }
    assert not missing
    assert len(parsers) >= 60


@pytest.mark.slow
def test_help_shows_each_example_in_a_line_of_its_own():
    """Examples in the docstring of a command, such as `python -m ...`, can be copied from its --help."""
    example_counts = []
    for command, parser in reference.commands().items():
        module = sys.modules.get(command.removeprefix("python ").removeprefix("-m ").removesuffix(".py"))
        examples = re.findall(r"^(?:python|torchrun|curl) .*$", (module and module.__doc__) or "", re.MULTILINE)
        assert not {*examples} - {*parser.format_help().splitlines()}, command
        example_counts.append(len(examples))
    assert sum(map(bool, example_counts)) >= 12


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_the_network(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        addresses = re.findall(r'<(?:script|img|iframe|link)[^>]*?(?:src|href)="?(https?://[^">]*)', page.read_text())
        assert not addresses, page


@pytest.mark.slow
@pytest.mark.browser
def test_search_works_from_a_disk(site: Path, browser: Any):
    with open_page(browser, (site / "index.html").as_uri()) as page:
        page.locator(".md-search__input").wait_for(state="visible")
        page.keyboard.press("f")
        page.keyboard.type("final_rate")
        result = page.locator(".md-search-result__link[href*='reference/settings']").first
        result.wait_for(state="visible")
        assert result.is_visible()
