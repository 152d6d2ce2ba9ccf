"""The table of tasks: what T5 reads and writes of each, and the mistakes of an entry that are told by file, task and
field."""

from pathlib import Path

import pytest

from src.errors import ConfigError
from src.experiments.config import added_field, load
from src.files import read_yaml
from src.systems.t5.tasks import task_table
from src.systems.t5.tasks.task_table import NamedTask, Task, find

A = {
    name: name[0].upper()
    for name in ("choice1", "choice2", "premise", "hypothesis", "question", "passage", "sentence", "answer", "word")
}
VALUES = {
    **A,
    "sentence1": "S1",
    "sentence2": "S2",
    "question1": "Q1",
    "question2": "Q2",
    "paragraph": "PA",
    "query": "QU",
    "entities": "E1, E2",
    "text": "T",
    "code": "def f(): …",
    **{
        f"{name}_sentence": str(i) for i, name in enumerate(["first", "second", "third", "fourth", "fifth", "sixth"], 1)
    },
}

OF, TAB = ("arxiv", "rocstory", "wiki"), "\t"
SIX = (
    "first_sentence: 1\tsecond_sentence: 2\tthird_sentence: 3\tfourth_sentence: 4\tfifth_sentence: 5\tsixth_sentence: 6"
)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("cola", "cola sentence: S"),
        ("sst2", "sst2 sentence: S"),
        ("sni", "Definition: T"),
        ("mrpc", "mrpc sentence1: S1 sentence2: S2"),
        ("qqp", "qqp question1: Q1 question2: Q2"),
        ("stsb", "stsb sentence1: S1 sentence2: S2"),
        ("mnli", "mnli hypothesis: H premise: P"),
        ("mnli_mismatched", "mnli hypothesis: H premise: P"),
        ("ax", "mnli hypothesis: H premise: P"),
        ("qnli", "qnli question: Q sentence: S"),
        ("rte", "rte sentence1: S1 sentence2: S2"),
        ("wnli", "wnli sentence1: S1 sentence2: S2"),
        ("boolq", "boolq passage: P question: Q"),
        ("cb", "cb hypothesis: H premise: P"),
        ("copa", "copa choice1: C choice2: C premise: P question: Q"),
        ("multirc", "multirc question: Q answer: A paragraph: PA"),
        ("record", "record query: QU entities: E1, E2 passage: P"),
        ("wic", "wic sentence1: S1 sentence2: S2 word: W"),
        ("wsc", "wsc text: T"),
        ("axb", "rte hypothesis: H premise: P"),
        ("axg", "rte hypothesis: H premise: P"),
        ("superglue_rte", "rte hypothesis: H premise: P"),
        ("wsc_simple", "wsc: T"),
        ("dpr", "wsc: T"),
        *((f"SP{of}", f"SP{of}: {SIX.rpartition(TAB)[0]}") for of in OF),
        *(
            (name, f"{name}: first_sentence: 1\tsecond_sentence: 2")
            for name in (*(f"BSO{of}" for of in OF), "RST", "PDTB-E", "PDTB-I")
        ),
        *((name, f"{name}: {SIX}") for name in ("DCchat", "DCwiki")),
        ("SSPabs", "SSPabs: first_sentence: 1"),
        *((name, f"{name} code: def f(): …") for name in ("codedoc", "codename")),
    ],
)
def test_inputs_of_the_model(task: str, expected: str):
    assert find(task).input(VALUES) == expected


def all_tasks() -> list[NamedTask]:
    return [
        find(name) for path in sorted(task_table.FOLDER.glob("*.yaml")) for name in read_yaml(path, "tasks by name")
    ]


