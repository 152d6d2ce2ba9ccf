"""Questions about source: exact small modules, and what must not be asked."""

import textwrap

import pytest

from data_prep.crossattn.code_questions import reveals, snippets


def snippets_of(source):
    return list(snippets(textwrap.dedent(source).lstrip("\n"), 0, 10_000))


def questions_of(source, index=0):
    return {(q.kind, q.text): q.answer for q in snippets_of(source)[index].questions}


def test_a_method_and_its_class():
    source = '''
    class Reader(Base):
        """Reads e.g. lines. Slowly.

        More.
        """

        @property
        @functools.cache
        def take(self, path, *rest, mode="r b", **options):
            """Give back
            the first line.
            """

            # a comment
            if not path:
                raise ValueError(path)
            raise io.Oops from None
    '''
    outer, inner = snippets_of(source)
    assert inner.context == textwrap.dedent("""\
        @property
        @functools.cache
        def take(self, path, *rest, mode="r b", **options):
            # a comment
            if not path:
                raise ValueError(path)
            raise io.Oops from None""")
    assert outer.context == "class Reader(Base):\n" + textwrap.indent(inner.context, "    ")
    assert {(q.kind, q.text): q.answer for q in outer.questions} == {
        ("does", "What does this class do?"): "Reads e.g. lines.",
        ("name", "What is the name of this class?"): "Reader",
    }
    assert {(q.kind, q.text): q.answer for q in inner.questions} == {
        ("does", "What does this method do?"): "Give back the first line.",
        ("name", "What is the name of this method?"): "take",
        ("parameters", "Which parameters does this method take besides self?"): "path, *rest, mode, **options",
        ("default", "What is the default of the parameter mode?"): '"r b"',
        ("raises", "Which exceptions does this method raise?"): "ValueError, io.Oops",
        ("calls", "Which names does this method call?"): "ValueError",
        ("decorators", "Which decorators does this method have?"): "property, functools.cache",
    }


def test_a_body_with_only_a_docstring_becomes_pass():
    assert snippets_of('def stub():\n    """Do nothing yet."""\n')[0].context == "def stub():\n    pass"


def test_docstrings_that_share_a_line_with_code_are_left_out():
    assert snippets_of('def stub(): "Do nothing."\n') == []
    assert snippets_of('def stub():\n    "Do nothing."; x = 1\n') == []
    assert snippets_of('def stub():\n    "Do nothing."  # really\n    x = 1\n')[0].context == "def stub():\n    x = 1"


def test_strings_that_are_less_indented_than_the_code_stay():
    source = 'class A:\n    def f(self):\n        return """x\n  y\n"""\n'
    assert snippets_of(source)[1].context == 'def f(self):\n    return """x\n  y\n"""'


def test_non_ascii_text_before_a_segment():
    assert questions_of("def f(é='ü', b='ö'): pass\n")["default", "What is the default of the parameter b?"] == "'ö'"


def test_calls_are_in_source_order_each_once():
    source = "def f(x):\n    a(b(x).c(), d[0](), a())\n    return [e(y) for y in g()]\n"
    assert questions_of(source)["calls", "Which names does this function call?"] == "a, b, c, e, g"


def test_form_feeds_do_not_shift_lines():
    assert snippets_of("x = 1\n\f\ndef f(a):\n    return a\n")[0].context == "def f(a):\n    return a"


@pytest.mark.parametrize(
    "body",
    [
        "raise",  # whatever came
        "raise error_of(x)",
        "raise make()",
        "err = ValueError(x)\n    raise err",
        "E = pick(x)\n    raise E",
        "raise Given(x)",
        "raise errors[x]",
        "return lambda: fail(x)",
        "def inner():\n        raise ValueError\n    return inner",
    ],
)
def test_no_questions_about_unnamed_exceptions(body):
    kinds = {kind for kind, _ in questions_of(f"def f(x, Given):\n    {body}\n")}
    assert "raises" not in kinds


def test_no_questions_about_deferred_code():
    assert "calls" not in {kind for kind, _ in questions_of("def f(x):\n    g(x)\n    return lambda: h(x)\n")}


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return it. Or not.", "Return it."),
        ("Return it", "Return it"),
        ("Return x.y here. then", "Return x.y here. then"),
        ("Is it?  Yes.", "Is it?"),
        ("First\n    second line.\n\n    Third.", "First second line."),
        ("f(x) -> y", None),
        ("open(name) opens it.", None),
        ("Undocumented.", None),
        ("These are taken:", None),
    ],
)
def test_first_sentence(docstring, sentence):
    assert (
        questions_of(f'def f(x):\n    """{docstring}"""\n    return x\n').get(("does", "What does this function do?"))
        == sentence
    )


@pytest.mark.parametrize(
    "source",
    ["def method(): pass", "class A:\n  def self(self): pass", "def f(f): pass", "def _(): pass", "def the(): pass"],
)
def test_no_questions_with_revealed_or_empty_answers(source):
    for snippet in snippets_of(source + "\n"):
        for q in snippet.questions:
            assert not reveals(q.text, q.answer)
            assert any(c.isalnum() for c in q.answer)


def test_no_question_about_a_default_named_like_its_parameter():
    assert "default" not in {kind for kind, _ in questions_of("def f(os=os): pass\n")}


@pytest.mark.parametrize(
    ("question", "answer", "given_away"),
    [
        ("What is Foo?", "foo", True),
        ("What is a, b now?", "A  b", True),
        ("What is it?", "what it", False),
        ("What is the default of x?", "None", False),
    ],
)
def test_reveals(question, answer, given_away):
    assert reveals(question, answer) is given_away


def test_limits_of_length():
    source = "def f(x):\n    return x\n"
    assert len(list(snippets(source, 22, 22))) == 1
    assert list(snippets(source, 23, 99)) == []
    assert list(snippets(source, 0, 21)) == []


def test_definitions_in_branches_are_found_and_functions_in_functions_are_not():
    source = """
    if x:
        def first(): g()
    else:
        try:
            def second(): g()
        except E:
            class Third:
                def fourth(self):
                    def fifth(): g()
    """
    assert [s.questions[0].answer for s in snippets_of(source)] == ["first", "second", "Third", "fourth"]


def test_source_with_syntax_errors():
    with pytest.raises(SyntaxError):
        snippets_of("def f(:\n")
