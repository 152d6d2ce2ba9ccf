"""Original releases of question answering: each layout is read as its makers describe it, and what is malformed is
named."""

import copy
import gzip
import json
import re
from collections import Counter

import pytest

from data_prep.crossattn.qa_releases.detection import LAYOUTS, layout_of
from data_prep.crossattn.qa_releases.placing import Placing
from data_prep.crossattn.qa_releases.question import (
    UNANSWERABLE,
    Passage,
    Question,
    Record,
    Skipped,
    clean_answers,
    passages,
)
from data_prep.crossattn.qa_releases.release import Release
from src.errors import DataError

SQUAD = {
    "title": "Blue_whales",
    "paragraphs": [
        {
            "context": "Whales sing. They weigh 100 t.",
            "qas": [
                {
                    "id": "q1",
                    "question": " How heavy? ",
                    "answers": [{"text": t, "answer_start": 0} for t in ("100 t", "100 t.", "100 t", " ")],
                },
                {
                    "id": "q2",
                    "question": "How old?",
                    "answers": [],
                    "plausible_answers": [{"text": "100 t"}],
                    "is_impossible": True,
                },
            ],
        }
    ],
}
HOTPOT = {
    "_id": "5a8b",
    "answer": "yes",
    "question": "Do Ann and Bob live in one town?",
    "supporting_facts": [["Ann", 0], ["Bob", 1], ["Ann", 1]],
    "context": [
        ["Cleo", ["Cleo sails.", " She lives at sea."]],
        ["Bob", ["Bob bakes.", " He lives in Rome."]],
        ["Empty", []],
        ["Ann", ["Ann lives in Rome."]],
    ],
    "type": "comparison",
    "level": "hard",
}
NQ_WORDS = [
    *("<H1>", "Ann", "</H1>"),  # tokens from 0
    *("<P>", "Ann", "sails", "since", "1990", ".", "</P>"),  # from 3
    *("<P>", "Then", "Rome", "</P>"),  # from 10
]
NQ = {
    "question_text": "since when does ann sail",
    "example_id": -42,
    "document_url": "https://en.wikipedia.org//w/index.php?title=Ann_(sailor)&amp;oldid=1",
    "document_text": " ".join(NQ_WORDS),
    "long_answer_candidates": [{"start_token": 3, "end_token": 10, "top_level": True}],
    "annotations": [
        {
            "annotation_id": 7,
            "yes_no_answer": "NONE",
            "long_answer": {"start_token": 3, "end_token": 10, "candidate_index": 0},
            "short_answers": [{"start_token": 7, "end_token": 8}],
        }
    ],
}
NQ_ORIGINAL = {
    **{key: NQ[key] for key in ("question_text", "example_id", "annotations", "document_url")},
    "document_title": "Ann (sailor)",
    "document_html": "<H1>Ann...",
    "document_tokens": [{"token": t, "start_byte": 0, "end_byte": 1, "html_token": t[0] == "<"} for t in NQ_WORDS],
    "question_tokens": ["since"],
}
NQ_HUB = {
    "id": "-42",
    "question": {"text": NQ["question_text"], "tokens": []},
    "document": {"title": "Ann (sailor)", "tokens": {"token": NQ_WORDS, "is_html": [t[0] == "<" for t in NQ_WORDS]}},
    "annotations": {
        "id": ["7"],
        "long_answer": [{"start_token": 3, "end_token": 10}],
        "short_answers": [{"start_token": [7], "end_token": [8], "text": ["1990"]}],
        "yes_no_answer": [-1],
    },
}
CTXS = {
    "question": "who sails",
    "answers": ["Ann", "Ann", " "],
    "ctxs": [
        {"id": "1", "title": "Sea", "text": "The sea is wet.", "score": 1.0, "hasanswer": False, "isgold": False},
        {"title": "Ann", "text": "Ann sails.", "hasanswer": True, "isgold": True},
    ],
    "nq_annotated_gold": {"title": "Ann", "long_answer": "Ann sails.", "short_answers": ["Ann"]},
}
DPR = {
    "dataset": "nq_train_psgs_w100",
    "question": "who sails",
    "answers": ["Ann"],
    "positive_ctxs": [{"title": "Ann", "text": "Ann sails.", "score": 1000, "passage_id": "1"}] * 2,
    "negative_ctxs": [{"title": "N", "text": "Not here.", "score": 0}],
    "hard_negative_ctxs": [
        {"title": "H", "text": "Hard.", "score": 14.5},
        {"title": "Ann", "text": "Ann sails.", "score": 3},
    ],
}
MARCO = {
    "query_id": 9652,
    "query": "what weighs a whale",
    "passages": [
        {"is_selected": 0, "url": "http://a", "passage_text": "Whales sing."},
        {"is_selected": 1, "url": "http://b", "passage_text": "A whale weighs 100 t."},
    ],
    "answers": ["100 t"],
    "query_type": "numeric",
    "wellFormedAnswers": "[]",
}
TOPIOCQA = {
    "Context": ["who is ann", "a sailor", "from where", "Rome"],
    "Conversation_no": 3,
    "Turn_no": 3,
    "Question": "how old is she",
    "is_nq": False,
    "Answer": "No",
    "Additional_answers": [{"Answer": "40"}],
    "Topic": "Ann",
    "Topic_section": "Life",
}
TRIVIA = {
    "Answer": {"Aliases": ["Ann S.", "Ann"], "NormalizedAliases": ["ann"], "Type": "WikipediaEntity", "Value": "Ann"},
    "EntityPages": [{"DocSource": "TagMe", "Filename": "Ann.txt", "Title": "Ann"}],
    "Question": "Who sails?",
    "QuestionId": "tc_1",
    "SearchResults": [
        {"Description": "Ann sails on ...", "Filename": "3/3_1.txt", "Rank": 0, "Title": "Sails", "Url": "http://a"}
    ],
}
NQ_OPEN = {"question": "who sails", "answer": ["Ann", "Ann S."]}
PREPARED_ROW = {
    "context": "Ann sails.",
    "contexts_list": ["The sea is wet.", "Ann sails.", " "],
    "titles_list": ["Sea", "Ann", ""],
    "useful_contexts": [0, 1, 0],
    "question": " who sails ",
    "answer": "Ann",
    "sample_idx": 7,
    "dataset": "nq",
}
ALL = {
    "prepared": PREPARED_ROW,
    "squad": SQUAD,
    "hotpotqa": HOTPOT,
    "nq": NQ,
    "ctxs": CTXS,
    "dpr": DPR,
    "msmarco": MARCO,
    "topiocqa": TOPIOCQA,
    "triviaqa": TRIVIA,
    "nq_open": NQ_OPEN,
}


