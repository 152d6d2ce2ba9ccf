"""Check the rules of the tree that ruff does not know, and the files around the code. `make lint` runs it."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from src.experiments.registry import RECIPES, TABLES  # noqa: E402  needs the path above


def in_src(*names: str) -> set[str]:
    return {f"src.{name}" for name in names}


# A layer can import itself and the layers of the levels above it in this list. A module belongs to the longest of these
# names that it starts with.
LEVELS: list[set[str]] = [
    {"src.support.library_output", "src.support.missing_package", "src.support.documents"},
    {"src.errors", "src.support.read_cache", "src.__init__"},
    {"src.experiments.batches", "src.experiments.dataset_protocols"},
    {"src.support.parsing", "src.support.renaming", "src.support.redaction"},
    {"src.files", "src.support.command_line", "src.support.served_page", "src.support.torch_settings"},
    {"src.experiments.config", "src.experiments.kinds"}
    | {f"src.support.{name}" for name in ("distributed", "flops", "patterns", "weights")},
    {"src.support.call_once", "src.support.deferred", "src.runs.history.log_rules", "src.experiments.registry"},
    {"src.experiments.interfaces"},
    {"src.experiments", "src.evaluation.metrics"},
    {"src.runs"},
    {"src.data.orders"},
    {"src.tables", "src.training", "src.models", "src.launch"},
    {"src.evaluation", "src.data", "src.sweeps", "src.operations"},
    {"src.recipes", "src.serving"},
    {"src.systems"},
    {"data_prep", "results"},
    {"trainval", "exp_configs", "job_configs"},
]
EVERY_LAYER = {layer for level in LEVELS for layer in level}


# Exceptions to the levels: data knows neither models nor loops, an experiment names models and metrics.
NOT = {
    "src.evaluation.metrics": in_src("support.distributed", "support.weights"),
    "src.experiments.interfaces": in_src("support.distributed", "support.weights", "files"),
    "src.data": in_src("tables", "training", "models", "launch"),
    "src.operations": in_src("training", "models"),
    "src.sweeps": in_src("training", "models"),
    "src.recipes": in_src("models", "launch", "tables", "sweeps", "operations"),
    "src.systems": in_src("launch", "tables", "sweeps", "operations"),
    "data_prep": in_src("training", "evaluation", "launch", "runs", "recipes", "serving"),
    "results": in_src("training", "models", "data", "recipes", "serving"),
    "trainval": in_src("training", "models", "data", "evaluation", "recipes", "serving", "systems"),
    "exp_configs": EVERY_LAYER - in_src("experiments", "systems"),
    "job_configs": EVERY_LAYER,
}
NEIGHBOURS = {"trainval": {"exp_configs", "job_configs"}}
OUTSIDE = ("tests", "benchmarks", "examples", "docs", ".ci")  # these can import anything
SHORT = {
    "src.systems.crossattn.demo": "found by its name",
    "src.__init__": "the first import of every command",
    "src.support.library_output": "settings of that import",
    "src.support.missing_package": "the hook of that import",
    "src.support.patterns": "one idea, which expressions and rewards share",
    "src.systems.crossattn.model.kv_cache": "found by its name",
}
"""Modules under 40 lines that are not entries of the registry, and the reason for each."""
MAX_LINES, MAX_ENTRIES, MIN_LINES = 400, 16, 40
VAGUE_FILES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "custom", "v2"}
VAGUE_FUNCTIONS = re.compile(
    "about|alike|alone|apart|at|begun|by|chosen|cut|do|done|drawn|found|given|gone|held|in|kept|known|laid|left|made|most|must|of|on|put"
    "|rest|said|same|seen|sent|set|shown|spoken|taken|told|what|where|which|who|whose|written|(?!seed|feed|embed)[a-z]+ed"
)
RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


class Module:
    """A Python file that git tracks or would track."""

    def __init__(self, path: str, text: str = "") -> None:
        self.path = path
        self.text = text or (ROOT / path).read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, path)
        self.name = path.removesuffix(".py").replace("/", ".")
        self.outside = path.startswith(OUTSIDE)

    def imports(self) -> Iterator[tuple[str, str | None, int]]:
        """(dotted name, its alias, line) of every import, also inside functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, alias.asname, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = self.name.split(".")[: -node.level] if node.level else []
                source = ".".join([*package, *([node.module] if node.module else [])])
                yield from ((f"{source}.{alias.name}", alias.asname, node.lineno) for alias in node.names)

    def type_lines(self) -> set[int]:
        """The lines below `if TYPE_CHECKING`, which never run."""
        blocks = [node for node in ast.walk(self.tree) if isinstance(node, ast.If)]
        type_blocks = [
            block for block in blocks if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        ]
        return {
            line for block in type_blocks for each in block.body for line in range(each.lineno, each.end_lineno + 1)
        }


