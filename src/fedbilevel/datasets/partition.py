"""Who holds which rows: clients, train and test, group-balanced validation. Pure functions of a seed.

Every function but two returns arrays of row numbers, sorted within each array: `folds` says of every row which fold it is
in, and the last step, `client_batches`, returns the rows themselves. The same seed gives the same rows on every machine,
and different functions draw different numbers from the same seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.tables.columns import check_lengths, encode_groups, shown

Rows = NDArray[np.int64]
Batch = dict[str, NDArray[Any]]

# A group gives at most this share of a client's rows of it to the validation set: the training part must keep it too.
_LARGEST_GROUP_SHARE = 0.5
# Redraws before `dirichlet` gives up on giving every client enough rows.
_DIRICHLET_TRIES = 1000


class ValidationSplit(NamedTuple):
    """Each client's rows, divided into training and validation.

    Attributes:
        train: per client, the rows left for training.
        validation: per client, the validation rows; none of them is among the client's training rows.
        per_group: per client, how many validation rows each group has that is not in `absent`.
        absent: per client, the groups that are not in its validation set.
    """

    train: list[Rows]
    validation: list[Rows]
    per_group: list[int]
    absent: list[list[Any]]


def iid(rows: int, clients: int = 3, *, seed: int = 0) -> list[Rows]:
    """`rows` rows dealt at random to `clients` clients; their sizes differ by one at most.

    Examples:
        >>> [len(part) for part in iid(11, 3)]
        [4, 4, 3]
    """
    _check_clients(clients, rows)
    order = _generator("iid", seed).permutation(rows)
    return [np.sort(part) for part in np.array_split(order, clients)]


def group_shares(sensitive: Any, shares: Sequence[float] = (2, 2, 6), *, seed: int = 0) -> list[Rows]:
    """The paper's non-I.I.D clients: each group is cut into `shares`, which are dealt at random, one to a client.

    There are as many clients as shares. Each share is within one row of its exact size. A group with fewer rows than
    there are clients is missing at some of them, and a client that nothing was dealt to is an error.
    """
    exact = np.asarray(shares, dtype=np.float64)
    if exact.ndim != 1 or exact.size == 0 or not np.isfinite(exact).all() or (exact <= 0).any():
        raise ValueError(f"shares={shares!r} must be positive numbers, one for each client.")
    codes, _ = encode_groups(sensitive, name="sensitive")
    _check_clients(exact.size, codes.size)
    generator = _generator("group_shares", seed)
    owner = np.empty(codes.size, dtype=np.int64)
    for members in _members(codes):
        sizes = apportion(members.size, exact)
        dealt_to = generator.permutation(exact.size)
        owner[generator.permutation(members)] = np.repeat(dealt_to, sizes)
    parts = [np.flatnonzero(owner == client) for client in range(exact.size)]
    if any(part.size == 0 for part in parts):
        raise ValueError(f"shares={shares!r}: {codes.size} rows in these groups leave a client without any.")
    return parts


def dirichlet(
    column: Any, clients: int = 3, *, concentration: float = 0.5, smallest: int = 1, seed: int = 0
) -> list[Rows]:
    """Clients that differ in `column` (labels or groups): each value's rows are spread by a Dirichlet draw.

    A small `concentration` makes clients that hold one value mostly, a large one makes them alike. The draw is repeated
    until every client has at least `smallest` rows.
    """
    if not (np.isfinite(concentration) and concentration > 0):
        raise ValueError(f"concentration={concentration!r} must be a positive number.")
    codes, _ = encode_groups(column, name="column")
    _check_clients(clients, codes.size)
    if smallest < 1 or smallest * clients > codes.size:
        raise ValueError(f"smallest={smallest!r}: {clients} clients cannot have that many rows each of {codes.size}.")
    generator = _generator("dirichlet", seed)
    members = _members(codes)
    for _ in range(_DIRICHLET_TRIES):
        # With a tiny concentration a draw can underflow to zeros or not-a-number; it is repeated.
        shares = [generator.dirichlet(np.full(clients, concentration)) for _ in members]
        if not all(np.isfinite(share).all() and share.sum() > 0 for share in shares):
            continue
        sizes = [apportion(rows.size, share) for rows, share in zip(members, shares, strict=True)]
        if np.sum(sizes, axis=0).min() >= smallest:
            owner = np.empty(codes.size, dtype=np.int64)
            for rows, size in zip(members, sizes, strict=True):
                owner[generator.permutation(rows)] = np.repeat(np.arange(clients), size)
            return [np.flatnonzero(owner == client) for client in range(clients)]
    raise ValueError(
        f"No draw gave each of {clients} clients {smallest} row(s) with concentration={concentration}; "
        "raise the concentration or lower the number of clients."
    )


def by_column(column: Any) -> list[Rows]:
    """Real sites: one client for each value of `column`, in sorted order of the values."""
    codes, _ = encode_groups(column, name="clients")
    return _members(codes)


def train_test_split(sensitive: Any, *, test_share: float = 0.3, seed: int = 0) -> tuple[Rows, Rows]:
    """Training and test rows with the same group proportions, each group within one row of its exact share.

    The test part has `test_share` of all rows, rounded, and every group keeps at least one row in the training part.
    To keep the proportions of the labels as well, pass the groups and the labels as the two columns of a table.
    """
    if not 0 < test_share < 1:
        raise ValueError(f"test_share={test_share!r} must lie between 0 and 1.")
    codes, _ = encode_groups(sensitive, name="sensitive")
    members = _members(codes)
    sizes = np.array([rows.size for rows in members])
    exact = sizes * test_share
    wanted = _round_up_largest(exact, total=round(float(exact.sum())))
    taken = np.minimum(wanted, sizes - 1)
    if taken.sum() == 0:
        raise ValueError(f"test_share={test_share!r} of {codes.size} rows in {sizes.size} groups leaves no test rows.")
    generator = _generator("train_test_split", seed)
    test = np.concatenate([generator.permutation(rows)[:count] for rows, count in zip(members, taken, strict=True)])
    is_test = np.zeros(codes.size, dtype=bool)
    is_test[test] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def folds(cells: Any, count: int, *, seed: int = 0) -> Rows:
    """Which of ``count`` folds every row is in: each value of ``cells`` shuffled and dealt round, going on where the last
    stopped."""
    codes = np.asarray(cells, np.int64)
    order = np.random.default_rng([seed, count]).permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    owner = np.empty(len(codes), np.int64)
    owner[order] = np.arange(len(codes)) % count
    return owner


def balanced_validation(
    sensitive: Any,
    parts: Sequence[Rows],
    *,
    size: float = 0.2,
    repeat: bool = False,
    absent: str = "skip",
    seed: int = 0,
) -> ValidationSplit:
    """From each client's rows a validation set with equally many rows of every group; the rest stays for training.

    Args:
        sensitive: the group of every row of the table.
        parts: each client's rows.
        size: how large the validation set is to be: a share of the client's rows if below 1, else a number of rows.
        repeat: what to do when the client's smallest group cannot fill its part. False: all groups get as few rows as
            that group can give. True: a group's validation rows are repeated until the part is full.
        absent: the rule for a client that lacks a group. "skip": its set is balanced over the groups it has, and the
            others are listed in the answer. "error": refuse.
        seed: of the draw.

    No group gives more than half of its rows at a client, so each stays in the training part as well. A group with one
    row at a client cannot be in both parts: it counts as absent there, and its row is for training.
    """
    if not (np.isfinite(size) and size > 0):
        raise ValueError(f"size={size!r} must be a share below 1 or a number of rows.")
    if absent not in ("skip", "error"):
        raise ValueError(f"absent={absent!r} is unknown; choose 'skip' or 'error'.")

    def draw(generator: np.random.Generator, present: list[Rows], rows: int) -> list[Rows]:
        wanted = max(1, int(size * rows if size < 1 else size) // len(present))
        can_give = [max(1, int(members.size * _LARGEST_GROUP_SHARE)) for members in present]
        per_group = wanted if repeat else min(wanted, *can_give)
        held = [
            generator.permutation(members)[: min(per_group, n)] for members, n in zip(present, can_give, strict=True)
        ]
        return [np.resize(members, per_group) for members in held]

    return _validation("balanced_validation", sensitive, parts, seed, draw, refuse_absent=absent == "error")


def proportional_validation(
    sensitive: Any, parts: Sequence[Rows], *, share: float = 0.2, seed: int = 0
) -> ValidationSplit:
    """From each client's rows `share` of every group, rounded to at least one row; not balanced.

    For outer losses that average within groups themselves: they use many more rows than a balanced set can hold. The
    rule for a group with one row at a client is that of `balanced_validation`. `per_group` holds the smallest group's.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share!r} must lie between 0 and 1.")

    def draw(generator: np.random.Generator, present: list[Rows], _: int) -> list[Rows]:
        counts = [min(max(1, round(share * members.size)), members.size - 1) for members in present]
        return [generator.permutation(members)[:count] for members, count in zip(present, counts, strict=True)]

    return _validation("proportional_validation", sensitive, parts, seed, draw)


