"""Every spec under configs/ does what its comment promises, run by the command line as a newcomer runs it."""

from __future__ import annotations

import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from running import Finished, despite_noise, run, sweep

from chunktune.candidates import enumerate_candidates
from chunktune.results import Record, Verdict
from chunktune.spec import load

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("1f1b", "gpipe", "memory_bound", "micro_batch", "python", "throughput_bound", "transformer")
PREDICTED = ("costs", "llama_70b")


@cache
def ran(name: str) -> Finished:
    """A config swept once: the choice without its confirmation, which costs a second start of the workers."""
    return sweep(CONFIGS / f"{name}.toml", "--quick", "--set", "sweep.budget=60s")


def recorded(name: str) -> Record:
    return ran(name).chosen()


def verdict(name: str) -> Verdict:
    found = recorded(name).verdict
    assert found is not None
    return found


def table(name: str) -> dict[str, Any]:
    return tomllib.loads((CONFIGS / f"{name}.toml").read_text())


def stage_peaks(name: str, chunks: int) -> list[int]:
    return [stage.peak_bytes for stage in ran(name).trial(chunks).stages]


def test_every_config_is_tested_here() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.toml")) == sorted((*NAMES, *PREDICTED))


@pytest.mark.parametrize("name", PREDICTED)
def test_a_config_for_whatif_is_predicted_without_a_device(name: str) -> None:
    command = [sys.executable, "-m", "chunktune", "whatif", str(CONFIGS / f"{name}.toml"), "--print", "chunks"]
    finished = run(command)
    assert finished.returncode == 0, finished
    assert int(finished.stdout) > 1


@pytest.mark.parametrize("name", (*NAMES, *PREDICTED))
def test_a_config_is_valid_names_its_stages_and_warns_of_nothing(name: str) -> None:
    spec = load(CONFIGS / f"{name}.toml", environ={}).spec
    assert spec.pipeline.stages is not None
    assert not enumerate_candidates(spec, spec.pipeline.stages).warnings


@pytest.mark.parametrize("name", NAMES)
def test_a_config_ends_in_a_verdict_without_a_restart(name: str) -> None:
    record = recorded(name)
    assert record.status == "complete"
    assert record.group_restarts == 0
    assert verdict(name).chunks in {trial.chunks for trial in record.trials if trial.fits}


@despite_noise(ran.cache_clear)
def test_throughput_bound_stops_where_smaller_chunks_cost_more_than_the_bubble() -> None:
    found = verdict("throughput_bound")
    # The best is sqrt((K-1) c N / a) = 2.1; a slow runtime only makes chunks dearer.
    assert found.chunks in (1, 2)
    assert (found.limit, found.limit_side, found.floor) == ("throughput", "above", None)
    assert found.limit_stage is not None


@despite_noise(ran.cache_clear)
def test_memory_bound_chooses_the_last_that_fits() -> None:
    found = verdict("memory_bound")
    assert (found.chunks, found.next_chunks) == (3, 4)
    assert (found.limit, found.limit_side) == ("memory", "above")
    assert found.limit_stage in (0, 1)


def test_memory_bound_really_ran_out_and_nobody_died_of_it() -> None:
    failed = ran("memory_bound").trial(4)
    assert failed.state == "oom"
    assert failed.shortage is not None
    assert failed.shortage.where == "rehearsal"
    # An allocation of one chunk's activations failed: 2 samples x 16 MiB.
    assert failed.shortage.asked_bytes == 2 * 16 * 2**20


@despite_noise(ran.cache_clear)
def test_micro_batch_ends_on_a_plateau_and_takes_the_smallest_within_tolerance() -> None:
    found = verdict("micro_batch")
    assert found.limit == "plateau"
    assert found.chunks == found.smallest_within_tolerance
    assert found.chunks in (4, 8, 16)
    assert (found.micro_batch, found.mini_batch) == (4, 4 * found.chunks)


@pytest.mark.parametrize("name", ["transformer", "python"])
def test_a_real_model_learns_the_same_at_every_chunk_count(name: str) -> None:
    losses = [trial.loss for trial in recorded(name).trials if trial.fits]
    assert len(losses) >= 2
    assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-3)


@pytest.mark.parametrize("name", ["transformer", "python"])
def test_a_real_model_has_a_limit_that_its_comment_names(name: str) -> None:
    assert verdict(name).limit in ("throughput", "schedule", "batch", "budget")


def test_the_pair_differs_in_the_schedule_and_in_nothing_else() -> None:
    gpipe, other = table("gpipe"), table("1f1b")
    assert (gpipe["pipeline"].pop("schedule"), other["pipeline"].pop("schedule")) == ("gpipe", "1f1b")
    assert gpipe == other


@despite_noise(ran.cache_clear)
def test_the_schedule_changes_the_memory_half_of_the_verdict() -> None:
    gpipe, other = verdict("gpipe"), verdict("1f1b")
    assert (gpipe.chunks, gpipe.limit, gpipe.next_chunks) == (3, "memory", 4)
    assert (other.chunks, other.limit, other.next_chunks) == (6, "range", None)
    # GPipe keeps every chunk, 1F1B two: from M = 2 to M = 3 one keeps half as much again, the other no more.
    assert min(stage_peaks("gpipe", 3)) > 1.4 * max(stage_peaks("gpipe", 2))
    assert max(stage_peaks("1f1b", 6)) < 1.1 * max(stage_peaks("1f1b", 2))


def test_the_schedule_does_not_change_the_time_half() -> None:
    gpipe, other = ran("gpipe").trial(2), ran("1f1b").trial(2)
    assert gpipe.bubble is not None and gpipe.bubble.measured is not None
    assert other.bubble is not None and other.bubble.measured is not None
    assert gpipe.bubble.ideal == other.bubble.ideal == pytest.approx(1 / 3)
    # Two runs, so no times are compared: each idles as long as the same formula says, and then some.
    assert gpipe.bubble.measured > 0.8 / 3 and other.bubble.measured > 0.8 / 3
