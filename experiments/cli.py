"""The command line `motley`: its commands, and how every mistake and failure ends in one line and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from experiments.commands.bench import bench
from experiments.commands.calibrate import calibrate
from experiments.commands.compare import compare
from experiments.commands.demo import demo
from experiments.commands.discover import discover
from experiments.commands.experiment import experiment
from experiments.commands.explain import explain
from experiments.commands.export import export
from experiments.commands.list import list_ as list_command
from experiments.commands.loop import loop
from experiments.commands.plan import plan
from experiments.commands.report import report
from experiments.commands.run import run as run_command
from experiments.commands.simulate import simulate
from experiments.commands.sweep import sweep
from experiments.commands.testbed import testbed
from experiments.commands.validate import validate
from experiments.exits import BAD_INPUT, FAILED, INTERRUPTED, tell_error
from sim.spec.reading import InputError
from sim.spec.version import VERSION

TRACEBACK = "MOTLEY_TRACEBACK"
"""The environment variable that makes an unexpected failure show where it came from."""

USAGE_ERROR = typer.BadParameter.__mro__[1]
"""What typer raises for wrong options, commands and values; it has no public name of its own."""

app = typer.Typer(
    name="motley",
    help="Plans, simulates, runs and compares the training of large language models on mixed GPUs.",
    epilog="Example: motley demo --out results/demo. Exit codes: 0; 1 no feasible plan; 2 bad input; 3 failed while running; "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    plan,
    simulate,
    compare,
    bench,
    calibrate,
    loop,
    sweep,
    run_command,
    validate,
    demo,
    explain,
    export,
    discover,
    report,
    experiment,
):
    app.command()(command)
app.command("list")(list_command)
app.add_typer(testbed, name="testbed")


def _tells_interrupts(command: Callable[..., Any] | None) -> Callable[..., Any]:
    """A command that says so when Ctrl-C ends it; typer makes of it an exit code alone."""
    assert command is not None

    @wraps(command)
    def called(*arguments: object, **options: object) -> object:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            tell_error("interrupted")
            raise typer.Exit(INTERRUPTED) from None

    return called


for entry in (*app.registered_commands, *testbed.registered_commands):
    entry.callback = _tells_interrupts(entry.callback)


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(f"motley {VERSION}")
        raise typer.Exit


@app.callback()
def _motley(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True, show_default=False)
    ] = False,
) -> None:
    """Plans, simulates, runs and compares the training of large language models on mixed GPUs."""


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command line with these arguments, or with those of the process. Every error is one line."""
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="motley", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InputError as error:
        tell_error(f"error: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:  # before a command has begun
        tell_error("interrupted")
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # typer makes the first into the second
        # The reader of the output has gone, as `head` does. What is still buffered must not fail again at the end.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if isinstance(error, USAGE_ERROR):
            message = error.format_message()  # type: ignore[attr-defined]
            if message:  # without any argument, the help is all there is to say
                tell_error(f"error: {message}")
            return BAD_INPUT
        if os.environ.get(TRACEBACK):
            raise
        if isinstance(error, OSError):
            tell_error(f"error: {_os_error_text(error)}")
        elif isinstance(error, MemoryError):
            tell_error("error: the memory of this machine ran out")
        else:
            tell_error(f"error: unexpected {type(error).__name__}: {error} (with {TRACEBACK}=1 it shows where)")
        return FAILED


def _os_error_text(error: OSError) -> str:
    """What the operating system did not do, with the file's name first, as in all other errors."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror.lower()}"


if __name__ == "__main__":
    sys.exit(run())