def client_batches(
    features: NDArray[Any], labels: Any, groups: NDArray[np.integer[Any]], split: ValidationSplit
) -> list[tuple[Batch, Batch]]:
    """Per client its training and validation arrays, as `ClientData.from_clients` takes them.

    Each is a dict: "features" float32 [rows, columns], "labels" float32 [rows], "groups" int32 [rows].

    Args:
        features: the encoded matrix of all rows.
        labels: 0 or 1 for every row.
        groups: the group code of every row, 0 to K-1; see `tables.encode_groups`.
        split: who holds which rows; see `partition.balanced_validation`.

    Returns:
        A pair (training, validation) for each client, as dictionaries of arrays.

    Raises:
        ValueError: Features are not a matrix, or not finite, or labels are not 0 and 1.
        TypeError: Groups are not whole numbers.
    """
    matrix = np.asarray(features, dtype=np.float32)
    if matrix.ndim != 2:
        raise ValueError(f"features must be a matrix [rows, columns], but its shape is {matrix.shape}.")
    target = np.asarray(labels, dtype=np.float32)
    codes = np.asarray(groups)
    if codes.dtype.kind not in "iu":
        raise TypeError(f"groups must be whole-number codes, not {codes.dtype}; make them with tables.encode_groups.")
    check_lengths(features=matrix, labels=target, groups=codes)
    if not np.isfinite(matrix).all():
        raise ValueError("features holds values that are not finite; fill missing values in before encoding.")
    if not np.isin(target, (0.0, 1.0)).all():
        raise ValueError("labels must hold 0 and 1 only.")

    def rows(index: NDArray[np.int64]) -> Batch:
        return {"features": matrix[index], "labels": target[index], "groups": codes[index].astype(np.int32)}

    return [(rows(train), rows(val)) for train, val in zip(split.train, split.validation, strict=True)]


