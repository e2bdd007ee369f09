"""The page as one file, in a browser: no request leaves it, text stays text, everything can be reached and read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tools.page.browser.hand_made import HOSTILE, RUN, answers, two_runs
from tests.tools.page.browser.looking import VIEWS, Looking

from taut.cli import main

pytestmark = pytest.mark.page
Look = Callable[..., Looking]
Write = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def real(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a run of SFT and one of GRPO: its address."""
    path = tmp_path_factory.mktemp("file") / "page.html"
    assert main(["page", str(runs), f"out={path}"]) == 0
    return path.as_uri()


@pytest.mark.parametrize(
    ("fragment", "shown"),
    [
        ("#/runs", ["sft", "grpo", "finished", "6 of 6"]),
        ("#/run/sft/overview", ["train/loss", "eval/loss", "Evaluations", "Decisions"]),
        ("#/run/sft/checks", ["Not relevant here"]),
        ("#/run/sft/samples", ["<|im_start|>", "Highest loss", "worst"]),
        ("#/run/sft/data", ["train"]),
        ("#/run/sft/model", ["Contract of the saved model"]),
        ("#/run/grpo/overview", ["rollout/reward", "train/grad_norm"]),
        ("#/run/grpo/samples?color=advantage", ["Highest advantage"]),
        ("#/run/grpo/rollouts", ["4 of 4 groups", "What is"]),
        ("#/run/grpo/rollouts?step=1&group=0", ["What is", "Answer 3", "length_target"]),
        ("#/run/grpo/rollouts?step=1&group=0&show=tokens", ["Point at a token"]),
        ("#/compare?runs=sft,grpo", ["What differs", "configuration"]),
    ],
)
def test_the_file_of_real_runs(real: str, look: Look, fragment: str, shown: list[str]) -> None:
    looking = look(real)
    tab = looking.go(fragment)
    text = tab.inner_text("main")
    assert [part for part in shown if part not in text] == []
    assert tab.query_selector_all("main .error") == []
    assert looking.requests == []


def test_as_trained_leads_only_to_what_is_there(real: str, look: Look) -> None:
    looking = look(real)
    found: list[str] = []
    for group in range(4):
        links = looking.go(f"#/run/grpo/rollouts?step=1&group={group}").get_by_role(
            "link", name="As trained"
        )
        found += [link.get_attribute("href") for link in links.all()]
    assert 0 < len(found) < 16  # 8 of the 16 answers are recorded token by token
    for place in found:
        assert looking.go(place).query_selector_all("main .error") == [], place


def test_what_is_not_in_the_file_is_said(real: str, look: Look) -> None:
    looking = look(real)
    tab = looking.go("#/run/sft/samples?step=1&id=nowhere")
    assert "not in this file" in tab.inner_text("main .error")
    assert "taut page" in tab.inner_text("main .error")
    assert "There is no run other" in looking.go("#/run/other/checks").inner_text("main")
    assert "There is no view other" in looking.go("#/run/sft/other").inner_text("main")


@pytest.mark.parametrize("view", VIEWS)
def test_hostile_text_is_text(written: Write, look: Look, view: str) -> None:
    looking = look(written(answers(HOSTILE)))
    tab = looking.go(VIEWS[view])
    for summary in tab.query_selector_all("main summary"):
        if summary.evaluate("one => !one.parentElement.open"):
            summary.click()
    tab.wait_for_timeout(100)
    assert tab.evaluate("window.ran") is None
    assert tab.query_selector_all("main img, main script, main svg[onload], main b") == []
    text = tab.inner_text("body")
    assert "<img" in text and "<svg" in text  # a sample's text is split at spaces
    assert (
        "\u27e8U+202E\u27e9" in text
        and "\u27e8U+0000\u27e9" in text
        and "\u27e8U+001B\u27e9[31m" in text
    )
    assert not any(letter in text for letter in "\u202e\x00\x1b\u200b")
    assert looking.requests == []


def test_the_policy_stops_what_would_get_in(written: Write, look: Look) -> None:
    """The second wall: markup that a mistake let in neither runs nor asks anyone."""
    looking = look(written(answers()))
    looking.may_say = ("Content Security Policy",)
    tab = looking.go(VIEWS["overview"])
    tab.evaluate(
        """() => {
            document.body.insertAdjacentHTML("beforeend", "<img src='http://127.0.0.1:9/x' onerror='window.ran=1'>");
            const made = document.createElement("script");
            made.textContent = "window.ran = 1";
            document.body.append(made);
        }"""
    )
    asked = tab.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert asked == "refused"
    assert tab.evaluate("window.ran") is None
    assert any("script" in line for line in looking.said)


