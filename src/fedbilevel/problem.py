"""The problem (two losses) and the data (one set per client), with the checks that run before anything is compiled.

minimise over x   1/M sum_m f_m(x, y_m(x))     subject to     y_m(x) = argmin over y of g_m(x, y)          (local)
minimise over x   1/M sum_m f_m(x, y(x))       subject to     y(x) = argmin over y of 1/M sum_m g_m(x, y)  (global)
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.calculus import Loss, Remembered, Tree
from fedbilevel.hints import hint
from fedbilevel.linear import LinearInner


@dataclass(frozen=True)
class BilevelProblem:
    """Two losses ``(outer, inner, batch) -> scalar`` and where to start.

    ``inner_loss`` (g) is evaluated on training rows, ``outer_loss`` (f) on validation rows; ``init(key)`` returns
    ``(outer, inner)``, any trees of float arrays; ``project`` maps the outer variable back into its set X after every
    update.  ``linear`` declares that the inner loss is a weighted generalised linear model, see `linear_problem`.
    ``lower_level``: whether every client has an inner variable of its own ("local") or all share one, the minimiser of
    the clients' mean inner loss ("global").  Every algorithm says which of the two it solves.

    Attributes:
        inner_loss: g, ``(outer, inner, training rows) -> scalar``; strongly convex in ``inner``.
        outer_loss: f, ``(outer, inner, validation rows) -> scalar``.
        init: key -> ``(outer, inner)``, any trees of float arrays.
        project: outer -> outer, into the set X; None: no bounds.
        linear: What `linear_problem` declares; None otherwise.
        lower_level: "local" or "global".

    Raises:
        ValueError: ``lower_level`` is another word.
        TypeError: A loss or ``init`` is not a function.

    Examples:
        >>> import fedbilevel as fb, jax.numpy as jnp
        >>> problem = fb.BilevelProblem(
        ...     inner_loss=lambda x, y, batch: jnp.mean((batch["a"] @ y - batch["b"]) ** 2) + jnp.exp(x) * jnp.sum(y**2),
        ...     outer_loss=lambda x, y, batch: jnp.mean((batch["a"] @ y - batch["b"]) ** 2),
        ...     init=lambda key: (jnp.zeros(()), jnp.zeros(3)),
        ... )
    """

    inner_loss: Loss
    outer_loss: Loss
    init: Callable[[jax.Array], tuple[Tree, Tree]]
    project: Callable[[Tree], Tree] | None = None
    linear: LinearInner | None = None
    lower_level: str = "local"

    def __post_init__(self) -> None:
        if self.lower_level not in ("local", "global"):
            raise ValueError(f"lower_level must be 'local' or 'global', not {self.lower_level!r}.")
        for name in ("inner_loss", "outer_loss", "init"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function, not {type(getattr(self, name)).__name__}.")

    def into_set(self, outer: Tree) -> Tree:
        return outer if self.project is None else self.project(outer)

    def start(self, key: jax.Array) -> tuple[Tree, Tree]:
        """Where algorithms start: what ``init`` says, in the set."""
        outer, inner = jax.tree.map(jnp.asarray, self.init(key))
        return self.into_set(outer), inner

    def check(self, data: ClientData, batch_size: int | None, outer_batch_size: int | None) -> None:
        """Evaluate shapes only: nothing is computed or compiled."""
        if data.val is None:
            raise ValueError(
                "A bilevel problem needs validation rows for its outer loss: pass val= to ClientData (the training rows "
                "again, if the two losses share their data)."
            )
        data.check_batch("train", batch_size)
        data.check_batch("val", outer_batch_size)
        start = shapes_of(self.init, "init", jax.random.key(0))
        if not (isinstance(start, tuple) and len(start) == 2):
            raise TypeError("init must return a pair (outer, inner).")
        for name, tree in zip(("outer", "inner"), start, strict=True):
            check_variable(name, tree)
        for name, part in (("inner_loss", "train"), ("outer_loss", "val")):
            check_loss(name, getattr(self, name), (*start, data.example(part)))
        if self.project is not None:
            projected = shapes_of(self.project, "project", start[0])
            if _signature(projected) != _signature(start[0]):
                raise ValueError(
                    f"project must return the outer variable's own shapes {_signature(start[0])}, not {_signature(projected)}."
                )


def linear_problem(
    inner: LinearInner,
    outer_loss: Loss,
    init: Callable[[jax.Array], tuple[Tree, Tree]],
    project: Callable[[Tree], Tree] | None = None,
) -> BilevelProblem:
    """A `BilevelProblem` whose inner loss is ``inner`` and whose inner variable is one coefficient vector.

    Args:
        inner: The declared inner loss.
        outer_loss: f, ``(outer, inner, validation rows) -> scalar``.
        init: key -> ``(outer, inner)``; the inner variable is one vector, ``[columns]``.
        project: outer -> outer, into the set X; None: no bounds.

    Returns:
        A `BilevelProblem` with a local lower level.
    """
    # The record itself is the loss: equal declarations are equal functions, and share one compiled program.
    return BilevelProblem(inner, outer_loss, init, project, linear=inner)


@dataclass(frozen=True)
class ClientData:
    """Training and validation rows of every client: trees whose leaves are ``[clients, samples, ...]``.

    Clients of unequal sizes come from `from_clients`; the leaves are then padded and ``train_sizes`` / ``val_sizes`` say
    how many rows are real.  Padding never counts: minibatches draw real rows only, and whole sets are cut to size (clients
    of equal size run together) or marked by a ``mask``, see `with_mask`.

    Attributes:
        train: Training rows: a tree with leaves ``[clients, rows, ...]``.
        val: Validation rows, likewise; None for methods of one level.
        train_sizes: How many training rows of each client are real, ``[clients]``; None: all.
        val_sizes: The same for validation rows.
        mask: Name of the leaf that marks real rows; see `with_mask`.

    Raises:
        ValueError: Shapes or sizes do not fit together, or a client has no rows.
    """

    train: Tree
    val: Tree = None
    train_sizes: Any = None
    val_sizes: Any = None
    mask: str | None = None

    def __post_init__(self) -> None:
        for part in ("train", "val"):
            tree = getattr(self, part)
            if tree is None:
                if part == "train":
                    raise ValueError("ClientData needs training rows: pass train=.")
                continue
            leaves, structure = jax.tree.flatten(tree)
            if not leaves:
                raise ValueError(f"ClientData got an empty tree as {part}.")
            arrays = [_array(leaf, part) for leaf in leaves]
            shapes = {array.shape[:2] for array in arrays}
            if any(array.ndim < 2 for array in arrays) or len(shapes) != 1:
                raise ValueError(
                    f"Every leaf of {part} must be [clients, samples, ...] with the same clients and samples; got shapes "
                    f"{[array.shape for array in arrays]}."
                )
            object.__setattr__(self, part, jax.tree.unflatten(structure, arrays))
            self._settle_sizes(part, arrays[0].shape[0], arrays[0].shape[1])
        if self.val is not None and _first(self.val).shape[0] != self.clients:
            raise ValueError(f"train has {self.clients} clients but val has {_first(self.val).shape[0]}.")

    def __repr__(self) -> str:
        parts = [f"{part} {rows} rows of {shapes}" for part, (rows, shapes) in self._described().items()]
        return f"ClientData({self.clients} client{'s' * (self.clients > 1)}; {'; '.join(parts)})"

    def _repr_html_(self) -> str:
        cells = [
            f"<tr><td>{part}</td><td>{rows}</td><td>{html.escape(shapes)}</td></tr>"
            for part, (rows, shapes) in self._described().items()
        ]
        head = "<tr><th>part</th><th>rows of a client</th><th>one row</th></tr>"
        return f"<p>ClientData: {self.clients} clients</p><table>{head}{''.join(cells)}</table>"

    def _described(self) -> dict[str, tuple[str, str]]:
        """By part: how many rows a client has, and what one row is."""
        told = {}
        for part in self.parts:
            sizes, row = getattr(self, f"{part}_sizes"), jax.tree.map(lambda leaf: leaf[0, 0], getattr(self, part))
            told[part] = (
                " to ".join(f"{size:,}" for size in sorted({int(sizes.min()), int(sizes.max())})),
                shapes_in(row),
            )
        return told

    def _settle_sizes(self, part: str, clients: int, samples: int) -> None:
        given = getattr(self, f"{part}_sizes")
        sizes = np.full(clients, samples, np.int32) if given is None else np.asarray(given, np.int32)
        if sizes.shape != (clients,):
            raise ValueError(f"{part}_sizes must have one number per client ({clients}), not shape {sizes.shape}.")
        if clients == 0:
            raise ValueError(f"{part} has no clients.")
        if (sizes < 1).any():
            raise ValueError(f"Client {int(np.argmin(sizes))} has no {part} samples: leave it out or give it rows.")
        if (sizes > samples).any():
            raise ValueError(
                f"{part}_sizes claims {int(sizes.max())} rows for a client, but the leaves hold {samples}."
            )
        object.__setattr__(self, f"{part}_sizes", sizes)

    @classmethod
    def from_clients(cls, clients: Sequence[Any], mask: str | None = None) -> ClientData:
        """From a list of ``(train, val)`` pairs (or ``train`` alone), one per client, of any sizes.

        ``mask="name"``: `with_mask` for all parts.
        """
        if not clients:
            raise ValueError("from_clients needs at least one client.")
        pairs = [pair if isinstance(pair, tuple) else (pair, None) for pair in clients]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError("Each client must be a pair (train, val), or its training rows alone.")
        if len({pair[1] is None for pair in pairs}) != 1:
            raise ValueError("Either every client has validation rows or none has.")
        train, train_sizes = _pad([pair[0] for pair in pairs], "train")
        if pairs[0][1] is None:
            data = cls(train, None, train_sizes)
        else:
            val, val_sizes = _pad([pair[1] for pair in pairs], "val")
            data = cls(train, val, train_sizes, val_sizes)
        return data if mask is None else data.with_mask(mask, *data.parts)

    def with_mask(self, name: str, *parts: str) -> ClientData:
        """With a leaf ``name`` among those of ``parts``, dicts: 1 for real rows and 0 for padding, for losses to use.

        Whole sets are then read with the padding, and all clients run together instead of one group per size.
        """
        marked = {}
        for part in parts:
            tree, samples = getattr(self, part), self.samples(part)
            if not isinstance(tree, dict) or name in tree:
                raise ValueError(f"mask={name!r} needs dicts without that key as the clients' {part} trees.")
            kind = next((leaf.dtype for leaf in jax.tree.leaves(tree) if leaf.dtype.kind == "f"), np.float32)
            real = np.arange(samples) < getattr(self, f"{part}_sizes")[:, None]
            marked[part] = {**tree, name: real.astype(kind)}
        return replace(self, **marked, mask=name)

    def marked(self, part: str) -> bool:
        """Whether a leaf says which rows of ``part`` are real."""
        tree = getattr(self, part)
        return self.mask is not None and isinstance(tree, dict) and self.mask in tree

    @property
    def parts(self) -> tuple[str, ...]:
        return ("train",) if self.val is None else ("train", "val")

    @property
    def clients(self) -> int:
        return int(_first(self.train).shape[0])

    def samples(self, part: str = "train") -> int:
        return int(_first(getattr(self, part)).shape[1])

    @property
    def has_padding(self) -> bool:
        """Whether some client has fewer rows than its arrays."""
        return any((getattr(self, f"{part}_sizes") < self.samples(part)).any() for part in self.parts)

    def equal_sizes(self, part: str | None = None) -> bool:
        """Whether whole sets (of ``part``) can be read as they stand: without padding, or with a mask."""
        return all(
            self.marked(one) or (getattr(self, f"{one}_sizes") == self.samples(one)).all()
            for one in (self.parts if part is None else (part,))
        )

    def only(self, client: int) -> ClientData:
        """One client as a federation of one, without padding."""

        def cut(part: str) -> Tree:
            size = int(getattr(self, f"{part}_sizes")[client])
            return jax.tree.map(lambda leaf: leaf[client : client + 1, :size], getattr(self, part))

        return ClientData(cut("train"), None if self.val is None else cut("val"), mask=self.mask)

    def example(self, part: str) -> Tree:
        """Shapes of a batch as the losses see it (all samples of one client)."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), getattr(self, part))

    def read(self, numbers: np.ndarray, places: int) -> tuple[Tree, Tree]:
        """``(train, val)`` of the clients of these ``numbers``, at the first of so many ``places``; the others are zeros.

        A NaN or infinity is refused here, where not all clients are looked at before a run.
        """

        def chosen(leaf: Any) -> np.ndarray:
            rows = np.zeros((places, *leaf.shape[1:]), leaf.dtype)
            # Into its place at once; "clip" because the numbers are in range and checking them would copy.
            np.take(np.asarray(leaf), numbers, axis=0, out=rows[: len(numbers)], mode="clip")
            return rows

        trees = {part: jax.tree.map(chosen, getattr(self, part)) for part in self.parts}
        few = {part: jax.tree.map(lambda leaf: leaf[: len(numbers)], tree) for part, tree in trees.items()}
        sizes = {f"{part}_sizes": getattr(self, f"{part}_sizes")[numbers] for part in self.parts}
        ClientData(**few, **sizes).check_finite(numbers)
        return trees["train"], trees.get("val")

    def check_finite(self, names: Any = None) -> None:
        """Refuse a NaN or infinity in a real row, by client (its number in ``names``, or here) and leaf."""
        for part in self.parts:
            for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(self, part)):
                if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                    continue
                if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                    continue
                if _finite_sum(leaf):
                    continue
                values = np.asarray(leaf)
                bad = ~np.isfinite(values).reshape(*leaf.shape[:2], -1).all(axis=-1)
                bad &= np.arange(leaf.shape[1]) < getattr(self, f"{part}_sizes")[:, None]
                if bad.any():
                    client, row = (int(place) for place in np.argwhere(bad)[0])
                    client = client if names is None else int(names[client])
                    name = jax.tree_util.keystr(path)
                    raise ValueError(
                        f"Client {client} has a NaN or infinity in row {row} of its {part} rows"
                        f"{f', leaf {name}' if name else ''}: mend or leave out such rows."
                    )

    def check_batch(self, part: str, batch_size: int | None) -> None:
        if batch_size is None:
            return
        sizes = getattr(self, f"{part}_sizes")
        if batch_size > sizes.min():
            option = "batch_size" if part == "train" else "outer_batch_size"
            raise ValueError(
                f"{option}={batch_size} is larger than the {part} set of client {int(np.argmin(sizes))} "
                f"({int(sizes.min())} rows): choose at most {int(sizes.min())}, or None for the whole set."
            )