def read(record, **more):
    name = layout_of(record, "here", None)
    return list(LAYOUTS[name].questions(Record(record, "here"), **more))


def one(record, **more):
    (question,) = read(record, **more)
    assert isinstance(question, Question)
    return question


def changed(record, **fields):
    return {**copy.deepcopy(record), **fields}


def without(record, *names):
    return {key: value for key, value in record.items() if key not in names}


def test_every_layout_is_detected_from_its_record():
    assert {name: layout_of(record, "here", None) for name, record in ALL.items()} == {name: name for name in LAYOUTS}
    assert layout_of(NQ_ORIGINAL, "here", None) == layout_of(NQ_HUB, "here", "nq") == "nq"
    with pytest.raises(
        DataError,
        match=r"here: expected the layout squad \(SQuAD .* got the fields question, answer\. It looks like nq_open.",
    ):
        layout_of(NQ_OPEN, "here", "squad")
    with pytest.raises(
        DataError,
        match=r"(?s)here: unknown layout with the fields text. .*:\n  prepared: .*squad: .*nq_open: NQ-open",
    ):
        layout_of({"text": "x"}, "here", None)
    with pytest.raises(DataError, match=r"--layout: unknown layout 'sqad'. Did you mean 'squad'\?"):
        layout_of(SQUAD, "here", "sqad")


def test_squad():
    passage = (Passage("Whales sing. They weigh 100 t.", "Blue whales", useful=True),)
    first, second = read(SQUAD)
    assert first == Question("here: paragraphs[0]: qas[0]", "q1", "How heavy?", ("100 t", "100 t."), passage, "squad")
    assert second == Question("here: paragraphs[0]: qas[1]", "q2", "How old?", (UNANSWERABLE,), passage, "squad_v2")
    plausible = in_squad(is_impossible=True)
    assert next(iter(read(plausible))).answers == (UNANSWERABLE,), "whatever answers stand beside the mark"
    row = {
        "id": "q1",
        "title": "T_U",
        "context": "C.",
        "question": "Q?",
        "answers": {"text": ["no"], "answer_start": [0]},
    }
    assert one(row) == Question("here", "q1", "Q?", ("No",), (Passage("C.", "T U", useful=True),), "squad")
    assert one(changed(row, answers={"text": [], "answer_start": []})).answers == (UNANSWERABLE,)