def test_curves_that_are_level_broken_or_empty_are_drawn(written: Write, look: Look) -> None:
    looking = look(written(answers()))
    tab = looking.go(VIEWS["overview"])
    for name in answers()[f"run/{RUN}/overview"]["curves"]:
        chart = tab.locator("figure.chart").filter(has=tab.locator(f'.chart-name[title="{name}"]'))
        chart.scroll_into_view_if_needed()
        is_empty = name in ("engine/nothing",)
        chart.locator(".chart-plot > .muted" if is_empty else "canvas").wait_for()
    said = {
        "train/level": "level: all within 1.4e",
        "train/broken": "1 \u00d7 nan, 1 \u00d7 inf, 1 \u00d7 \u2212inf",
        "train/huge": "200 \u00d7 beyond 1e300",
        "engine/nan": "200 \u00d7 nan",
    }
    for name, text in said.items():
        chart = tab.locator("figure.chart").filter(has=tab.locator(f'.chart-name[title="{name}"]'))
        assert text in chart.inner_text(), name
    for scale in ("log scale",):
        tab.get_by_label(scale).check()
    looking.settle()
    wide = tab.locator("figure.chart").filter(has=tab.locator('.chart-name[title="train/broken"]'))
    assert "not above 0 left out" in wide.inner_text()
    tab.get_by_label("Smoothing").select_option("9")
    looking.settle()
    assert "line: mean of 9 points" in wide.inner_text()


def test_gaps_are_gaps_and_sparse_curves_are_joined(written: Write, look: Look) -> None:
    """Pixels of the line color: none in the middle of a gap, some between two evaluations."""
    looking = look(written(answers()))
    looking.may_say = ("willReadFrequently",)
    tab = looking.go(f"#/run/{RUN}/overview")

    def is_drawn_at(name: str, step: float) -> bool:
        found: bool = tab.evaluate(
            """([name, step]) => {
                const plot = document.querySelector(`.chart-name[title="${name}"]`).closest("figure");
                const canvas = plot.querySelector("canvas");
                const over = plot.querySelector(".u-over").getBoundingClientRect();
                const all = canvas.getBoundingClientRect();
                const scale = canvas.width / all.width;
                const x = (over.left - all.left + (over.width * (step - 1)) / 199) * scale;
                const top = (over.top - all.top) * scale;
                const data = canvas.getContext("2d").getImageData(x - 1, top, 2, over.height * scale).data;
                for (let at = 0; at < data.length; at += 4) {
                    if (data[at + 3] > 100 && data[at + 2] > data[at] + 60) return true; // blue: the line
                }
                return false;
            }""",
            [name, step],
        )
        return found

    assert is_drawn_at("train/gaps", 10) and not is_drawn_at("train/gaps", 33)
    assert is_drawn_at("eval/loss", 75) and not is_drawn_at("eval/loss", 20)
    assert is_drawn_at("train/level", 100)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_read_it(written: Write, look: Look, width: int, scheme: str) -> None:
    looking = look(written(two_runs()), width=width, scheme=scheme)
    for fragment in [*VIEWS.values(), "#/runs", f"#/compare?runs={RUN},other"]:
        tab = looking.go(fragment)
        assert looking.violations() == [], fragment
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, fragment


@pytest.mark.parametrize("view", VIEWS)
def test_the_keyboard_reaches_everything(written: Write, look: Look, view: str) -> None:
    tab = look(written(answers())).go(VIEWS[view])
    wanted = tab.eval_on_selector_all(
        "a[href], button:enabled, input, select, summary, [tabindex='0']",
        """all => all.filter((one) => one.checkVisibility() && one.tabIndex >= 0)
            .map((one, index) => (one.setAttribute("data-test", index), index))""",
    )
    reached = set()
    for _ in range(len(wanted) + 5):
        tab.keyboard.press("Tab")
        number, is_seen = tab.evaluate(
            """() => {
                const one = document.activeElement;
                const style = getComputedStyle(one);
                const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
                return [one.getAttribute("data-test"), isSeen];
            }"""
        )
        if number is not None:
            assert is_seen, number
            reached.add(int(number))
    assert reached == set(wanted)