def _has_finite_sum(leaf: Any) -> bool:
    """One quick pass: a sum with a NaN or infinity in it is never finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.sum(np.asarray(leaf))))


_finite_sum = Remembered(_has_finite_sum)


def check_variable(name: str, tree: Tree) -> None:
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError(f"init gave an empty tree as the {name} variable.")
    if not any(leaf.size for leaf in leaves):
        raise ValueError(f"The {name} variable holds no numbers ({shapes_in(tree)}): there is nothing to learn in it.")
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"The {name} variable has a leaf of type {leaf.dtype}: gradients need floating-point leaves; make init "
                f"return float32 or float64."
            )


def check_loss(name: str, loss: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    value = shapes_of(loss, name, *arguments)
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or leaves[0].shape != () or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        shapes = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
        raise ValueError(
            f"{name} must return one real number (a scalar), but it returns {', '.join(shapes) or 'nothing'}."
        )


def shapes_of(function: Callable[..., Any], name: str, *arguments: Any) -> Any:
    """``jax.eval_shape`` that answers a mismatch with one sentence."""
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:
        given = ", ".join(str(_signature(argument)) for argument in arguments)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        keys = {key for argument in arguments if isinstance(argument, dict) for key in argument}
        if isinstance(error, KeyError) and error.args[0] not in keys:
            reason = f"the batch has no {error.args[0]!r}; {hint(error.args[0], sorted(keys, key=str))}"
        raise ValueError(f"{name} cannot be evaluated on arguments of shapes {given}: {reason}") from error


def shapes_in(tree: Tree) -> str:
    """Types and shapes of a tree's leaves, in few words: ``{a: float32[5], b: float32[]}``."""
    return str(_signature(tree)).replace("'", "")


