"""What is no spec, no record, no journal and no command line: one message, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import (
    GOLDEN,
    JOURNAL,
    ask,
    ask_elsewhere,
    assert_refused,
    command_line,
    controls,
    listing,
    steering_variables,
)

from chunktune.errors import SpecError, UsageError
from chunktune.spec import resolve
from chunktune.tables import FAMILIES, SECTIONS


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; locks lie beside it."""
    here, locks = tmp_path / "here", tmp_path / "locks"
    here.mkdir()
    locks.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(locks))
    for name in steering_variables():
        monkeypatch.delenv(name)
    return here


Make = Callable[[Path], None]


def holding(data: bytes | str) -> Make:
    """A file with this content."""
    return lambda path: path.write_bytes(data if isinstance(data, bytes) else data.encode()) and None


def sparse(size: int) -> Make:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


def linked(target: str) -> Make:
    return lambda path: path.symlink_to(target)


def unreadable(path: Path) -> None:
    path.write_text("x")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")


def with_journal_as_directory(path: Path) -> None:
    (path / "journal.jsonl").mkdir(parents=True)


def with_record_as_directory(path: Path) -> None:
    (path / "record.json").mkdir(parents=True)


# --- specs

SLEEP = """
[model]
family = "sleep"
layers = 4
seconds_per_chunk = 0.001
seconds_per_sample = 0.0005

[pipeline]
stages = 2
schedule = "gpipe"

[batch]
mini_batch = 4
"""
TRANSFORMER = """
[model]
family = "transformer"
layers = 8
hidden = 256
heads = 4
vocab = 4096
sequence = 128

[pipeline]
stages = 2

[batch]
mini_batch = 4
"""
MANY_COMMAS = "1," * 300_000


def sleep(old: str, new: str) -> str:
    assert old in SLEEP
    return SLEEP.replace(old, new)


def transformer(old: str, new: str) -> str:
    assert old in TRANSFORMER
    return TRANSFORMER.replace(old, new)


