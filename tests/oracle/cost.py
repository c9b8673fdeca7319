"""Times and costs of a report once more, in SQL: sums of operations, steps matched by context length, least squares.

Used by recompute.py, after its tables `unions` and `verify` are there.
"""

import random

from resample import Resamples, compare


def prepare(db, manifest, k, has_kernels):
    """Steps with their octave and, where operations were recorded, only those that have any; points of the fit."""
    db.execute("create table op as select null::uinteger as step_id, null::usmallint as layer, '' as component, 0::hugeint as ns limit 0")
    if has_kernels:
        db.execute("""
            insert into op
            select step_id, case when module::varchar = 'target' then layer end,
                   case when module::varchar = 'draft' then 'draft' else component::varchar end, sum(end_ns - begin_ns)
            from kernels group by all""")
    present = "and step_id in (select step_id from op)" if has_kernels else ""
    db.execute(f"""
        create table timed as
        select step_id, request_id, phase::varchar as phase, rows, accepted,
               case when context_len = 0 then 0 else floor(log2(context_len))::int + 1 end as octave,
               target_host_ns as pass, host_end_ns - host_begin_ns as step
        from steps where phase::varchar in ('decode', 'verify') and target_host_ns > 0 and host_end_ns > host_begin_ns {present}""")
    full = manifest["window_completeness"] == "full"
    db.execute(f"""
        create table points as
        with experts as (select step_id, layer, sum(ns)::double / 1000 as t from op where component = 'experts' and layer is not null group by all)
        select t.request_id, e.layer, {k}::double as u, 1::double as w, e.t from experts e join timed t using (step_id) where t.phase = 'decode'
        union all
        select t.request_id, e.layer, n.u::double, t.rows::double, e.t from experts e join timed t using (step_id)
        join unions n using (step_id, layer) where t.phase = 'verify' and {full}""")


def means(db, rows, values):
    """Mean of a value of steps, verify and decode matched by octave. `values` is a query of (step_id, x)."""
    cells = db.execute(f"""
        select octave, phase, count(*), sum(coalesce(x, 0))::double
        from timed left join ({values}) using (step_id) where phase = 'decode' or rows = {rows} group by all""").fetchall()
    n = {(o, p): c for o, p, c, _ in cells}
    total = {(o, p): s for o, p, _, s in cells}
    both = [o for o, p in n if p == "verify" and (o, "decode") in n]
    if both:
        weight = sum(n[o, "verify"] for o in both)
        return (
            sum(total[o, "verify"] for o in both) / weight,
            sum(n[o, "verify"] * total[o, "decode"] / n[o, "decode"] for o in both) / weight,
        )
    plain = lambda phase: next(iter([sum(s for (o, p), s in total.items() if p == phase) / c for c in [sum(c for (o, p), c in n.items() if p == phase)] if c]), None)
    return plain("verify"), plain("decode")


def medians(db, rows, column):
    """Medians of steps, verify and decode, each step with the weight that it has in `means`."""
    steps = db.execute(f"select phase, octave, {column}, step_id from timed where phase = 'decode' or rows = {rows}").fetchall()
    n = {}
    for phase, octave, *_ in steps:
        n[octave, phase] = n.get((octave, phase), 0) + 1
    both = {o for o, p in n if p == "verify" and (o, "decode") in n}
    found = []
    for phase in ["verify", "decode"]:
        weight = lambda o: n[o, "verify"] / n[o, "decode"] if both and phase == "decode" else 1.0
        times = sorted((ns, step, weight(o)) for p, o, ns, step in steps if p == phase and (not both or o in both))
        half, below, median = sum(w for *_, w in times) / 2, 0.0, None
        for i, (ns, _, w) in enumerate(times):
            below += w
            if below >= half * (1 - 1e-9):
                other = times[i + 1][0] if below <= half * (1 + 1e-9) and i + 1 < len(times) else ns
                median = (ns + other) / 2
                break
        total = sum(w * ns for ns, _, w in times)
        mean = total / (2 * half) if times else None
        share = max(((w * ns, ns, w) for ns, _, w in times), default=None)
        noisy = bool(times) and (
            max(mean / median, median / mean) > 1.5 or (len(times) >= 10 and share[2] * (share[1] - median) / total > 0.1)
        )
        found.append((median, noisy))
    return found


def ratio_interval(db, rows, column):
    """Bootstrap over requests of the matched ratio."""
    cells = {}
    for request, octave, phase, count, total in db.execute(f"""
            select request_id, octave, phase, count(*), sum({column})::double from timed
            where phase = 'decode' or rows = {rows} group by all""").fetchall():
        cells.setdefault(request, []).append((octave, phase, count, total))
    requests = list(cells.values())
    if len(requests) < 2:
        return None
    rng, values = random.Random(5), []
    for _ in range(2000):
        n, total = {}, {}
        for request in rng.choices(requests, k=len(requests)):
            for octave, phase, count, t in request:
                n[octave, phase] = n.get((octave, phase), 0) + count
                total[octave, phase] = total.get((octave, phase), 0) + t
        both = [o for o, p in n if p == "verify" and (o, "decode") in n]
        if both:
            verify = sum(total[o, "verify"] for o in both)
            values.append(verify / sum(n[o, "verify"] * total[o, "decode"] / n[o, "decode"] for o in both))
    values.sort()
    return [values[int(len(values) * 0.025)], values[int(len(values) * 0.975) - 1]] if values else None


