"""Float64 statement of the scan, one time step after another, and its adjoint, in numpy.

Written from the definition of the recurrence, in another form than both implementations under test: no chunks, no
look-ahead weights, no autograd. Rows may go on from a state and a write before them; what the last token leaves is told
with its angles counted from that token. Axis letters: b batch, h head, s time, r rank, n state, p width, j angle.
"""

from itertools import pairwise

import numpy as np

NAMES = ("q", "k", "v", "z", "q_bias", "k_bias", "psi", "zeta", "phi", "D", "adt", "dt", "trap", "angles")


def _sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def _turn(a, theta):
    """Rotate the pairs (j, N/2 + j) of a [b,h,s,r,n] by theta [b,h,s,j]."""
    half, count = a.shape[-1] // 2, theta.shape[-1]
    cos, sin = np.cos(theta)[:, :, :, None], np.sin(theta)[:, :, :, None]
    out = a.copy()
    first, second = a[..., :count], a[..., half : half + count]
    out[..., :count] = cos * first - sin * second
    out[..., half : half + count] = sin * first + cos * second
    return out


def _moment(turned, grad, count):
    """Gradient of the angle from a rotated vector and the gradient of that vector."""
    half = turned.shape[-1] // 2
    first, second = turned[..., :count], turned[..., half : half + count]
    return (grad[..., half : half + count] * first - grad[..., :count] * second).sum(3)


def _turn_state(state, theta):
    """Rotate the rows (j, N/2 + j) of a state [b,h,n,p] by theta [b,h,j]."""
    return _turn(state.swapaxes(2, 3)[:, :, None], theta[:, :, None])[:, :, 0].swapaxes(2, 3)


