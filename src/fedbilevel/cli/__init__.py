"""The command line: the only place that prints.

Importing this package must stay cheap (``--help`` answers in a fraction of a second), so JAX and everything that imports it
are loaded inside the commands, which are listed here.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated

import typer

from fedbilevel._version import __version__
from fedbilevel.cli import data as data_sets
from fedbilevel.cli.audit import audit, federated_audit
from fedbilevel.cli.export import export
from fedbilevel.cli.federate import approve, check, init, install, request, revoke, start, status, stop
from fedbilevel.cli.fit import fit
from fedbilevel.cli.own_data import schema
from fedbilevel.cli.predict import predict
from fedbilevel.cli.report import compare, report
from fedbilevel.cli.studies import bench, fairness, rates
from fedbilevel.cli.submit import demo, submit
from fedbilevel.cli.table1 import table1
from fedbilevel.cli.tune import federated_tune, tune

app = typer.Typer(
    name="fedbilevel",
    help="Federated bilevel optimization, and group-fair federated learning as its first application.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
about = "Fits over real sites: certificates, restarts, nothing lost."
federate = typer.Typer(name="federate", help=about, no_args_is_help=True, rich_markup_mode=None)
site = typer.Typer(name="site", help="What a site can do for itself.", no_args_is_help=True, rich_markup_mode=None)


about = "Data sets: what there is, and how to have it."
data = typer.Typer(name="data", help=about, no_args_is_help=True, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedbilevel {__version__}")
        raise typer.Exit


@app.callback()
def before(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options that stand before the command."""


for _group, _command, _example in (
    (app, table1, "table1 --splits many --out runs/many"),
    (app, rates, "rates --out runs/rates"),
    (app, bench, "bench --tasks cleaning --out runs/bench"),
    (app, fairness, "fairness --out runs/fairness --cases adult-sex --splits 20"),
    (app, schema, "schema site1.csv site2.csv --target income --sensitive sex --out schema.toml"),
    (app, fit, "fit site1.csv site2.csv --target income --sensitive sex --out runs/income"),
    (app, tune, "tune site1.csv site2.csv --target income --out runs/tuned"),
    (app, predict, "predict runs/income rows.csv > predictions.csv"),
    (app, audit, "audit site1.csv site2.csv --target income --prediction score --sensitive sex --out runs/audit"),
    (app, export, "export runs/income --onnx model.onnx --card model-card.md"),
    (app, report, "report runs/table1 --figures"),
    (app, compare, "compare runs/table1 runs/table1-grid"),
    (data, data_sets.list_all, "data list --json"),
    (data, data_sets.show, "data show heart"),
    (data, data_sets.get, "data get heart --csv sites/heart"),
    (federate, init, "federate init --site north --site south --server fl.example.org"),
    (federate, revoke, "federate revoke south --kits federation"),
    (site, request, "federate site request north"),
    (site, install, "federate site install kits/north --key north.key"),
    (site, check, "federate site check kits/north --schema schema.toml"),
    (site, approve, "federate site approve kits/north outcome-1a2b3c4d"),
    (federate, start, "federate start kits/north"),
    (federate, submit, "federate submit --kits federation --schema schema.toml --out runs/income"),
    (federate, federated_audit, "federate audit --kits federation --schema runs/audit/schema.toml --out runs/sites"),
    (federate, federated_tune, "federate tune --kits federation --schema runs/tuned/schema.toml --out runs/sites"),
    (federate, status, "federate status --kits federation"),
    (federate, stop, "federate stop kits/north"),
    (federate, demo, "federate demo --out runs/demo"),
):
    _group.command(_command.__name__.removesuffix("_all"), epilog=f"Example:  fedbilevel {_example}")(_command)
federate.add_typer(site)
app.add_typer(data)
app.add_typer(federate)


COLLECT = 50_000
"""Objects from one look for garbage to the next."""


def main() -> None:
    """Entry point: one clear sentence and exit code 2 on bad input, never a traceback."""
    # What is imported and traced stays.  To look for garbage in it as often as Python does by default takes half a second.
    gc.set_threshold(COLLECT)
    try:
        app()
    except (ValueError, TypeError, ArithmeticError, OSError, RuntimeError, ImportError) as error:
        if os.environ.get("FEDBILEVEL_TRACEBACK"):
            raise
        print(f"fedbilevel: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if (stop := _interruption(end)) is not None:
            print(f"fedbilevel: {stop or 'Stopped.'}", file=sys.stderr)
        raise


def _interruption(end: SystemExit) -> str | None:
    """What the Ctrl-C behind an exit says ("" for nothing); None if there was none.  Typer turns it into an exit code."""
    cause: BaseException | None = end
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return None
