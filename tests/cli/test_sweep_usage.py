import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import chunktune.pipeline
from chunktune.candidates import Candidates
from chunktune.cli import app, options, outputs
from chunktune.cli.app import main
from chunktune.errors import EnvironmentFailedError, InterruptedSweepError, UserCodeError
from chunktune.request import SweepRequest
from chunktune.results import ByRule, Candidate, LimitDetail, Record, Trial, Verdict

SPEC = """
[model]
family = "sleep"
layers = 4
seconds_per_chunk = 0.001
seconds_per_sample = 0.001
[pipeline]
stages = 2
[batch]
mini_batch = 4
"""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a spec, outside any torchrun."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


class FakeLaunch:
    """Stands for the launcher: keeps the request, emits events, answers or raises."""

    def __init__(self, answer: Record | BaseException | None) -> None:
        self.answer = answer
        self.requests: list[SweepRequest] = []
        self.events: list[dict[str, Any]] = []

    def run(self, request: SweepRequest, on_event: Callable[[dict[str, Any]], None]) -> Record | None:
        self.requests.append(request)
        if request.output_dir:
            Path(request.output_dir, "logs").mkdir(parents=True, exist_ok=True)
        for event in self.events:
            on_event(event)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def trial(chunks: int, state: str = "ok", reason: str | None = None) -> Trial:
    return Trial.model_validate(
        {"chunks": chunks, "micro_batch": 4 // chunks, "mini_batch": 4, "state": state, "reason": reason}
    )


def record(*trials: Trial, **verdict: Any) -> Record:
    fields: dict[str, Any] = {
        "chunks": 2,
        "micro_batch": 2,
        "mini_batch": 4,
        "limit": "throughput",
        "limit_side": "above",
        "limit_stage": None,
        "limit_detail": LimitDetail(),
        "next_chunks": 4,
        "floor": None,
        "confidence": "clear",
        "by_rule": ByRule(pipeline=2, stage=2),
        "smallest_within_tolerance": 2,
        "confirmed": "fresh processes",
        **verdict,
    }
    return Record(
        schema_version=1,
        tool={"name": "chunktune", "version": "0"},
        mode="measured",
        status="complete",
        quick=False,
        spec={},
        sources={},
        environment={},
        candidates=tuple(Candidate(chunks=m, micro_batch=4 // m, mini_batch=4, legal=True) for m in (1, 2, 4)),
        trials=trials or (trial(1), trial(2), trial(4)),
        comparisons=(),
        verdict=Verdict(**fields),
        started_at="2026-01-01T00:00:00Z",
        elapsed_s=1.0,
    )


NOTHING = {"chunks": None, "micro_batch": None, "mini_batch": None, "smallest_within_tolerance": None}
OOM = record(trial(1, "oom", "rank 0 needs 9 bytes"), trial(2, "error", "ValueError: no"), limit="memory", **NOTHING)
BROKEN = record(trial(1, "error", "ValueError: no"), trial(2, "error", "ValueError: no"), limit="failed", **NOTHING)
SPENT = record(trial(1, "skipped"), limit="budget", **NOTHING)
UNCLEAR = record(confidence="unclear", confidence_reasons=("M = 4 against M = 2: 0.99 [0.9, 1.1]",))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLaunch]:
    fake = FakeLaunch(record())
    monkeypatch.setitem(sys.modules, "chunktune.pipeline.launch", fake)
    monkeypatch.setattr(chunktune.pipeline, "launch", fake, raising=False)
    monkeypatch.setattr(outputs, "_print_table", lambda _: print("THE TABLE"))
    yield fake


def sweep(*arguments: str) -> int:
    return main(["sweep", "spec.toml", *arguments])


# Usage


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--stagez", "2"], ["No such option: --stagez", "--stages", "run 'chunktune sweep --help'"]),
        (["--stages", "0"], ["flag --stages: pipeline.stages: is 0", "did you mean 1?"]),
        (["--chunks", "0"], ["flag --chunks: batch.chunks: item 1 is 0"]),
        (["--mini-batch", "-1"], ["flag --mini-batch: batch.mini_batch: is -1"]),
        (["--schedule", "gpip"], ["flag --schedule", "did you mean gpipe?"]),
        (["--set", "nonsense"], ["--set", "section.key=value"]),
        (["--json", "-", "--print", "chunks"], ["--json - and --print chunks would share stdout"]),
        (["--json", "-", "--csv", "-"], ["--json - and --csv - would share stdout"]),
        (["--json", "a", "--csv", "./a"], ["--json and --csv both write to ./a"]),
        (["--json", "no/such/dir.json"], ["there is no directory no/such"]),
        (["--csv", "."], ["--csv . is a directory"]),
        (["--print", "everything"], ["--print everything is unknown", "--print chunks"]),
        (["--dry-run", "--csv", "a"], ["nothing for --csv"]),
        (["--dry-run", "--print", "chunks"], ["nothing for --print chunks"]),
        (["--output-dir", "spec.toml"], ["spec.toml is no directory"]),
    ],
)
def test_usage_errors(launch: FakeLaunch, capsys: Capture, arguments: list[str], parts: list[str]) -> None:
    assert sweep(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, launch.requests) == ("", [])
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert all(part in err for part in parts)


