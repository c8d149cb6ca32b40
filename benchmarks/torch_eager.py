"""FedBiO and FedBiOAcc the way a paper's authors write them: eager PyTorch autograd and a Python loop over the clients.

Hessian-vector products are double backward passes (`torch.autograd.grad` of a gradient made with `create_graph`),
minibatches are index tensors drawn with replacement, everything runs on one thread.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from stopwatch import Stopwatch
from task import GROUPS, Client, Settings
from torch import Tensor
from torch.autograd import grad


class Batch(NamedTuple):
    rows: Tensor
    labels: Tensor
    groups: Tensor | None  # None for validation rows: the outer loss does not ask for groups


class Batches(NamedTuple):
    """All minibatches of one step of one client; FedBiOAcc evaluates two points on the same ones."""

    inner: Batch
    validation: Batch
    cross: Batch
    hessians: list[Batch]


def inner_loss(x: Tensor, y: Tensor, batch: Batch, ridge: float) -> Tensor:
    weights = GROUPS * torch.softmax(x, 0)[batch.groups]
    losses = F.binary_cross_entropy_with_logits(batch.rows @ y, batch.labels, reduction="none")
    return (weights * losses).mean() + 0.5 * ridge * (y @ y)


def outer_loss(y: Tensor, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(batch.rows @ y, batch.labels)


def inner_gradient(x: Tensor, y: Tensor, batch: Batch, ridge: float) -> Tensor:
    y = y.detach().requires_grad_()
    return grad(inner_loss(x, y, batch, ridge), y)[0]


def hypergradient(x: Tensor, y: Tensor, batches: Batches, settings: Settings) -> Tensor:
    """Estimate the hypergradient with the Neumann series (Eq. 5); f does not depend on x directly."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    term = grad(outer_loss(y, batches.validation), y)[0]
    total = term.clone()
    for batch in batches.hessians:
        gradient = grad(inner_loss(x, y, batch, settings.ridge), y, create_graph=True)[0]
        term = term - settings.neumann_step * grad(gradient, y, grad_outputs=term)[0]
        total += term
    gradient = grad(inner_loss(x, y, batches.cross, settings.ridge), y, create_graph=True)[0]
    return -grad(gradient, x, grad_outputs=settings.neumann_step * total)[0]


class LocalClient:
    """One client: its data, its variables and its momenta."""

    def __init__(self, client: Client, settings: Settings) -> None:
        rows, labels, groups, val_rows, val_labels = (torch.from_numpy(part) for part in client)
        self.train = Batch(rows, labels, groups.long())
        self.val = Batch(val_rows, val_labels, None)
        self.settings = settings
        self.x = torch.zeros(GROUPS, dtype=rows.dtype)
        self.y = torch.zeros(rows.shape[1], dtype=rows.dtype)
        self.x_before, self.y_before = self.x, self.y
        self.nu, self.omega = torch.zeros_like(self.x), torch.zeros_like(self.y)

    def draw(self, given: NDArray[np.int32] | None) -> Batches:
        """Draw one step's minibatches, or take the given indices [slots, batch]."""
        size = self.settings.batch_size
        if size is None:
            return Batches(self.train, self.val, self.train, [self.train] * self.settings.terms)

        def pick(data: Batch, slot: int) -> Batch:
            index = torch.randint(len(data.labels), (size,)) if given is None else torch.from_numpy(given[slot]).long()
            return Batch(data.rows[index], data.labels[index], None if data.groups is None else data.groups[index])

        hessians = [pick(self.train, 3 + j) for j in range(self.settings.terms)]
        return Batches(pick(self.train, 0), pick(self.val, 1), pick(self.train, 2), hessians)

    def step(self, t: int, given: NDArray[np.int32] | None = None) -> None:
        """Make local step t = 1, 2, ... (Alg. 2, lines 4-6; Alg. 3, lines 4-15)."""
        options = self.settings
        batches = self.draw(given)
        omega = inner_gradient(self.x, self.y, batches.inner, options.ridge)
        nu = hypergradient(self.x, self.y, batches, options)
        if options.algorithm == "fedbioacc" and t > 1:
            alpha_before = options.alpha(t - 1)
            keep_inner = min(max(1 - options.c_inner * alpha_before**2, 0.0), 1.0)
            keep_outer = min(max(1 - options.c_outer * alpha_before**2, 0.0), 1.0)
            omega_before = inner_gradient(self.x_before, self.y_before, batches.inner, options.ridge)
            nu_before = hypergradient(self.x_before, self.y_before, batches, options)
            omega = omega + keep_inner * (self.omega - omega_before)
            nu = nu + keep_outer * (self.nu - nu_before)
        self.x_before, self.y_before, self.omega, self.nu = self.x, self.y, omega, nu
        alpha = options.alpha(t)
        self.y = self.y - options.inner_step * alpha * omega
        self.x = self.x - options.outer_step * alpha * nu


def synchronise(clients: list[LocalClient]) -> None:
    """Average what the algorithm averages; in FedBiOAcc also x_t and nu_t (Alg. 3, line 17)."""
    names = ("x",) if clients[0].settings.algorithm == "fedbio" else ("x", "x_before", "nu")
    for name in names:
        mean = torch.stack([getattr(client, name) for client in clients]).mean(0)
        for client in clients:
            setattr(client, name, mean)


class Outcome(NamedTuple):
    outer: NDArray[np.floating]  # [clients, groups]
    inner: NDArray[np.floating]  # [clients, features]
    seconds: float
    cpu: float


def run(
    clients: list[Client], settings: Settings, steps: int, indices: NDArray[np.int32] | None = None, seed: int = 0
) -> Outcome:
    """Run on one thread; with `indices` on these minibatches, otherwise on minibatches drawn as it goes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    local = [LocalClient(client, settings) for client in clients]
    with Stopwatch() as watch:
        for t in range(1, steps + 1):
            for m, client in enumerate(local):
                client.step(t, None if indices is None else indices[t - 1, m])
            if t % settings.local_steps == 0:
                synchronise(local)
    outer, inner = np.stack([c.x.numpy() for c in local]), np.stack([c.y.numpy() for c in local])
    return Outcome(outer, inner, watch.seconds, watch.cpu)
