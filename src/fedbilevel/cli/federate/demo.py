"""``fedbilevel federate demo``."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbilevel.cli.federate.parts import UP_SECONDS, LocalSteps, Seed, ended_by_signals, hushed, need_nvflare
from fedbilevel.cli.federate.submit import carry_out, tell_result
from fedbilevel.cli.terminal import AsJson, Quiet, check_folder, prepare_jax

if TYPE_CHECKING:
    from fedbilevel.jobs.federate import FederateResult
    from fedbilevel.jobs.fit import FitOptions


def demo(
    method: Annotated[
        str, typer.Option(help="fedbioacc, fedbio, fedavg, fedreg, fedminmax, fcfl, fedfb or fairfed.")
    ] = "fedbioacc",
    steps: Annotated[int, typer.Option(help="Training steps of the model.", min=1)] = 1000,
    weight_steps: Annotated[int, typer.Option(help="Steps of the bilevel stage.", min=1)] = 500,
    local_steps: LocalSteps = 5,
    rows: Annotated[int | None, typer.Option(help="Take so many of Adult's rows; all if not given.", min=300)] = None,
    seed: Seed = 0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the federation: kits, tables and logs, in OUT-federation.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/federate-demo"),
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """A whole federation on this machine: certificates, a server, three sites, one fit on Adult by sex, the page.

    The sites are real processes with files of their own, over mutual TLS on loopback.  Nothing is left running.
    """
    need_nvflare()
    check_folder(out)
    talks = not (quiet or as_json)
    prepare_jax()
    from fedbilevel.jobs.fit import FitOptions

    fit = FitOptions(
        method=method, steps=steps, weight_steps=weight_steps, local_steps=local_steps, seed=seed, compare_with=None
    )
    home = out.with_name(f"{out.name}-federation") if keep else Path(tempfile.mkdtemp(prefix="fedbilevel-demo-"))
    if keep and home.exists():
        raise ValueError(f"{home} is there already: move it away, or name another --out.")
    try:
        with ended_by_signals():
            result = _run(home, fit, rows, out, talks)
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    tell_result(result, out, as_json, quiet)
    if talks and keep:
        print(f"Kits, tables and logs are in {home}")


def _run(home: Path, fit: FitOptions, rows: int | None, out: Path, talks: bool) -> FederateResult:
    import jax

    from fedbilevel.federation.nvflare.sessions import wait_for_sites
    from fedbilevel.federation.operator import processes
    from fedbilevel.federation.operator.demo import prepare
    from fedbilevel.jobs.federate import job

    began = time.monotonic()

    def say(text: str) -> None:
        if talks:
            print(f"{time.monotonic() - began:5.1f} s  {text}", file=sys.stderr, flush=True)

    made = prepare(home, rows, fit.seed)
    sites = list(made.kits.sites)
    settings = job(fit, made.schema, sites, reply_timeout=60.0)
    say(f"certificates and kits for a server, a coordinator and the sites {', '.join(sites)}")
    environment = {
        "JAX_PLATFORMS": "cpu",
        # Sites on one machine compile the same programs, and so does the next demo.
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),  # type: ignore[attr-defined]
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    with processes.started(made.kits, environment) as running:
        with hushed():
            there = wait_for_sites(made.kits, sites, UP_SECONDS)
        if len(there) < len(sites):
            ended = [name for name, process in running.items() if process.poll() is not None]
            reason = f"{ended[0]} ended at once" if ended else f"only {', '.join(there) or 'no site'} came up"
            raise RuntimeError(f"The demo's federation did not start: {reason}; --keep keeps its logs.")
        say(f"server and {len(sites)} sites are up, over mutual TLS")
        result = carry_out(made.kits, settings, fit, made.schema, out, made.test, 120.0, not talks)
        say("trained, measured, page written")
    say("everything is stopped")
    return result
