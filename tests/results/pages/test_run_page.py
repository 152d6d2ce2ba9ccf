"""The page of one run: everything that its files say, and nothing from elsewhere."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from results.pages import layers, run_page
from src.runs import ledger
from src.runs.run_dir import RunDir
from src.tables import results
from tests.results.pages.test_report import HOSTILE, Page


def record(step: int, name: str, context: str, **numbers: Any) -> dict[str, Any]:
    return {"step": step, "name": name, "context": context, "abs_var_mean": 0.5, **numbers}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    exp = {"recipe": "toy", "seed": 0, "model": {"name": HOSTILE}}
    with RunDir.open(tmp_path / "runs", exp, exp) as run_dir:
        for step in (2, 4):
            by_source = {"loss/books": 2.0, "loss/code": 1.0}
            losses = {"train_loss": 3.0 / step, "val_loss": 4.0 / step, "val_perplexity": 9.0}
            run_dir.scores.append(
                {
                    "step": step,
                    **losses,
                    "grad_norm": 1.5,
                    "clip_rate": 0.5,
                    "learning_rate": 0.1,
                    "tokens": 8 * step,
                    **by_source,
                }
            )
        run_dir.set_status("failed", step=4, steps=8, reason=HOSTILE)
    perf = [{"step": 2, "tokens_per_second": 10.0, "mfu": 0.4}, {"step": 4, "data_wait_rate": 0.1}]
    (run_dir.path / run_page.PERF).write_text("".join(json.dumps(row) + "\n" for row in perf))
    records = [
        record(2, "a.weight", "hp_grad", abs_var_mean=0.25),
        record(2, HOSTILE, "hp_grad", abs_var_mean=None, nonfinite=3),
        record(2, "a.weight", "effective_update", update_rate=0.001),
        record(2, "a", "output", type="Linear"),
        record(2, "a", "input[0]", type="Linear"),
    ]
    (run_dir.path / layers.FILE).write_text("".join(json.dumps(line) + "\n" for line in records))
    ledger.append(run_dir.path, ledger.event("rewind", why=HOSTILE, to=2))
    return run_dir.path


def page(run: Path, tmp_path: Path, *arguments: str) -> str:
    output = tmp_path / "new" / "page.html"
    assert run_page.main([str(run), *arguments, "-o", str(output)]) == 0
    return output.read_text()


@pytest.mark.slow
def test_everything_is_in_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = page(run, tmp_path)
    assert capsys.readouterr().out == f"{tmp_path}/new/page.html\n"
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == [
        "Scores",
        "Losses",
        "Training",
        "Loss by source",
        "Other scores",
        "Layers",
        "Events",
        "Experiment",
    ]
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions == [
        "loss",
        "by source",
        "Gradients: mean |g|",
        "Update ratio: |update| / |w|",
        "Activations: mean |output|",
    ]
    details = "".join(re.findall("<details><summary>.*?</details>", text))
    for title in ("gradient norm before clipping", "share of clipped steps", "learning rate", "MFU", "val_perplexity"):
        assert f'<td class="key">{title}</td>' in details, "a chart of one value"
    assert text.count("data:image/svg+xml;base64,") == len(captions)
    assert '<span class="chip failed">' in text
    assert "step 4 of 8" in text
    assert re.search(r"Gradients: mean \|g\|, step 2</td><td>[^/]*&lt;script.*?</td><td>not finite</td>", text)
    assert "<td>a.weight</td><td>0.001</td>" in text


def test_the_pictures_name_their_lines(run: Path, tmp_path: Path):
    pictures = [
        base64.b64decode(data).decode() for data in re.findall(r"base64,([A-Za-z0-9+/=]+)", page(run, tmp_path))
    ]
    assert all(picture.rstrip().endswith("</svg>") for picture in pictures)
    for name in ("train_loss", "val_loss"):
        assert name in pictures[0]
    assert "loss/books" in pictures[1]


def test_nothing_is_loaded_or_run_and_hostile_text_is_text(run: Path, tmp_path: Path):
    parsed = Page(page(run, tmp_path))
    assert parsed.links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in parsed.links)
    assert not {"script", "link", "iframe", "object", "embed", "form"} & set(parsed.tags)
    assert "".join(parsed.texts).count(HOSTILE) == 6, "both titles, reason, layer, event and experiment"


def test_heat_maps_mark_zero_and_non_finite_values():
    kind = layers.Layers("x")
    for step, values in {1: (1e-3, None, 0.0), 5: (1.0, 10.0, 0.0)}.items():
        for name, value in zip("abc", values, strict=True):
            kind.add(name, step, value)
    (image,) = layers.draw(kind).axes[0].images
    numbers = image.get_array()
    assert numbers is not None
    assert image.get_clim() == (-3.0, 1.0)
    assert [[round(float(v), 6) for v in row] for row in numbers.filled(99)] == [[-3.0, 0.0], [99, 1.0], [-4.0, -4.0]]
    assert [tuple(round(c * 255) for c in image.cmap(v)[:3]) for v in (float("nan"), -0.1)] == [
        (180, 35, 24),
        (227, 230, 234),
    ]


def test_many_steps_are_thinned_to_the_last():
    kind = layers.Layers("x")
    for step in range(1, 1002):
        kind.add("a", step, 1.0)
    assert len(kind.steps()) <= layers.MAX_COLUMNS
    assert kind.steps()[-1] == 1001
    assert kind.steps() == sorted(kind.steps())


def test_a_run_without_scores_and_damaged_lines(run: Path, tmp_path: Path):
    with open(run / run_page.PERF, "a") as file:
        file.write('{"step": 2, "tokens_per_second": 20.0}\n[1]\n{"step": 6, "torn')
    with open(run / layers.FILE, "a") as file:
        file.write('{"step": 2}\n{"step": 9, "na')
    rows, warnings = run_page.read_perf(run)
    assert rows[0] == {"step": 2, "tokens_per_second": 20.0}, "a step that was made again counts as it was made last"
    assert [row["step"] for row in rows] == [2, 4]
    assert "1 of its lines are no rows" in warnings[0]
    text = page(run, tmp_path)
    assert "1 of its lines are no records of statistics" in text
    for name in ("scores.jsonl", run_page.PERF, layers.FILE, ledger.FILE):
        (run / name).unlink()
    text = page(run, tmp_path)
    assert re.findall("<h2>(.*?)</h2>", text) == ["Experiment"]


def test_a_run_of_a_group_is_called_by_what_distinguishes_it_and_shows_its_answers(demo_runs: Path, tmp_path: Path):
    row = next(
        row for row in results.load_rows(demo_runs, "demo")[0] if row["data.context_tokens"] == 16 and row["seed"] == 1
    )
    text = page(demo_runs / row["exp_id"], tmp_path)
    assert "<title>demo: context_tokens=16, num_layers=1, seed=1</title>" in text
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings[:3] == ["Configuration", "Scores", "Losses"]
    facts = dict(re.findall('<td class="key">([^<]*)</td><td>([^<]*)</td>', text))
    assert (facts["group"], facts["data.context_tokens"]) == ("demo", "16")
    assert '<td class="key">inference/em</td><td>0.25</td><td>0.25</td><td>0.25</td>' in text, (
        "with the control and the gain"
    )
    assert "20 of 60 questions are answered right." in text
    assert text.count('class="sample right"') == 10
    assert text.count('class="sample wrong"') == 20
    assert '<section class="only-wrong">' in text


def test_a_run_is_found_by_the_start_of_its_id(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "page.html"
    assert run_page.main([run.name[:6], "--runs", str(run.parent), "-o", str(output)]) == 0
    assert run.name in output.read_text()
    capsys.readouterr()
    assert run_page.main(["0" * 32, "--runs", str(run.parent)]) == 1
    assert run_page.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 2
