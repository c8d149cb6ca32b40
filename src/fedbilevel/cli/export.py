"""``fedbilevel export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbilevel.cli.options import AsJson, Quiet
from fedbilevel.cli.terminal import tell


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A folder made by fit, or a model file.")],
    onnx: Annotated[Path | None, typer.Option(help="Write the model as an ONNX graph to this file.")] = None,
    inputs: Annotated[
        str, typer.Option(help="What the graph takes: columns (of the table, as they are) or features (encoded).")
    ] = "columns",
    card: Annotated[Path | None, typer.Option(help="Write the model card, Markdown, to this file.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model of the folder; the fitted one if not given.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a trained model as an ONNX graph, and a model card.

    The graph holds the encoding too.  If onnxruntime is installed, the command first runs the graph on made-up rows; it must
    agree with the model to 1e-6.
    """
    if onnx is None and card is None:
        raise ValueError("--onnx or --card is missing: name a file to write.")
    from fedbilevel.jobs.export import named_model, need_onnx, write_onnx

    if onnx is not None:
        need_onnx()
    told: dict[str, object] = {}
    shown = []
    if card is not None:
        from fedbilevel.report.card import write

        if not source.is_dir():
            raise ValueError(f"--card needs the run folder that {source} is from: it tells of data and results.")
        told["card"] = str(write(source, card))
        shown.append(f"The model card is in {card}")
    if onnx is not None:
        difference = write_onnx(named_model(source, model), onnx, inputs)
        checked = (
            "not run: onnxruntime is not installed" if difference is None else f"largest difference {difference:.1e}"
        )
        told |= {"onnx": str(onnx), "difference": difference}
        shown.append(f"The graph is in {onnx} (checked with onnxruntime: {checked})")
    tell(as_json, quiet, told, shown)
