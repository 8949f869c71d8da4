"""The command line: the commands, and the one place that turns errors into messages and exit codes.

    0  an M was chosen        4  a check failed
    1  a bug                  5  inconclusive under --strict
    2  usage or spec          6  the environment or the user's code failed
    3  no M is feasible       130 / 143  interrupted or terminated

Neither torch nor pandas is imported here: help has to be quick.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import MutableMapping, Sequence
from typing import Annotated

import typer
from typer.main import get_command

from chunktune import __version__
from chunktune.cli import interrupts
from chunktune.cli.check import EXAMPLES as CHECK_EXAMPLES
from chunktune.cli.check import check
from chunktune.cli.completion import join_bash_words
from chunktune.cli.doctor import EXAMPLES as DOCTOR_EXAMPLES
from chunktune.cli.doctor import doctor
from chunktune.cli.export import EXAMPLES as EXPORT_EXAMPLES
from chunktune.cli.export import export
from chunktune.cli.history import EXAMPLES as HISTORY_EXAMPLES
from chunktune.cli.history import history
from chunktune.cli.init import EXAMPLES as INIT_EXAMPLES
from chunktune.cli.init import init
from chunktune.cli.outputs import tell
from chunktune.cli.report import EXAMPLES as REPORT_EXAMPLES
from chunktune.cli.report import report as report_command
from chunktune.cli.schema import EXAMPLES as SCHEMA_EXAMPLES
from chunktune.cli.schema import schema
from chunktune.cli.sweep import leads, sweep
from chunktune.cli.validate import validate
from chunktune.cli.whatif import EXAMPLES, whatif
from chunktune.errors import ChunktuneError, InterruptedSweepError, UsageError, UserCodeError
from chunktune.units import shorten

INTERNAL_ERROR = 1
USAGE_ERROR = 2
_INTERRUPTED = 130
_RANK_0_SPEAKS_S = 5.0

# The base of everything that typer raises about a command line; it has no public name of its own.
_TyperUsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="chunktune",
    help="Choose the chunk count M (micro-batches) of a pipeline-parallel training step by running it.",
    epilog="Example: chunktune sweep spec.toml --stages 4 --schedule gpipe",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("sweep")(sweep)
app.command("whatif", epilog=EXAMPLES)(whatif)
app.command("validate")(validate)
app.command("report", epilog=REPORT_EXAMPLES)(report_command)
app.command("history", epilog=HISTORY_EXAMPLES)(history)
app.command("check", epilog=CHECK_EXAMPLES)(check)
app.command("export", epilog=EXPORT_EXAMPLES)(export)
app.command("doctor", epilog=DOCTOR_EXAMPLES)(doctor)
app.command("init", epilog=INIT_EXAMPLES)(init)
app.command("schema", epilog=SCHEMA_EXAMPLES)(schema)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chunktune {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Choose the chunk count M (micro-batches) of a pipeline-parallel training step by running it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    settle_colour(os.environ)
    join_bash_words(os.environ)
    try:
        code = get_command(app)(args=given, prog_name="chunktune", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        lost = interrupts.seen() and not isinstance(error, ChunktuneError)
        return report(KeyboardInterrupt() if lost else error, debug="--debug" in given)
    if code == _INTERRUPTED:
        print("error: interrupted", file=sys.stderr)  # typer makes an exit code of Ctrl-C, and says nothing
    return code if isinstance(code, int) else 0


def report(error: BaseException, *, debug: bool) -> int:
    """Say on stderr what went wrong, with a traceback only under --debug; the result is the exit code."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    message, code = _explain(error)
    if isinstance(error, (UsageError, UserCodeError)) and not leads(os.environ):
        # Every rank of the user's torchrun found the same; rank 0 says it, unless the agent ends it before.
        time.sleep(_RANK_0_SPEAKS_S)
        return code
    tell(message)
    return code


def settle_colour(environ: MutableMapping[str, str]) -> None:
    """Keep typer from colouring where nobody asked: it takes GITHUB_ACTIONS for a terminal, and half of NO_COLOR.

    FORCE_COLOR still forces; otherwise colour goes to terminals only.
    """
    if environ.get("NO_COLOR") or (environ.get("GITHUB_ACTIONS") and not environ.get("FORCE_COLOR")):
        environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"


def _explain(error: BaseException) -> tuple[str, int]:
    if isinstance(error, ChunktuneError):
        return f"error: {error}", error.exit_code
    if isinstance(error, _TyperUsageError):
        return f"error: {_usage(error)}", USAGE_ERROR
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "error: interrupted", InterruptedSweepError("").exit_code
    text = shorten(str(error).strip().partition("\n")[0], 300)
    return f"internal error: {type(error).__name__}: {text}; run again with --debug", INTERNAL_ERROR


def _usage(error: Exception) -> str:
    """typer's message, and where to read on."""
    wording = getattr(error, "format_message", error.__str__)()
    command = getattr(getattr(error, "ctx", None), "command_path", "chunktune")
    return f"{wording}\nrun '{command} --help' for its options"