def _signature(tree: Tree) -> Any:
    return jax.tree.map(
        lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__, tree
    )


def _first(tree: Tree) -> Any:
    return jax.tree.leaves(tree)[0]


def _array(leaf: Any, part: str) -> Any:
    array = leaf if isinstance(leaf, jax.Array | np.ndarray) else np.asarray(leaf)
    if array.dtype == object or array.dtype.kind in "USM":
        raise TypeError(f"A leaf of {part} has type {array.dtype}: encode text and dates as numbers first.")
    return array


def _pad(trees: Sequence[Tree], part: str) -> tuple[Tree, Any]:
    structures = {jax.tree.structure(tree) for tree in trees}
    if len(structures) != 1:
        raise ValueError(f"The {part} trees of the clients have different structures: {sorted(map(str, structures))}.")
    sizes: list[int] = []
    for number, tree in enumerate(trees):
        lengths = {np.shape(leaf)[0] if np.ndim(leaf) else -1 for leaf in jax.tree.leaves(tree)}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError(f"The {part} leaves of client {number} have different numbers of samples: {lengths}.")
        sizes.append(lengths.pop())
    longest = max(max(sizes), 1)

    def stack(*leaves: Any) -> np.ndarray:
        arrays = [np.asarray(leaf) for leaf in leaves]
        if len({(array.shape[1:], array.dtype) for array in arrays}) != 1:
            raise ValueError(
                f"A leaf of {part} differs between clients beyond its length: {[(a.shape, str(a.dtype)) for a in arrays]}."
            )
        out = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
        for row, array in zip(out, arrays, strict=True):
            row[: len(array)] = array
        return out

    return jax.tree.map(stack, *trees), np.asarray(sizes, np.int32)
