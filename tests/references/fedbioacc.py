"""FedBiOAcc (Alg. 3), naively: lists of clients, no JAX."""

from functools import partial
from types import SimpleNamespace

import numpy as np

from tests.references.fedbio import anew, answers, searched


def fedbioacc(model, phi, start, rows, *, rounds, local_steps, constants, previous, weights,
              cohorts=None, project=lambda x: x, three_vectors=False, average_momentum=True, alone=False,
              search=None):  # fmt: skip
    """(x, [y of each client]).  ``three_vectors`` averages x_{t+1} itself, as line 17 is printed, not through x_t and nu_t.
    ``alone``: nobody sends nu.  Steps that are not numbers: see `fedbio`."""
    k = SimpleNamespace(**constants)
    alpha = lambda t: k.delta / np.cbrt(k.u + k.sigma**2 * t)  # noqa: E731
    walks = not hasattr(k.outer_step, "moved")
    eta = lambda t: k.outer_step * alpha(t) if walks else k.outer_step.length  # noqa: E731
    kept = lambda c, t: min(1.0, max(0.0, 1 - c * alpha(t) ** 2))  # noqa: E731
    x = before = project(start[0])
    nu = [np.zeros_like(x) for _ in weights]
    sites = [SimpleNamespace(y=start[1], y_before=start[1], x_before=x, omega=None, last=0) for _ in weights]
    done = 0
    for number in range(rounds):
        active = dict(enumerate(weights)) if cohorts is None else cohorts[number]
        sent, due = [], partial(_searched, sites, active, k.outer_step, search, phi, rows, number, project, local_steps)
        x, alone_ = due(x, 0)
        if alone_:
            done = 0  # momenta start anew
            anew(k.inner_step, active)
            continue
        for m in active:
            site, own, momentum = sites[m], x, nu[m]
            missed = site.last != done
            if alone and walks and not missed and done:
                length = sum(eta(t) for t in range(done - local_steps + 1, done + 1))
                momentum = site.nu + (site.arrived - x) / length
            own_before = before if previous == "paper" and walks else x if missed else site.x_before
            omega_before = site.x_before if missed else own_before  # omega is the client's own, nu the server's
            for i in range(local_steps):
                t, read = done + i + 1, rows(number, m, i)
                if hasattr(k.inner_step, "settled"):
                    site.y = k.inner_step.settled(m, own, site.y, read, 1)
                omega, estimate = model.inner_gradient(m, own, site.y, read.inner), phi(m, own, site.y, read)
                if site.omega is not None:
                    earlier = model.inner_gradient(m, omega_before, site.y_before, read.inner)
                    omega = omega + kept(k.c_inner, t - 1) * (site.omega - earlier)
                if t > 1 and not (alone and missed and i == 0):
                    earlier = phi(m, own_before, site.y_before, read)
                    estimate = estimate + kept(k.c_outer, t - 1) * (momentum - earlier)
                momentum, site.omega, site.y_before = estimate, omega, site.y
                own_before = omega_before = own
                if callable(k.inner_step):
                    site.y = k.inner_step(m, own, site.y, omega, read)
                else:
                    site.y = site.y - k.inner_step * alpha(t) * omega
                own = project(own - eta(t) * momentum)
            site.x_before, site.last = own_before, done + local_steps
            site.nu, site.arrived = momentum, own
            nu[m] = momentum
            sent.append((active[m], own_before, momentum, own))
        if not sent:
            continue
        done += local_steps
        shares = [reply[0] for reply in sent]
        before, mean_nu, after = (np.average([reply[i] for reply in sent], axis=0, weights=shares) for i in (1, 2, 3))
        if not walks:
            after = k.outer_step.moved(x, mean_nu)
        elif previous == "paper" and not three_vectors:
            after = before - eta(done) * mean_nu
        if average_momentum:
            nu = [mean_nu for _ in weights]
        x, again = due(project(after), 1)
        if again:
            done = 0
            anew(k.inner_step, active)
    return x, np.stack(answers(k.inner_step, [site.y for site in sites]))


def _searched(sites, active, rule, search, phi, rows, number, project, more, x, at):
    """(x, how many exchanges that took) after the searches that are due, with y of every site in place."""
    ys = [site.y for site in sites]
    x, count = searched(active, rule, search, phi, rows, number, x, ys, project, more, at)
    for site, y in zip(sites, ys, strict=True):
        site.y = y
    return x, count