def test_every_task_is_in_the_test_above():
    (marker,) = (mark for mark in test_inputs_of_the_model.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert sorted(name for name, _ in marker.args[1]) == sorted(task.name for task in all_tasks())


def test_columns_keep_their_order_and_a_row_without_a_label_has_one_text():
    """Google's test of `preprocessors.glue`."""
    qqp = NamedTask(
        "qqp", load(Task, {**PLAIN, "columns": ["q1", "q2", "q3"], "labels": ["not_duplicate", "duplicate"]}, "t")
    )
    row = {"q3": "Who?", "q1": "How so?", "q2": "Why not?"}
    assert qqp.input(row) == "qqp q1: How so? q2: Why not? q3: Who?"
    assert (qqp.target("not_duplicate"), qqp.target(None)) == ("not_duplicate", "<unk>")
    other = NamedTask("qqp", load(Task, {**PLAIN, "columns": ["q2", "q1"]}, "t"))
    assert other.input(row) == "qqp q2: Why not? q1: How so?"


PLAIN = {"columns": ["text"], "labels": ["bad", "good"], "metrics": ["accuracy"], "weight": 1}
NLI = ["entailment", "neutral", "contradiction"]


@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("cola", ["unacceptable", "acceptable"]),
        ("sst2", ["negative", "positive"]),
        ("mrpc", ["not_equivalent", "equivalent"]),
        ("qqp", ["not_duplicate", "duplicate"]),
        *((name, NLI) for name in ("mnli", "mnli_mismatched", "ax")),
        *((name, ["entailment", "not_entailment"]) for name in ("qnli", "rte", "superglue_rte", "axb", "axg")),
        ("wnli", ["not_entailment", "entailment"]),
        *((name, ["False", "True"]) for name in ("boolq", "multirc", "wic", "wsc")),
        ("cb", ["entailment", "contradiction", "neutral"]),
        ("copa", ["choice1", "choice2"]),
        ("SPwiki", [f"{name} sentence" for name in ("First", "Second", "Third", "Fourth", "Fifth")]),
        ("BSOroc", []),
        ("BSOarxiv", ["Incorrect order", "Correct order"]),
        ("DCchat", ["Incoherent", "Coherent"]),
        ("SSPabs", ["Does not belong to abstract", "Belongs to abstract"]),
        ("record", []),
    ],
)
def test_targets_of_the_model(task: str, labels: list[str]):
    if task == "BSOroc":
        with pytest.raises(
            ConfigError, match=r"task: unknown task 'BSOroc'\. Did you mean 'BSOrocstory'\? Known: BSOarxiv"
        ):
            find(task)
        return
    assert find(task).answers == labels


@pytest.mark.parametrize(("task", "count"), [("RST", 41), ("PDTB-E", 12), ("PDTB-I", 11)])
def test_numbers_of_relations(task: str, count: int):
    assert len(find(task).answers) == count


class TestDefectsInSeedRepo:
    """Each of these was wrong in the code that this table takes the place of."""

    def test_rte_is_no_sentiment_and_has_its_colons(self):
        rte = find("rte")
        assert rte.answers == ["entailment", "not_entailment"]
        assert "sentence2: " in rte.input({"sentence1": "a", "sentence2": "b"})

    def test_premise_and_hypothesis_of_mnli_are_not_swapped(self):
        row = {"premise": "It rains.", "hypothesis": "It is wet."}
        assert find("mnli").input(row) == "mnli hypothesis: It is wet. premise: It rains."

    @pytest.mark.parametrize(
        ("label", "text"),
        [("2.45", "2.4"), ("2.5", "2.4"), ("3.1", "3.2"), ("3.3", "3.2"), ("0", "0.0"), ("4.95", "5.0"), ("5", "5.0")],
    )
    def test_similarity_goes_in_steps_of_a_fifth(self, label: str, text: str):
        """round(5 x) / 5, halves to even: Google's preprocessors.stsb."""
        assert find("stsb").target(label) == text

    def test_similarity_has_26_texts(self):
        assert find("stsb").answers == [f"{i / 5:.1f}" for i in range(26)]

    def test_cola_has_one_colon_and_is_optimised_by_its_correlation(self):
        cola = find("cola")
        assert cola.input({"sentence": "x"}).count(":") == 1
        assert cola.optimised_metric == "matthews"

    def test_ax_uses_the_prompt_of_mnli_and_is_never_trained_on(self):
        ax, mnli = find("ax"), find("mnli")
        row = {"premise": "p", "hypothesis": "h"}
        assert ax.input(row) == mnli.input(row)
        assert (ax.answers, ax.task.weight, ax.task.trained) == (mnli.answers, None, False)

    def test_sst2_has_one_colon(self):
        assert find("sst2").input({"sentence": "x"}) == "sst2 sentence: x"


