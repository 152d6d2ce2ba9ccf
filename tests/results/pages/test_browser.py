"""The dashboard and the report in a real browser: what a reader clicks and sees. Nothing may be asked of another
machine."""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bokeh.embed import file_html
from bokeh.resources import INLINE

from results import report
from results.pages import chart, run_page
from results.pages.learning_curves import Curves, Line
from src.runs.run_dir import RunDir
from src.tables import results

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright import sync_api as playwright
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browsing import SLOW, open_page
from tests.servers import running_server

pytestmark = [pytest.mark.browser, pytest.mark.slow]
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@dataclass
class World:
    """A folder of runs that a page shows while it changes."""

    runs: Path
    ids: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, exp: dict, *, group: str, state: str = "done", reason: str = "", steps: int = 4) -> str:
        """A run with scores, and a log of its job that names it."""
        with RunDir.open(self.runs, exp, exp, facts={"groups": [group]}) as run:
            for step in range(1, steps + 1):
                run.scores.append(
                    {"step": step, "val_loss": exp["model"]["stride"] / step + 0.1 * exp["seed"], "em": 0.125 * step}
                )
            run.set_status(state, step=steps, **({"reason": reason} if reason else {}))  # type: ignore[arg-type]
        self.ids[name] = run.exp_id
        (self.runs / "logs").mkdir(exist_ok=True)
        (self.runs / "logs" / f"{run.exp_id}.out.log").write_text(f"begin\nthis is the log of {name}\n")
        return run.exp_id


def click_until_page_opens(page: Page, link: Locator) -> Page:
    """The page that a link opens. A click is lost if the table moves under the mouse, as it does while curves load."""
    for _ in range(12):
        with suppress(playwright.TimeoutError):
            with page.context.expect_page(timeout=SLOW / 12) as tab:
                link.click()
            return tab.value
    raise AssertionError(f"no page opened: {link}")


