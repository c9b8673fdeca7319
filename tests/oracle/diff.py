"""Recomputes a comparison from its two reports and compares every number that is tested.

Usage: diff.py BASE.json CANDIDATE.json DIFF.json SCHEMA.json

Shares no code with specprof: what a request moves a ratio by is found by changing its weight a little, Student's t by numerical
integration, Benjamini and Hochberg by the definition. Prints how much was compared; exits 1 with the first differences.
"""

import functools
import json
import math
import sys
from pathlib import Path

import jsonschema

failures = []
compared = 0


def same(where, found, expected, tolerance):
    global compared
    compared += 1
    ok = found == expected if found is None or expected is None else abs(found - expected) <= tolerance * max(1e-3, abs(expected))
    if not ok:
        failures.append(f"{where}: diff {found!r}, recomputed {expected!r}")


def density(t, df):
    log = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi) - (df + 1) / 2 * math.log1p(t * t / df)
    return math.exp(log)


def upper_tail(t, df):
    """P(T > t) for t >= 0 by Simpson's rule on x = t / (1 + t), which maps the tail to (x, 1)."""
    x, n = t / (1 + t), 800
    f = lambda y: 0.0 if y >= 1 else density(y / (1 - y), df) / (1 - y) ** 2
    h = (1 - x) / n
    return h / 3 * (f(x) + f(1) + sum((4 if i % 2 else 2) * f(x + i * h) for i in range(1, n)))


@functools.cache
def quantile(tail, df):
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, df) > tail else (low, middle)
    return (low + high) / 2


def ratio(pairs):
    return sum(n for n, _ in pairs) / sum(d for _, d in pairs)


def influences(pairs, log):
    """What each request moves the ratio by: derivatives by finite differences of its weight."""
    h = 1e-6
    out = []
    n, d = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    of = (lambda a, b: math.log(a / b)) if log else (lambda a, b: a / b)
    for a, b in pairs:
        out.append((of(n + h * a, d + h * b) - of(n - h * a, d - h * b)) / (2 * h))
    return out


def error(us):
    m = len(us)
    return math.sqrt(m / (m - 1) * sum(u * u for u in us)), m - 1


def tested(base, candidate, pairing, log):
    """Change, standard error and degrees of freedom of two lists of (numerator, denominator)."""
    of = math.log if log else (lambda v: v)
    at = of(ratio(candidate)) - of(ratio(base))
    b, c = influences(base, log), influences(candidate, log)
    if pairing is not None:
        return (at, *error([c[j] - b[i] for i, j in pairing]))
    (sb, db), (sc, dc) = error(b), error(c)
    se = math.hypot(sb, sc)
    return at, se, se ** 4 / (sb ** 4 / db + sc ** 4 / dc)


def pairs_of(base, candidate):
    """Places of the same prompts, the first run of a prompt with the first."""
    rest = {}
    for j, request in enumerate(candidate["by_request"]):
        rest.setdefault(request["identity"]["prompt"], []).append(j)
    return [(i, rest[request["identity"]["prompt"]].pop(0)) for i, request in enumerate(base["by_request"])]


def sums(report, row):
    """The (numerator, denominator) of each request for a row of the diff, or None where it is no plain ratio of sums."""
    path, layer = row["path"], row["layer"]
    if path == "acceptance.tokens_per_step":
        return [(r["accepted"] + r["verify_steps"], r["verify_steps"]) for r in report["by_request"]]
    key = {"union.mean": "union", "wasted_mean": "wasted"}.get(path)
    if key is None:
        return None
    numbers = [entry["layer"] for entry in report["layers"]]
    pick = (lambda xs: sum(xs)) if layer is None else (lambda xs: xs[numbers.index(layer)])
    return [(pick(r["sums"][key]), pick(r["sums"]["windows"])) for r in report["by_request"]]


def main():
    base, candidate, diff, schema = (json.loads(Path(path).read_text()) for path in sys.argv[1:5])
    jsonschema.Draft202012Validator(schema).validate(diff)
    paired = diff["pairing"]["paired"]
    pairing = pairs_of(base, candidate) if paired else None
    if paired:
        same("pairing.pairs", diff["pairing"]["pairs"], len(pairing), 0)
    for row in diff["metrics"]:
        b, c = sums(base, row), sums(candidate, row)
        where = f"{row['layer']}:{row['path']}"
        same(f"{where}.change", row["change"], row["candidate"] - row["base"], 1e-12)
        if b is None or row["method"] not in ("paired", "unpaired"):
            continue
        same(f"{where}.base", row["base"], ratio(b), 1e-9)
        same(f"{where}.candidate", row["candidate"], ratio(c), 1e-9)
        at, se, df = tested(b, c, pairing, False)
        t = quantile(0.025, df)
        same(f"{where}.change_ci95[0]", row["change_ci95"][0], at - t * se, 1e-4)
        same(f"{where}.change_ci95[1]", row["change_ci95"][1], at + t * se, 1e-4)
        same(f"{where}.p", row["p"], min(1.0, 2 * upper_tail(abs(at) / se, df)) if se > 0 else float(at == 0), 1e-3)
        at, se, df = tested(b, c, pairing, True)
        t = quantile(0.025, df)
        same(f"{where}.relative_ci95[0]", row["relative_ci95"][0], math.expm1(at - t * se), 1e-4)
        same(f"{where}.relative_ci95[1]", row["relative_ci95"][1], math.expm1(at + t * se), 1e-4)
        same(f"{where}.detectable", row["detectable"], math.expm1((t + quantile(0.2, df)) * se), 1e-4)
    for of_layers in (False, True):
        family = [row for row in diff["metrics"] if row["p"] is not None and (row["layer"] is not None) == of_layers]
        for row in family:
            reach = [other["p"] for other in family if other["p"] >= row["p"]]
            q = min([1.0] + [p * len(family) / sum(o["p"] <= p for o in family) for p in reach])
            same(f"{row['layer']}:{row['path']}.q", row["q"], q, 1e-9)
            claimed = row["verdict"] in ("better", "worse") or row["note"] is not None and row["note"].startswith("changed")
            if claimed != (q <= 0.05 and row["change"] != 0):
                failures.append(f"{row['layer']}:{row['path']}: {row['verdict']} at q {q}")
    print(f"{compared} numbers compared, {len(failures)} differ")
    for failure in failures[:20]:
        print(failure)
    sys.exit(bool(failures))


main()
