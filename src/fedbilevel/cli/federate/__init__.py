"""``fedbilevel federate``: the same fit over real sites.  One file a group of commands; listed here."""

from __future__ import annotations

import typer

from fedbilevel.cli.federate.check import check
from fedbilevel.cli.federate.demo import demo
from fedbilevel.cli.federate.init import init
from fedbilevel.cli.federate.processes import start, status, stop
from fedbilevel.cli.federate.submit import submit

about = "The same fit over real sites: certificates, restarts, nothing lost."
app = typer.Typer(name="federate", help=about, no_args_is_help=True, rich_markup_mode=None)
site = typer.Typer(name="site", help="What a site can do for itself.", no_args_is_help=True, rich_markup_mode=None)
site.callback()(lambda: None)  # a group of commands even while it has one
app.add_typer(site)
for group, command, example in (
    (app, init, "init --site north --site south --server fl.example.org"),
    (site, check, "site check kits/north --schema schema.toml"),
    (app, start, "start kits/north"),
    (app, submit, "submit --kits federation --schema schema.toml --out runs/income"),
    (app, status, "status --kits federation"),
    (app, stop, "stop kits/north"),
    (app, demo, "demo --out runs/demo"),
):
    group.command(epilog=f"Example:  fedbilevel federate {example}")(command)
