"""Requests drawn again and again, for intervals of what is made of their times.

Used after cost.py's `prepare`, whose tables `timed` and `points` are read.
"""

import numpy as np

RESAMPLES = 2000
PHASES = {"verify": 0, "decode": 1}


SHARES = (0.025, 0.975)
# Of two times so many resamples, the share below a quantile differs by 5 standard deviations at most: once in a million comparisons more.
# In shares and not in values, because few requests give few different values, and a quantile may lie between two that are far apart.
BAND = 5 * np.sqrt(SHARES[0] * SHARES[1] * 2 / RESAMPLES)


def quantiles(values, shares=SHARES):
    """The 2.5 % and 97.5 % of the finite values, nearest rank; None without any."""
    values = np.sort(values[np.isfinite(values)])
    if not len(values):
        return None
    return [float(values[min(max(int(np.ceil(len(values) * share)), 1), len(values)) - 1]) for share in shares]


def compare(where, found, values, failures):
    """Whether an interval is about the one of these resamples. `values` is None where there can be no interval."""
    expected = None if values is None else quantiles(values)
    if found is None or expected is None:
        if found != expected:
            failures.append(f"{where}: report {found!r}, recomputed about {expected!r}")
        return
    lowest, highest = (quantiles(values, [share + side for share in SHARES]) for side in (-BAND, BAND))
    slack = 1e-9 * max(map(abs, lowest + highest))
    if any(not low - slack <= f <= high + slack for low, f, high in zip(lowest, found, highest)):
        failures.append(f"{where}: report {found!r}, recomputed about {expected!r}")


class Resamples:
    """Resamples of all requests that have a time or a window. `several`: verify and decode steps with times are of two requests each."""

    def __init__(self, db, rows):
        self.db, self.rows = db, rows
        self.requests = sorted(r for (r,) in db.execute("select request_id from timed union select request_id from verify").fetchall())
        self.place = {r: i for i, r in enumerate(self.requests)}
        n = len(self.requests)
        self.rng = np.random.default_rng(5)
        self.counts = self.rng.multinomial(n, [1 / n] * n, size=RESAMPLES).astype(float) if n > 1 else None
        octaves = [o for (o,) in db.execute("select distinct octave from timed order by octave").fetchall()]
        self.octave = {o: i for i, o in enumerate(octaves)}
        self.steps = self.cells("select step_id, 1 as x from timed")
        each = (self.steps.sum(axis=1) > 0).sum(axis=0)
        self.several = self.counts is not None and bool((each >= 2).all())
        self.each = each

    def cells(self, values):
        """Sums of a value of steps by request, octave and phase."""
        out = np.zeros((len(self.requests), len(self.octave), 2))
        for request, octave, phase, total in self.db.execute(f"""
                select request_id, octave, phase, sum(x)::double from timed join ({values}) using (step_id)
                where phase = 'decode' or rows = {self.rows} group by all""").fetchall():
            out[self.place[request], self.octave[octave], PHASES[phase]] += total
        return out

    def means(self, values):
        """Mean of a value in verify and in decode steps of each resample, matched by octave where the trace has both anywhere."""
        n, total = (np.tensordot(self.counts, x, 1) for x in (self.steps, self.cells(values)))
        with np.errstate(all="ignore"):
            if not (self.steps.sum(axis=0) > 0).all(axis=1).any():
                return tuple(total[:, :, p].sum(axis=1) / n[:, :, p].sum(axis=1) for p in (0, 1))
            both = (n > 0).all(axis=2)
            verify = np.where(both, n[:, :, 0], 0).sum(axis=1)
            weighed = np.where(both, n[:, :, 0] * total[:, :, 1] / n[:, :, 1], 0).sum(axis=1)
            return np.where(both, total[:, :, 0], 0).sum(axis=1) / verify, weighed / verify

    def fit(self, layers):
        """b, c and a (µs) of each resample of the points of these layers; None where verify points are of one request."""
        out = np.zeros((len(self.requests), len(layers), 10))
        verify = set()
        for request, layer, *sums in self.db.execute(f"""
                select request_id, layer, count(*), sum(u), sum(w), sum(t), sum(u*u), sum(u*w), sum(w*w), sum(u*t), sum(w*t), max(w)
                from points where layer in ({', '.join(map(str, layers))}) group by all""").fetchall():
            out[self.place[request], layers.index(layer), :9] = sums[:9]
            if sums[9] > 1:
                verify.add(request)
        if self.counts is None or len(verify) < 2:
            return None
        found = [np.array(x) for x in zip(*(solve(s) for s in np.tensordot(self.counts, out, 1)))]
        # Rows have a slope in the whole trace: resamples without one fit something else.
        if np.isfinite(solve(out.sum(axis=0))[1]):
            for x in found[:1] + found[2:]:
                x[~np.isfinite(found[1])] = np.nan
        return found


def solve(layers):
    """Slopes of t on u and w about each layer's means, and the mean of the layers' intercepts."""
    layers = layers[layers[:, 0] > 0]
    n, u, w, t, uu, uw, ww, ut, wt = layers[:, :9].T
    uu, uw, ww, ut, wt = (float((xy - x * y / n).sum()) for xy, x, y in [(uu, u, u), (uw, u, w), (ww, w, w), (ut, u, t), (wt, w, t)])
    # Three unknowns a layer and slope: as many points as that, and one more, make a fit.
    rows_vary = ww > 0.5
    if n.sum() < len(layers) + (3 if rows_vary else 2) or uu <= 1e-9 * n.sum():
        return [np.nan] * 3
    if not rows_vary:
        b, c = ut / uu, np.nan
    else:
        determinant = uu * ww - uw * uw
        if determinant <= 1e-9 * uu * ww:
            return [np.nan] * 3
        b, c = (ut * ww - wt * uw) / determinant, (wt * uu - ut * uw) / determinant
    return b, c, float(((t - b * u - (c if rows_vary else 0) * w) / n).mean())


class Costs:
    """Step costs of each resample, through its mean decode and verify step; those without a cost of an expert are left out."""

    def __init__(self, resamples, layers, steps, experts, decode_experts, gamma):
        """`steps` windows and `experts` of them (the last drafts included) by request of `resamples`."""
        slopes = resamples.fit(layers)
        self.known = resamples.several and slopes is not None
        if not self.known:
            return
        verify, decode = (x / 1000 for x in resamples.means("select step_id, pass as x from timed"))
        verify_step, self.decode = (x / 1000 for x in resamples.means("select step_id, step as x from timed"))
        with np.errstate(all="ignore"):
            mean = resamples.counts @ experts / (resamples.counts @ steps)
        self.expert = slopes[0]
        passes = verify - decode
        self.draft = (verify_step - self.decode - passes) / gamma
        self.row = (passes - self.expert * (mean - decode_experts)) / gamma
        self.fixed = self.decode - self.expert * decode_experts - self.row
        self.usable = np.isfinite(self.fixed) & np.isfinite(self.row) & (self.expert > 0) & (self.decode > 0)

    def ratio(self, length, experts):
        """Cost of a step with `length` drafts and these mean experts (one number, or one a resample)."""
        if length == 0:
            return np.where(self.usable, 1.0, np.nan)
        cost = self.fixed + self.row * (length + 1) + self.expert * experts + self.draft * length
        return np.where(self.usable, cost / self.decode, np.nan)
