"""The page of schedules in a browser: it computes what `simulate` does and follows its controls."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from lightning_pipeline.draw import Step, draw_page
from lightning_pipeline.draw.steps import peaks_of
from lightning_pipeline.schedules import SCHEDULES, Schedule, get_schedule
from lightning_pipeline.simulate import StageTime

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000")
RANKS, MICROBATCHES = (1, 2, 3, 4, 8), (2, 4, 6, 8, 13, 32)
SIZES = [(1, 2), (2, 4), (3, 6), (4, 8), (4, 13), (4, 2), (8, 32)]
TIMES = [  # of the work, latency, bytes / bandwidth
    (StageTime(1, 1, 1), 0.0, 0.0),
    (StageTime(1, 1.2, 0.8), 0.3, 0.0),
    (StageTime(0.37, 0.51, 0), 0.1, 0.07),
    (StageTime(1, 1, 1), 0.25, 0.9),
    (StageTime(0.4, 0.3, 0.2), 0.0, 1.7),
]
Ask = Callable[[str, str], Any]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Runs a script in a page, and returns the value that it ends with."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        reason = f"the page was NOT tested: none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and .ci/run should have installed one")
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("page")

    def ask(page: str, script: str) -> Any:
        answer = (
            "<script>ready.then(() => { const answer = document.createElement('pre');"
            f"answer.textContent = JSON.stringify((() => {{ {script} }})());"
            "answer.id = 'answer'; document.body.append(answer); });</script></body>"
        )
        path = folder / "page.html"
        path.write_text(page.replace("</body>", answer), encoding="utf-8")
        words = [browser, *FLAGS, f"--user-data-dir={folder}", "--dump-dom", path.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        found = re.search('<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
        assert found, f"no answer from {browser}: {done.stderr[-2000:]}"
        return json.loads(html.unescape(found[1]))

    return ask


@pytest.fixture(scope="module")
def page() -> str:
    return draw_page(SCHEDULES, Step(ranks=4, microbatches=8), RANKS, MICROBATCHES)


@pytest.fixture(scope="module")
def computed(ask: Ask, page: str) -> Any:
    """By schedule, size and times: what the page computes, or null."""
    times = [[[*time[:3]], message, transfer] for time, message, transfer in TIMES]
    return ask(
        page,
        f"""
        return DATA.schedules.map((_, at) => {json.dumps(SIZES)}.map(([ranks, m]) => {{
          const lists = actionLists(orders, at, ranks, m);
          return lists && {json.dumps(times)}.map(([time, message, transfer]) => {{
            const rows = simulate(lists, time, message, transfer);
            const spans = rows.map((row) => row.map((s) => [nameOf(s), s.start, s.end]));
            return {{ spans, ...figures(rows) }};
          }});
        }}));
        """,
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_page_computes_what_the_simulation_does(schedule: Schedule, computed: Any) -> None:
    ran = 0
    v = schedule.default_stages_per_rank
    for (ranks, m), found in zip(SIZES, computed[SCHEDULES.index(schedule)], strict=True):
        if not schedule.allows_microbatches(m, ranks, v):
            assert found is None
            continue
        ran += 1
        for (time, message, transfer), one in zip(TIMES, found, strict=True):
            timeline = Step(ranks, m, time, message, transfer).timeline(schedule)
            spans = [[[str(a), start, end] for a, start, end in row] for row in timeline.spans]
            assert one["spans"] == spans
            assert one["step"] == timeline.makespan
            assert one["peaks"] == peaks_of(timeline)
            assert one["bubble"] == pytest.approx(timeline.bubble, abs=1e-12)
    assert ran >= 4


CARDS = """
const cards = () => Object.fromEntries([...document.querySelectorAll(".card")].map((card) => [
  card.querySelector("h2").textContent,
  [...card.querySelectorAll("dd"), ...card.querySelectorAll(".card p")].map((n) => n.textContent),
]));
const move = (selector, value) => {
  const input = document.querySelector(selector);
  input.value = value;
  input.dispatchEvent(new Event("input"));
};
"""


def card(schedule: Schedule, step: Step) -> list[str]:
    """What a card should show."""
    timeline = step.timeline(schedule)
    numbers = (timeline.makespan, max(peaks_of(timeline)))
    return [f"{100 * timeline.bubble:.1f} %", *(f"{round(n, 2):g}" for n in numbers)]


def test_cards_follow_the_controls(ask: Ask, page: str) -> None:
    shown = ask(
        page,
        CARDS
        + f"""
        const shown = [cards()];
        move("#microbatches", {MICROBATCHES.index(32)});
        shown.push(cards());
        move("#ranks", {RANKS.index(8)});
        move("[aria-label='Time of weight gradients (W)']", "0.37");
        move("#message", 0.5);
        shown.push(cards());
        move("#transfer", 0.75);
        shown.push(cards());
        move("#microbatches", {MICROBATCHES.index(13)});
        shown.push(cards());
        return shown;
        """,
    )
    unequal = StageTime(1, 1, 0.37)
    steps = [Step(4, 8), Step(4, 32), Step(8, 32, unequal, 0.5), Step(8, 32, unequal, 0.5, 0.75)]
    for cards, step in zip(shown[:4], steps, strict=True):
        assert cards == {entry.name: card(entry, step) for entry in SCHEDULES}
    dualpipev = shown[4][get_schedule("dualpipev").name]
    assert dualpipev == ["Not with 13 microbatches on 8 ranks; it runs with 32."]


def test_pointer_and_keys_tell_of_an_action(ask: Ask, page: str) -> None:
    at = SCHEDULES.index(get_schedule("1f1b"))
    told = ask(
        page,
        f"""
        const view = views[{at}], svg = view.body.querySelector("svg");
        const box = svg.getBoundingClientRect(), tip = document.getElementById("tip");
        const told = [];
        const point = (time, rank) => svg.dispatchEvent(new PointerEvent("pointermove", {{
          bubbles: true, clientX: box.left + LEFT + time * view.scale,
          clientY: box.top + HEAD + (rank + 0.5) * PITCH,
        }}));
        const press = (key) => {{
          svg.dispatchEvent(new KeyboardEvent("keydown", {{ key, bubbles: true }}));
          told.push(tip.hidden ? null : tip.textContent.split("\\n"));
        }};
        point(10.5, 0);
        told.push(tip.textContent.split("\\n"), svg.querySelectorAll(".needed").length);
        press("ArrowRight");
        press("ArrowDown");
        press("Escape");
        point(5, 0);
        told.push(tip.hidden);
        return told;
        """,
    )
    assert told == [
        [
            "0B0 on rank 0",
            "backward of microbatch 0 on stage 0",
            "start 10, end 12",
            "needs 0F0 on the same rank, there at 1",
            "needs 1B0 from rank 1, there at 10",
            "its rank waits for it from 4 to 10",
        ],
        2,
        [
            "0F4 on rank 0",
            "forward of microbatch 4 on stage 0",
            "start 12, end 13",
            "needs nothing but its rank",
            "its rank is busy until 12",
        ],
        [
            "1B1 on rank 1",
            "backward of microbatch 1 on stage 1",
            "start 11, end 13",
            "needs 1F1 on the same rank, there at 3",
            "needs 2B1 from rank 2, there at 11",
            "its rank is busy until 11",
        ],
        None,
        True,
    ]


def test_everything_can_be_reached_and_has_a_name(ask: Ask, page: str) -> None:
    found = ask(
        page,
        """
        const named = (node) => node.labels?.length || node.getAttribute("aria-label");
        const controls = [...document.querySelectorAll("input, select")];
        const timelines = [...document.querySelectorAll("svg")];
        return {
          nameless: [...controls, ...timelines].filter((node) => !named(node)).length,
          controls: controls.length,
          reached: timelines.filter((node) => node.tabIndex === 0).length,
          wide: document.documentElement.scrollWidth > innerWidth,
        };
        """,
    )
    assert found == {"nameless": 0, "controls": 14, "reached": len(SCHEDULES), "wide": False}


def test_whole_page_is_light(ask: Ask) -> None:
    whole = draw_page(SCHEDULES, Step(ranks=8, microbatches=32))
    assert len(whole) < 300_000  # bytes: the page is in ASCII but for a few signs
    cards = ask(whole, CARDS + "return cards();")
    assert cards == {entry.name: card(entry, Step(8, 32)) for entry in SCHEDULES}
