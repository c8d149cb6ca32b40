"""A run is a folder: what was asked for, what came out, and enough to go on after being stopped at any moment.

::

    run.toml              format, command, version, when, status; the resolved configuration; the environment; the command
    rows.csv .parquet     one row a finished run           groups.csv    rates of every group
    weights.csv           learned weights                  history.csv   convergence and cost
    models/*.npz          one file a model                 log.txt       lines with time stamps
    parts/                results saved and not yet merged into the tables above
    lock                  held while a process writes

Every file appears whole or not at all.  A part is written before the next one starts, so a process that is killed loses the
parts it was computing and nothing else; `RunFolder.open` with the same configuration goes on from there.
"""

from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.reading import FORMAT, Run, model_file, read
from fedbilevel.runs.tables import GROUPS, HISTORY, ROWS, TABLES, WEIGHTS
from fedbilevel.runs.toml import toml_text

__all__ = [
    "FORMAT",
    "GROUPS",
    "HISTORY",
    "ROWS",
    "TABLES",
    "WEIGHTS",
    "Run",
    "RunFolder",
    "model_file",
    "read",
    "toml_text",
]