def layer_of(name: str) -> str | None:
    """The layer of a dotted name; None for a module of another project."""
    layers = [layer for layer in EVERY_LAYER if f"{name}.".startswith(f"{layer}.")]
    parts = name.split(".")
    fallback = ".".join(parts[:2]) if parts[0] == "src" else parts[0] if parts[0] in OUTSIDE else None
    return max(layers, key=len) if layers else fallback


def system_of(name: str) -> str | None:
    """The training system of a dotted name; None for the core."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["src", "systems"] and len(parts) > 2 else None


def layer_errors(module: Module) -> Iterator[str]:
    """Imports of a higher layer, of another recipe or of another system."""
    layer = layer_of(module.name)
    level = next((number for number, level in enumerate(LEVELS) if layer in level), None)
    if layer is None or level is None:
        yield f"{module.path}: is in no layer; put it into one, or add a layer to LEVELS"
        return
    allowed = {layer} | NEIGHBOURS.get(layer, set()) | (set().union(*LEVELS[:level]) - NOT.get(layer, set()))
    recipes = set(RECIPES.modules.values()) - {module.name}
    for name, _, line in module.imports():
        other_recipe = any(f"{name}.".startswith(f"{recipe}.") for recipe in recipes)
        other_system = system_of(module.name) and system_of(name) not in (None, system_of(module.name))
        if (target := layer_of(name)) is not None and (target not in allowed or other_recipe or other_system):
            yield f"{module.path}:{line}: imports {name}, which its layer must not"


def naming_errors(module: Module) -> Iterator[str]:
    """Vague names of files and functions, ranks that are read from the environment, broad excepts without a reason."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef) and VAGUE_FUNCTIONS.fullmatch(node.name.strip("_")):
            is_property = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
            if not is_property and not node.name.startswith("__"):
                yield f"{module.path}:{node.lineno}: function {node.name}: name it by a verb, or a noun for its result"
        reads_ranks = module.name in ("src.support.distributed", "src.runs.environment")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in RANKS and not reads_ranks:
            yield f"{module.path}:{node.lineno}: {node.value}: call src/support/distributed.py"
    for number, line in enumerate(module.text.splitlines(), 1):
        if re.search(r"# noqa: BLE001(?!\s{2,}\S)", line):
            yield f"{module.path}:{number}: broad except: write the reason after `# noqa: BLE001`"


def alias_errors(module: Module, names: set[str]) -> Iterator[str]:
    for name, alias, line in module.imports():
        if alias and alias != name.rpartition(".")[2] and name in names:
            yield f"{module.path}:{line}: imports {name} as {alias}; a module has one name"


def size_errors(modules: list[Module], files: list[str]) -> Iterator[str]:
    entries: dict[Path, set[str]] = {}
    for path in files:
        parts = Path(path).parts
        for depth in range(1, len(parts)):
            entries.setdefault(Path(*parts[:depth]), set()).add(parts[depth])
    for folder, names in entries.items():
        count = len(names - {"__init__.py"})
        if (
            folder.parts[0] in {"src", "data_prep", "results", "tests", "benchmarks", "examples"}
            and count > MAX_ENTRIES
        ):
            yield f"{folder}: {count} entries; move files that belong together into a folder of at most {MAX_ENTRIES}"
    lines = {module.name: module.text.count("\n") for module in modules if module.path.startswith("src/")}
    registry_modules = {name for table in TABLES for name in table.modules.values()}
    for name in {name for name, count in lines.items() if count < MIN_LINES} - registry_modules ^ SHORT.keys():
        yield f"{name}: {lines.get(name)} lines; merge it into its caller, or correct SHORT in .ci/rules.py"
    for module in modules:
        if module.text.count("\n") > MAX_LINES and not module.path.startswith(("tests/", "trainval.py")):
            yield f"{module.path}: {module.text.count(chr(10))} lines, at most {MAX_LINES}"
    for path in files:
        if VAGUE_FILES & set(Path(path).with_suffix("").parts):
            yield f"{path}: a vague name"