def test_hotpotqa():
    whole = Question(
        where="here",
        id="5a8b",
        text="Do Ann and Bob live in one town?",
        answers=("Yes",),
        passages=(
            Passage("Cleo sails. She lives at sea.", "Cleo", useful=False),
            Passage("Bob bakes. He lives in Rome.", "Bob", useful=True),
            Passage("Ann lives in Rome.", "Ann", useful=True),
        ),
        dataset="hotpotqa",
    )
    assert one(HOTPOT) == whole
    hub = changed(
        without(HOTPOT, "_id"),
        id="5a8b",
        supporting_facts={"title": ["Ann", "Bob"], "sent_id": [0, 1]},
        context={"title": [t for t, _ in HOTPOT["context"]], "sentences": [s for _, s in HOTPOT["context"]]},
    )
    assert one(hub) == whole
    assert read(without(HOTPOT, "answer", "supporting_facts")) == [
        Skipped("no answer is given, as in the hidden test set")
    ]


@pytest.mark.parametrize("record", [NQ, NQ_ORIGINAL, NQ_HUB])
def test_nq_in_its_three_layouts(record):
    """Html is left out of the context; the title comes from the address where it is nowhere else."""
    passage = Passage("Ann sails since 1990 .", "Ann (sailor)", useful=True)
    assert one(record) == Question("here", "-42", "since when does ann sail", ("1990",), (passage,), "nq")


def test_the_title_of_a_page_comes_from_its_address():
    for address, title in (
        ("https://x/?oldid=1&amp;title=Ann_B", "Ann B"),
        ("https://x/?title=A%26B_%28C%29&oldid=1", "A&B (C)"),
        ("", ""),
        ("http://[x", ""),
    ):
        assert one(changed(NQ, document_url=address)).passages[0].title == title


def with_annotations(*annotations):
    """NQ with annotators who each found (long answer, short answers, yes or no)."""
    none = (-1, -1)
    return changed(
        NQ,
        annotations=[
            {
                "long_answer": dict(zip(("start_token", "end_token"), long or none, strict=True)),
                "short_answers": [{"start_token": s, "end_token": e} for s, e in short],
                "yes_no_answer": yes_no,
            }
            for long, short, yes_no in annotations
        ],
    )


def test_nq_answers():
    long, other, nothing = (3, 10), (10, 14), (None, [], "NONE")
    assert read(with_annotations(nothing)) == [Skipped("no long answer, so no context")]
    assert one(with_annotations((long, [], "NONE"))).answers == (UNANSWERABLE,)
    assert one(with_annotations((long, [], "YES"))).answers == ("Yes",)
    assert one(with_annotations((long, [], "NO"))).answers == ("No",)
    assert one(with_annotations((long, [(4, 5), (7, 8)], "NONE"))).answers == ("Ann", "1990")
    several = one(
        with_annotations(
            nothing, (other, [], "NONE"), (long, [(7, 8)], "NONE"), (long, [(4, 5), (7, 8)], "NONE"), nothing
        )
    )
    assert several.answers == ("1990", "Ann")
    assert several.passages[0].text == "Ann sails since 1990 ."
    assert one(with_annotations((other, [], "NONE"), (long, [(7, 8)], "NONE"), nothing)).answers == (UNANSWERABLE,), (
        "one of three is too few"
    )
    assert read(with_annotations((long, [(7, 8)], "NONE"), nothing, nothing)) == [
        Skipped("no long answer, so no context")
    ]


def test_retrieved_passages():
    sea, ann = Passage("The sea is wet.", "Sea", useful=False), Passage("Ann sails.", "Ann", useful=True)
    assert one(CTXS) == Question("here", None, "who sails", ("Ann",), (sea, ann), "nq_open")
    fid = changed(CTXS, id="7", ctxs=[{"title": "Sea", "text": "The sea is wet.", "score": 1.0}])
    assert one(fid).passages == (Passage("The sea is wet.", "Sea", useful=None),)
    assert one(fid).id == "7"


