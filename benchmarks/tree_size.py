"""Size of the source tree: files, folders, tokens of code and counts of constructs that make code hard to follow.

`python -m benchmarks.tree_size [CHECKOUT ...]` prints one column for each checkout (this one by default). Tokens are
those of Python's tokenizer without docstrings, comments and layout, so that denser lines gain nothing.
"""

import ast
import collections
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_CODE = ("src", "data_prep", "results")


def main() -> None:
    columns = [figures(Path(folder)) for folder in sys.argv[1:] or ["."]]
    for name in columns[0]:
        print("|", name, "|", " | ".join(f"{column[name]:,}" for column in columns), "|")


def figures(root: Path) -> dict[str, int]:
    """Each figure of a checkout by its name."""
    listing = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listing.splitlines() if (root / name).exists()]
    texts = {path: (root / path).read_text() for path in files if path.suffix == ".py"}
    code = {path: ast.parse(text) for path, text in texts.items() if path.parts[0] in _CODE}
    nodes = [node for tree in code.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    uses = collections.Counter(node.id for node in nodes if isinstance(node, ast.Name))
    uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    entries = collections.Counter(path.parent for path in {part for path in files for part in (path, *path.parents)})
    lines = {path: text.count("\n") for path, text in texts.items()}
    tokens = {path: _tokens(text) for path, text in texts.items()}
    docstrings = {path: len(_docstring_lines(text)) for path, text in texts.items()}
    golden = next((root / path for path in files if path.name == "config_fields.json"), None)
    classes = json.loads(golden.read_text()).values() if golden else []
    return {
        "Python files in src, data_prep, results": len(code),
        "folders in src, data_prep, results": len({path.parent for path in code}),
        "most entries in a folder of src, data_prep, results, tests, benchmarks": max(
            count for path, count in entries.items() if path.parts and path.parts[0] in (*_CODE, "tests", "benchmarks")
        ),
        **{
            f"{what} in {room}": sum(values[path] for path in texts if path.parts[0] == room)
            for what, values in (("lines", lines), ("lines of docstrings", docstrings), ("tokens", tokens))
            for room in (*_CODE, "tests", "benchmarks")
        },
        "tokens in src, data_prep, results": sum(tokens[path] for path in code),
        "longest module there, lines": max(lines[path] for path in code),
        "fields of experiments": sum(len({*keys["original"], *keys.get("added", {})}) for keys in classes),
        "functions": len(functions),
        "functions with a name used once": sum(uses[each.name] == 1 for each in functions),
        "`Any` in annotations": uses["Any"],
        "imports within functions": sum(
            isinstance(inner, ast.Import | ast.ImportFrom) for each in functions for inner in ast.walk(each)
        ),
        "modules imported under another name": sum(_aliases(tree, code) for tree in code.values()),
        "commands": sum('__name__ == "__main__"' in texts[path] or path.name == "__main__.py" for path in code),
    }


def _aliases(tree: ast.Module, code: dict[Path, ast.Module]) -> int:
    ours = {".".join(path.with_suffix("").parts) for path in code}
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
            count += sum(bool(name.asname) and f"{prefix}{name.name}" in ours for name in node.names)
    return count


def _docstring_lines(text: str) -> set[int]:
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


def _tokens(text: str) -> int:
    docstrings = _docstring_lines(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _LAYOUT and token.start[0] not in docstrings for token in tokens)


if __name__ == "__main__":
    main()
