from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_record import (
    MIB,
    NASTY,
    every_record,
    failed_trial,
    infeasible_record,
    ok_trial,
    record,
    shortage,
    stage,
    verdict,
)

from chunktune.report.charts import memory_chart, throughput_chart
from chunktune.report.html import to_html
from chunktune.report.terminal import verdict_rows
from chunktune.report.trials import trial_cells
from chunktune.results import Record, Trial

VOID = ("meta", "br")
HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&" + NASTY


class Page(HTMLParser):
    """Reads a page: its text, its tags with their attributes, and that every tag is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def drawn(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def of_class(svg: str, name: str) -> list[dict[str, str]]:
    return [element.attrib for element in drawn(svg).iter() if element.get("class") == name]


def with_memory(peak_bytes: int, budget_bytes: int | None, capacity_bytes: int | None, chunks: int = 4) -> Trial:
    sizes = {"peak_bytes": peak_bytes, "budget_bytes": budget_bytes, "capacity_bytes": capacity_bytes}
    return ok_trial(4).model_copy(update={"chunks": chunks, "stages": (stage(0, 4).model_copy(update=sizes),)})


# --- the page


@pytest.mark.parametrize("made", every_record())
def test_every_record_is_a_whole_page_that_needs_nothing(made: Record) -> None:
    text = to_html(made)
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n")
    assert not {"script", "link", "img", "iframe", "object", "a", "form"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import|src=|href=", text)
    policy = next(meta for meta in page.named("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert (policy["content"] or "").startswith("default-src 'none'")
    assert "nan" not in text.lower().replace("nanosecond", "")


@pytest.mark.parametrize("made", every_record())
def test_the_page_says_all_that_the_terminal_says(made: Record) -> None:
    text = " ".join(" ".join(Page(to_html(made)).texts).split())
    for label, words in verdict_rows(made):
        assert f"{label} {words}" in text.replace("\n", " ")
    for row in trial_cells(made)[1]:
        assert all(cell in text for cell in row)


def test_what_was_not_tried_is_said() -> None:
    page = Page(to_html(record(verdict=None, trials=(), status="interrupted")))
    assert "no value of M was tried" in "".join(page.texts)
    assert page.named("svg") == []


def test_a_reason_stands_beside_its_trial() -> None:
    text = to_html(record("memory"))
    assert re.search(r'<td>oom</td>.*<td class="reason">out of memory: rank 1 needs at least 1.17 GiB', text)
    assert 'class="reason"' not in to_html(record("throughput"))


def test_the_chosen_row_is_marked() -> None:
    assert re.findall(r'<tr class="chosen"><td>(\d+)</td>', to_html(record())) == ["4"]


def test_light_and_dark_and_narrow_are_provided_for() -> None:
    text = to_html(record())
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport" content="width=device-width' in text
    assert "overflow-x: auto" in text
    used, defined = set(re.findall(r"var\(--(\w+)\)", text)), set(re.findall(r"--(\w+):", text))
    assert used == defined


def test_untrusted_texts_stay_texts() -> None:
    nasty = record(
        tool={"name": HOSTILE, "version": HOSTILE},
        spec={"model": {}, "pipeline": {"schedule": HOSTILE}, "sweep": {}},
        environment={"costs": HOSTILE},
        trials=(ok_trial(4), failed_trial(8, "error", reason=HOSTILE)),
        verdict=verdict("failed", findings=(HOSTILE,), advice=(HOSTILE,), confidence_reasons=(HOSTILE,)),
        warnings=(HOSTILE,),
        started_at=HOSTILE,
    )
    text = to_html(nasty)
    plain_page = Page(to_html(record("failed", trials=(ok_trial(4), failed_trial(8, "error")))))
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    assert "<script" not in text
    assert {tag for tag, _ in Page(text).tags} == {tag for tag, _ in plain_page.tags}
    assert [attributes for _, attributes in Page(text).tags if "onerror" in attributes] == []


# --- the charts


def test_points_stand_higher_where_throughput_is_higher() -> None:
    svg = throughput_chart(record("throughput"))
    heights = [float(dot["cy"]) for dot in of_class(svg, "dot")]  # M = 2 and 8
    chosen = [float(dot["cy"]) for dot in of_class(svg, "chosen")]
    assert len(heights) == 2
    assert len(chosen) == 1
    assert chosen[0] < min(heights)
    assert heights[1] < heights[0]  # 8 is faster than 2, and y grows downwards


def test_the_interval_of_a_point_is_that_of_its_step() -> None:
    svg = throughput_chart(record(trials=(ok_trial(4),)))
    whisker, dot = of_class(svg, "whisker")[0], of_class(svg, "chosen")[0]
    assert float(whisker["y1"]) > float(dot["cy"]) > float(whisker["y2"])
    alone = ok_trial(4).model_copy(update={"step_interval_s": None})
    whisker = of_class(throughput_chart(record(trials=(alone,))), "whisker")[0]
    assert whisker["y1"] == whisker["y2"]


def test_the_capacity_is_one_line_and_the_budget_below_it() -> None:
    trials = tuple(with_memory(size * MIB, 80 * MIB, 100 * MIB, chunks) for chunks, size in ((2, 40), (4, 60)))
    svg = memory_chart(record(trials=(*trials, failed_trial(8, "killed"))))
    capacity, budget = of_class(svg, "capacity"), of_class(svg, "budget")
    assert (len(capacity), len(budget)) == (1, 1)
    assert float(capacity[0]["y1"]) < float(budget[0]["y1"])
    bars = [*of_class(svg, "dot"), *of_class(svg, "chosen")]
    assert sorted(float(bar["height"]) for bar in bars) == pytest.approx([40 * 220 / 128, 60 * 220 / 128], abs=0.1)
    assert "killed" in [text.text for text in drawn(svg).iter() if text.get("class") == "state"]


def test_unequal_capacities_have_a_line_each() -> None:
    trials = (with_memory(MIB, 80 * MIB, 100 * MIB, 2), with_memory(MIB, 80 * MIB, 200 * MIB, 4))
    svg = memory_chart(record(trials=trials))
    assert (len(of_class(svg, "capacity")), len(of_class(svg, "budget"))) == (2, 1)


def test_what_did_not_fit_is_drawn_as_needed() -> None:
    lacking = failed_trial(8, "oom").model_copy(
        update={"shortage": shortage(needed_bytes=120 * MIB, budget_bytes=80 * MIB)}
    )
    svg = memory_chart(record(trials=(with_memory(60 * MIB, 80 * MIB, 100 * MIB), lacking)))
    assert float(of_class(svg, "short")[0]["height"]) == pytest.approx(120 * 220 / 128, abs=0.1)


def test_without_bytes_there_is_no_chart_of_memory() -> None:
    bare = stage(0, 4).model_copy(update=dict.fromkeys(("peak_bytes", "budget_bytes", "capacity_bytes")))
    made = record(trials=(ok_trial(4).model_copy(update={"stages": (bare,)}),))
    assert memory_chart(made) == ""
    assert "Peak memory" not in to_html(made)


def test_nothing_that_ran_is_drawn_as_states() -> None:
    assert not of_class(throughput_chart(infeasible_record()), "dot")
    assert len(of_class(throughput_chart(infeasible_record()), "state")) == 3


@given(
    st.lists(
        st.tuples(st.floats(0, 1e300), st.integers(0, 2**63 - 1), st.none() | st.integers(0, 2**63 - 1)),
        min_size=1,
        max_size=30,
    )
)
@settings(max_examples=100, deadline=None)
def test_all_that_is_drawn_lies_within_its_picture(rows: list[tuple[float, int, int | None]]) -> None:
    trials = tuple(
        with_memory(peak, budget, None, index).model_copy(
            update={"chunks": index, "throughput_samples_per_s": rate, "step_interval_s": None}
        )
        for index, (rate, peak, budget) in enumerate(rows, start=1)
    )
    made = record(trials=trials, verdict=verdict("memory", chunks=1))
    for svg in filter(None, (throughput_chart(made), memory_chart(made))):
        root = drawn(svg)
        width, height = (float(word) for word in root.attrib["viewBox"].split()[2:])
        for element in root.iter():
            for name, value in element.attrib.items():
                if name in ("x", "x1", "x2", "cx"):
                    assert 0 <= float(value) <= width
                if name in ("y", "y1", "y2", "cy"):
                    assert 0 <= float(value) <= height
