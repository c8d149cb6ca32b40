"""FedBiO's work at a client in PyTorch, for all peers that train with it: Hessian-vector products by double backward."""

import torch
from common import GROUPS, INNER_STEP, NEUMANN_STEP, OUTER_STEP, RIDGE, STEPS, TERMS
from torch.autograd import grad
from torch.nn.functional import binary_cross_entropy_with_logits


def inner_loss(x, y, rows, labels, groups):
    losses = binary_cross_entropy_with_logits(rows @ y, labels, reduction="none")
    return (GROUPS * torch.softmax(x, 0)[groups] * losses).mean() + RIDGE / 2 * y @ y


def local_steps(x, y, rows, labels, groups, val_rows, val_labels):
    for _ in range(STEPS):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        (gradient,) = grad(inner_loss(x, y, rows, labels, groups), y, create_graph=True)
        (term,) = grad(binary_cross_entropy_with_logits(val_rows @ y, val_labels), y)
        total = term
        for _ in range(TERMS):
            term = term - NEUMANN_STEP * grad(gradient, y, term, retain_graph=True)[0]
            total = total + term
        (cross,) = grad(gradient, x, NEUMANN_STEP * total)
        x, y = x + OUTER_STEP * cross, y - INNER_STEP * gradient
    return x.detach(), y.detach()
