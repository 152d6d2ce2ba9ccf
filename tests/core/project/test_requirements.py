"""The locks have every pin of the requirements, with hashes, and nothing that depends on the machine."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = sorted((ROOT / "requirements").glob("*.txt"))
FILES = sorted(ROOT.glob("requirements*.txt")) + EXTRAS
LOCKS = ("requirements.lock", "requirements-dev.lock", ".ci/ray.lock")
UNLOCKED = re.compile(r"(torch|triton|cuda-.*|nvidia-.*)==")
"""What depends on the machine."""


def pins(path: Path) -> dict[str, str]:
    """{name: version} of the lines `name==version`; other lines are comments, or include a file."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    found = [line.split("==") for line in lines if line and not line.startswith("-r ")]
    return {name.lower().replace("_", "-"): version for name, version in found}


def locked(name: str) -> dict[str, set[str]]:
    """{package: versions} of a lock: several where the version of Python decides. Each of its entries must have
    hashes."""
    found: dict[str, set[str]] = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / name).read_text().strip()):
        if entry.startswith("#"):
            continue
        first, *hashes = entry.split("\n")
        package, version = re.fullmatch(
            (
                r"([a-z0-9.-]+)==([^ ;]+)(?: ;.*)? "
                r"\\"
            ),
            first,
        ).groups()  # pyright: ignore[reportOptionalMemberAccess]
        assert hashes, f"{package} has no hash"
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?", line) for line in hashes), package
        found.setdefault(package, set()).add(version)
    return found


@pytest.mark.parametrize(
    ("path", "lock"),
    [(path, "requirements-dev.lock") for path in FILES] + [(ROOT / "requirements.txt", "requirements.lock")],
)
def test_every_pin_is_locked_with_its_hashes(path: Path, lock: str):
    known = locked(lock)
    wanted = {name: {version} for name, version in pins(path).items() if name != "torch"}
    assert wanted
    assert {name: known.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_no_build_of_torch_and_no_address(lock: str):
    assert not [name for name in locked(lock) if UNLOCKED.match(f"{name}==")]
    assert not re.search(r"://|--(extra-)?index-url|--find-links", (ROOT / lock).read_text())


def test_what_is_installed_first_is_not_changed_by_the_rest():
    core, everything = locked("requirements.lock"), locked("requirements-dev.lock")
    assert {name: everything.get(name) for name in core} == core


def test_the_tests_have_what_each_feature_needs():
    included = re.findall(r"^-r (\S+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert [ROOT / name for name in included] == [
        ROOT / "requirements.txt",
        *EXTRAS,
    ]


@pytest.mark.parametrize("path", EXTRAS, ids=lambda path: path.stem)
def test_what_stands_apart_says_what_for_and_is_named_where_it_is_missing(path: Path):
    assert re.match(r"# .+\.\n", path.read_text())
    sources = [file.read_text() for room in ("src", "data_prep") for file in (ROOT / room).rglob("*.py")]
    assert any(f"requirements/{path.name}" in text for text in sources)