def fit(db, where, by_layer):
    """Slopes of t on u and w, about each layer's means, from SQL's own covariances."""
    sums = db.execute(f"""
        select sum(n), sum(n * uu), sum(n * uw), sum(n * ww), sum(n * ut), sum(n * wt), sum(n * tt) from (
            select count(*) as n, var_pop(u) as uu, covar_pop(u, w) as uw, var_pop(w) as ww, covar_pop(u, t) as ut, covar_pop(w, t) as wt, var_pop(t) as tt
            from points where {where} {'group by layer' if by_layer else ''})""").fetchone()
    n, uu, uw, ww, ut, wt, tt = sums
    if not n or not uu:
        return None
    if ww < 1e-12:
        b, c = ut / uu, None
    else:
        determinant = uu * ww - uw * uw
        if determinant < 1e-9 * uu * ww:
            return None
        b, c = (ut * ww - wt * uw) / determinant, (wt * uu - ut * uw) / determinant
    levels = db.execute(f"select avg(t), avg(u), avg(w) from points where {where} group by layer order by layer").fetchall()
    a = sum(t - b * u - (c or 0) * w for t, u, w in levels) / len(levels)
    return {"us_per_expert": b, "us_per_row": c, "intercept_us": a, "r2": (b * ut + (c or 0) * wt) / tt if tt else None, "points": int(n)}


def check_fit_intervals(resamples, where, found, layers, failures):
    """Intervals of a fit, which are of every resample fitted anew."""
    fits = resamples.fit(layers)
    for key, i, value in [("ci95", 0, "us_per_expert"), ("us_per_row_ci95", 1, "us_per_row"), ("intercept_us_ci95", 2, "intercept_us")]:
        compare(f"{where}.{key}", found[key], None if fits is None or found[value] is None else fits[i], failures)


def check_time_intervals(resamples, where, found, layers, failures):
    condition = f"layer in ({', '.join(map(str, layers))})"
    parts = [(found, condition)] + [(part, f"{condition} and component = '{part['component']}'") for part in found["by_component"]]
    for part, condition in parts:
        means = resamples.means(f"select step_id, sum(ns) / 1000 as x from op where {condition} group by all") if resamples.counts is not None else None
        for i, key in enumerate(["verify_us", "decode_us"]):
            known = means is not None and part[key] is not None and resamples.each[i] >= 2
            compare(f"{where}.{part.get('component', 'all')}.{key}_ci95", part[f"{key}_ci95"], means[i] if known else None, failures)


def check_fit(db, same, where, found, condition, bytes_per_expert, by_layer=False):
    expected = fit(db, condition, by_layer)
    if expected is None:
        same(f"{where}.us_per_expert", found["us_per_expert"], None)
        return
    for key, value in expected.items():
        same(f"{where}.{key}", found[key], value, 1e-6)
    if found["us_per_row"] is None and not by_layer:
        slope, r2 = db.execute(f"select regr_slope(t, u), regr_r2(t, u) from points where {condition}").fetchone()
        same(f"{where}.us_per_expert (regr_slope)", found["us_per_expert"], slope, 1e-6)
        same(f"{where}.r2 (regr_r2)", found["r2"], r2, 1e-6)
    b = expected["us_per_expert"]
    same(f"{where}.implied_gb_per_s", found["implied_gb_per_s"], bytes_per_expert / b / 1000 if b > 0 else None, 1e-6)


def check_time(db, same, where, found, rows, layers):
    condition = f"layer in ({', '.join(map(str, layers))})"
    totals = [0.0, 0.0]
    components = [c for (c,) in db.execute(f"select distinct component from op join timed t using (step_id) where {condition} and (phase = 'decode' or rows = {rows})").fetchall()]
    same(f"{where}.by_component", sorted(c["component"] for c in found["by_component"]), sorted(components))
    for part in found["by_component"]:
        verify, decode = means(db, rows, f"select step_id, sum(ns) as x from op where component = '{part['component']}' and {condition} group by all")
        for i, (key, ns) in enumerate([("verify_us", verify), ("decode_us", decode)]):
            same(f"{where}.{part['component']}.{key}", part[key], None if ns is None else ns / 1000, 1e-9)
            totals[i] = None if ns is None or totals[i] is None else totals[i] + ns / 1000
    same(f"{where}.verify_us", found["verify_us"], totals[0] if components else None)
    same(f"{where}.decode_us", found["decode_us"], totals[1] if components else None)


