"""Check that code and docs are in plain English. `make lint` runs it; with paths, it lists every hit in these files.

Limits: a habit of HABITS in at most 1 % of the sentences of the code and of the lines of the docs, and in no test name.
No variable, parameter, attribute, function or class is named by a bare participle.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_PERCENT = 1.0

HABITS = {
    "tell: say report, log, print": r"\b(told|tells?)\b",
    "go on: say continue, resume": r"\b(go(es)?|going|went) on\b",
    "a clause with what as a noun: name the thing": (
        r"\b[Ww]hat (is|was|are|were|has|had|it|they|an?|the|each|no|one|this|that|comes?|came|follows|stands|reads?"
        r"|makes?|needs?|does|may|all|must|can|people|processes|runs?|training|models?|transformers|others?|launch|`\w+`)\b"
    ),
    "a sentence that starts with Of: start with the subject": (
        r"(?:^|\.\s|\"\"\"|: )Of (an?|the|each|all|its|one|this|that|which|beams|losses|several|some|these|those"
        r"|every|two|both|what)\b"
    ),
    "is none: say there is no, or None": r"\b(is|are|was|were|has|have|be|names|holds) none\b",
    "so many: give the number a name": r"\bso (many|few|long|much|large)\b",
    "stand, lie: say is, appears, is stored": r"\b(stands?|stood|lies)\b",
    "beside: say next to, also": r"\bbesides?\b",
    "anew: say again, re-": r"\banew\b",
    "others, otherwise: name them, say differently": r"\b(otherwise|others)\b",
    "whole: say complete, all": r"\bwhole\b",
    "who, whose: only for people": r"\b(who|whom|whose)\b",
    "begin: say start": r"\b(begins?|began|begun|beginning)\b",
    "behind: say after": r"\bbehind\b",
    "alike, alone, apart: say the same, only, separately": r"\b(alike|alone|apart)\b",
    "keep: say save, retain": r"\b(kept|keeps)\b",
    "ask: say request, query": r"\b(asked|asks|asking)\b",
    "lack: say is missing, has no": r"\b(lacks?|lacking|lacked)\b",
    "most, least as a noun: say maximum, minimum": (
        r"(?:^|\"\"\"|\. )(Most|Least|At most|At least)\b|\bmost (tokens|lines|rows|bytes|curves"
        r"|values|characters)\b|at the most"
    ),
    "may: say can": r"\bmay\b",
}
IRREGULAR = re.compile(
    "begun|bound|bought|broken|brought|built|caught|chosen|done|drawn|driven|fallen|felt|forgotten|fought|found"
    "|frozen|given|gone|grown|heard|held|hidden|kept|known|laid|led|left|lent|lost|made|meant|met|own|paid|put|read"
    "|risen|said|seen|sent|shaken|shown|sold|split|spoken|spread|stolen|stood|struck|stuck|swept|taken|taught"
    "|thought|thrown|told|torn|understood|won|worn|woken|written"
)
TERMS = re.compile(
    "allowed|batched|cached|captured|changed|chunked|clipped|combined|compiled|converted|decoded|deepspeed|deferred"
    "|disabled|done|dropped|elapsed|embed|enabled|encoded|expected|failed|feed|finished|flattened|frozen|fused|gated"
    "|gathered|generated|grouped|hidden|hundred|ignored|indexed|initialized|interleaved|led|loaded|logged|masked"
    "|matched|merged|need|nested|normalized|packed|padded|parsed|patched|pinned|pooled|pretrained|projected|put"
    "|quantized|read|red|rejected|removed|rendered|requested|required|reserved|resolved|sampled|saved|scaled|seed"
    "|seen|selected|sharded|shared|shed|shifted|shuffled|skipped|sorted|speed|split|spread|stacked|supported|tied"
    "|tokenized|trained|transposed|truncated|unchanged|unexpected|unfinished|unpacked|unsupported|unused|visited|weighted|wrapped"
)
"""Words that look like participles, and those that torch, transformers, TRL and the like use as names."""


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) of the strings with three words or more, and of the comments."""
    tree = ast.parse(text)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            if node.value.count(" ") > 1:
                for sentence in re.split(r"(?<=[.])\s+", " ".join(node.value.split())):
                    yield node.lineno, sentence
        elif isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and "noqa" not in token.string:
            yield token.start[0], token.string.lstrip("# ")


def names(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, scope, name) of each variable, parameter, attribute, function, class and alias that the code defines."""

    def walk(node: ast.AST, scope: str) -> Iterator[tuple[int, str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield child.lineno, scope, child.name
                inner = f"{scope}.{child.name}".strip(".")
            elif isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
                yield child.lineno, scope, child.id if isinstance(child, ast.Name) else child.attr
            elif isinstance(child, ast.arg):
                yield child.lineno, scope, child.arg
            elif isinstance(child, ast.alias) and child.asname:
                yield child.lineno, scope, child.asname
            yield from walk(child, inner)

    yield from walk(ast.parse(text), "")


def is_bare_participle(name: str) -> bool:
    word = name.strip("_").lower()
    if name.startswith("__"):
        return False  # Python's own, such as __reversed__
    return not TERMS.fullmatch(word) and bool(IRREGULAR.fullmatch(word) or re.fullmatch("[a-z]+ed", word))


def habit_of(sentence: str) -> str | None:
    return next((advice for advice, pattern in HABITS.items() if re.search(pattern, sentence)), None)


def check(files: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """({kind: hits}, {kind: number of sentences, lines or names})."""
    hits: dict[str, list[str]] = {"code": [], "docs": [], "tests": [], "names": []}
    counts = dict.fromkeys(hits, 0)

    def note(kind: str, place: str, text: str) -> None:
        counts[kind] += 1
        if (advice := habit_of(text)) is not None:
            hits[kind].append(f"{place}: {advice}: {text[:160]}")

    for path in files:
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".md"):
            for line, words in enumerate(text.splitlines(), 1):
                note("docs", f"{path}:{line}", words)
        elif path.endswith(".py"):
            for line, sentence in sentences(text) if not path.startswith("tests/") else ():
                note("code", f"{path}:{line}", sentence)
            for line, scope, name in names(text):
                counts["names"] += 1
                if is_bare_participle(name):
                    hits["names"].append(
                        f"{path}:{line}: {scope or 'module'}: {name} is a bare participle; say of what"
                    )
                if name.startswith("test_"):
                    note("tests", f"{path}:{line}", name.removeprefix("test_").replace("_", " "))
    return hits, counts


def main(paths: Sequence[str]) -> bool:
    """Whether a limit is exceeded; prints the hits of each kind that exceeds it, and with `paths` all of theirs."""
    files = subprocess.check_output(["git", "ls-files", "--", *paths], cwd=ROOT, text=True).splitlines()
    hits, counts = check([path for path in files if path.endswith((".py", ".md")) and (ROOT / path).exists()])
    failed = False
    for kind, kind_hits in hits.items():
        allowed = 0 if paths or kind in ("tests", "names") else MAX_PERCENT / 100 * counts[kind]
        if len(kind_hits) > allowed:
            print(*kind_hits, sep="\n")
            failed = True
        print(f"{kind}: {len(kind_hits)} of {counts[kind]}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
