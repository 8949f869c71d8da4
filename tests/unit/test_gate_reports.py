"""What a gate found, as text, Markdown, JSON and JUnit; the dashboard; what GitHub Actions takes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
import sample_record as sample
from hypothesis import given
from hypothesis import strategies as st

from chunktune.gate import Conditions, Finding, Gate, check
from chunktune.report import github, plain
from chunktune.report.dashboard import to_benchmark
from chunktune.report.gate import HEADINGS, headline, to_json, to_markdown, to_text
from chunktune.report.junit import to_junit
from chunktune.results import Record

HOSTILE = "\x1b[31m::error::a|b\r\n::set-output name=x::1 <b>%0A,: ]]> & \ufffe\x00 \u202e`"
WORDS = Finding(check=f"spec.{HOSTILE}", outcome="failed", words=HOSTILE, expected=HOSTILE, found=[HOSTILE])
ODD = Gate(f"runs/{HOSTILE}", HOSTILE, (WORDS,))


def slow_gate() -> Gate:
    baseline = sample.record(spec={**sample.spec(), "device": {"headroom": 0.05}})
    trial = sample.ok_trial(4).model_copy(update={"step_median_s": 0.1, "step_interval_s": (0.099, 0.101)})
    record = baseline.model_copy(update={"confirmation": trial})
    conditions = Conditions(max_peak_bytes=2**29, expect_chunks=2)
    return Gate("runs/new", "ci/baseline.json", check(record, conditions, baseline))


def passing_gate() -> Gate:
    return Gate("runs/new", None, check(sample.record(), Conditions()))


# --- the table


def test_the_table_has_every_check_and_those_that_failed_first() -> None:
    gate = slow_gate()
    text = to_text(gate)
    assert text.startswith("chunktune check: FAILED, 3 of 10 checks (runs/new against ci/baseline.json)\n")
    rows = [re.split(r" +\| +", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    assert tuple(rows[0]) == HEADINGS
    assert [row[1] for row in rows[1:]] == ["FAILED"] * 3 + ["passed"] * 7
    cells = {row[0]: row[2:] for row in rows[1:]}
    assert cells["throughput"] == ["at least 380 samples/s", "320 samples/s", "-20.0% [-21.6%, -18.4%]"]
    assert cells["peak"] == ["at most 512 MiB", "900 MiB", "+388 MiB"]
    assert cells["headroom"] == ["at least 5%", "18.2%", "+13.2%"]
    assert cells["expected chunks"] == ["M = 2", "M = 4", "+2"]
    sentences = text.rpartition("+\n")[2].strip().splitlines()
    assert [line.partition(": ")[0] for line in sentences] == ["FAILED"] * 3


def test_what_passes_needs_no_sentence() -> None:
    text = to_text(passing_gate())
    assert text.startswith("chunktune check: passed, 3 checks (runs/new)\n")
    assert text.endswith("+\n")


@pytest.mark.parametrize("width", [30, 60, 200])
def test_all_fits_the_terminal(width: int) -> None:
    text = to_text(slow_gate(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "FAILED: throughput:" in text
    assert ("passed: chunks:" in text) is (width < 200)  # without a table every check has its sentence


def test_a_warning_is_counted_in_the_headline() -> None:
    quick = sample.record(quick=True)
    gate = Gate("a", None, check(quick, Conditions()))
    assert headline(gate) == "chunktune check: passed, 4 checks, 1 warning (a)"


def test_markdown_is_a_table_and_a_list() -> None:
    lines = to_markdown(slow_gate()).splitlines()
    assert lines[0].startswith("### chunktune check: FAILED, 3 of 10 checks")
    assert lines[2] == "| check | result | expected | found | by |"
    assert sum(line.startswith("- FAILED: ") for line in lines) == 3


def test_json_has_plain_numbers() -> None:
    answer = json.loads(to_json(slow_gate()))
    assert (answer["record"], answer["baseline"], answer["passed"]) == ("runs/new", "ci/baseline.json", False)
    findings = {finding["check"]: finding for finding in answer["findings"]}
    assert findings["peak"]["expected"] == 2**29
    assert findings["throughput"]["ratio"] == pytest.approx(0.8)
    assert findings["throughput"]["unit"] == "samples/s"


def test_junit_has_a_case_a_check_and_a_failure_where_it_failed() -> None:
    gate = slow_gate()
    suite = ET.fromstring(to_junit(gate)).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("10", "3")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(cases) == [finding.check for finding in gate.findings]
    assert {name for name, case in cases.items() if case.find("failure") is not None} == {
        finding.check for finding in gate.failed
    }
    failure = cases["peak"].find("failure")
    assert failure is not None
    assert failure.get("message") == failure.text == "rank 0 has 900 MiB at the peak, at most 512 MiB is asked"


# --- hostile texts


def test_no_control_character_and_no_markup_gets_out() -> None:
    for text in (to_text(ODD), to_text(ODD, 40), to_markdown(ODD)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    for text in (to_text(ODD), to_markdown(ODD)):  # the runner reads no terminal, so nothing is wrapped there
        assert not any(line.lstrip().startswith("::") for line in text.splitlines())
    assert "<b>" not in to_markdown(ODD)
    assert all(line.count("|") - line.count("\\|") == 6 for line in to_markdown(ODD).splitlines() if line[0:2] == "| ")


def test_junit_holds_any_text() -> None:
    case = ET.fromstring(to_junit(ODD)).find("testsuite/testcase")
    assert case is not None
    assert case.findtext("failure") == plain(HOSTILE)


@given(st.text(), st.text())
def test_junit_is_xml_whatever_the_words(name: str, words: str) -> None:
    finding = Finding(check=name, outcome="failed", words=words)
    case = ET.fromstring(to_junit(Gate(name, words, (finding,))).encode()).find("testsuite/testcase/failure")
    assert case is not None
    assert case.get("message") == plain(words)


# --- the dashboard


def test_the_dashboard_has_step_time_peak_and_bubble() -> None:
    entries = json.loads(to_benchmark(sample.record()))
    assert [entry["name"] for entry in entries] == [
        "step time (1f1b, K = 2)",
        "peak of budget (1f1b, K = 2)",
        "bubble (1f1b, K = 2)",
    ]
    assert [entry["unit"] for entry in entries] == ["s", "share", "share"]
    assert [entry["value"] for entry in entries] == pytest.approx([0.08, 900 / 1045, 0.25])
    # The expression of github-action-benchmark, src/extractRangeInfo.ts.
    found = re.search(r"(?P<prefix>(\+-|±)\s*)(?P<value>\d.+)", entries[0]["range"])
    assert found is not None
    assert float(found["value"]) == pytest.approx(0.0008)
    assert entries[0]["extra"].splitlines()[0] == "M = 4, b = 8, N = 32"


@pytest.mark.parametrize("record", [sample.infeasible_record(), sample.record(verdict=None, trials=())])
def test_a_record_without_a_choice_gives_no_curve(record: Record) -> None:
    assert json.loads(to_benchmark(record)) == []


def test_every_record_gives_a_list_of_numbers() -> None:
    for record in sample.every_record():
        assert all(isinstance(entry["value"], float) for entry in json.loads(to_benchmark(record)))


# --- GitHub Actions


def unescaped(text: str) -> str:
    for code, char in (("%2C", ","), ("%3A", ":"), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(code, char)
    return text


@given(st.text())
def test_escaping_is_reversible_and_keeps_a_command_on_its_line(text: str) -> None:
    data, value = github.escape_data(text), github.escape_property(text)
    assert unescaped(value) == text
    assert "\n" not in data + value
    assert "\r" not in data + value
    assert not set(":,") & set(value)
    for code, char in (("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        data = data.replace(code, char)
    assert data == text


@given(st.text(), st.text())
def test_an_annotation_is_one_command(title: str, message: str) -> None:
    line = github.annotation("warning", title, message)
    found = re.fullmatch(r"::warning title=([^:,]*)::(.*)", line)
    assert found is not None
    assert (unescaped(found[1]), unescaped(found[2])) == (plain(title), plain(message))


def read_outputs(text: str) -> dict[str, str]:
    """What the runner reads from $GITHUB_OUTPUT."""
    values, lines = {}, iter(text.split("\n"))
    for line in lines:
        if not line:
            continue
        name, marked, delimiter = line.partition("<<")
        assert marked
        value = []
        for inner in lines:
            if inner == delimiter:
                break
            value.append(inner)
        else:
            raise AssertionError("a value without its end")
        values[name] = "\n".join(value)
    return values


@given(st.dictionaries(st.sampled_from(["chunks", "limit", "record"]), st.text(), min_size=1))
def test_no_value_can_end_its_output_and_begin_another(values: dict[str, str]) -> None:
    assert read_outputs(github.output_lines(values)) == values


def test_delimiters_cannot_be_foreseen() -> None:
    lines = [github.output_lines({"a": "1"}).splitlines()[0] for _ in range(2)]
    assert lines[0] != lines[1]


def test_the_outputs_are_the_answer_and_where_it_lies() -> None:
    assert github.outputs(sample.record(), "out/record.json") == {
        "chunks": "4",
        "micro_batch": "8",
        "limit": "throughput",
        "confidence": "clear",
        "record": "out/record.json",
    }
    assert set(github.outputs(sample.record(verdict=None), "").values()) == {""}
    infeasible = github.outputs(sample.infeasible_record(), "")
    assert (infeasible["chunks"], infeasible["limit"]) == ("", "memory")


def test_everything_odd_about_a_record_becomes_a_warning() -> None:
    unclear = sample.verdict("budget", confidence="unclear", confidence_reasons=("too few\nrounds",))
    lines = github.record_annotations(sample.record(verdict=unclear, warnings=(HOSTILE,)))
    assert lines[:2] == [
        "::warning title=chunktune::the loss agrees",
        "::warning title=chunktune::unclear: too few rounds",
    ]
    assert lines[2].startswith("::warning title=chunktune::::error::a|b ::set-output name=x::1 <b>%250A")
    assert len(lines) == 3


def test_failed_checks_become_errors_and_warnings_warnings() -> None:
    levels = [line.split(" ")[0] for line in github.finding_annotations(slow_gate().findings)]
    assert levels == ["::error"] * 3
    quick = check(sample.record(quick=True), Conditions())
    assert github.finding_annotations(quick) == [
        "::warning title=chunktune check%3A mode::the record is a quick run, with few samples"
    ]


def test_every_record_has_a_summary() -> None:
    for record in sample.every_record():
        text = github.summary(record, "sweep")
        assert text.startswith("### chunktune sweep\n\n**")
        assert "- 4 stages on 2 cores\n" in text


@given(st.integers(0, github.SUMMARY_BYTES + 10), st.integers(1, 40))
def test_a_summary_never_holds_more_than_a_mebibyte(used_bytes: int, lines: int) -> None:
    text = "| ä | b |\n" * (lines * 3000)
    fitted = github.fitting(text, used_bytes)
    assert len(fitted.encode()) + used_bytes <= max(github.SUMMARY_BYTES, used_bytes)
    if len(text.encode()) + used_bytes <= github.SUMMARY_BYTES:
        assert fitted == text
    elif fitted:
        assert fitted.endswith("(cut: a step summary holds 1 MiB)\n")
