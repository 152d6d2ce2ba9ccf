"""Questions to rows: what they mean, and where a mistake in them is."""

import pytest

from src.errors import ConfigError
from src.experiments import expressions

ROW = {
    "state": "done",
    "seed": 0,
    "model.stride": 4,
    "model.name": "hf",
    "model.sizes": [1, 2],
    "loss": 0.5,
    "em": None,
    "em/nq": 3.0,
    "tied": True,
    "data.path": "a/b-7.json",
}


@pytest.mark.parametrize(
    "text",
    [
        "model.stride > 2 and state == 'done'",
        "model.stride == 4.0",
        "seed == 0 and not seed",
        "0 < loss <= 0.5 < model.stride",
        "model.stride in [2, 4]",
        "model.stride in (2, 4)",
        "model.name not in ['gpt', state]",
        "model.sizes == [1, 2]",
        "2 in model.sizes",
        "'json' in data.path",
        "em == None and em == null and None == nothing.at.all",
        "em != 0",
        "not em < 1 and not em >= 1 and not None < 1",
        "tied and tied == true and tied != 1 and seed != false and True == tied",
        "matches(data.path, '-\\d+')",
        'matches(data.path, "^a/.*json$")',
        "not matches(seed, '0') and not matches(em, '') and not matches(absent, '')",
        "value('em/nq') == 3",
        "not (seed == 1 or loss > 1)",
        "seed == 1 or\n loss < 1",
        "-1 < seed < +1",
        "state > 'a' and not state > 1 and not model.sizes > 1 and not model.sizes < [3]",
        "not ('x' in seed) and not (1 in state) and 1 not in em",
        "loss == 5e-1",
        "not 1 < state and not seed < 'a' and not true > seed and not seed < tied",
        "model.sizes != [1, true]",
        "'ü' != 'u'",
        "   tied",
    ],
)
def test_it_holds(text: str):
    assert expressions.compile(text).matches(ROW) is True


@pytest.mark.parametrize(
    "text",
    [
        "seed == 1",
        "0 < loss < 0.5",
        "em",
        "absent",
        "model.stride not in [4]",
        "loss < 1 and seed",
        "tied == 1",
        "state in []",
    ],
)
def test_it_does_not_hold(text: str):
    assert expressions.compile(text).matches(ROW) is False


def test_names_are_those_that_are_read():
    query = expressions.compile("a.b.c > 1 and matches(d, 'e') or value('f/g') in [h, 'i', null, true, None]")
    assert query.names == {"a.b.c", "d", "f/g", "h"}
    assert query.text.startswith("a.b.c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^query: expected a comparison such as seed == 0, got nothing\.$"),
        ("  ", "got nothing"),
        ("seed = 0", r"^query, character 6 \(at '= 0'\): write == to compare\.$"),
        ("seed == 0 and", r"^query, character 14 \(at the end\): "),
        ("  seed == 0 and loss ==", r"character 24 \(at the end\)"),
        ("(seed == 0", r"character 1 .*'\(' was never closed"),
        ("model.name ~ 'hf'", r"character 12 \(at \"~ 'hf'\"\): to search, write matches\(name"),
        ("a && b", "write 'and' and 'or'"),
        ("a + 1 > 2", r"character 1 .*: cannot use 'a \+ 1'"),
        ("seed == 0 and loss * 2 > 1", r"character 15 \(at 'loss \* 2 > 1'\)"),
        ("'ü' == s and f(x)", r"character 14 \(at 'f\(x\)'\): the only calls are"),
        ("em is None", r"character 7 .*write == or !="),
        ("__import__('os').system('true')", r"the only calls are"),
        ("matches(a)", "the only calls are"),
        ("matches(a, b)", "the only calls are"),
        ("matches(a, '(')", r"character 12 .*is not a valid RE2 expression: missing"),
        ("value(a)", "the only calls are"),
        ("a[0] == 1", r"cannot use 'a\[0\]'"),
        ("a[0].b == 1", r"expected a dotted name"),
        ("lambda: 1", "cannot use 'lambda: 1'"),
        ("[x for x in y]", "cannot use"),
        ("f'{a}' == 1", "cannot use"),
        ("b'a' == 1", "cannot use"),
        ("a == 1j", "cannot use '1j'"),
        ("a == ...", "cannot use"),
        ("-a == 1", "cannot use '-a'"),
        ("a == -True", "cannot use '-True'"),
        ("{'a': 1} == b", "cannot use"),
        ("(a := 1)", "cannot use"),
        ("a; b", "character 2"),
        ("a\0", "query"),
        ("(" * 250 + "a" + ")" * 250, "query"),
        ("not " * 60 + "a", "nested more than 50 deep"),
        ("not " * 2000 + "a", "query"),
        ("a" * 10_001, "10001 characters, at most 10000"),
        ("a == " + "9" * 5000, "query"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        expressions.compile(text)


def test_messages_start_with_the_place():
    with pytest.raises(ConfigError, match=r"^--where, character 3 "):
        expressions.compile("a b", "--where")


def test_python_evaluates_nothing():
    with pytest.raises(ConfigError):
        expressions.compile("exit()")
    assert expressions.compile("exit == null and open == null and a.__class__ == null").matches({"a": 1}) is True
