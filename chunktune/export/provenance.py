"""Where an export comes from and how far it can be trusted: the lines of its head comment and its warnings. Pure."""

from __future__ import annotations

from chunktune import __version__
from chunktune.export.settings import Framework, Translation, Version
from chunktune.export.values import Values
from chunktune.report import plain
from chunktune.results import Record, Verdict


def caveats(record: Record, verdict: Verdict) -> tuple[str, ...]:
    """Why the choice in a record may not hold, a sentence each."""
    found = []
    if record.mode == "predicted":
        found.append("the record is a prediction: nothing was measured; chunktune sweep measures")
    if record.mode == "rehearsed":
        found.append("the record is a rehearsal: the pipeline between the stages was simulated, not run")
    if record.quick:
        found.append("the record is of a quick sweep: it measured less and confirmed nothing")
    if record.status != "complete":
        found.append(f"the sweep of the record was {record.status}; what it had not tried is not in the choice")
    if verdict.confidence == "unclear":
        reasons = "; ".join(plain(reason) for reason in verdict.confidence_reasons)
        found.append("the choice is unclear" + (f": {reasons}" if reasons else ""))
    return tuple(found)


def head_lines(
    name: str, record: Record, verdict: Verdict, values: Values, framework: Framework, version: Version
) -> tuple[str, ...]:
    """What stands at the top of every file. `name`: what people call the record."""
    cut = f"K = {values.stages}, V = {values.virtual_stages}, schedule {values.schedule}"
    recompute = "full" if values.recompute else "none"
    tokens = f", {values.sequence} tokens a sample" if values.sequence is not None else ""
    return (
        f"{framework.title} {version}, written by chunktune {__version__} from the record {name}",
        f"({record.mode}, begun {record.started_at}).",
        f"M = {values.chunks} chunks of b = {values.micro_batch}: N = {values.mini_batch} samples a pipeline and step,"
        f" {values.global_batch} over D = {values.replicas}.",
        f"{cut}, recompute {recompute}, optimizer {values.optimizer}, precision {values.precision}{tokens}.",
        f"limit {verdict.limit}, from {verdict.limit_side}; confidence {verdict.confidence}.",
    )


def noted(warnings: tuple[str, ...], translation: Translation) -> tuple[str, ...]:
    """Everything that has to be said with an export, marked as what it is."""
    return (
        *(f"warning: {text}" for text in warnings),
        *(f"not translated: {text}" for text in translation.untranslated),
        *(f"note: {text}" for text in translation.remarks),
    )