def test_a_missing_argument_and_an_unknown_command(capsys: Capture) -> None:
    assert main(["sweep"]) == main(["swep"]) == 2
    err = capsys.readouterr().err
    assert "neither SPEC nor --resume DIR is given" in err
    assert "No such command 'swep'" in err


def test_all_mistakes_at_once(place: Path, launch: FakeLaunch, capsys: Capture) -> None:
    (place / "spec.toml").write_text(SPEC.replace("stages = 2", "stages = 0\nschedul = 1"))
    assert sweep("--mini-batch", "0", "--set", "sweep.patience=-1", "--tolerance", "90%") == 2
    err = capsys.readouterr().err
    assert "5 mistakes in the spec:" in err
    assert launch.requests == []


def test_control_characters_do_not_reach_the_terminal(capsys: Capture) -> None:
    assert main(["sweep", "\x1b[31m.toml"]) == main(["sweep", "spec.toml", "--\x1b[31m"]) == 2
    assert "\x1b" not in capsys.readouterr().err


# What is asked of the launcher


def test_flags_become_the_request(place: Path, launch: FakeLaunch) -> None:
    values = {
        "stages": "3",
        "schedule": "gpipe",
        "virtual-stages": "1",
        "recompute": "full",
        "partition": "2,1,1",
        "micro-batch": "2",
        "chunks": "1,2,4",
        "optimizer": "sgd",
        "precision": "bfloat16",
        "device": "cpu",
        "memory": "2GiB",
        "headroom": "10%",
        "criterion": "stage",
        "tolerance": "2%",
        "patience": "3",
        "budget": "90s",
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", value)]
    assert sweep(*flags, "--set", "training.seed=5", "--quick", "--output-dir", "out") == 0
    (request,) = launch.requests
    spec = request.spec
    assert (spec.pipeline.stages, spec.pipeline.partition) == (3, (2, 1, 1))
    assert (spec.batch.micro_batch, spec.batch.mini_batch, spec.batch.chunks) == (2, None, (1, 2, 4))
    assert (spec.device.memory, spec.device.headroom, spec.sweep.budget) == (2 * 2**30, 0.1, 90.0)
    assert (spec.training.seed, request.quick, request.name) == (5, True, "spec")
    assert (request.spec_dir, request.output_dir) == (str(place), str(place / "out"))
    given = {key for key, source in request.sources.items() if source.startswith("flag --")}
    assert given == set(options.OVERRIDES.values()) - {"batch.mini_batch"}


@pytest.mark.parametrize(("text", "chunks"), [("8", (8,)), ("1, 2", (1, 2)), ("1:64", "1:64"), ("auto", "auto")])
def test_forms_of_chunks(launch: FakeLaunch, text: str, chunks: Any) -> None:
    assert sweep("--chunks", text) == 0
    assert launch.requests[0].spec.batch.chunks == chunks


def test_the_environment_is_read(launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKTUNE_PIPELINE__STAGES", "4")
    assert sweep() == 0
    assert launch.requests[0].sources["pipeline.stages"] == "environment CHUNKTUNE_PIPELINE__STAGES"


def test_output_directories(place: Path, launch: FakeLaunch, capsys: Capture) -> None:
    assert sweep() == sweep() == 0
    first, second = (Path(request.output_dir) for request in launch.requests)
    assert first != second
    assert first.parent == second.parent == place / "runs"
    assert first.name.startswith("spec-")
    (first / "journal.jsonl").touch()
    assert sweep("--output-dir", str(first)) == 2
    assert "already holds journal.jsonl" in capsys.readouterr().err
    assert sweep("--output-dir", str(first), "--force") == 0
    assert (first / "journal.jsonl").exists()


def test_an_output_directory_that_cannot_be_made(place: Path, launch: FakeLaunch, capsys: Capture) -> None:
    (place / "file").touch()
    assert sweep("--output-dir", "file/below") == 6
    assert "cannot be used for output" in capsys.readouterr().err


# Streams


def test_the_table_goes_to_stdout(launch: FakeLaunch, capsys: Capture) -> None:
    launch.events = [{"event": "warning", "text": "speed drifts"}]
    assert sweep() == 0
    out, err = capsys.readouterr()
    assert out == "THE TABLE\n"
    assert "speed drifts" in err


def test_quiet(launch: FakeLaunch, capsys: Capture) -> None:
    launch.events = [{"event": "warning", "text": "speed drifts"}]
    assert sweep("-q", "--json", "r.json") == 0
    assert capsys.readouterr() == ("THE TABLE\n", "")


def test_json_alone_on_stdout(launch: FakeLaunch, capsys: Capture) -> None:
    assert sweep("--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["chunks"] == 2


def test_the_number_alone_on_stdout(launch: FakeLaunch, capsys: Capture) -> None:
    assert sweep("--print", "chunks", "--json", "r.json") == 0
    out, err = capsys.readouterr()
    assert out == "2\n"
    assert "Wrote r.json" in err


def test_files_in_every_format(place: Path, launch: FakeLaunch, capsys: Capture) -> None:
    assert sweep("--json", "r.json", "--csv", "r.csv", "--markdown", "r.md", "--output-dir", "out") == 0
    assert json.loads((place / "r.json").read_text())["schema_version"] == 1
    assert "chunks" in (place / "r.csv").read_text()
    assert "|" in (place / "r.md").read_text()
    assert capsys.readouterr().out == "THE TABLE\n"


def test_a_disk_that_is_full(launch: FakeLaunch, capsys: Capture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    assert sweep("--json", "/dev/full") == 6
    assert "/dev/full cannot be written" in capsys.readouterr().err


# Exit codes


@pytest.mark.parametrize(
    ("answer", "arguments", "code", "part"),
    [
        (record(), [], 0, ""),
        (record(), ["--strict"], 0, ""),
        (UNCLEAR, [], 0, ""),
        (UNCLEAR, ["--strict"], 5, "M = 4 against M = 2: 0.99"),
        (OOM, [], 3, "M = 1: oom: rank 0 needs 9 bytes"),
        (OOM, ["--strict", "--print", "chunks"], 3, "M = 2: error: ValueError: no"),
        (BROKEN, [], 6, "M = 1: error: ValueError: no"),
        (SPENT, [], 6, "limit budget"),
        (record().model_copy(update={"verdict": None, "status": "failed"}), [], 6, "without a verdict"),
        (UserCodeError("the factory raised"), [], 6, "error: the factory raised"),
        (EnvironmentFailedError("no worker came up"), [], 6, "error: no worker came up"),
        (InterruptedSweepError("interrupted"), [], 130, "error: interrupted"),
        (InterruptedSweepError("terminated", 143), [], 143, "error: terminated"),
        (KeyboardInterrupt(), [], 130, ""),
        (ValueError("odd\nthing"), [], 1, "internal error: ValueError: odd; run again with --debug"),
    ],
)
def test_exit_codes(
    launch: FakeLaunch,
    capsys: Capture,
    answer: Record | BaseException,
    arguments: list[str],
    code: int,
    part: str,
) -> None:
    launch.answer = answer
    assert sweep("-q", *arguments) == code
    out, err = capsys.readouterr()
    assert part in err
    assert "Traceback" not in err
    assert ("THE TABLE" in out) is (isinstance(answer, Record) and "--print" not in arguments)


def test_tracebacks_only_with_debug(launch: FakeLaunch, capsys: Capture) -> None:
    launch.answer = ValueError("odd")
    assert sweep("--debug") == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "internal error: ValueError: odd" in err


@pytest.mark.parametrize("answer", [record(), OOM, BROKEN, SPENT, UNCLEAR])
def test_under_torchrun_every_verdict_ends_with_0(
    launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch, capsys: Capture, answer: Record
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    launch.answer = answer
    assert sweep("--strict") == 0
    assert launch.requests[0].output_dir == ""
    assert "THE TABLE" in capsys.readouterr().out


def test_other_ranks_of_torchrun_are_silent(
    place: Path, launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    launch.answer = None
    assert sweep("--json", "only/on/rank/0.json", "--output-dir", "out") == 0
    assert launch.requests[0].output_dir == str(place / "out")
    assert capsys.readouterr() == ("", "")
    assert sweep("--dry-run") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_costs_are_for_whatif(launch: FakeLaunch, place: Path, capsys: Capture, arguments: list[str]) -> None:
    costs = 'family = "costs"\nmicro_batch = 1\nforward_s = 0.1\nbackward_s = 0.2\n'
    (place / "spec.toml").write_text(f"[model]\n{costs}[pipeline]\nstages = 2\n[batch]\nmini_batch = 4\n")
    assert sweep("-q", *arguments) == 2
    assert "use chunktune whatif spec.toml" in capsys.readouterr().err
    assert launch.requests == []


# Dry run


@pytest.fixture
def planned(launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    fake = SimpleNamespace(static_bytes=lambda spec, stages: (2**20,) * stages)
    refused = Candidate(chunks=3, micro_batch=None, mini_batch=4, legal=False, reason="4 is no multiple of 3")
    found = Candidates("mini_batch", 4, (1, 2, 4), (1, 2), "batch", "range", (refused,), ("N = 4 is small",))
    monkeypatch.setitem(sys.modules, "chunktune.estimate", fake)
    monkeypatch.setattr("chunktune.candidates.enumerate_candidates", lambda spec, stages: found)
    yield fake


def test_dry_run_for_a_reader(planned: SimpleNamespace, launch: FakeLaunch, capsys: Capture) -> None:
    assert sweep("--dry-run", "--budget", "90s") == 0
    out = capsys.readouterr().out
    for part in (
        "K = 2",
        "and 1 more between",
        "refused: M = 3: 4 is no multiple of 3",
        "warning: N = 4 is small",
        "1.00 MiB, 1.00 MiB",
        "90.0 s",
    ):
        assert part in out
    assert launch.requests == []
    assert not Path("runs").exists()


def test_dry_run_as_json(planned: SimpleNamespace, capsys: Capture) -> None:
    assert sweep("--dry-run", "--json", "-") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [row["chunks"] for row in plan["candidates"]] == [1, 2, 4]
    assert plan["refused"][0]["reason"] == "4 is no multiple of 3"
    assert (plan["static_bytes"], plan["budget_s"], plan["stages"]) == ([2**20, 2**20], 600.0, 2)


def test_dry_run_without_an_estimate(planned: SimpleNamespace, capsys: Capture) -> None:
    def fail(spec: object, stages: int) -> None:
        raise NotImplementedError("no such family")

    planned.static_bytes = fail
    assert sweep("--dry-run") == 0
    out = capsys.readouterr().out
    assert "a rank: not available" in out
    assert "NotImplementedError: no such family" in out


def test_dry_run_where_the_devices_cannot_be_counted(
    planned: SimpleNamespace, launch: FakeLaunch, place: Path, capsys: Capture
) -> None:
    (place / "spec.toml").write_text(SPEC.replace("stages = 2", ""))

    def fail(spec: object) -> int:
        raise EnvironmentFailedError("the driver is too old")

    launch.visible_stages = fail  # type: ignore[attr-defined]
    assert sweep("--dry-run") == 0
    out = capsys.readouterr().out
    assert "K = 1" in out
    assert "the driver is too old" in out


# Small parts


def test_colour_settings_are_left_alone_where_nothing_forces_them() -> None:
    environ = {"FORCE_COLOR": "1"}
    app.settle_colour(environ)
    assert environ == {"FORCE_COLOR": "1"}