def cycle_errors(modules: list[Module]) -> Iterator[str]:
    """Groups of modules that import one another, also inside functions, except for types."""
    names = {module.name for module in modules}
    needs = {
        module.name: {
            target
            for name, _, line in module.imports()
            for target in [name if name in names else name.rpartition(".")[0]]
            if target in names and target != module.name and line not in module.type_lines()
        }
        for module in modules
    }
    cycles: list[set[str]] = []
    for start in sorted(needs):
        reachable, queue = set[str](), list(needs[start])
        while queue:
            if (name := queue.pop()) not in reachable:
                reachable.add(name)
                queue += needs[name]
        if start in reachable and not any(start in cycle for cycle in cycles):
            cycles.append({name for name in reachable if start in _reachable(needs, name)})
    yield from (f"import cycle: {', '.join(sorted(cycle))}" for cycle in cycles)


def _reachable(needs: dict[str, set[str]], start: str) -> set[str]:
    reachable, queue = set[str](), [start]
    while queue:
        for name in needs[queue.pop()] - reachable:
            reachable.add(name)
            queue.append(name)
    return reachable


def lock_entries(path: Path) -> dict[str, set[str]]:
    """{package: versions}, several where the version of Python decides. pip checks the hashes as it installs."""
    entries: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", path.read_text(), re.MULTILINE):
        entries.setdefault(name, set()).add(version)
    return entries


