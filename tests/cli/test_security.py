"""Records and specs are data: nothing in them runs, and nothing in them reaches a terminal or a page as a command."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from asking import DATA, GOLDEN, JOURNAL, ROOT, Answer, ask, controls, steering_variables

from chunktune.record import parse_record

PACKAGE = ROOT / "chunktune"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in steering_variables():
        monkeypatch.delenv(name)
    return tmp_path


# --- what the package may not do

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "torch.load",
    "yaml.load",
    "numpy.load",
    "np.load",
}
# torch pickles what these send: between the workers of one sweep, which are forks of one process, and no file.
PICKLING_CALLS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
PICKLING_FILES = {"chunktune/pipeline/group.py"}


@functools.cache
def sources() -> list[tuple[str, ast.AST]]:
    """Every node of every module of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(str(path.relative_to(ROOT)), node) for path in files for node in ast.walk(ast.parse(path.read_text()))]


def name_of(node: ast.AST) -> str:
    """A dotted name; what is before it is left out."""
    if isinstance(node, ast.Attribute):
        before = name_of(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_no_module_imports_what_unpickles() -> None:
    found = {(file, name) for file, node in sources() for name in modules_of(node)}
    assert len(found) > 300
    assert not {(file, name) for file, name in found if name.split(".")[0] in FORBIDDEN_MODULES}


def test_no_module_runs_text_or_loads_pickles() -> None:
    calls = {(file, name_of(node.func)) for file, node in sources() if isinstance(node, ast.Call)}
    assert ("chunktune/strict.py", "json.loads") in calls
    assert not {(file, name) for file, name in calls if name in FORBIDDEN_CALLS}
    assert {file for file, name in calls if name.split(".")[-1] in PICKLING_CALLS} <= PICKLING_FILES


def test_no_command_goes_through_a_shell() -> None:
    shells = [
        (file, ast.unparse(node))
        for file, node in sources()
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "shell"
    ]
    assert shells == []


# --- whose code runs

EVIL = """
from pathlib import Path
Path("ran.txt").write_text("evil.py was imported")
def build(**arguments):
    Path("ran.txt").write_text("evil.build was called")
    raise RuntimeError("evil")
"""
SPEC = """
[model]
family = "python"
factory = "evil:build"

[pipeline]
stages = 2
schedule = "gpipe"

[batch]
mini_batch = 16
"""
MODEL = {"family": "python", "factory": "evil:build", "arguments": {}}


@pytest.fixture
def evil(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leaves a file behind where it is imported."""
    (place / "evil.py").write_text(EVIL)
    (place / "spec.toml").write_text(SPEC)
    monkeypatch.syspath_prepend(str(place))
    data = json.loads(GOLDEN.read_text())
    data["spec"]["model"] = MODEL
    (place / "record.json").write_text(json.dumps(data))
    (place / "held").mkdir()
    lines = JOURNAL.read_text().splitlines()
    start = json.loads(lines[0])
    start["spec"]["model"] = MODEL
    (place / "held" / "journal.jsonl").write_text("\n".join([json.dumps(start), *lines[1:]]) + "\n")
    return place


READING = [
    *(["report", "record.json", *more] for more in ([], ["--html", "-"], ["--trace", "-"], ["--json", "-"])),
    *(["report", "held"], ["report", "record.json", "held"]),
    *(["history", "."], ["history", "held", "record.json"]),
    *(["check", "record.json", "--baseline", "record.json"], ["check", "held", "--max-peak", "80GiB"]),
    *(["export", "record.json", "--to", name] for name in ("torch", "torchtitan", "megatron-lm")),
    *(["whatif", "--from", "record.json", *more] for more in ([], ["--vary", "K=1,2"], ["--vary", "V=1"])),
    *(["whatif", "--from", "held"], ["whatif", "spec.toml", "--from", "record.json"]),
    ["sweep", "--resume", "held"],
]


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_no_record_and_no_journal_makes_a_factory_run(arguments: list[str], evil: Path) -> None:
    answer = ask(*arguments)
    assert not (evil / "ran.txt").exists()
    assert answer.code in (0, 2, 4), answer


@pytest.mark.parametrize("arguments", [["whatif", "spec.toml"], ["sweep", "spec.toml", "--dry-run"]], ids=" ".join)
def test_a_factory_runs_from_the_spec_that_is_given(arguments: list[str], evil: Path) -> None:
    answer = ask(*arguments)
    assert (evil / "ran.txt").read_text() == "evil.build was called"
    assert answer.code == 6, answer
    assert "RuntimeError: evil" in answer.err


def test_a_prediction_says_whose_code_ran(evil: Path) -> None:
    mine = ask("whatif", str(ROOT / "configs" / "python.toml"), "--chunks", "2")
    assert mine.code == 0, mine
    assert "no step was run; the model's own code ran, on tensors without values" in mine.err
    assert "; nothing was run" in ask("whatif", "--from", "record.json").err


# --- what reaches a terminal, and a page

ESCAPES = "\x1b[31m\x1b]8;;https://example.org\x07\x9b5m\x00\x08\r\u202e\u2066\u200b"
MARKUP = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&lt;|`*_[a](javascript:b)"
NASTY = f"{ESCAPES}{MARKUP}\n::error::x"
# The texts that a record may not choose: names of states and the like, and what the spec's own rules check.
FIXED = {
    *(
        "state",
        "where",
        "mode",
        "status",
        "limit",
        "limit_side",
        "confidence",
        "outcome",
        "criterion",
        "kinds",
        "basis",
    ),
    *("holds", "peaks", "schema_version", "loss", "confirmed"),
}


def nasty(node: Any, key: str = "") -> Any:
    """Every text that a record may hold, made nasty; the spec keeps its own, since a prediction reads it again."""
    if key in FIXED or key == "spec":
        return node
    if isinstance(node, dict):
        return {name: nasty(value, name) for name, value in node.items()}
    if isinstance(node, list):
        return [nasty(value, key) for value in node]
    return f"{node}{NASTY}" if isinstance(node, str) else node


def nasty_record(**changes: Any) -> str:
    """The golden record with nasty texts, and with texts where it had none."""
    data = nasty(json.loads(GOLDEN.read_text()))
    data["warnings"] = [NASTY, "b" + NASTY]
    data["verdict"]["findings"] = [NASTY]
    data["verdict"]["advice"] = [NASTY]
    data["verdict"]["confidence_reasons"] = [NASTY]
    data["environment"][NASTY] = NASTY
    data["environment"]["devices"] = [{"name": NASTY, "host": NASTY, NASTY: NASTY}] * 2
    data["sources"][NASTY] = NASTY
    data["tool"][NASTY] = NASTY
    data["trials"][-1] |= {"state": "error", "reason": NASTY, "rank": 1, "step_s": [], "stages": []}
    for candidate in data["candidates"]:
        candidate["reason"] = NASTY
    return json.dumps({**data, **changes})


def with_nasty_spec() -> str:
    """The same where the spec, too, says what it likes; no prediction reads it."""
    spec = json.loads(GOLDEN.read_text())["spec"]
    spec["model"] = {"family": NASTY, NASTY: NASTY, "factory": NASTY, "arguments": {NASTY: [NASTY]}}
    spec["hardware"] = {"name": NASTY}
    spec[NASTY] = {NASTY: NASTY}
    return nasty_record(spec=spec)


FORMATS = {
    "report": ["", "--json -", "--csv -", "--markdown -", "--html -", "--trace -", "--print chunks", "--github"],
    "history": ["", "--json -", "--csv -", "--markdown -"],
    "check": [
        *(
            "--max-peak 80GiB",
            "--expect-chunks 64",
            "--baseline r2.json --allow-different spec",
            "--max-peak 1B --json -",
        ),
        *("--max-peak 1B --markdown -", "--max-peak 1B --junit -", "--benchmark-json -", "--max-peak 1B --github"),
    ],
    "export": [f"--to {name}" for name in ("torch", "torchtitan", "megatron-lm", "deepspeed", "nemo", "accelerate")],
}
SHOWN = [(command, more) for command, several in FORMATS.items() for more in several]
SHOWN += [("report", "r2.json"), ("report", "r2.json --markdown -"), ("report", "r2.json --csv -")]
SHOWN += [("history", "r2.json"), ("history", "r2.json --markdown -")]
PREDICTED = ["", "--markdown -", "--html -", "--csv -", "--json -", "--vary K=1,2", "--vary K=1,2 --markdown -"]


def assert_harmless(answer: Answer, more: str) -> None:
    """No control character anywhere; in a page or a table of Markdown no markup but its own."""
    # CSV ends its lines with \r\n, as its standard has it.
    text = answer.both.replace("\r\n", "\n") if "--csv" in more else answer.both
    assert not controls(text), sorted(map(ascii, controls(text)))
    if any(flag in more for flag in ("--html", "--markdown", "--junit")):
        assert "<img" not in answer.out
        assert "<script>alert(2)" not in answer.out
        assert "</script><script>" not in answer.out
    # A line of its own would be a command to GitHub's runner, or a line of another's.
    assert not [line for line in answer.both.splitlines() if line.startswith("::error::")]


@pytest.mark.parametrize("make", [nasty_record, with_nasty_spec])
@pytest.mark.parametrize(("command", "more"), SHOWN)
def test_no_escape_and_no_markup_of_a_record_gets_through(command: str, more: str, make: Any, place: Path) -> None:
    (place / "r.json").write_text(make())
    (place / "r2.json").write_text(nasty_record(elapsed_s=1.0))
    answer = ask(command, "r.json", *more.split())
    assert answer.code in ((0, 4) if command == "check" else (0,)), answer
    assert_harmless(answer, more)


@pytest.mark.parametrize("more", PREDICTED)
def test_no_escape_and_no_markup_gets_through_a_prediction(more: str, place: Path) -> None:
    (place / "r.json").write_text(nasty_record())
    answer = ask("whatif", "--from", "r.json", *more.split())
    assert answer.code == 0, answer
    assert_harmless(answer, more)


def test_no_escape_gets_through_in_a_name_of_a_file(place: Path) -> None:
    folder = place / ("a\x1b[31m\u202e<img src=x>" + "b")
    folder.mkdir()
    (folder / "record.json").write_bytes(GOLDEN.read_bytes())
    spec = folder / "s\x1b]8;;x\x07.toml"
    spec.write_text(SPEC.replace('"python"\nfactory = "evil:build"', SLEEPING))
    name = str(folder.relative_to(place))
    commands = [
        *(["report", name], ["report", name, str(DATA / "record_v2.json")], ["history", "."], ["check", name]),
        *(["check", name, "--markdown", "-"], ["check", name, "--baseline", name], ["history", ".", "--markdown", "-"]),
        *(["export", name, "--to", "torch"], ["whatif", "--from", name], ["report", name, "--csv", f"{name}/x.csv"]),
        *(["sweep", str(spec), "--dry-run"], ["whatif", str(spec)], ["report", f"{name}/none"], ["sweep", name]),
        *(["init", "--family", "sleep", "--output", f"{name}/x.toml"], ["schema", "spec", "--output", f"{name}/y"]),
    ]
    for arguments in commands:
        answer = ask(*arguments)
        assert answer.code in (0, 2, 4), answer
        assert_harmless(answer, " ".join(arguments[2:]))


SLEEPING = '"sleep"\nlayers = 4\nseconds_per_chunk = 0.001\nseconds_per_sample = 0.001'


def test_the_nasty_records_are_records() -> None:
    for made in (nasty_record(), with_nasty_spec()):
        record = parse_record(made.encode(), "r.json")
        assert "\x1b[31m" in record.started_at
        assert record.verdict is not None and "<img" in record.verdict.findings[0]