def test_rows_that_are_prepared_already():
    sea, ann = Passage("The sea is wet.", "Sea", useful=False), Passage("Ann sails.", "Ann", useful=True)
    assert one(PREPARED_ROW) == Question("here", None, "who sails", ("Ann",), (sea, ann), "nq")
    ours = changed(PREPARED_ROW, id="42", answers=["Ann", "Ann S."], titles_list=None)
    assert (one(ours).id, one(ours).answers, one(ours).passages[1].title) == ("42", ("Ann", "Ann S."), "")
    assert [passage.useful for passage in one(without(PREPARED_ROW, "useful_contexts")).passages] == [None, None]
    assert read(changed(PREPARED_ROW, contexts_list=[" "], titles_list=[], useful_contexts=[])) == [
        Skipped("no context has any text")
    ]


def test_dpr():
    """Each text once, useful where it is positive anywhere; hard negatives before random ones."""
    ann, hard, other = (
        Passage("Ann sails.", "Ann", useful=True),
        Passage("Hard.", "H", useful=False),
        Passage("Not here.", "N", useful=False),
    )
    assert one(DPR) == Question("here", None, "who sails", ("Ann",), (ann, hard, other), "nq")
    assert read(changed(DPR, positive_ctxs=[])) == [Skipped("no passage holds the answer")]


def test_msmarco():
    sing, weigh = Passage("Whales sing.", useful=False), Passage("A whale weighs 100 t.", useful=True)
    assert one(MARCO) == Question("here", "9652", "what weighs a whale", ("100 t",), (sing, weigh), "msmarco")
    hub = changed(
        MARCO,
        passages={"is_selected": [0, 1], "passage_text": ["Whales sing.", "A whale weighs 100 t."], "url": ["a", "b"]},
    )
    assert one(hub) == one(MARCO)
    assert one(changed(MARCO, answers=["No Answer Present."])).answers == (UNANSWERABLE,)
    assert read(changed(MARCO, answers=[])) == read(changed(MARCO, answers=[""])) == [Skipped("no answer is given")]


def test_topiocqa():
    turns = Passage("Q: who is ann\nA: a sailor\nQ: from where\nA: Rome", useful=True)
    assert one(TOPIOCQA) == Question(
        "here", "3/3", "how old is she", ("No", "40"), (turns,), "topiocqa", family="who is ann"
    )
    gold = changed(TOPIOCQA, Gold_passage={"id": "1", "title": "Ann", "text": "Ann is 40."})
    assert one(gold).passages == (Passage("Ann is 40.", "Ann", useful=True),)
    first = changed(TOPIOCQA, Context=[], Turn_no=1)
    assert read(first) == [Skipped("a first turn, without a gold passage: there is nothing to read")]
    assert one(changed(gold, Context=[], Turn_no=1)).family == "how old is she"