def check(db, report, manifest, rows, layers, k, same, failures):
    """Everything under `time` and `cost`; gives the resamples of requests, None where no time is shown."""
    has_kernels = bool(manifest["tables"].get("kernels")) and sum(p["rows"] for p in manifest["tables"]["kernels"]) > 0
    cost = report["cost"]
    if manifest["emulated"]:
        for key in ["source", "verify_ratio", "step_ratio", "speedup", "verify_us", "unattributed_us"]:
            same(f"cost.{key}", cost[key], None)
        same("cost.attribution", cost["attribution"], [])
        return
    prepare(db, manifest, k, has_kernels)
    resamples = Resamples(db, rows)
    ratios, of_medians, noisy = {}, {}, False
    for name, column in [("verify_ratio", "pass"), ("step_ratio", "step")]:
        verify, decode = means(db, rows, f"select step_id, {column} as x from timed")
        ratios[name] = verify / decode if verify and decode else None
        same(f"cost.{name}", cost[name], ratios[name])
        prefix = "" if column == "pass" else "_step"
        same(f"cost.verify{prefix}_us", cost[f"verify{prefix}_us"], verify / 1000 if verify else None)
        same(f"cost.decode{prefix}_us", cost[f"decode{prefix}_us"], decode / 1000 if decode else None)
        (verify, verify_noisy), (decode, decode_noisy) = medians(db, rows, column)
        noisy = noisy or verify_noisy or decode_noisy
        same(f"cost.verify{prefix}_us_median", cost[f"verify{prefix}_us_median"], verify / 1000 if verify else None)
        same(f"cost.decode{prefix}_us_median", cost[f"decode{prefix}_us_median"], decode / 1000 if decode else None)
        of_medians[name] = verify / decode if ratios[name] is not None else None
        same(f"cost.{name}_median", cost[f"{name}_median"], of_medians[name])
        expected, found = ratio_interval(db, rows, column), cost[f"{name}_ci95"]
        if ratios[name] is None or expected is None or found is None:
            same(f"cost.{name}_ci95", found, None if ratios[name] is None else expected)
        elif any(abs(f - e) > 0.25 * (expected[1] - expected[0]) + 1e-9 for f, e in zip(found, expected)):
            failures.append(f"cost.{name}_ci95: report {found!r}, recomputed about {expected!r}")
    same("cost.break_even", cost["break_even"], ratios["step_ratio"])
    tokens = db.execute(f"select avg(accepted + 1) from timed where phase = 'verify' and rows = {rows}").fetchone()[0]
    same("cost.tokens_per_step", cost["tokens_per_step"], tokens)
    same("cost.speedup", cost["speedup"], tokens / ratios["step_ratio"] if ratios["step_ratio"] else None)
    same("cost.speedup_median", cost["speedup_median"], tokens / of_medians["step_ratio"] if of_medians["step_ratio"] else None)
    same("warnings: noisy_times", any(w["code"] == "noisy_times" for w in report["warnings"]), noisy)
    if cost["bytes"]:
        size = manifest["model"]["bytes_per_expert"]
        total, wasted = db.execute(f"select sum(u), sum(wasted) from unions where rows = {rows}").fetchone()
        windows = db.execute(f"select count(distinct step_id) from unions where rows = {rows}").fetchone()[0]
        same("cost.bytes.per_window", cost["bytes"]["per_window"], float(total) * size / windows)
        if manifest["window_completeness"] == "full":
            same("cost.bytes.wasted_per_window", cost["bytes"]["wasted_per_window"], float(wasted) * size / windows)
    if not has_kernels:
        same("cost.attribution", cost["attribution"], [])
        return resamples
    accounted = 0.0
    for part in cost["attribution"]:
        verify, decode = means(db, rows, f"select step_id, sum(ns) as x from op where component = '{part['component']}' group by all")
        same(f"cost.{part['component']}.verify_us", part["verify_us"], None if verify is None else verify / 1000)
        same(f"cost.{part['component']}.decode_us", part["decode_us"], None if decode is None else decode / 1000)
        if verify is not None and decode is not None:
            accounted += (verify - decode) / 1000
    if ratios["step_ratio"]:
        same("cost.unattributed_us", cost["unattributed_us"], cost["verify_step_us"] - cost["decode_step_us"] - accounted, 1e-6)
    size = manifest["model"]["bytes_per_expert"]
    for layer, found in zip(layers, report["layers"]):
        check_time(db, same, f"layers[{layer}].time", found["time"], rows, [layer])
        check_fit(db, same, f"layers[{layer}].cost", found["cost"], f"layer = {layer}", size)
        points = db.execute(f"select count(*) from points where layer = {layer}").fetchone()[0]
        same(f"layers[{layer}].cost.residuals", sum(r["points"] for r in found["cost"]["residuals"]), points)
    check_time(db, same, "overall.time", report["overall"]["time"], rows, layers)
    check_fit(db, same, "overall.cost", report["overall"]["cost"], "true", size, by_layer=True)
    for where, part, of in [(f"layers[{layers[0]}]", report["layers"][0], layers[:1]), ("overall", report["overall"], layers)]:
        check_fit_intervals(resamples, f"{where}.cost", part["cost"], of, failures)
        check_time_intervals(resamples, f"{where}.time", part["time"], of, failures)
    return resamples