NO_SPECS: dict[str, tuple[Make, str]] = {
    # what is no TOML
    "empty": (holding(""), "holds no settings; a spec needs"),
    "only a comment": (holding("# nothing\n\n"), "holds no settings"),
    "only a byte order mark": (holding(b"\xef\xbb\xbf"), "holds no settings"),
    "binary": (holding(bytes(range(256)) * 10), "is binary; a spec is a TOML file"),
    "UTF-16": (holding(SLEEP.encode("utf-16")), "is binary"),
    "Latin-1": (holding(b'name = "\xe9"'), "is no UTF-8 text (byte 8)"),
    "10 MiB": (holding(b"#" * 10 * 2**20), "is larger than 1.00 MiB; a spec is a TOML file of at most 1.00 MiB"),
    "sparse and endless": (sparse(2**40), "is larger than 1.00 MiB"),
    "JSON": (holding('{"model": {"family": "sleep"}}'), "is no TOML"),
    "an open text": (holding('[model]\nfamily = "sleep\n'), "is no TOML"),
    "an open table": (holding("[model\n"), "is no TOML"),
    "an escape in a text": (holding('a = "\x1b[31m"\n'), "is no TOML"),
    "a duplicate key": (holding(SLEEP + "mini_batch = 8\n"), "sets a key or table twice, at line"),
    "a duplicate table": (holding(SLEEP + "[model]\n"), "sets a key or table twice"),
    "a key that is a table too": (holding(SLEEP + "mini_batch.x = 1\n"), "sets a key or table twice"),
    # deep, many, long
    "deep lists": (holding(SLEEP + "chunks = " + "[" * 300_000), "nested too deeply; tables and lists may be nested"),
    "deep tables": (holding("a = " + "{b = " * 5000 + "1" + "}" * 5000), "nested too deeply"),
    "a deep key": (holding(SLEEP + ".".join("a" * 100_000) + " = 1\n"), "nested too deeply"),
    "a deep quoted key": (holding(" . ".join(['"a"'] * 50_000) + " = 1\n"), "nested too deeply"),
    "a deep header": (holding(f"[{'.'.join('a' * 33)}]\nb = 1\n"), "nested too deeply"),
    "a hundred thousand keys": (holding("".join(f"k{i}=1\n" for i in range(90_000))), "settings; a spec has 1000 at"),
    "a hundred unknown keys": (holding(SLEEP + "".join(f"k{i} = 1\n" for i in range(100))), "and 50 more"),
    "a long key": (holding(SLEEP + "a" * 900_000 + " = 1\n"), "unknown key; [batch] has mini_batch, micro_batch"),
    "a long list": (holding(f"{SLEEP}chunks = [{MANY_COMMAS}]\n"), "has 300000 items; must have 4096 at most"),
    "a number of 6000 digits": (holding(sleep("= 4\nsec", "= 0x" + "f" * 5000 + "\nsec")), "more than 4300 digits"),
    # wrong types
    "a word for a number": (holding(sleep("layers = 4", 'layers = "four"')), 'model.layers: is "four"; must be a'),
    "a fraction for a count": (holding(sleep("batch = 4", "batch = 4.5")), "batch.mini_batch: is 4.5; must be a whole"),
    "true for a count": (holding(sleep("batch = 4", "batch = true")), "batch.mini_batch: is true; must be a whole"),
    "a date for a count": (holding(sleep("batch = 4", "batch = 2026-01-02")), "batch.mini_batch: is 2026-01-02"),
    "a list for a count": (holding(sleep("batch = 4", "batch = [4]")), "batch.mini_batch: is [4]; must be a whole"),
    "a table for a count": (holding(sleep("batch = 4", "batch = {a = 4}")), "batch.mini_batch: is a table; must be"),
    "a number for a table": (holding("model = 3\n"), "model"),
    "a list of tables": (holding(SLEEP.replace("[model]", "[[model]]")), "model"),
    "NaN": (holding(sleep("= 0.001", "= nan")), "model.seconds_per_chunk: is nan; must be a finite number"),
    "infinity": (holding(sleep("= 0.001", "= -inf")), "model.seconds_per_chunk: is -inf"),
    "a mixed list": (holding(f'{SLEEP}chunks = [1, "2"]\n'), 'batch.chunks: item 2 is "2"'),
    # unknown and contradictory keys
    "no family": (holding("[batch]\nmini_batch = 4\n"), "model: is missing; a spec has a table [model]"),
    "an unknown family": (holding(sleep('"sleep"', '"sleepy"')), "must be one of transformer, mlp, sleep, costs"),
    "an unknown table": (holding(SLEEP + "[pipelin]\nstages = 2\n"), "(did you mean pipeline?)"),
    "an unknown key": (holding(SLEEP + "minibatch = 2\n"), "batch.minibatch: unknown key"),
    "a key of another table": (holding(SLEEP + "stages = 2\n"), "batch.stages: unknown key"),
    "a key with escapes": (holding(SLEEP + '"\\u001b[31m\\u202e" = 2\n'), "batch.\\x1b[31m\\u202e: unknown key"),
    "a value with escapes": (holding(sleep('"gpipe"', '"\\u001b]8;;x\\u0007"')), '"\\x1b]8;;x\\x07"; must be one'),
    "N and b": (holding(SLEEP + "micro_batch = 2\n"), "micro_batch"),
    "neither N nor b": (holding(sleep("mini_batch = 4", "")), "mini_batch"),
    "heads that do not divide": (holding(transformer("heads = 4", "heads = 7")), "must divide model.hidden = 256"),
    "factors of other layers": (holding(sleep("[pipeline]", "slowdown = [1, 2]\n[pipeline]")), "has 2 factors; must"),
    "parts of another model": (holding(sleep("stages = 2", "stages = 2\npartition = [3, 4]")), "must sum to the model"),
    "parts of another K": (holding(sleep("stages = 2", "stages = 2\npartition = [2, 1, 1]")), "of the 2 parts"),
    "a device of nobody": (holding(SLEEP + '[hardware]\nname = "h1000"\n'), 'hardware.name: is "h1000"; must be one'),
    "a factory of no form": (
        holding('[model]\nfamily = "python"\nfactory = "os.system(\'x\')"\n[batch]\nmini_batch = 4\n'),
        'must have the form "package.module:function"',
    ),
    # absurd sizes
    "a million layers": (holding(sleep("layers = 4", "layers = 1000000")), "4096 or less (did you mean 4096?)"),
    "a billion stages": (holding(sleep("stages = 2", "stages = 1000000000")), "4096 or less (did you mean 4096?)"),
    "a width of 2 GiB": (
        holding(transformer("n = 256", "n = 2147483647")),
        "16777216 or less (did you mean 16777216?)",
    ),
    "10^30 samples": (
        holding(sleep("batch = 4", f"batch = {10**30}")),
        "2147483647 or less (did you mean 2147483647?)",
    ),
    "a negative batch": (holding(sleep("batch = 4", "batch = -4")), "must be a whole number, 1 or more"),
    "a range that falls": (holding(SLEEP + 'chunks = "9:3"\n'), "must ascend from 1 on"),
    "a budget of nothing": (holding(SLEEP + "[sweep]\nbudget = 0\n"), "a duration is a number of seconds above 0"),
    "all of the memory kept free": (holding(SLEEP + "[device]\nheadroom = 1\n"), "from 0 to below 1"),
    # what is no file
    "a directory": (lambda path: path.mkdir(), "is a directory; give a TOML file"),
    "nothing": (lambda path: None, "does not exist; give a TOML file"),
    "a link to itself": (linked("bad.toml"), "bad.toml"),
    "a link to nothing": (linked("nothing.toml"), "does not exist"),
    "a device without end": (linked("/dev/zero"), "is no regular file; give a TOML file"),
    "without permission": (unreadable, "cannot be read: Permission denied"),
}