def test_triviaqa(tmp_path):
    """Texts of pages where they are there, or else what a search engine said of them."""
    question = one(TRIVIA)
    assert question == Question(
        "here", "tc_1", "Who sails?", ("Ann", "Ann S."), (Passage("Ann sails on ...", "Sails"),), "triviaqa"
    )
    for name, text in (("wikipedia/Ann.txt", "Ann is a sailor."), ("web/3/3_1.txt", "Sails are white.")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert one(TRIVIA, evidence=tmp_path).passages == (
        Passage("Ann is a sailor.", "Ann"),
        Passage("Sails are white.", "Sails"),
    )
    assert read(changed(TRIVIA, SearchResults=[]))[0].reason.startswith(
        "no page has any text: name the release's folder"
    )
    hub = {
        "question_id": "tc_1",
        "question": "Who sails?",
        "answer": {"value": "Ann", "aliases": ["Ann S."]},
        "entity_pages": {"title": ["Ann"], "wiki_context": ["Ann is a sailor."]},
        "search_results": {"title": [], "search_context": []},
    }
    assert one(hub).passages == (Passage("Ann is a sailor.", "Ann"),)
    (tmp_path / "wikipedia/Ann.txt").unlink()
    with pytest.raises(DataError, match=r"here: EntityPages\[0\]: its text .*wikipedia/Ann.txt is missing"):
        read(TRIVIA, evidence=tmp_path)
    with pytest.raises(DataError, match=r"got '../../x'"):
        read(changed(TRIVIA, EntityPages=[{"Filename": "../../x", "Title": "x"}]), evidence=tmp_path)


def test_nq_open_has_no_passages():
    assert one(NQ_OPEN) == Question("here", None, "who sails", ("Ann", "Ann S."), (), "nq_open")


def in_squad(**fields):
    article = copy.deepcopy(SQUAD)
    article["paragraphs"][0]["qas"][0].update(fields)
    return article


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            in_squad(answers=[{"text": " "}]),
            "here: paragraphs[0]: qas[0]: all answers are blank.",
        ),
        (in_squad(answers=[]), "here: paragraphs[0]: qas[0]: no answers. Add one, or set 'is_impossible'"),
        (
            in_squad(is_impossible="false"),
            "here: paragraphs[0]: qas[0]: field 'is_impossible': expected bool, got 'false' (str).",
        ),
        (in_squad(question=" "), "here: paragraphs[0]: qas[0]: field 'question': expected text"),
        (
            in_squad(question="\ud800?"),
            r"here: paragraphs[0]: qas[0]: field 'question': \ud800 at character 0 is half of a surrogate pair",
        ),
        (in_squad(id=None), "here: paragraphs[0]: qas[0]: field 'id': expected str, got None"),
        (
            {"paragraphs": [{"context": "", "qas": SQUAD["paragraphs"][0]["qas"]}]},
            "here: paragraphs[0]: field 'context': expected text",
        ),
        ({"paragraphs": [{"qas": []}]}, "here: paragraphs[0]: field 'context' is missing. Fields: qas."),
        (changed(HOTPOT, answer=""), "here: all answers are blank."),
        (
            changed(HOTPOT, context=[["Ann", "text"]]),
            "here: field 'context': expected a list of sentences for 'Ann', got",
        ),
        (changed(HOTPOT, context=[["Ann"]]), "here: field 'context'[0]: expected [title, sentences], got ['Ann']"),
        (
            changed(HOTPOT, supporting_facts={"title": ["a"], "sent_id": []}),
            "field 'supporting_facts': expected lists of equal length, got 1 of 'title' and 0 of 'sent_id'",
        ),
        (with_annotations(((3, 15), [], "NONE")), "here: long answer: expected a span within 14 tokens, got 3 to 15."),
        (
            with_annotations(((3, 10), [(5, 5)], "NONE")),
            "here: short answer: expected a span within 14 tokens, got 5 to 5.",
        ),
        (
            with_annotations(((3, None), [], "NONE")),
            "here: long answer: expected a span within 14 tokens, got 3 to None.",
        ),
        (
            changed(
                NQ_HUB,
                annotations={**NQ_HUB["annotations"], "short_answers": [{"start_token": 5, "end_token": 6}]},
            ),
            "here: field 'annotations': field 'short_answers': field 'start_token': expected list, got 5",
        ),
        (
            with_annotations(((3, 10), [], ["YES"])),
            "here: field 'yes_no_answer': expected str or int, got ['YES'] (list).",
        ),
        (
            changed(PREPARED_ROW, useful_contexts=[1]),
            "here: field 'useful_contexts': expected 3 values, one per context, got 1.",
        ),
        (
            changed(PREPARED_ROW, titles_list=["a"]),
            "here: field 'titles_list': expected 3 values, one per context, got 1.",
        ),
        (changed(PREPARED_ROW, contexts_list="text"), "here: field 'contexts_list': expected list, got 'text' (str)."),
        (without(CTXS, "answers"), "here: field 'answers' is missing. Fields: question, ctxs, nq_annotated_gold."),
        (changed(CTXS, ctxs=[{"title": "a"}]), "here: ctxs[0]: field 'text' is missing. Fields: title."),
        (
            changed(MARCO, passages={"is_selected": [0], "passage_text": []}),
            "field 'passages': expected lists of equal length, got 0 of 'passage_text' and 1 of 'is_selected'",
        ),
        (changed(MARCO, query_id=None), "here: field 'query_id': expected str, got None"),
        (
            changed(TOPIOCQA, Context=["a"]),
            "here: field 'Context': expected alternating questions and answers, got an odd number of texts (1).",
        ),
        (changed(TRIVIA, Answer={"Aliases": []}), "here: field 'Answer': field 'Value' is missing."),
        (changed(NQ_OPEN, answer=["", " "]), "here: all answers are blank."),
        (changed(DPR, positive_ctxs=None), "here: field 'positive_ctxs': expected list, got None"),
    ],
)
def test_a_malformed_record_is_named(record, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read(record)


def test_answers_and_passages_are_deduplicated():
    assert clean_answers([" a", "YES", "a", "", "no", "Nothing"], "here") == ("a", "Yes", "No", "Nothing")
    first, again, useful = (
        Passage("x", "A", useful=False),
        Passage("x", "B", useful=False),
        Passage("x", "C", useful=True),
    )
    assert passages([first, again, Passage(" ")]) == (first,)
    assert passages([first, useful, again]) == (useful,)


LETTERS = Question("here", "7", "?", ("z",), tuple(Passage(c, useful=c in "UV") for c in "abUcVd"), "toy")


def order(question=LETTERS, **options):
    return "".join(passage.text for passage in Placing(**{"seed": 0, **options}).place(question).passages)


def test_useful_passages_are_at_the_requested_position():
    expected = {
        "given": "abUcVd",
        "first": "UVabcd",
        "middle": "abUVcd",
        "last": "abcdUV",
        "0": "UVabcd",
        "3": "abcUVd",
        "9": "abcdUV",
    }
    assert {position: order(position=position) for position in expected} == expected
    assert order(position="given", distractors=2) == "abUV"
    assert order(position="middle", distractors=3) == "aUVbc"
    assert order(position="last", distractors=0) == "UV"
    assert order(position="first", distractors=9) == "UVabcd"


def test_a_random_order_depends_only_on_the_seed_and_the_question():
    assert order(position="random") == order(position="random")
    assert sorted(order(position="random", distractors=2)) == sorted("abUV")
    orders = [order(Question("", str(i), "?", ("z",), LETTERS.passages, "toy"), position="random") for i in range(300)]
    places = Counter(order.index("U") for order in orders)
    assert set(places) == set(range(6))
    assert min(places.values()) > 25, "each place about 50 times"
    assert order(position="random", seed=1) != order(position="random", seed=0)


def test_distractors_can_be_drawn_from_other_questions():
    pool = [*LETTERS.passages, *(Passage(text, useful=True) for text in ("p", "q", "has Z in it", "p", "r"))]
    passages = Placing(0, distractors=8, position="first", pool=pool).place(LETTERS).passages
    assert [p.text for p in passages[:6]] == list("UVabcd")
    assert sorted(p.text for p in passages[6:]) == ["p", "q", "r"], "none with the answer, none twice, none of its own"
    assert [p.useful for p in passages] == [True] * 2 + [False] * 7
    few = Placing(0, distractors=5, position="given", pool=pool).place(LETTERS).passages
    assert "".join(p.text for p in few[:6]) == "abUcVd"
    assert len(few) == 7


def test_positions_require_marked_passages():
    unknown = Question("FILE:3", "7", "?", ("z",), (Passage("a"), Passage("b")), "toy")
    assert order(unknown) == "ab"
    assert sorted(order(unknown, position="random")) == ["a", "b"]
    for options in ({"distractors": 1}, {"position": "first"}):
        with pytest.raises(DataError, match=r"FILE:3: this release does not mark useful passages"):
            order(unknown, **options)
    with pytest.raises(DataError, match=r"--position: expected one of given, first, .* or a number from 0, got '-1'"):
        Placing(0, position="-1")


@pytest.mark.parametrize("name", ALL)
def test_a_release_is_read_from_lines_or_a_list_packed_or_not(tmp_path, name):
    record = ALL[name]
    expected = [(name, question) for question in read(record)]
    for text in (json.dumps(record), json.dumps([record]), json.dumps({"data": [record]})):
        for data in (text.encode(), gzip.compress(text.encode())):
            (tmp_path / "f").write_bytes(data)
            questions = list(Release(str(tmp_path / "f"), "train").questions())
            assert [(layout, getattr(q, "id", None)) for layout, q in questions] == [
                (layout, getattr(q, "id", None)) for layout, q in expected
            ]


def test_msmarco_in_columns(tmp_path):
    records = [MARCO, changed(MARCO, query_id=2, answers=["No Answer Present."])]
    columns = {name: {str(i): record[name] for i, record in enumerate(records)} for name in sorted(MARCO)}
    (tmp_path / "dev_v2.1.json").write_text(json.dumps(columns))
    questions = [question for _, question in Release(str(tmp_path / "dev_v2.1.json"), "val").questions()]
    assert [(q.id, q.answers) for q in questions] == [("9652", ("100 t",)), ("2", (UNANSWERABLE,))]
    assert questions[0].passages == one(MARCO).passages


def test_evidence_is_only_for_triviaqa(tmp_path):
    (tmp_path / "f").write_text(json.dumps(CTXS))
    with pytest.raises(DataError, match=r"f:1: --evidence is only for the layout triviaqa, got ctxs."):
        list(Release(str(tmp_path / "f"), "train", evidence=tmp_path).questions())
    (tmp_path / "f").write_text("[]")
    with pytest.raises(DataError, match=r"f: empty."):
        list(Release(str(tmp_path / "f"), "train").questions())