def apportion(total: int, shares: Any) -> NDArray[np.int64]:
    """`total` things divided like `shares` (largest remainders): every part within one of its exact size."""
    weights = np.asarray(shares, dtype=np.float64)
    return _round_up_largest(total * (weights / weights.sum()), total=total)


def _validation(
    function: str,
    sensitive: Any,
    parts: Sequence[Rows],
    seed: int,
    draw: Callable[[np.random.Generator, list[Rows], int], list[Rows]],
    refuse_absent: bool = False,
) -> ValidationSplit:
    """``draw`` says which rows of each group a client validates with, given its groups of two rows and more, and its rows."""
    codes, names = encode_groups(sensitive, name="sensitive")
    _check_parts(parts, codes.size)
    generator = _generator(function, seed)
    split = ValidationSplit([], [], [], [])
    for client, part in enumerate(parts):
        members = [part[codes[part] == code] for code in range(len(names))]
        lacking = [name for name, rows in zip(names, members, strict=True) if rows.size < 2]
        if len(lacking) == len(names):
            raise ValueError(
                f"Client {client} has {part.size} row(s) and no group with two of them, one to train on and one to "
                "validate with; give it more rows or leave it out."
            )
        if lacking and refuse_absent:
            raise ValueError(f"Client {client} has fewer than two rows of the group {shown(lacking[0])}.")
        held = draw(generator, [rows for rows in members if rows.size >= 2], part.size)
        validation = np.sort(np.concatenate(held))
        split.train.append(np.setdiff1d(part, validation))
        split.validation.append(validation)
        split.per_group.append(min(rows.size for rows in held))
        split.absent.append(lacking)
    return split


def _round_up_largest(exact: NDArray[np.float64], *, total: int) -> NDArray[np.int64]:
    whole = np.floor(exact).astype(np.int64)
    upwards = np.argsort(-(exact - whole), kind="stable")[: max(0, total - int(whole.sum()))]
    whole[upwards] += 1
    return whole


def _members(codes: NDArray[np.int32]) -> list[Rows]:
    return [np.flatnonzero(codes == code) for code in range(int(codes.max(initial=-1)) + 1)]


def _generator(function: str, seed: int) -> np.random.Generator:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed={seed!r} must be a whole number, 0 or larger.")
    return np.random.default_rng([zlib.crc32(function.encode()), int(seed)])


def _check_clients(clients: int, rows: int) -> None:
    if clients < 1:
        raise ValueError(f"clients={clients!r} must be at least 1.")
    if rows < clients:
        raise ValueError(f"{rows} row(s) cannot be dealt to {clients} clients; every client needs at least one.")


def _check_parts(parts: Sequence[Rows], rows: int) -> None:
    if len(parts) == 0:
        raise ValueError("parts is empty: there are no clients.")
    together = np.concatenate(parts)
    if together.size and (together.min() < 0 or together.max() >= rows):
        raise ValueError(f"parts names row {together.max()}, but the sensitive column has {rows} rows.")
    if np.unique(together).size < together.size:
        raise ValueError("parts gives a row to two clients; every row belongs to one.")
