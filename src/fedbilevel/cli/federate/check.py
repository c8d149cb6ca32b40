"""``fedbilevel federate site check``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbilevel.cli.federate.parts import KitFolder, Metric, need_nvflare, tell
from fedbilevel.cli.terminal import AsJson, Quiet, prepare_jax


def check(
    kit: KitFolder,
    schema: Annotated[Path | None, typer.Option(help="The schema of the run to come, from its coordinator.")] = None,
    method: Annotated[str, typer.Option(help="The method of the run to come.")] = "fedbioacc",
    formulation: Annotated[str, typer.Option(help="cells or paper; for fedbioacc and fedbio.")] = "cells",
    metric: Metric = "equal_opportunity",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Would this site take part, and what would leave it?

    Looks at the kit's certificate and rules, reads the table by the schema under the site's own policy, does one local step
    of each stage, and lists everything that would have been sent.  Nothing is sent.
    """
    need_nvflare()
    from fedbilevel.federation.operator.kits import check_dates, loosened, open_kit
    from fedbilevel.federation.protocol.policy import FILE, read_policy

    if schema is None:
        raise ValueError("--schema is missing: name the schema file the coordinator sent.")
    opened = open_kit(kit, "site")
    warnings = [*filter(None, [check_dates(opened)]), *loosened(opened)]
    policy = read_policy(opened.folder / "local")
    source = policy.source
    if source.table is None:
        raise ValueError(f"{opened.folder / 'local' / FILE} names no table: fill in [data], table and columns.")
    prepare_jax()
    from fedbilevel.federation.operator.rehearsal import rehearse
    from fedbilevel.jobs.federate import job
    from fedbilevel.jobs.fit import FitOptions
    from fedbilevel.tables.reading import open_table
    from fedbilevel.tables.schema import Schema

    table, meaning = open_table(source.table), Schema.read(schema)
    table.check_columns(source.columns)
    fit = FitOptions(method=method, formulation=formulation, metric=metric, compare_with=None)
    left, said = rehearse(opened.name, job(fit, meaning, [opened.name]), policy)
    if policy.privacy is None:
        warnings.append("Replies leave without noise: [privacy] in local/fedbilevel.toml would add it.")
    until = f"{opened.until:%Y-%m-%d}"

    def shown() -> Iterator[str | tuple[str, Any]]:
        import pandas as pd

        title = "What would leave this site (one round a stage; training repeats work)"
        yield title, pd.DataFrame(left, columns=["when", "what", "shape", "bytes"])
        yield f"{opened.name} would take part: {source.table} fits {schema}."
        yield f"It connects to {opened.address}; its certificate is good until {until}."
        yield from (f"Note: {warning}" for warning in warnings)

    told = {
        "site": opened.name, "server": opened.address, "until": until, "warnings": warnings,
        "table": str(source.table), "columns": list(source.columns), "tell": list(policy.tell),
        "left": [thing._asdict() for thing in left], "said": said,
    }  # fmt: skip
    tell(as_json, quiet, told, shown())