@pytest.mark.parametrize(
    ("task", "metrics"),
    [
        ("cola", ["matthews", "accuracy"]),
        ("mrpc", ["f1", "accuracy"]),
        ("stsb", ["pearson", "spearman"]),
        ("cb", ["macro_f1", "accuracy"]),
        ("multirc", ["f1a", "question_match"]),
        ("record", ["f1", "em"]),
        ("rte", ["accuracy"]),
    ],
)
def test_how_answers_are_scored(task: str, metrics: list[str]):
    rows_found = find(task)
    assert rows_found.task.metrics == metrics
    row_given = {name for part in rows_found.metrics() for name in part.score_names()}
    assert set(metrics) <= row_given


def test_the_weights_of_t5():
    rows_found = {task.name: task.task.weight for task in all_tasks()}
    assert [rows_found[name] for name in ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli")] == [
        *(8551, 67349, 3668, 363849, 5749, 392702, 104743, 2490),
        None,
    ]
    names = ("boolq", "cb", "copa", "multirc", "record", "wic", "wsc")
    assert [rows_found[name] for name in names] == [9427, 250, 400, 27243, 138854, 5428, 259]


def test_the_files_that_glue_takes():
    rows_found = {task.name: task.task.submission for task in all_tasks() if task.task.submission}
    assert {name: (row_given.file, row_given.label) for name, row_given in rows_found.items()} == {
        "cola": ("CoLA.tsv", "number"),
        "sst2": ("SST-2.tsv", "number"),
        "mrpc": ("MRPC.tsv", "number"),
        "qqp": ("QQP.tsv", "number"),
        "stsb": ("STS-B.tsv", "text"),
        "mnli": ("MNLI-m.tsv", "text"),
        "mnli_mismatched": ("MNLI-mm.tsv", "text"),
        "ax": ("AX.tsv", "text"),
        "qnli": ("QNLI.tsv", "text"),
        "rte": ("RTE.tsv", "text"),
        "wnli": ("WNLI.tsv", "number"),
        "boolq": ("BoolQ.jsonl", "lower"),
        "cb": ("CB.jsonl", "text"),
        "copa": ("COPA.jsonl", "number"),
        "multirc": ("MultiRC.jsonl", "number"),
        "record": ("ReCoRD.jsonl", "text"),
        "wic": ("WiC.jsonl", "lower"),
        "wsc": ("WSC.jsonl", "text"),
        "superglue_rte": ("RTE.jsonl", "text"),
        "axb": ("AX-b.jsonl", "text"),
        "axg": ("AX-g.jsonl", "text"),
    }


def test_scores_in_percent():
    assert find("cola").percent({"matthews": 30.0, "accuracy": 0.5}) == 30.0
    assert find("rte").percent({"accuracy": 0.5}) == 50.0


