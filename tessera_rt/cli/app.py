"""The command line: `tessera train | plan | check | simulate | show | profile | models | doctor | kernels | bench`.

Planning commands never load torch; the others load it when they run.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tessera_rt import __version__
from tessera_rt.cli.bench import app as bench
from tessera_rt.cli.info import DOCTOR_EXAMPLES, MODELS_EXAMPLES, doctor, models
from tessera_rt.cli.kernels import app as kernels
from tessera_rt.cli.output import EXIT_CODES, exit_code, report, report_system
from tessera_rt.cli.plan import CHECK_EXAMPLES, PLAN_EXAMPLES, check, plan
from tessera_rt.cli.run import PROFILE_EXAMPLES, TRAIN_EXAMPLES, profile, train
from tessera_rt.cli.show import SHOW_EXAMPLES, show
from tessera_rt.cli.simulate import SIMULATE_EXAMPLES, simulate
from tessera_rt.errors import TesseraError


class _Commands(TyperGroup):
    """Errors of ours end a command with their text on stderr and their code, whoever calls it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TesseraError as error:
            report(error)
            raise typer.Exit(exit_code(error)) from None
        except BrokenPipeError:  # whoever read our output has gone: typer ends the command quietly
            raise
        except OSError as fault:
            raise typer.Exit(report_system(fault)) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 110},
    help="Tessera plans and runs pipeline- and expert-parallel training of mixture-of-experts models.",
    epilog=EXIT_CODES,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tessera {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    return


for _command, _short, _text in (
    (train, "Train a model by a plan.", TRAIN_EXAMPLES),
    (plan, "Plan the training of a model.", PLAN_EXAMPLES),
    (check, "Check a plan file.", CHECK_EXAMPLES),
    (simulate, "Simulate one step of a plan and draw it.", SIMULATE_EXAMPLES),
    (show, "Show a plan, or what a run measured against it.", SHOW_EXAMPLES),
    (profile, "Measure what every task takes on this machine.", PROFILE_EXAMPLES),
    (models, "List the models that come with Tessera.", MODELS_EXAMPLES),
    (doctor, "Say whether this machine has what Tessera needs.", DOCTOR_EXAMPLES),
):
    app.command(help=_text, short_help=_short)(_command)
app.add_typer(kernels, name="kernels")
app.add_typer(bench, name="bench")


def main() -> None:
    """The console script `tessera`."""
    app()


if __name__ == "__main__":
    main()