@pytest.mark.parametrize("command", [["sweep", "--dry-run"], ["sweep"], ["whatif"]], ids=" ".join)
@pytest.mark.parametrize("row", NO_SPECS)
def test_what_is_no_spec_is_refused(row: str, command: list[str], place: Path) -> None:
    make, says = NO_SPECS[row]
    make(place / "bad.toml")
    before = listing(place)
    assert_refused(ask(*command, "bad.toml"), says)
    assert listing(place) == before


def test_a_name_that_is_too_long_is_refused(place: Path) -> None:
    for name in ("x" * 300, "x" * 5000, "", "a/b/c"):
        answer = ask("sweep", "--dry-run", name)
        assert_refused(answer, "error: ")
        assert len(answer.err) < 500
    assert listing(place) == {}


GOOD_SPECS = {
    "CRLF": SLEEP.replace("\n", "\r\n").encode(),
    "a byte order mark": b"\xef\xbb\xbf" + SLEEP.encode(),
    "unicode": ("# \N{SNOWMAN} \N{GREEK SMALL LETTER ALPHA}\u202e\n" + SLEEP).encode(),
    "quoted keys": SLEEP.replace("[batch]", '["batch"]').replace("mini_batch", "'mini_batch'").encode(),
    "many dots in a comment": (SLEEP + f"# {'.' * 500_000}\n# {'a.' * 20} {'x' * 100_000}\n").encode(),
}


@pytest.mark.parametrize("row", GOOD_SPECS)
def test_what_is_one_after_all_is_read(row: str, place: Path) -> None:
    (place / "good.toml").write_bytes(GOOD_SPECS[row])
    before = listing(place)
    for command in (["sweep", "--dry-run"], ["whatif"]):
        answer = ask(*command, "good.toml")
        assert answer.code == 0, answer
        assert not controls(answer.both)
    assert listing(place) == before


BAD_VALUES: tuple[Any, ...] = (
    *("", "x", "gpip", "auto ", "-1", "0", "1.5", "nan", "10 GB ", "12GIB", "5 %", "200%", "-5%", "1:0", "0:5", "9:3"),
    *("1.5.2GB", "999999999999999999GiB", "0s", "0B", "FULL", "adam", "fp32", "a.b", "\x1b[31m", "9" * 5000),
    *(-1, 0, 1.5, 1e300, -1e300, float("nan"), float("inf"), 10**30, True, None, {}, {"a": 1}, 2**63, 0.5, 4097, 2**31),
)
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"layers": 8, "hidden": 2**16, "heads": 1, "vocab": 4096, "sequence": 128},
    "mlp": {"layers": 8, "hidden": 256},
    "sleep": {"layers": 4, "seconds_per_chunk": 0.001, "seconds_per_sample": 0.001},
    "costs": {"micro_batch": 6, "forward_s": 0.1, "backward_s": 0.1},
    "python": {"factory": "a:b"},
}


def nearest_values(family: str, section: str, key: str, bad: Any) -> list[tuple[str, dict[str, Any]]]:
    """What is called nearest to a bad value, and the spec that has it instead."""
    tables: dict[str, Any] = {"model": {"family": family, **MODELS[family]}, "pipeline": {"stages": 2}}
    tables["batch"] = {} if key == "micro_batch" and section == "batch" else {"mini_batch": 8}
    tables.setdefault(section, {})[key] = bad
    found = []
    for mistake in mistakes_of(tables):
        assert mistake.source.isprintable() and str(mistake).isprintable() and len(str(mistake)) < 1000
        if mistake.nearest and mistake.key == f"{section}.{key}" and key != "heads":
            table = {**tables[section], key: value_of(mistake.nearest)}
            found.append((mistake.nearest, {**tables, section: table}))
    return found


def value_of(nearest: str) -> Any:
    try:
        return tomllib.loads(f"value = {nearest}")["value"]
    except tomllib.TOMLDecodeError:
        return nearest


def mistakes_of(tables: dict[str, Any]) -> tuple[Any, ...]:
    try:
        resolve(tables, Path("spec.toml"), environ={})
    except SpecError as error:
        return error.mistakes
    return ()


KEYS = [
    *((family, "model", key) for family, table in FAMILIES.items() for key in table.model_fields),
    *(("sleep", section, key) for section, table in SECTIONS.items() for key in table.model_fields),
]