def requirement_errors() -> Iterator[str]:
    """Every pin is locked, no lock depends on the machine, and every extra file is named by the code that needs it."""
    locks = {name: lock_entries(ROOT / name) for name in ("requirements.lock", "requirements-dev.lock", ".ci/ray.lock")}
    extras = sorted((ROOT / "requirements").glob("*.txt"))
    main = ROOT / "requirements.txt"
    for path in [main, *sorted(ROOT.glob("requirements-*.txt")), *extras]:
        for name, version in re.findall(r"^([\w.-]+)==([^\s#]+)", path.read_text(), re.MULTILINE):
            for lock in ["requirements-dev.lock", *(["requirements.lock"] if path == main else [])]:
                lock_versions = locks[lock].get(name.lower().replace("_", "-"))
                if name != "torch" and lock_versions != {version}:
                    yield f"{path.name}: {name}=={version}, but {lock} has {lock_versions or 'none'}; run make lock"
    for name, versions in locks["requirements.lock"].items():
        if locks["requirements-dev.lock"].get(name) != versions:
            yield f"requirements.lock: {name} {versions} differs from requirements-dev.lock; run make lock"
    for lock, entries in locks.items():
        if machine_packages := [name for name in entries if re.match(r"(torch|triton|cuda-.*|nvidia-.*)$", name)]:
            yield f"{lock}: {machine_packages} depend on the machine; add them to UNLOCKED in the Makefile"
        if re.search(r"://|--(extra-)?index-url|--find-links", (ROOT / lock).read_text()):
            yield f"{lock}: names an address"
    dev_includes = set(re.findall(r"^-r (\S+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE))
    code = "".join(file.read_text() for room in ("src", "data_prep") for file in (ROOT / room).rglob("*.py"))
    for path in (f"requirements/{extra.name}" for extra in extras):
        if path not in dev_includes:
            yield f"requirements-dev.txt: does not include {path}"
        if path not in code:
            yield f"{path}: no code names it in the message for a missing package"


def document_errors() -> Iterator[str]:
    """Lines and links of the pages; versions; targets of make and files that documents, workflows and images name.
    mkdocs checks the links of the pages in docs/."""
    readme = (ROOT / "README.md").read_text()
    site = sorted((ROOT / "docs").rglob("*.md"))
    pages = [ROOT / "README.md", ROOT / "AGENTS.md", *(path for path in site if path.parent == ROOT / "docs")]
    others = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")]
    documents = [*pages, *others, *sorted((ROOT / "resources").rglob("*.md"))]
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in documents:
        text, name = page.read_text(), page.relative_to(ROOT)
        if page in pages:
            long = [
                f"{name}:{number}: over 119 characters"
                for number, line in enumerate(text.splitlines(), 1)
                if len(line) > 119 and not line.startswith(("| ", "!["))
            ]
            yield from long
        for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            target = page.parent / link if link else page
            if (
                page not in site
                and "://" not in link
                and not (target.exists() and (not anchor or anchor in _anchors(target)))
            ):
                yield f"{name}: dead link {link}#{anchor}"
        for target in re.findall(r"^make ([a-z0-9-]+)", text, re.MULTILINE):
            if target not in targets:
                yield f"{name}: make {target} is not in the Makefile"
    if readme.count("\n") > 110:
        yield "README.md: over 110 lines"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {
        "pyproject.toml": project["version"],
        "CITATION.cff": _first(r"^version: (\S+)", "CITATION.cff"),
        "CHANGELOG.md": _first(r"^## \[(\d[^\]]*)\]", "CHANGELOG.md"),
    }
    if len({version.strip("\"'") for version in versions.values()}) > 1:
        yield f"versions differ: {versions}"
    around = [*sorted((ROOT / ".github" / "workflows").glob("*.yml")), ROOT / "Dockerfile"]
    around.append(ROOT / ".devcontainer" / "devcontainer.json")
    for path in around:
        text, name = path.read_text(), path.relative_to(ROOT)
        make_targets = {word for words in re.findall(r"\bmake ([a-z -]+)", text) for word in words.split()}
        yield from (f"{name}: make {word} is not in the Makefile" for word in make_targets - targets)
        scripts = set(re.findall(r"run: (\.ci/\w+)", text))
        yield from (f"{name}: no file {script}" for script in scripts if not (ROOT / script).exists())
        if re.search(r"pip3? install|[\w-]+==\S+", text):
            yield f"{name}: installs packages itself; versions belong in requirements.txt"


def command_errors(files: list[str]) -> Iterator[str]:
    """Commands `python -m MODULE` in documents and docstrings without such a module; MODULE.x is a placeholder."""
    for path in (name for name in files if name.endswith((".md", ".py", ".yaml")) and not name.startswith("tests/")):
        text = (ROOT / path).read_text(encoding="utf-8")
        for module in set(re.findall(r"python -m ((?:src|data_prep|results|benchmarks|tests)(?:\.\w+)+)", text)):
            file = ROOT / module.replace(".", "/")
            if not (file.with_suffix(".py").exists() or (file / "__main__.py").exists() or module.endswith(".x")):
                yield f"{path}: python -m {module}: no such module"


def system_errors(systems: Path = ROOT / "src" / "systems") -> Iterator[str]:
    """Each system has its groups and a README, and its table names existing files."""
    for folder in (path for path in sorted(systems.iterdir()) if path.is_dir() and path.name != "__pycache__"):
        yield from (f"{folder / name}: missing" for name in ("README.md", "groups.py") if not (folder / name).exists())
        page = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").exists() else ""
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
            for name in re.findall(r"`([^`]+)`", row):
                if not (folder / name).exists():
                    yield f"{folder / 'README.md'}: no file {name}"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _first(pattern: str, name: str) -> Any:
    match = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
    return match[1] if match else ""


def violations() -> Iterator[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    paths = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    files = [path for path in sorted(set(paths)) if (ROOT / path).exists()]
    modules = [Module(path) for path in files if path.endswith(".py")]
    names = {module.name for module in modules}
    for module in modules:
        yield from alias_errors(module, names)
        if not module.outside:
            yield from layer_errors(module)
            yield from naming_errors(module)
    yield from cycle_errors([module for module in modules if not module.outside])
    yield from size_errors(modules, files)
    yield from requirement_errors()
    yield from document_errors()
    yield from command_errors(files)
    yield from system_errors()


if __name__ == "__main__":
    messages = list(violations())
    print(*messages, sep="\n")
    sys.exit(bool(messages))
