"""``fedbilevel federate``: the same fit over real sites.  One file a group of commands; listed here."""

from __future__ import annotations

import typer

from fedbilevel.cli.federate.check import check
from fedbilevel.cli.federate.demo import demo
from fedbilevel.cli.federate.init import init
from fedbilevel.cli.federate.processes import start, status, stop
from fedbilevel.cli.federate.submit import submit

app = typer.Typer(
    name="federate",
    help="The same fit over real sites: certificates, restarts, nothing lost.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
site = typer.Typer(name="site", help="What a site can do for itself.", no_args_is_help=True, rich_markup_mode=None)

app.command(epilog="Example:  fedbilevel federate init --site north --site south --server fl.example.org")(init)
site.command(epilog="Example:  fedbilevel federate site check kits/north --schema schema.toml")(check)
app.add_typer(site)
app.command(epilog="Example:  fedbilevel federate start kits/north")(start)
app.command(epilog="Example:  fedbilevel federate submit --kits federation --schema schema.toml --out runs/income")(
    submit
)
app.command(epilog="Example:  fedbilevel federate status --kits federation")(status)
app.command(epilog="Example:  fedbilevel federate stop kits/north")(stop)
app.command(epilog="Example:  fedbilevel federate demo --out runs/demo")(demo)


@site.callback()
def about_sites() -> None:
    """Makes ``site`` a group of commands even while it has one."""