@pytest.mark.parametrize(("family", "section", "key"), KEYS)
def test_what_is_called_nearest_is_taken(family: str, section: str, key: str) -> None:
    for bad in BAD_VALUES:
        for nearest, tables in nearest_values(family, section, key, bad):
            wrong = [str(each) for each in mistakes_of(tables) if each.key == f"{section}.{key}"]
            assert not wrong, (bad, nearest)


# --- records


def golden(**changes: Any) -> dict[str, Any]:
    return {**json.loads(GOLDEN.read_text()), **changes}


def without(name: str) -> Make:
    return holding(json.dumps({key: value for key, value in golden().items() if key != name}))


def changed(path: str, value: Any) -> Make:
    """The golden record with one value changed; a number may be given as the text that stands in the file."""
    data, (*parents, last) = golden(), path.split(".")
    node: Any = data
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    at: Any = int(last) if isinstance(node, list) else last
    assert node[at] is not Ellipsis
    node[at] = "@" if isinstance(value, Raw) else value
    text = json.dumps(data)
    return holding(text.replace('"@"', value) if isinstance(value, Raw) else text)


class Raw(str):
    """A text that stands in a JSON file without quotes."""


WHOLE = GOLDEN.read_bytes()
NO_RECORDS: dict[str, tuple[Make, str]] = {
    "empty": (holding(b""), "not a record: not JSON"),
    "binary": (holding(bytes(range(256))), "not a record: not"),
    "half": (holding(WHOLE[: len(WHOLE) // 2]), "not a record: not JSON (line"),
    "all but the last byte": (holding(WHOLE.rstrip()[:-1]), "not a record: not JSON (line"),
    "twice": (holding(WHOLE + WHOLE), "not a record: not JSON"),
    "UTF-16": (holding(WHOLE.decode().encode("utf-16")), "not a record: not UTF-8"),
    "a list": (holding(b"[" + WHOLE + b"]"), 'it has no "schema_version"'),
    "a number": (holding(b"3"), 'it has no "schema_version"'),
    "another program's": (holding(b'{"version": 1}'), 'it has no "schema_version"'),
    "TOML": (holding(SLEEP), "not a record: not JSON"),
    "a newer one": (holding(json.dumps(golden(schema_version=99))), "read it with the newer chunktune that wrote it"),
    "version 0": (
        holding(json.dumps(golden(schema_version=0))),
        "schema_version is 0; it must be a whole number, 1 to",
    ),
    "version -1": (holding(json.dumps(golden(schema_version=-1))), "schema_version is -1; it must be a whole number"),
    "a text for the version": (holding(json.dumps(golden(schema_version="3"))), "schema_version is '3'; it must be"),
    "3.0 for the version": (holding(json.dumps(golden(schema_version=3.0))), "schema_version is 3.0; it must be"),
    "true for the version": (holding(json.dumps(golden(schema_version=True))), "schema_version is True; it must be"),
    "an endless version": (holding(json.dumps(golden(schema_version=10**300))), "it"),
    "without trials": (without("trials"), "trials: field required"),
    "without a spec": (without("spec"), "spec: field required"),
    "without a version": (without("schema_version"), 'it has no "schema_version"'),
    "unknown fields": (holding(json.dumps(golden(extra=1))), "extra: extra inputs are not permitted"),
    "a text for trials": (changed("trials", "all"), "trials: "),
    "null for a trial": (changed("trials.0", None), "trials.0: "),
    "NaN": (changed("elapsed_s", Raw("NaN")), "NaN is not a number that JSON knows"),
    "infinity": (changed("elapsed_s", Raw("-Infinity")), "-Infinity is not a number that JSON knows"),
    "1e999": (changed("elapsed_s", Raw("1e999")), "1e999 is beyond what a float can hold"),
    "10^30 chunks": (changed("trials.0.chunks", 10**30), "trials.0.chunks: "),
    "a number of 5000 digits": (changed("trials.0.chunks", Raw("9" * 5000)), "not a record: "),
    "a negative duration": (changed("trials.0.step_median_s", -1.0), "trials.0.step_median_s: is -1.0; durations,"),
    "a negative peak": (changed("trials.0.stages.0.peak_bytes", -1), "trials.0.stages.0.peak_bytes: is -1; durations"),
    "an endless duration": (changed("trials.0.step_median_s", 1e300), "trials.0.step_median_s: is 1e+300; durations,"),
    "a text for a number": (changed("trials.0.chunks", "4"), "trials.0.chunks: input should be a valid integer"),
    "a fraction for a count": (changed("trials.0.chunks", 1.5), "trials.0.chunks: input should be a valid integer"),
    "an unknown state": (changed("trials.0.state", "fine"), "trials.0.state: input should be 'ok'"),
    "deep lists": (holding(b"[" * 200_000), "nested too deeply"),
    "deep tables": (holding(b'{"schema_version": 3, "spec": ' + b'{"a":' * 900 + b"1" + b"}" * 901), "bad"),
    "300 MiB": (sparse(300 * 2**20), "holds 300 MiB; a record has 256 MiB at most"),
    "a directory without one": (lambda path: path.mkdir(), "holds no record.json and no journal.jsonl; a record is"),
    "a directory of directories": (with_record_as_directory, "is not a regular file"),
    "a journal that is a directory": (with_journal_as_directory, "is not a regular file"),
    "nothing": (lambda path: None, "there is no such file; a record is the record.json that a sweep wrote"),
    "a link to itself": (linked("bad"), "bad: the record cannot be read"),
    "a device without end": (linked("/dev/zero"), "is not a regular file"),
    "without permission": (unreadable, "the record cannot be read (Permission denied)"),
}
READERS: dict[str, list[str]] = {
    "report": ["report", "bad"],
    "report --json": ["report", "bad", "--json", "-"],
    "report of two": ["report", str(GOLDEN), "bad"],
    "history": ["history", "bad"],
    "check": ["check", "bad", "--max-peak", "80GiB"],
    "check --baseline": ["check", str(GOLDEN), "--baseline", "bad"],
    "check --update": ["check", "bad", "--baseline", "new.json", "--update"],
    "export": ["export", "bad", "--to", "torch"],
    "whatif --from": ["whatif", "--from", "bad"],
    "whatif SPEC --from": ["whatif", "spec.toml", "--from", "bad"],
}
# A directory tree without a record is an answer to history, in other words.
IN_OTHER_WORDS = {
    **{("history", row): "no record can be read from bad" for row in ("a directory without one", "a link to itself")},
    ("history", "a directory of directories"): "no record can be read from bad",
    ("history", "a journal that is a directory"): "no record can be read from bad",
    **{
        ("check --baseline", row): "bad: there is no such file; a baseline is"
        for row in ("nothing", "a link to itself")
    },
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("row", NO_RECORDS)
def test_what_is_no_record_is_refused(row: str, reader: str, place: Path) -> None:
    make, says = NO_RECORDS[row]
    make(place / "bad")
    (place / "spec.toml").write_text(SLEEP)
    before = listing(place)
    assert_refused(ask(*READERS[reader]), IN_OTHER_WORDS.get((reader, row), says))
    assert listing(place) == before


def test_nothing_waits_for_a_pipe_that_never_delivers(place: Path) -> None:
    os.mkfifo(place / "bad")
    (place / "held").mkdir()
    os.mkfifo(place / "held" / "journal.jsonl")
    (place / "spec.toml").write_text(SLEEP)
    before = listing(place)
    commands = [["sweep", "bad"], ["sweep", "bad", "--dry-run"], ["whatif", "bad"], ["sweep", "--resume", "held"]]
    commands += [*READERS.values(), ["report", "held"], ["history", "held"], ["whatif", "--from", "held"]]
    for answer in ask_elsewhere(commands, place):
        assert_refused(answer, "")
        assert any(word in answer.err for word in ("regular file", "holds no journal.jsonl")), answer
    assert listing(place) == before


# A record in which one number does not go with another: readable, and of no use to predict from.
TORN: dict[str, Make] = {
    "a part too few": changed("trials.0.predicted.parts", golden()["trials"][0]["predicted"]["parts"][:1]),
    "updates of more ranks": changed("trials.0.predicted.update_s", [0.1] * 5),
    "a boundary too many": changed("trials.0.predicted.boundary_bytes", [1, 2, 3]),
    "parts without layers": changed("layers_per_part", [1]),
    "no pipeline": changed("spec.pipeline", {}),
    "a list for the pipeline": changed("spec.pipeline", [1]),
    "a model of nobody": changed("spec.model", {"family": "x"}),
    "ranks of another K": changed("trials.0.stages.1.rank", 7),
    "a profile that is no loss": changed("layers", golden()["layers"][:-1]),
    "what the schedule refuses": changed("spec.pipeline.schedule", "dualpipe-v"),
    "operations without end": changed("trials.0.predicted.parts.0.forward_s", 1e300),
}


@pytest.mark.parametrize("row", TORN)
def test_a_record_that_does_not_fit_together_is_refused_as_a_source_of_costs(row: str, place: Path) -> None:
    TORN[row](place / "bad")
    (place / "spec.toml").write_text(SLEEP)
    before = listing(place)
    for spec in ([], ["spec.toml"]):
        for vary in ([], ["--vary", "K=1,2"]):
            assert_refused(ask("whatif", *spec, "--from", "bad", *vary), "error: ")
    for command in (["report", "bad"], ["history", "bad"]):
        assert ask(*command).code in (0, 2)
    assert listing(place) == before


# --- journals

LINES = JOURNAL.read_bytes().splitlines(keepends=True)


def event(number: int, **changes: Any) -> bytes:
    """A line of the golden journal with some of its fields changed; `...` takes one out."""
    merged = {**json.loads(LINES[number]), **changes}
    return json.dumps({key: value for key, value in merged.items() if value is not ...}).encode() + b"\n"


def first(kind: str) -> int:
    return next(number for number, line in enumerate(LINES) if json.loads(line)["event"] == kind)


def journal(number: int, *lines: bytes) -> bytes:
    """The golden journal with a line replaced, and without its end."""
    kept = [*LINES[:number], *lines, *LINES[number + 1 :]]
    return b"".join(line for line in kept if b'"event": "end"' not in line)


START, TRIAL, ROUNDS = first("start"), first("trial"), first("rounds")
SPEC = json.loads(LINES[START])["spec"]
NO_JOURNALS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no whole start event, so nothing was measured"),
    "one torn line": (LINES[0][:-1], "holds no whole start event"),
    "half a line": (LINES[0][:100], "holds no whole start event"),
    "binary": (bytes(range(256)), "journal.jsonl: line 1 is not an event"),
    "garbage in the middle": (journal(TRIAL, b"%&/(\n"), f"line {TRIAL + 1} is not an event: not JSON"),
    "zeros in the middle": (journal(TRIAL, b"\0" * 5000 + b"\n"), f"line {TRIAL + 1} is not an event: not JSON"),
    "no UTF-8 in the middle": (journal(TRIAL, b'{"event": "\xff"}\n'), f"line {TRIAL + 1} is not an event: not UTF-8"),
    "an empty line": (journal(TRIAL, b"\n"), f"line {TRIAL + 1} is not an event"),
    "a number for an event": (journal(TRIAL, b"7\n"), 'an object with "event" is expected'),
    "two lines in one": (journal(TRIAL, LINES[TRIAL].strip() + LINES[TRIAL]), f"line {TRIAL + 1} is not an event"),
    "no start": (journal(START), "holds no whole start event"),
    "a newer one": (
        journal(START, event(START, schema_version=99)),
        "schema_version is 99; this chunktune reads up to",
    ),
    "version 0": (journal(START, event(START, schema_version=0)), "schema_version is 0; it must be a whole number"),
    "a text for the version": (journal(START, event(START, schema_version="3")), "schema_version is '3'; it must be"),
    "a start without a spec": (journal(START, event(START, spec=...)), 'the event "start" lacks spec'),
    "a spec that is none": (journal(START, event(START, spec={})), "damaged"),
    "a spec without K": (journal(START, event(START, spec={**SPEC, "pipeline": {}})), "damaged"),
    "an unknown family": (
        journal(START, event(START, spec={**SPEC, "model": {"family": "x"}})),
        "the spec in it is dam",
    ),
    "devices that are none": (journal(START, event(START, environment={"devices": "two"})), "devices are no list"),
    "a trial without one": (journal(TRIAL, event(TRIAL, trial=...)), 'the event "trial" lacks trial'),
    "a number for a trial": (journal(TRIAL, event(TRIAL, trial=7)), "damaged"),
    "a trial of nothing": (journal(TRIAL, event(TRIAL, trial={})), "damaged"),
    "NaN": (
        journal(TRIAL, event(TRIAL, elapsed_s=0.0).replace(b"0.0,", b"NaN,")),
        "NaN is not a number that JSON knows",
    ),
    "a word for a time": (journal(TRIAL, event(TRIAL, elapsed_s="soon")), "damaged"),
    "rounds of nothing": (journal(ROUNDS, event(ROUNDS, rounds=7)), "the journal's rounds"),
    "rounds of other M": (
        journal(ROUNDS, event(ROUNDS, values=[64])),
        "its rounds are not of the values that they name",
    ),
    "values that are none": (journal(ROUNDS, event(ROUNDS, values=["a"])), "are no values of M"),
    "no values": (journal(ROUNDS, event(ROUNDS, values=[])), "are no values of M"),
    "1 MiB of one line": (b"x" * 2**20, "holds no whole start event"),
}


class WouldRunError(UsageError):
    """Raised in the place of a sweep."""


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> str:
    """No sweep is started; what would be is said instead."""

    def run(*given: object) -> None:
        raise WouldRunError("the sweep would go on")

    monkeypatch.setattr("chunktune.cli.sweep.run", run)
    return "the sweep would go on"


@pytest.mark.parametrize("row", NO_JOURNALS)
def test_what_is_no_journal_is_not_gone_on_with(row: str, place: Path, stopped: str) -> None:
    content, says = NO_JOURNALS[row]
    (place / "held").mkdir()
    (place / "held" / "journal.jsonl").write_bytes(content)
    before = listing(place)
    for more in ([], ["--budget", "2h"]):
        assert_refused(ask("sweep", "--resume", "held", *more), says)
    assert listing(place) == before


def test_what_holds_no_journal_is_not_gone_on_with(place: Path, stopped: str) -> None:
    (place / "none").mkdir()
    with_journal_as_directory(place / "folder")
    (place / "file").write_text("x")
    before = listing(place)
    for name in ("none", "folder", "file", "missing", "x" * 300):
        assert_refused(ask("sweep", "--resume", name), "")
    assert listing(place) == before


@pytest.mark.parametrize("end", ["", '{"event": "tri'])
def test_a_whole_beginning_is_gone_on_with(end: str, place: Path, stopped: str) -> None:
    (place / "held").mkdir()
    (place / "held" / "journal.jsonl").write_bytes(b"".join(LINES[: ROUNDS + 1]) + end.encode())
    before = listing(place)
    assert_refused(ask("sweep", "--resume", "held"), stopped)
    assert listing(place) == before


def test_a_journal_cut_anywhere_is_refused_or_gone_on_with(place: Path, stopped: str) -> None:
    (place / "held").mkdir()
    whole = JOURNAL.read_bytes()
    for cut in range(0, len(whole), len(whole) // 40):
        (place / "held" / "journal.jsonl").write_bytes(whole[:cut])
        before = listing(place)
        answer = ask("sweep", "--resume", "held")
        assert_refused(answer, "holds no whole start event" if cut < len(LINES[0]) else stopped)
        assert ask("report", "held").code == (2 if cut < len(LINES[0]) else 0)
        assert listing(place) == before


# --- command lines

COMMANDS: dict[str, list[str]] = {
    "sweep": ["spec.toml", "--dry-run"],
    "whatif": ["spec.toml"],
    "validate": [],
    "report": ["record.json"],
    "history": ["record.json"],
    "check": ["record.json", "--baseline", "record.json"],
    "export": ["record.json", "--to", "torch"],
    "doctor": ["--no-noise"],
    "init": ["--output", "-"],
    "schema": ["spec"],
}
VALUES = {"empty": "", "negative": "-1", "enormous": "9" * 25, "endless": "9" * 5000}
# What is refused without these; `check` looks at one thing at a time.
NEEDED = {("report", "--chunks"): ["--trace", "-"], ("check", "--baseline"): []}
# (option, value) that is no mistake, and the exit code: a sweep may take its time ...
TAKEN = {("--budget", "enormous"): 0, **{("--output-dir", name): 0 for name in ("negative", "enormous", "endless")}}
# ... nor an M that no sweep chose.
TAKEN[("--expect-chunks", "enormous")] = 4


NAMES_OF_FILES = ("negative", "enormous")


def options() -> list[tuple[str, str, str]]:
    """(command, option, name of the value) of every option that takes a value; a file may be named like a number."""
    found = []
    for name, command in command_line().commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.is_flag:
                takes = parameter.metavar or parameter.type.name
                asked = [value for value in VALUES if takes != "FILE" or value not in NAMES_OF_FILES]
                found += [(name, parameter.opts[-1], value) for value in asked]
    return found


def test_every_command_is_asked() -> None:
    assert set(command_line().commands) == set(COMMANDS)
    assert len(options()) > 250


@pytest.mark.parametrize(("command", "option", "value"), options())
def test_every_option_refuses_what_it_cannot_take(command: str, option: str, value: str, place: Path) -> None:
    (place / "spec.toml").write_text(SLEEP)
    (place / "record.json").write_bytes(GOLDEN.read_bytes())
    before = listing(place)
    arguments = COMMANDS[command] + NEEDED.get((command, option), [])
    if option in arguments:
        arguments = arguments[: arguments.index(option)] + arguments[arguments.index(option) + 2 :]
    if option == "--resume":
        arguments = []
    answer = ask(command, *arguments, option, VALUES[value])
    if (option, value) in TAKEN:
        assert answer.code == TAKEN[(option, value)]
    else:
        assert_refused(answer, "")
        assert len(answer.err.splitlines()) <= 3
    assert listing(place) == before


@pytest.mark.parametrize("value", NAMES_OF_FILES)
def test_a_file_may_be_named_like_a_number(value: str, place: Path) -> None:
    answer = ask("schema", "spec", "--output", VALUES[value])
    assert (answer.code, answer.out, answer.err) == (0, "", f"Wrote {VALUES[value]}\n")
    assert list(listing(place)) == [VALUES[value]]


LINES_OF_COMMANDS: dict[str, list[str]] = {
    "an unknown command": ["sweeep", "spec.toml"],
    "an unknown option": ["sweep", "spec.toml", "--stage", "4"],
    "an option without its value": ["sweep", "spec.toml", "--stages"],
    "a value for a switch": ["sweep", "spec.toml", "--dry-run=yes"],
    "two specs": ["sweep", "spec.toml", "spec.toml"],
    "no spec": ["sweep"],
    "no spec and no record": ["whatif"],
    "no record": ["report"],
    "no framework": ["export", "record.json"],
    "an empty spec": ["sweep", ""],
    "an escape for a command": ["\x1b[31m"],
    "an escape for an option": ["sweep", "spec.toml", "--\x1b[31m"],
    "an escape for a value": ["sweep", "spec.toml", "--stages", "\x1b[31m\u202e"],
    "an escape for a file": ["sweep", "spec.toml", "--json", "a\x1b[31m/b"],
    "an escape for a record": ["report", "\x1b[31m\u202e"],
    "stdout twice": ["report", "record.json", "--json", "-", "--csv", "-"],
    "one file twice": ["report", "record.json", "--json", "x", "--csv", "./x"],
    "a file in no directory": ["report", "record.json", "--json", "none/x"],
    "a directory for a file": ["report", "record.json", "--json", "."],
    "over the record": ["report", "record.json", "--csv", "record.json"],
    "over a record of many": ["history", ".", "--csv", "record.json"],
    "a key set to nothing": ["sweep", "spec.toml", "--set", "pipeline.stages="],
    "a key that is none": ["sweep", "spec.toml", "--set", ".=1"],
    "a deep key": ["sweep", "spec.toml", "--set", ".".join("a" * 10_000) + "=1"],
    "a deep value": ["sweep", "spec.toml", "--set", "batch.chunks=" + "[" * 50_000],
    "an open list": ["sweep", "spec.toml", "--chunks", "[1, 2"],
    "a list of a million": ["sweep", "spec.toml", "--chunks", MANY_COMMAS + "1"],
    "two fixed batches": ["whatif", "spec.toml", "--vary", "N=4,8", "--vary", "b=1,2"],
    "a key varied twice": ["whatif", "spec.toml", "--vary", "K=1", "--vary", "stages=2"],
    "a key varied and set": ["whatif", "spec.toml", "--vary", "K=1,2", "--stages", "2"],
    "unknown keys varied": ["whatif", "spec.toml", *[f"--vary=x{n}=1" for n in range(3)]],
    "10 000 combinations": [
        *("whatif", "spec.toml", "--vary", f"N={','.join(map(str, range(1, 101)))}"),
        *("--vary", f"patience={','.join(map(str, range(100)))}"),
    ],
    "a value of a key varied to nothing": ["whatif", "spec.toml", "--vary", "K="],
    "a number of 6000 digits varied": ["whatif", "spec.toml", "--vary", "N=0x" + "f" * 5000],
    "a number of 6000 digits set": ["whatif", "spec.toml", "--set", "batch.mini_batch=0x" + "f" * 5000],
    "a list of such numbers": ["whatif", "spec.toml", "--vary", "chunks=[0x" + "f" * 5000 + "]"],
    "another device's speed": ["whatif", "--from", "record.json", "--device", "h100-80gb"],
    "commas alone": ["whatif", "spec.toml", "--vary", "K=,,,"],
    "a value that is none": ["whatif", "spec.toml", "--vary", "K=x,y"],
    "one M of many settings": ["whatif", "spec.toml", "--vary", "K=1,2", "--print", "chunks"],
    "a schema of nothing": ["schema", "journal"],
    "a family of nobody": ["init", "--family", "sleepy"],
    "what cannot be swept": ["init", "--family", "sleep", "--stages", "100"],
}


@pytest.mark.parametrize("row", LINES_OF_COMMANDS)
def test_what_a_command_line_cannot_mean_is_refused(row: str, place: Path) -> None:
    (place / "spec.toml").write_text(SLEEP)
    (place / "record.json").write_bytes(GOLDEN.read_bytes())
    before = listing(place)
    assert_refused(ask(*LINES_OF_COMMANDS[row]), "")
    assert listing(place) == before


def test_variables_are_checked_like_options(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "spec.toml").write_text(SLEEP)
    monkeypatch.setenv("CHUNKTUNE_PIPELINE__STAGES", "\x1b[31m")
    monkeypatch.setenv("CHUNKTUNE_X", "1")
    answer = ask("sweep", "spec.toml")
    assert_refused(answer, "2 mistakes in the spec")
    assert "environment CHUNKTUNE_PIPELINE__STAGES: pipeline.stages" in answer.err
    assert "variables are named CHUNKTUNE_SECTION__KEY" in answer.err


@pytest.mark.parametrize("reader", [name for name in READERS if name != "whatif SPEC --from"])
def test_the_golden_record_is_read(reader: str, place: Path) -> None:
    """What is refused above is refused for what was changed in it."""
    (place / "bad").write_bytes(GOLDEN.read_bytes())
    answer = ask(*READERS[reader])
    assert answer.code == 0, answer