class Oracle:
    """Forward pass on construction; `gradients(do)` returns the adjoint of every input.

    `before` holds what rows go on from: "state" and "write" [b,h,n,p], whose adjoints are then returned too, and
    "goes_on" [b], whether the row's first token belongs to their document.
    """

    def __init__(self, values, segment_ids=None, angles_cumulated=False, before=None):
        self.i = {name: np.asarray(values[name], dtype=np.float64) for name in NAMES}
        self.before = before
        self.cumulated = angles_cumulated
        i = self.i
        _, length, _, self.groups, _ = i["q"].shape
        heads = i["v"].shape[2]
        group_of = np.arange(heads) // (heads // self.groups)
        self.fresh = np.zeros((i["q"].shape[0], length), bool)
        self.fresh[:, 0] = True
        if segment_ids is not None:
            ids = np.asarray(segment_ids)
            self.fresh[:, 1:] = ids[:, 1:] != ids[:, :-1]
        time_angles = i["angles"].transpose(0, 2, 1, 3)
        self.theta = time_angles
        if not angles_cumulated:
            self.theta = self._per_document(np.pi * np.tanh(time_angles) * i["dt"][..., None])
        spread = lambda name, bias: i[name][:, :, :, group_of].transpose(0, 3, 1, 2, 4) + i[bias][None, :, None]  # noqa: E731
        self.q, self.k = _turn(spread("q", "q_bias"), self.theta), _turn(spread("k", "k_bias"), self.theta)
        self.x = i["v"].transpose(0, 2, 1, 3)[:, :, :, None] * i["psi"][None, :, None]
        self.u = i["z"].transpose(0, 2, 1, 3)[:, :, :, None] * i["zeta"][None, :, None]
        self.mix = _sigmoid(i["trap"])
        keep = ~self.fresh[:, None]
        if before is not None:
            keep[:, 0, 0] = before["goes_on"]
        self.alpha = np.exp(i["adt"]) * keep
        self.beta = (1 - self.mix) * i["dt"] * self.alpha
        self.gamma = self.mix * i["dt"]
        self._forward(length)

    def _per_document(self, terms, reverse=False):
        """Running sum over time of terms [b,h,s,j], forth or back, started anew in every document."""
        length, out = terms.shape[2], np.zeros_like(terms)
        for row in range(terms.shape[0]):
            starts = [*np.flatnonzero(self.fresh[row]), length]
            for a, b in pairwise(starts):
                part = terms[row, :, a:b]
                out[row, :, a:b] = part[:, ::-1].cumsum(1)[:, ::-1] if reverse else part.cumsum(1)
        return out

    def _forward(self, length):
        batch, heads, _, _, n = self.k.shape
        self.writes = np.einsum("bhsrn,bhsrp->bhsnp", self.k, self.x)
        self.states = np.zeros((batch, heads, length + 1, n, self.x.shape[-1]))
        self.first_write = np.zeros_like(self.states[:, :, 0])
        if self.before is not None:
            self.states[:, :, 0], self.first_write = self.before["state"], self.before["write"]
        for t in range(length):
            before = self.writes[:, :, t - 1] if t else self.first_write
            self.states[:, :, t + 1] = (
                self.alpha[:, :, t, None, None] * self.states[:, :, t]
                + self.beta[:, :, t, None, None] * before
                + self.gamma[:, :, t, None, None] * self.writes[:, :, t]
            )
        self.y = np.einsum("bhsrn,bhsnp->bhsrp", self.q, self.states[:, :, 1:])
        self.y += self.i["D"][None, :, None, None, None] * self.x
        gated = self.y * self.u * _sigmoid(self.u) * self.i["phi"][None, :, None]
        self.out = gated.sum(3).transpose(0, 2, 1, 3)
        self.final_state, self.final_write = self._from_last_token(self.states[:, :, -1], self.writes[:, :, -1])

    def _from_last_token(self, *states):
        if self.cumulated:
            return states
        return tuple(_turn_state(state, -self.theta[:, :, -1]) for state in states)

    def gradients(self, grad_out, grad_final=None):
        i, length = self.i, self.y.shape[2]
        go = np.asarray(grad_out, np.float64).transpose(0, 2, 1, 3)[:, :, :, None]
        silu = self.u * _sigmoid(self.u)
        g = go * i["phi"][None, :, None] * silu
        du = go * i["phi"][None, :, None] * self.y * _sigmoid(self.u) * (1 + self.u * _sigmoid(-self.u))
        out = {"phi": (go * silu * self.y).sum((0, 2)), "D": (g * self.x).sum((0, 2, 3, 4))}
        out["zeta"] = (du * i["z"].transpose(0, 2, 1, 3)[:, :, :, None]).sum((0, 2))
        out["z"] = (du * i["zeta"][None, :, None]).sum(3).transpose(0, 2, 1, 3)
        dq = np.einsum("bhsrp,bhsnp->bhsrn", g, self.states[:, :, 1:])
        dwrites = np.zeros_like(self.writes)
        dalpha, dbeta, dgamma = (np.zeros_like(self.gamma) for _ in range(3))
        ds = np.zeros_like(self.final_state)
        if grad_final is not None:
            ds = grad_final if self.cumulated else _turn_state(grad_final, self.theta[:, :, -1])
        for t in reversed(range(length)):
            ds = ds + np.einsum("bhrn,bhrp->bhnp", self.q[:, :, t], g[:, :, t])
            dgamma[:, :, t] = (ds * self.writes[:, :, t]).sum((-1, -2))
            dwrites[:, :, t] += self.gamma[:, :, t, None, None] * ds
            dalpha[:, :, t] = (ds * self.states[:, :, t]).sum((-1, -2))
            dbeta[:, :, t] = (ds * (self.writes[:, :, t - 1] if t else self.first_write)).sum((-1, -2))
            if t:
                dwrites[:, :, t - 1] += self.beta[:, :, t, None, None] * ds
            else:
                out["write"] = self.beta[:, :, 0, None, None] * ds
            ds = self.alpha[:, :, t, None, None] * ds
        out["state"] = ds
        if self.before is None:
            del out["state"], out["write"]
        dk = np.einsum("bhsnp,bhsrp->bhsrn", dwrites, self.x)
        dx = np.einsum("bhsnp,bhsrn->bhsrp", dwrites, self.k) + i["D"][None, :, None, None, None] * g
        out["v"] = (dx * i["psi"][None, :, None]).sum(3).transpose(0, 2, 1, 3)
        out["psi"] = (dx * i["v"].transpose(0, 2, 1, 3)[:, :, :, None]).sum((0, 2))
        self._weights(out, dalpha, dbeta, dgamma)
        self._directions(out, dq, dk, grad_final)
        return out

    def _weights(self, out, dalpha, dbeta, dgamma):
        dt, mix = self.i["dt"], self.mix
        out["adt"] = self.alpha * dalpha + self.beta * dbeta
        out["dt"] = mix * dgamma + (1 - mix) * self.alpha * dbeta
        out["trap"] = mix * (1 - mix) * dt * (dgamma - self.alpha * dbeta)

    def _directions(self, out, dq, dk, grad_final):
        count = self.theta.shape[-1]
        dtheta = _moment(self.q, dq, count) + _moment(self.k, dk, count)
        if grad_final is not None and not self.cumulated:  # the final state is turned back by the last angle
            rows = (t.swapaxes(2, 3)[:, :, None] for t in (self.final_state, grad_final))
            dtheta[:, :, -1] -= _moment(*rows, count)[:, :, 0]
        if not self.cumulated:
            rest = self._per_document(dtheta, reverse=True)
            slope = np.tanh(self.i["angles"].transpose(0, 2, 1, 3))
            out["dt"] = out["dt"] + np.pi * (rest * slope).sum(-1)
            dtheta = rest * np.pi * (1 - slope**2) * self.i["dt"][..., None]
        out["angles"] = dtheta.transpose(0, 2, 1, 3)
        for name, grad in (("q", dq), ("k", dk)):
            flat = _turn(grad, -self.theta)
            out[name + "_bias"] = flat.sum((0, 2))
            batch, heads, length, ranks, n = flat.shape
            grouped = flat.reshape(batch, self.groups, heads // self.groups, length, ranks, n).sum(2)
            out[name] = grouped.transpose(0, 2, 3, 1, 4)
