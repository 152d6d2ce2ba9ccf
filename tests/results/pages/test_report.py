"""The report: one file with everything in it, whatever the runs say of themselves."""

import base64
import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest

from results import report
from results.pages import overview
from src.runs.run_dir import RunDir

HOSTILE = "<script>alert(1)</script>\"'&--></style></svg> $\\frac$"


class Page(HTMLParser):
    """The texts, tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def write_report(runs: Path, tmp_path: Path, *arguments: str) -> str:
    output = tmp_path / "new" / "report.html"
    assert report.main([str(runs), *arguments, "-o", str(output)]) == 0
    return output.read_text()


def add(runs: Path, exp: dict, state: str = "done", **facts: object) -> str:
    with RunDir.open(runs, exp, exp, facts=dict(facts.pop("env", {}))) as run:  # type: ignore[call-overload]
        run.scores.append({"step": 1, "val_loss": 1.0})
        run.set_status(state, step=1, **facts)  # type: ignore[arg-type]
    return run.exp_id


def test_report_of_several_groups(runs: Path, tmp_path: Path):
    add(runs, {"recipe": "toy", "seed": 0, "model": {"name": "m", "stride": 7}}, env={"groups": ["late"]})
    text = write_report(runs, tmp_path, "-e", "tiny", "late")
    assert "Experiments: tiny, late" in text
    assert "of 3 configurations." in text


def test_everything_is_in_it(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = write_report(runs, tmp_path, "-e", "tiny")
    assert capsys.readouterr().out == f"{tmp_path}/new/report.html\n"
    values = [1 / 4 + 0.1 * seed + 1 / 3 for seed in range(3)]
    half = 4.302653 * statistics.stdev(values) / 3**0.5
    assert f"{statistics.fmean(values):.2f} ± 0.10\n95 %: ± {half:.2g}" in text
    assert "Best val_loss: 0.68 ± 0.10 with stride=1, of 2 configurations." in text
    for heading in ("Results", "Learning curves", "Experiments", "Configuration"):
        assert f"<h2>{heading}</h2>" in text
    assert text.count("data:image/svg+xml;base64,") == 3
    for row in overview.load(runs).rows:
        assert row["exp_id"][:8] in text
    assert text.count('class="chip done"') == 7, "each experiment and the sum"


def test_pictures_are_complete_and_name_their_lines(runs: Path, tmp_path: Path):
    pictures = re.findall(r"base64,([A-Za-z0-9+/=]+)", write_report(runs, tmp_path, "--metric", "em"))
    (picture,) = [base64.b64decode(data).decode() for data in pictures]
    assert picture.rstrip().endswith("</svg>")
    assert "stride=1 (3)" in picture


def test_report_loads_nothing_remote_and_runs_nothing(runs: Path, tmp_path: Path):
    page = Page(write_report(runs, tmp_path))
    assert page.links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not {"script", "link", "iframe", "object", "embed", "form"} & set(page.tags)
    assert "url(" not in "".join(page.texts)


def test_hostile_text_is_shown_as_it_is(tmp_path: Path):
    runs = tmp_path / "runs"
    for seed in (0, 1):
        exp = {"recipe": "toy", "seed": seed, "text": f"{HOSTILE} {seed % 2}", HOSTILE.replace(".", ""): seed}
        add(
            runs,
            exp,
            "failed",
            reason=HOSTILE,
            env={"groups": [HOSTILE], "host": HOSTILE, "packages": {"torch": HOSTILE}},
        )
    page = Page(write_report(runs, tmp_path, "-e", HOSTILE))
    assert page.tags.count("script") == 0
    assert page.tags.count("style") == 1
    page_text = "".join(page.texts)
    assert page_text.count(HOSTILE) >= 8
    assert "<script>alert(1)</script>" in page_text


def test_a_damaged_directory_is_a_warning(runs: Path, tmp_path: Path):
    names = sorted(path.name for path in runs.iterdir() if len(path.name) == 32)
    (runs / names[0] / "exp_dict.json").write_text("{")
    (runs / names[1] / "status.json").write_text("[1, ")
    (runs / names[2] / "env.json").write_text("[1, ")
    text = write_report(runs, tmp_path)
    assert "warning" in text
    assert names[0] in text
    assert '<span class="chip unknown">' in text


def test_report_has_reasons_lineage_and_environments(tmp_path: Path):
    runs = tmp_path / "runs"
    parent = {"recipe": "toy", "seed": 0, "model": {"name": "m"}}
    first = add(runs, parent, env={"commit": "c0ffee", "packages": {"torch": "2.0"}})
    child = {
        "recipe": "toy",
        "seed": 0,
        "model": {"name": "x", "base": {"name": "experiment", "exp_id": first, "checkpoint": "last"}},
    }
    second = add(runs, child, "failed", reason="out of memory", env={"commit": "c0ffee", "packages": {"torch": "2.1"}})
    text = write_report(runs, tmp_path)
    assert "out of memory" in text
    assert "c0ffee" in text
    assert "2.0 (1)\n2.1 (1)" in text or "2.1 (1)\n2.0 (1)" in text
    assert re.search(rf"{first[:8]}.*\n└─ {second[:8]}", text)


def test_haven_runs_without_scores_and_empty_histories(tmp_path: Path):
    exp = {"a": 1}
    with RunDir.open(tmp_path / "runs", exp, exp) as run:
        run.set_status("done")
    text = write_report(tmp_path / "runs", tmp_path)
    assert "Learning curves" not in text
    assert run.exp_id[:8] in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "los"], "unknown score 'los'."),
        (["-e", "tny"], "unknown group 'tny'. Did you mean 'tiny'?"),
        (["-o", "/proc/version/sub/x.html"], "x.html: cannot write: Not a directory"),
    ],
)
def test_mistakes_are_one_line(runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert report.main([str(runs), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_runs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert report.main([str(tmp_path / "none")]) == 1
    assert "no such folder of runs" in capsys.readouterr().err


def test_deleting_the_index_changes_no_word(runs: Path, tmp_path: Path):
    def report_text() -> str:
        return re.sub(r"written [^<]*UTC", "", write_report(runs, tmp_path))

    first, again = report_text(), report_text()
    for path in runs.glob("index.sqlite*"):
        path.unlink()
    assert first == again == report_text()


def test_values_of_configs_are_json_when_they_are_not_texts(tmp_path: Path):
    add(tmp_path / "runs", {"recipe": "toy", "flag": True, "nothing": None, "list": [1, "a"]})
    text = write_report(tmp_path / "runs", tmp_path)
    for value in (json.dumps(True), json.dumps(None), "[1, &quot;a&quot;]"):
        assert f"<td>{value}</td>" in text


def test_report_is_replaced_atomically(runs: Path, tmp_path: Path):
    before = write_report(runs, tmp_path)
    shutil.rmtree(next(path for path in runs.iterdir() if len(path.name) == 32))
    assert write_report(runs, tmp_path) != before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.html"]