def test_classes_by_number():
    assert [find("cb").class_of(text) for text in ("neutral", "entailment", "Neutral", "")] == [2, 0, -1, -1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            "metrics: [acuracy]",
            r"own\.yaml: mine: metrics: unknown metric of kind 'classes' 'acuracy'\. Did you mean 'accuracy'\?",
        ),
        ("colums: [a]", r"own\.yaml: mine: unknown key 'colums'\. Did you mean 'columns'\?"),
        ("columns: []", r"own\.yaml: mine\.columns: expected a list that is not empty"),
        ("columns: [label]", r"mine: columns: 'label' is reserved"),
        ("columns: [text, text]", r"mine: columns: duplicate 'text'\."),
        ("labels: [bad]", r"mine: labels: expected two or more for kind 'classes', .* got 1 for 'classes'\."),
        ("labels: [bad, 1]", r"mine\.labels\[1\]: expected str, got 1 \(int\)\."),
        ('labels: [bad, ""]', r"mine: labels: expected texts without outer white space"),
        ("labels: [bad, bad]", r"mine: labels: duplicate 'bad'\."),
        ("kind: regression", r"mine: labels: expected .* got 2 for 'regression'"),
        ("range: [0.0, 5.0]", r"mine: range: required for kind 'regression'"),
        ("optimise: f1", r"mine: optimise: unknown metric of this task 'f1'"),
        ("weight: 0", r"mine\.weight: expected a number > 0\.0, got 0"),
        ("names: {txt: [a]}", r"mine: names: unknown column 'txt'\. Did you mean 'text'\?"),
        ("plain: [[label]]", r"mine: plain: missing column 'text' in \['label'\]\."),
        ("plain: [[text, label], [label, text]]", r"mine: plain: two lists have the same number of columns"),
        ("submission: {file: ../x.tsv, label: text}", r"mine\.submission\.file: expected text of the form"),
        ("submission: {file: x.tsv, label: id}", r"mine\.submission\.label: unknown value 'id'"),
        ("columns: [a]\n  columns: [b]", r"own\.yaml:\d+: not valid YAML: .*'columns'"),
        ("columns: [", r"own\.yaml:\d+: not valid YAML"),
    ],
)
def test_mistake_is_reported_by_file_task_and_field(tmp_path: Path, changes: str, message: str):
    entry = {"columns": "[text]", "labels": "[bad, good]", "metrics": "[accuracy]", "weight": "1"}
    key, _, value = changes.partition(": ")
    path = tmp_path / "own.yaml"
    path.write_text("mine:\n" + "".join(f"  {name}: {text}\n" for name, text in {**entry, key: value}.items()))
    with pytest.raises(ConfigError, match=message):
        find("mine", path)


def test_a_task_of_ones_own(tmp_path: Path):
    path = tmp_path / "own.yaml"
    path.write_text("mine:\n  columns: [text]\n  labels: [bad, good]\n  metrics: [accuracy]\n  weight: 3\n")
    assert find("mine", path).input({"text": "x"}) == "mine text: x"
    assert find("rte", path).name == "rte"
    path.write_text(path.read_text().replace("mine", "rte"))
    with pytest.raises(ConfigError, match=r"own\.yaml: rte: duplicate name, also in .*glue\.yaml\."):
        find("rte", path)
    with pytest.raises(ConfigError, match=r"gone\.yaml: no such file\."):
        find("rte", tmp_path / "gone.yaml")
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match=r"own\.yaml: expected tasks by name, got list\."):
        find("rte", path)


def test_another_entry_is_another_fingerprint():
    one, other = (NamedTask("t", load(Task, {**PLAIN, "columns": [name]}, "t")) for name in ("a", "b"))
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == NamedTask("t", one.task).fingerprint != NamedTask("u", one.task).fingerprint


def test_fields_that_are_added_leave_the_fingerprint_of_older_runs():
    class LaterFile(task_table.Submission):
        header: bool = added_field(True)

    class LaterTask(Task):
        submission: LaterFile | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
        suffix: str | None = added_field(None)

    def fingerprint(cls: type[Task], **options: object) -> str:
        raw = {
            "columns": ["a"],
            "kind": "text",
            "metrics": ["em"],
            "weight": 1.0,
            "submission": {"file": "a.tsv", "label": "text"},
        }
        return NamedTask("t", load(cls, {**raw, **options}, "t")).fingerprint

    assert fingerprint(LaterTask) == fingerprint(Task)
    changed = {"suffix": "."}, {"submission": {"file": "a.tsv", "label": "text", "header": False}}
    assert len({fingerprint(Task), *(fingerprint(LaterTask, **options) for options in changed)}) == 3
