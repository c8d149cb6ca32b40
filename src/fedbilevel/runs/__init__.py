"""A run is a folder: what was asked for, what came out, and enough to go on after being stopped at any moment.

::

    run.toml              format, command, version, when, status; the resolved configuration; the environment; the command
    rows.csv .parquet     one row a finished run           groups.csv    rates of every group
    weights.csv           learned weights                  history.csv   convergence and cost
    NAME.csv              further tables of a command: `Run.others`
    models/*.npz          one file a model                 log.txt       lines with time stamps
    parts/                results saved and not yet merged into the tables above
    lock                  held while a process writes

Every file appears whole or not at all.  A part is written before the next one starts, so a process that is killed loses the
parts it was computing and nothing else; `RunFolder.open` with the same configuration goes on from there.

What a row says, by command (columns of `ROWS` that a command does not measure are empty):

``table1``
    dataset adult | credit, split iid | noniid.  With ``--grid`` also the table ``grid``: every learning rate tried.
``bench``
    dataset is the task, split the lower level (local | global), method the algorithm; ``score``, ``solved``, ``objective``.
``fairness``
    dataset is the case (adult-sex | adult-race | credit-status), split iid | noniid, seed and split_seed the number of the
    random split; every method with its default setting, the rows set aside being the validation rows.  Tables in `Run.others`:
    ``fairness-rows`` (case, distribution, split, method, setting, default, {train,aside,test}_{accuracy,gap,gap_majority,lead},
    weights: all settings), ``fairness-table``, ``fairness-chosen``, ``fairness-fronts``, ``fairness-duels`` (the last three
    where grids were run) and ``fairness-floors``.  Another call adds cases and splits to a finished folder; its parts stay.
``rates``
    dataset is the horizon ("T = 200"), split the algorithm (fedbio | fedbioacc), method the variant, seed the number of
    the run over all problems; ``mean_square`` is the mean of ‖grad h‖^2 up to the horizon (lower is better), for the theorems'
    own step sizes beside their ``bound``, and ``late_mean_square`` that over the second half.  Tables in `Run.others`:
    ``rates-points``, ``rates-slopes``, ``rates-coverage``, ``rates-bounds``, ``rates-checks``, ``rates-communication``,
    ``rates-estimator``, ``rates-speedup``.
"""

from fedbilevel.runs.files import FORMAT, GROUPS, HISTORY, ROWS, TABLES, WEIGHTS, Run, model_file, read
from fedbilevel.runs.folder import RunFolder

__all__ = ["FORMAT", "GROUPS", "HISTORY", "ROWS", "TABLES", "WEIGHTS", "Run", "RunFolder", "model_file", "read"]