def experiment(stride: int, seed: int, **more: object) -> dict:
    return {"recipe": "toy", "seed": seed, "model": {"name": "m", "stride": stride}, **more}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Four that are done, one that runs as long as the test does, one that failed, one that is damaged."""
    world = World(tmp_path / "runs")
    for stride in (1, 2):
        for seed in (0, 1):
            world.add(f"stride {stride} seed {seed}", experiment(stride, seed), group="reach")
    world.add("failed", experiment(3, 0), group="repair", state="failed", reason="CUDA out of memory on step 4")
    damaged_run = world.runs / ("ab" * 16)
    damaged_run.mkdir()
    (damaged_run / "exp_dict.json").write_text('{"recipe": ')
    with RunDir.open(world.runs, experiment(4, 0), {}, facts={"groups": ["repair"]}) as run:
        run.scores.append({"step": 1, "val_loss": 4.0, "em": 0.0})
        world.ids["running"] = run.exp_id
        yield world


@pytest.fixture
def page(browser: Browser, world: World) -> Iterator[Page]:
    with (
        running_server(["results.dashboard", str(world.runs), "-e", "all", "--port", "0"]) as address,
        open_page(browser, address) as dashboard_page,
    ):
        expect(rows(dashboard_page, "jobs")).to_have_count(7, timeout=SLOW)
        yield dashboard_page


def rows(page: Page, table: str) -> Locator:
    return page.locator(f".{table} .tabulator-row")


def choose(page: Page, label: str, exp_id: str) -> None:
    """Choose an experiment in a list whose entries begin with short ids."""
    choices = page.get_by_label(label)
    option = choices.locator("option", has_text=exp_id[:8])
    expect(option).to_have_count(1)
    choices.select_option(option.get_attribute("value"))


def choose_metric(page: Page, name: str) -> None:
    page.locator(".metrics input").click()
    page.locator(".metrics").get_by_role("option", name=name, exact=True).click()


def type_into(page: Page, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).fill(text)
    page.get_by_label(label, exact=True).press("Enter")


def hover(page: Page, x: float, y: float, is_reached: Callable[[], bool]) -> None:
    """Move the mouse to a place until the page has reacted: a page that is still being painted misses a move."""
    for step in range(1000):
        page.mouse.move(x - step % 2, y)
        page.wait_for_timeout(30)
        if is_reached():
            return
    raise AssertionError(f"the page did not react to the mouse at {x}, {y}")


def test_results_states_and_warnings_are_seen(page: Page, world: World):
    expect(page.get_by_role("heading", name="Experiments")).to_be_visible()
    for chip in ("4 done", "1 running", "1 failed", "1 unknown"):
        expect(page.locator(".chips").get_by_text(chip, exact=True)).to_be_visible()
    expect(rows(page, "results")).to_have_count(4)
    expect(rows(page, "results").nth(0)).to_contain_text("0.300 ± 0.071")
    expect(page.get_by_text("1 warning")).to_be_visible()
    expect(page.locator(".warnings li")).to_contain_text("ab" * 16)
    expect(rows(page, "jobs").nth(0)).to_contain_text("CUDA out of memory on step 4")
    page.get_by_label("Spread").select_option("95 % interval")
    expect(rows(page, "results").nth(0)).to_contain_text("0.30 ± 0.64")


def test_filters_narrow_everything_and_a_wrong_expression_is_reported_at_its_field(page: Page, world: World):
    page.get_by_label("Group").select_option("reach")
    expect(rows(page, "jobs")).to_have_count(4, timeout=SLOW)
    page.get_by_label("Group").select_option("all")
    expect(rows(page, "jobs")).to_have_count(7, timeout=SLOW)

    type_into(page, "Expression", "model.stride >= 2 and state == 'done'")
    expect(rows(page, "jobs")).to_have_count(2)
    expect(rows(page, "results")).to_have_count(1)
    type_into(page, "Expression", "model.strid > 1")
    expect(page.locator(".error")).to_contain_text("unknown name 'model.strid'. Did you mean 'model.stride'?")
    expect(rows(page, "jobs")).to_have_count(2)
    type_into(page, "Expression", "model.stride >")
    expect(page.locator(".error")).to_contain_text("expression, character")
    type_into(page, "Expression", "")
    expect(page.locator(".error")).to_have_count(0)
    expect(rows(page, "jobs")).to_have_count(7)

    type_into(page, "Search", "out of MEMORY")
    expect(rows(page, "jobs")).to_have_count(1)
    type_into(page, "Search", "")
    page.locator(".states input").click()
    page.get_by_role("option", name="running").click()
    expect(rows(page, "jobs")).to_have_count(1)
    expect(rows(page, "jobs").nth(0)).to_contain_text(world.ids["running"][:8])


def test_an_experiment_is_chosen_and_its_log_config_differences_and_ancestry_are_read(page: Page, world: World):
    one, other = world.ids["stride 1 seed 0"], world.ids["stride 2 seed 0"]
    rows(page, "jobs").filter(has_text=one[:8]).click()
    expect(page.get_by_text("this is the log of stride 1 seed 0")).to_be_visible()
    choose(page, "Experiment", other)
    expect(page.get_by_text("this is the log of stride 2 seed 0")).to_be_visible()
    page.get_by_text("Config", exact=True).click()
    expect(page.locator("tr").filter(has_text="model.stride")).to_contain_text("2")
    page.get_by_text("Differences", exact=True).click()
    choose(page, "Compare with", one)
    expect(page.locator("tr").filter(has_text="experiment: model.stride")).to_have_text("experiment: model.stride21")
    page.get_by_text("Lineage", exact=True).click()
    expect(page.locator("pre").filter(has_text=other[:8])).to_be_visible()


def test_columns_can_change_again_before_the_table_is_drawn(page: Page):
    for _ in range(6):
        for expression in ("model.stride == 2", ""):  # without a stride that varies there is no column of it
            type_into(page, "Expression", expression)
            page.wait_for_timeout(40)
    type_into(page, "Expression", "model.stride == 1 or model.stride == 3")
    expect(rows(page, "jobs")).to_have_count(3, timeout=SLOW)
    expect(rows(page, "results")).to_have_count(2)
    type_into(page, "Expression", "model.stride == 2")
    expect(rows(page, "results")).to_have_count(1)
    expect(page.locator(".results .tabulator-col-title").get_by_text("stride", exact=True)).to_be_hidden()


def test_the_curves_are_of_the_chosen_metric(page: Page):
    axes = "[...Bokeh.documents[0].all_models].filter(model => model.type === 'LinearAxis')"
    axis_labels = f"() => {axes}.map(axis => axis.axis_label)"
    page.wait_for_function(f"({axis_labels})().includes('val_loss')")
    choose_metric(page, "em")
    page.wait_for_function(f"({axis_labels})().includes('em')")
    choose_metric(page, "val_loss")
    page.wait_for_function(f"['em', 'val_loss'].every(name => ({axis_labels})().includes(name))")
    page.locator(".metrics .choices__button").last.click()
    page.get_by_label("x axis").select_option("val_loss")
    page.wait_for_function(f"['em', 'val_loss'].every(name => ({axis_labels})().includes(name))")


def test_a_curve_is_found_by_the_mouse_between_its_points_and_lights_up_with_its_row(browser: Browser, tmp_path: Path):
    """Of two hundred points, as of four; the link of a job opens the page of its run; a long reason wraps."""
    world = World(tmp_path / "runs")
    for stride in range(1, 21):
        world.add(f"stride {stride}", experiment(stride, 0), group="reach", steps=200)
    failed = world.add("failed", experiment(30, 0), group="reach", state="failed", reason="a reason that goes on " * 20)
    with (
        running_server(["results.dashboard", str(world.runs), "-e", "all", "--port", "0"]) as address,
        open_page(browser, address) as page,
    ):
        expect(rows(page, "results")).to_have_count(10, timeout=SLOW)
        plot = page.locator(".plot canvas").first
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        lit = page.locator(".results .tabulator-selected")
        for share in (
            step % 60 / 60 for step in range(600)
        ):  # down across the curves, again and again until the page has seen it
            page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + share * box["height"])
            page.wait_for_timeout(30)
            if page.locator(".bk-tooltip-content").count() and lit.count():
                break
        expect(page.locator(".bk-tooltip-content").first).to_contain_text("stride=")
        expect(lit).to_have_count(1)
        page.locator(
            ".results .tabulator-row:not(.tabulator-selected)"
        ).first.click()  # also on the second page its curve is one of the 12
        alphas = (
            "[...Bokeh.documents[0].all_models].filter(m => m.type === 'Line' && m.line_width.value === "
            "2).map(m => m.line_alpha.value)"
        )
        page.wait_for_function(
            f"() => {{ const found = {alphas}; return found.filter(a => a === 1).length === 1 && found.length > 9; }}"
        )
        legend = page.locator(".legend").first
        assert legend.evaluate("node => node.scrollHeight > node.clientHeight || node.clientHeight > 200")
        job = rows(page, "jobs").filter(has_text=failed[:8])
        assert (job.bounding_box() or {"height": 0})["height"] > 60
        run_page_tab = click_until_page_opens(page, job.get_by_role("link"))
        expect(run_page_tab.get_by_role("heading", name="Scores", exact=True)).to_be_visible(timeout=SLOW)
        run_page_tab.close()
        page.set_viewport_size({"width": 880, "height": 1000})
        expression = page.get_by_label("Expression", exact=True).bounding_box()
        assert expression is not None
        assert expression["width"] >= 280


def test_where_curves_overlap_the_one_next_to_the_mouse_is_lit_once(browser: Browser, tmp_path: Path):
    """All are below the mouse, and the picture is painted again when one lights up, which asks anew what is below
    it."""
    world = World(tmp_path / "runs")
    for stride in range(1, 13):
        world.add(f"stride {stride}", experiment(stride, 0), group="reach", steps=60)
    with (
        running_server(["results.dashboard", str(world.runs), "-e", "all", "--port", "0"]) as address,
        open_page(browser, address) as page,
    ):
        page.locator(".live-switch").click()
        page.locator(".plot canvas").first.scroll_into_view_if_needed()
        page.wait_for_function("Bokeh.documents[0].is_idle")
        page.evaluate("""() => {
            window.told = []
            const told = change => change.attr === 'data' && 'colour' in change.value
            Bokeh.documents[0].on_change(change => { if (told(change)) window.told.push(change.value.colour[0]) })
        }""")
        lit = page.locator(".results .tabulator-selected .tabulator-cell").last
        for stride in (7, 4, 9):
            x, y, colour = page.evaluate(_PLACE, [f"stride={stride}", 12, stride / 12])
            hover(page, x, y, lambda: lit.count() == 1 and lit.inner_text() == str(stride))  # noqa: B023
            page.evaluate("async () => { for (let i = 0; i < 60; i++) await new Promise(requestAnimationFrame) }")
            assert page.evaluate("window.told.splice(0)") == [colour]
        rows(page, "results").first.click()
        expect(lit).to_have_text("1")
        hover(
            page, x, y, lambda: lit.inner_text() == "9"
        )  # a row was highlighted since, so the same curve is reported again


@pytest.mark.parametrize(
    ("curves", "logarithmic", "point", "tooltip"),
    [
        ([[100, 1], [10.6, 10.6]], True, (1.5, 10), "curve 0"),  # drawn straight between its logarithms
        ([[100, 1], [53, 53]], False, (1.5, 50.5), "curve 0"),
        ([[5, 5], [5.05, 5.05]], False, (1.5, 5.05), "curve 1"),
        ([[math.nan, math.nan], [5, 5]], False, (1.5, 5), "curve 1"),
    ],
)
def test_a_curve_is_where_it_is_drawn(
    browser: Browser,
    tmp_path: Path,
    curves: list[list[float]],
    logarithmic: bool,
    point: tuple[float, float],
    tooltip: str,
):
    lines = [Line(f"curve {number}", f"#00000{number}", [1, 2], mean, mean, mean) for number, mean in enumerate(curves)]
    plot = chart.Plot(lambda _: None)
    plot.show({"loss": Curves(lines)}, "step", logarithmic)
    (tmp_path / "page.html").write_text(file_html(plot.pane.object, INLINE, "curves"))
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("Bokeh.documents[0]?.is_idle")
    across, down, colour = page.evaluate(_PLACE, [tooltip, *point])
    hover(
        page,
        across,
        down,
        lambda: page.evaluate("[...Bokeh.documents[0].all_models].some(model => model.data?.colour?.[0])"),
    )
    assert (
        page.evaluate("[...Bokeh.documents[0].all_models].find(model => model.data?.colour).data.colour[0]") == colour
    )
    page.close()


_PLACE = """([label, x, y]) => {
    const plot = [...Bokeh.documents[0].all_models].find(model => model.type === 'Plot' || model.type === 'Figure')
    const view = Bokeh.index.find_one(plot)
    const drawn = view.canvas_view.el.getBoundingClientRect()
    const line = plot.renderers.find(part => part.name && part.data_source.data.label[0] === label)
    return [drawn.x + view.frame.x_scale.compute(x), drawn.y + view.frame.y_scale.compute(y), line.name]
}"""
"""Where on the page a point of a picture is, and the colour of the curve with a label."""


def test_a_link_restores_the_view(browser: Browser, demo_runs: Path):
    with running_server(["results.dashboard", str(demo_runs), "--port", "0"]) as address:
        with open_page(browser, address) as page:
            choose_metric(page, "train_loss")
            page.get_by_label("Spread").select_option("95 % interval")
            type_into(page, "Expression", "model.num_layers == 2")
            expect(rows(page, "jobs")).to_have_count(2)
            page.get_by_text("Answers", exact=True).click()
            page.wait_for_function("location.search.includes('train_loss') && location.search.includes('tab=1')")
            link = page.url
        with open_page(browser, link) as page:
            expect(rows(page, "jobs")).to_have_count(2, timeout=SLOW)
            expect(page.locator(".metrics .choices__item--selectable").first).to_contain_text("train_loss")
            expect(page.get_by_label("Spread")).to_have_value("95 % interval")
            expect(page.locator(".sample").first).to_be_visible()


def test_the_page_shows_new_runs_without_a_reload(page: Page, world: World):
    choose(page, "Experiment", world.ids["failed"])
    page.locator("select").filter(has_text="every 2 s").select_option("every 2 s")
    expect(rows(page, "results").nth(0)).to_contain_text("0.300 ± 0.071")
    with RunDir.open(world.runs, experiment(1, 0), experiment(1, 0), facts={"groups": ["reach"]}):
        pass
    world.add("new", experiment(5, 0), group="late")
    expect(page.get_by_text("5 done", exact=True)).to_be_visible(timeout=SLOW)
    expect(rows(page, "results")).to_have_count(5)
    expect(page.get_by_label("Group").locator("option", has_text="late")).to_have_count(1)
    log = world.runs / "logs" / f"{world.ids['failed']}.out.log"
    log.write_text(log.read_text() + "one line more\n")
    expect(page.get_by_text("one line more")).to_be_visible(timeout=SLOW)


def test_a_page_with_its_switch_off_does_not_refresh(page: Page, world: World):
    page.locator("select").filter(has_text="every 2 s").select_option("every 2 s")
    page.locator(".live-switch").click()
    page.get_by_label("Group").select_option("reach")
    expect(rows(page, "jobs")).to_have_count(4)
    world.add("new", experiment(5, 0), group="reach")
    with pytest.raises(AssertionError, match="expected not to have count"):
        expect(rows(page, "jobs")).not_to_have_count(4, timeout=5000)
    page.locator(".live-switch").click()
    expect(rows(page, "jobs")).to_have_count(5, timeout=SLOW)


def test_text_of_a_run_is_shown_and_never_obeyed(browser: Browser, tmp_path: Path):
    world = World(tmp_path / "runs")
    for seed in (0, 1):
        world.add(
            f"{HOSTILE} {seed}",
            experiment(1, seed, **{"note": HOSTILE + str(seed), f"k{HOSTILE.replace('.', '')}": seed}),
            group=HOSTILE,
            state="failed",
            reason=HOSTILE,
        )
    with (
        running_server(["results.dashboard", str(world.runs), "-e", "all", "--port", "0"]) as address,
        open_page(browser, address) as page,
    ):
        expect(rows(page, "jobs")).to_have_count(2, timeout=SLOW)
        for tab in ("Config", "Differences", "Lineage", "Log"):
            page.get_by_text(tab, exact=True).click()
        page.locator(".by input").click()
        page.get_by_label("Group").select_option(HOSTILE)
        expect(page.get_by_text("this is the log of <img")).to_be_visible()
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0


def test_the_notebook_is_served_as_the_same_page(browser: Browser, world: World):
    env = os.environ | {"TRAINVAL_RUNS": str(world.runs)}
    serve = ["panel", "serve", "results/pages/results.ipynb", "--port", "0", "--address", "127.0.0.1"]
    with running_server(serve, env) as address, open_page(browser, address) as page:
        expect(rows(page, "results")).to_have_count(4, timeout=3 * SLOW)
        expect(rows(page, "results").nth(0)).to_contain_text("0.300 ± 0.071")
        expect(rows(page, "jobs")).to_have_count(7)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_the_window_and_each_is_light_or_dark(
    browser: Browser, demo_runs: Path, tmp_path: Path, scheme: Any
):
    report.main([str(demo_runs), "-o", str(tmp_path / "report.html")])
    run = next(row["exp_id"] for row in results.load_rows(demo_runs, "demo")[0])
    run_page.main([str(demo_runs / run), "-o", str(tmp_path / "run.html")])
    with running_server(["results.dashboard", str(demo_runs), "-e", "all", "--port", "0"]) as address:
        for page_address in (address, (tmp_path / "report.html").as_uri(), (tmp_path / "run.html").as_uri()):
            context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
            page = context.new_page()
            page.goto(page_address)
            if page_address == address:
                expect(rows(page, "jobs")).to_have_count(8, timeout=SLOW)
                expect(rows(page, "results")).to_have_count(5, timeout=SLOW)
            for width in (1280, 800, 400):
                page.set_viewport_size({"width": width, "height": 900})
                page.wait_for_function("document.documentElement.scrollWidth <= innerWidth", timeout=20_000)
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128) == (scheme == "dark"), background
            context.close()


def test_the_report_opens_offline(browser: Browser, world: World, tmp_path: Path):
    output = tmp_path / "report.html"
    assert report.main([str(world.runs), "-o", str(output)]) == 0
    moved_report = Path(shutil.move(output, tmp_path / "elsewhere.html"))
    context = browser.new_context(offline=True, java_script_enabled=False)
    requests: list[str] = []
    messages: list[str] = []
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.goto(moved_report.as_uri())
    expect(page.get_by_role("heading", name="Results")).to_be_visible()
    expect(page.locator("tr").filter(has_text="CUDA out of memory on step 4")).to_be_visible()
    picture = page.get_by_alt_text("val_loss by step").bounding_box()
    assert picture is not None
    assert picture["height"] > 200
    context.close()
    assert [url for url in requests if not url.startswith("data:")] == [moved_report.as_uri()]
    assert not messages