def test_keys_of_the_samples(written: Write, look: Look) -> None:
    looking = look(written(answers()))
    tab = looking.go(f"#/run/{RUN}/samples?step=40")
    for key, name in {
        "w": "weight",
        "a": "advantage",
        "e": "entropy",
        "r": "ratio",
        "l": "loss",
    }.items():
        tab.keyboard.press(key)
        pressed = tab.locator(".choice button[aria-pressed=true]")
        assert pressed.inner_text() == name
        assert tab.inner_text(".legend").startswith(name)
    tab.focus(".tokens")
    tab.keyboard.press("Home")
    assert "0" in tab.inner_text(".facts") and "context" in tab.inner_text(".facts")
    for _ in range(20):
        tab.keyboard.press("ArrowRight")
    facts = tab.inner_text(".facts")
    assert "nan" in facts  # the first target's loss
    tab.keyboard.press("ArrowRight")
    facts = tab.inner_text(".facts")
    for name in ("token", "id", "logprob", "weight", "advantage", "ratio", "clipped", "entropy"):
        assert name in facts
    logprob = tab.evaluate(
        "[...document.querySelectorAll('.facts dt')].find(dt => dt.textContent === 'logprob').nextSibling.textContent"
    )
    assert logprob == "\u22124"
    tab.hover(".tokens .special >> nth=0")
    assert '"<|im_start|>"' in tab.inner_text(".facts")


def test_a_hundred_thousand_tokens_are_drawn_where_they_are_seen(
    written: Write, look: Look
) -> None:
    looking = look(written(answers(num_tokens=100_000)))
    tab = looking.go(f"#/run/{RUN}/samples?step=40")
    count = "document.querySelectorAll('.tokens .t').length"
    first = tab.evaluate(count)
    assert 300 <= first < 10_000
    height = tab.evaluate("document.documentElement.scrollHeight")
    tab.evaluate(f"window.scrollTo(0, {height // 2})")
    looking.until(f"{count} > {first}")
    assert tab.evaluate(count) < 20_000
    middle = tab.evaluate("document.elementFromPoint(500, 400).closest('.chunk').children.length")
    assert middle > 0  # what is seen has its tokens
    tab.focus(".tokens")
    tab.keyboard.press("End")
    assert "99,999" in tab.inner_text(".facts")
    assert tab.evaluate("document.querySelectorAll('.tokens .at').length") == 1
    assert tab.evaluate(count) < 30_000


def test_every_view_is_restored_by_its_address(written: Write, look: Look) -> None:
    looking = look(written(two_runs()))
    for fragment in [*VIEWS.values(), f"#/compare?runs={RUN},other"]:
        looking.go(fragment)
        before = looking.text()
        looking.tab.reload()
        looking.settle()
        assert looking.text() == before, fragment


def test_what_is_chosen_is_in_the_address(written: Write, look: Look) -> None:
    looking = look(written(answers()))
    tab = looking.go(f"#/run/{RUN}/overview")
    tab.get_by_label("log scale").check()
    tab.get_by_label("Smoothing").select_option("51")
    tab.get_by_label("from step").fill("20")
    tab.get_by_label("to step").fill("90")
    tab.get_by_label("to step").press("Enter")
    tab.get_by_text("rollout (2)").click()
    looking.until("location.hash.includes('open=rollout')")
    for part in ("log=1", "smooth=51", "from=20", "to=90"):
        assert part in tab.evaluate("location.hash")
    looking.settle()
    before = looking.text()
    tab.reload()
    looking.settle()
    tab.locator('.chart-name[title="rollout/reward"]').wait_for()
    assert looking.text() == before
    tab = looking.go(f"#/run/{RUN}/rollouts?step=40")
    tab.get_by_label("Signal").select_option("no")
    assert "1 of 2 groups" in tab.inner_text("main")
    tab.get_by_label("text in the prompt").fill("nowhere")
    assert "0 of 2 groups" in tab.inner_text("main")
    before = looking.text()
    tab.reload()
    looking.settle()
    assert looking.text() == before


def test_dragging_over_a_curve_zooms_all(written: Write, look: Look) -> None:
    looking = look(written(answers()))
    tab = looking.go(f"#/run/{RUN}/overview")
    box = tab.locator(".u-over").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 40, steps=5)
    tab.mouse.up()
    looking.until("location.hash.includes('from=')")
    low, high = (int(tab.get_by_label(f"{end} step").input_value()) for end in ("from", "to"))
    assert math.isclose(low, 100, abs_tol=3) and math.isclose(high, 150, abs_tol=3)
    looking.settle()
    ranges = tab.evaluate("document.querySelectorAll('.u-over').length")
    assert ranges >= 6
    tab.get_by_role("button", name="All steps").click()
    looking.until("!location.hash.includes('from=')")


def test_an_alarm_opens_its_sample(written: Write, look: Look) -> None:
    looking = look(written(answers()))
    tab = looking.go(f"#/run/{RUN}/overview")
    assert tab.locator(".flag").count() >= 6  # one on each curve
    tab.locator(".flag").first.click()
    tab.wait_for_selector(".tokens")
    assert tab.inner_text("h2.id") == "q1#0"
    looking.go(f"#/run/{RUN}/overview")
    tab.get_by_role("link", name="q1#0").click()
    tab.wait_for_selector(".tokens")
    assert "step=40" in tab.evaluate("location.hash")
