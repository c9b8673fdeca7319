"""Recomputes a report from the trace's Parquet files with SQL and compares every number.

Usage: recompute.py TRACE REPORT.json SCHEMA.json

Shares no code with specprof. Counts must be equal, means within 1e-9; bootstrap intervals, whose random numbers
differ, within a quarter of their width. Prints what was compared; exits 1 with the first differences.
"""

import hashlib
import json
import math
import random
import struct
import sys
from pathlib import Path

import duckdb
import jsonschema

import advice
import cost
import sections

failures = []
compared = 0


def same(where, found, expected, tolerance=1e-9):
    """Compares two numbers, lists or nulls."""
    global compared
    if isinstance(expected, (list, tuple)):
        if not isinstance(found, list) or len(found) != len(expected):
            failures.append(f"{where}: {found!r} has not the length of {expected!r}")
            return
        for i, (f, e) in enumerate(zip(found, expected)):
            same(f"{where}[{i}]", f, e, tolerance)
        return
    compared += 1
    if found is None or expected is None or isinstance(expected, (int, str)):
        ok = found == expected
    else:
        ok = abs(found - expected) <= tolerance * max(1.0, abs(expected))
    if not ok:
        failures.append(f"{where}: report {found!r}, recomputed {expected!r}")


def interval(where, found, clusters):
    """Compares an interval with one drawn here. `clusters` are (numerator, denominator) by request."""
    global compared
    compared += 1
    clusters = [c for c in clusters if c[1] > 0]
    if len(clusters) < 2:
        if found is not None:
            failures.append(f"{where}: {found!r} from {len(clusters)} request")
        return
    if found is None:
        failures.append(f"{where}: null from {len(clusters)} requests")
        return
    rng = random.Random(1)
    ratios = []
    for _ in range(2000):
        drawn = rng.choices(clusters, k=len(clusters))
        ratios.append(sum(n for n, _ in drawn) / sum(d for _, d in drawn))
    ratios.sort()
    low, high = ratios[49], ratios[1949]
    slack = 0.25 * (high - low) + 1e-9
    if abs(found[0] - low) > slack or abs(found[1] - high) > slack:
        failures.append(f"{where}: report {found!r}, recomputed about {[low, high]!r}")


def nearest_rank(histogram, share):
    rank = max(1, math.ceil(sum(histogram) * share))
    below = 0
    for value, n in enumerate(histogram):
        below += n
        if below >= rank:
            return value
    return None


def tables(db, trace):
    """The tables that the manifest lists, as views."""
    manifest = json.loads((trace / "manifest.json").read_text())
    for name, parts in manifest["tables"].items():
        if parts:
            files = [str(trace / part["path"]) for part in parts]
            db.execute(f"create view {name} as select * from read_parquet({files!r})")
    return manifest


def prepare(db, k, kept_only):
    """One row per routed slot of the target's verify windows, and one per window."""
    db.execute("create table verify as select step_id, request_id, rows, accepted from steps where phase::varchar = 'verify'")
    slots = " union all ".join(f"select step_id, layer, row, e{i} as id from routes where module::varchar = 'target'" for i in range(k))
    # A window's rows are those that are there; in a trace of all rows they must be the step's.
    complete = "n <= v.rows" if kept_only else "n = v.rows"
    db.execute(f"""
        create table windows as
        select v.step_id, v.request_id, w.layer, w.n as rows, least(v.accepted, w.n - 1) as accepted
        from verify v
        join (select step_id, layer, count(*) as n from routes where module::varchar = 'target' group by all) w using (step_id)
        where {complete}""")
    db.execute(f"""
        create table slots as
        select w.step_id, w.request_id, w.layer, w.rows, w.accepted, s.row, s.id
        from windows w join ({slots}) s using (step_id, layer)""")
    # The first row of a window that touches an expert is the row that adds it.
    db.execute("""
        create table touched as
        select step_id, request_id, layer, rows, accepted, id, min(row) as first
        from slots group by all""")
    db.execute("""
        create table unions as
        select step_id, request_id, layer, rows, accepted, count(*) as u, count(*) filter (first > accepted) as wasted
        from touched group by all""")
    db.execute("""
        create table reuse as
        with ordered as (
            select step_id, layer, rows, u, lag(step_id) over (partition by request_id, layer order by step_id) as before from unions)
        select o.layer, o.rows, o.step_id, o.u, count(b.id) as shared
        from ordered o
        join touched t on t.step_id = o.step_id and t.layer = o.layer
        left join touched b on b.step_id = o.before and b.layer = o.layer and b.id = t.id
        where o.before is not null
        group by all""")
    db.execute("""
        create table pairs as
        select w.step_id, w.layer, w.rows, i.i, j.i as j, coalesce(o.n, 0) as n
        from windows w
        join (select unnest(range(64)) as i) i on i.i < w.rows
        join (select unnest(range(64)) as i) j on j.i < w.rows and i.i < j.i
        left join (
            select a.step_id, a.layer, a.row as i, b.row as j, count(*) as n
            from slots a join slots b on a.step_id = b.step_id and a.layer = b.layer and a.id = b.id and a.row < b.row
            group by all) o on o.step_id = w.step_id and o.layer = w.layer and o.i = i.i and o.j = j.i""")


def popularity(db, layer, experts):
    """p_e by expert, over all verify rows of the layer."""
    rows = db.execute("select sum(rows) from windows where layer = ?", [layer]).fetchone()[0]
    counts = dict(db.execute("select id, count(*) from slots where layer = ? group by id", [layer]).fetchall())
    return [counts.get(e, 0) / rows for e in range(experts)] if rows else None, counts


def check_load(where, load, counts, experts):
    if not counts:
        same(where, load, None)
        return
    slots = sum(counts.values())
    q = sorted((n / slots for n in counts.values()), reverse=True)
    entropy = -sum(x * math.log2(x) for x in q)
    expected = {
        "entropy_bits": entropy,
        "effective_experts": 2**entropy,
        "top_1pct_share": sum(q[: math.ceil(experts / 100)]),
        "max_over_mean": q[0] * experts,
    }
    for key, value in expected.items():
        same(f"{where}.{key}", load[key], value)


def check_windows(db, where, stats, layers, k, experts, popular, kept_only):
    """All statistics of windows of one length in some layers."""
    rows = stats["rows"]
    chosen = f"rows = {rows} and layer in ({','.join(map(str, layers))})"
    one = lambda sql: db.execute(sql.replace("$", chosen)).fetchone()
    every = lambda sql: db.execute(sql.replace("$", chosen)).fetchall()
    windows, union, wasted = one("select count(*), sum(u), sum(wasted) from unions where $")
    same(f"{where}.windows", stats["windows"], windows)
    if not windows:
        same(f"{where}.union", stats["union"], None)
        return
    counts = dict(every("select u, count(*) from unions where $ group by u"))
    histogram = [counts.get(u, 0) for u in range(max(counts) + 1)]
    mean = union / windows
    same(f"{where}.union.histogram", stats["union"]["histogram"], histogram)
    same(f"{where}.union.mean", stats["union"]["mean"], mean)
    same(f"{where}.union.max", stats["union"]["max"], max(counts))
    for key, share in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)]:
        same(f"{where}.union.{key}", stats["union"][key], nearest_rank(histogram, share))
    interval(f"{where}.union.ci95", stats["union"]["ci95"], every("select sum(u), count(*) from unions where $ group by request_id"))

    added = dict(every("select first, count(*) from touched where $ group by first"))
    marginal = [added.get(i, 0) / windows for i in range(rows)]
    same(f"{where}.marginal", stats["marginal"], marginal)
    same(f"{where}.prefix_union", stats["prefix_union"], [math.fsum(marginal[: j + 1]) for j in range(rows)])
    kept, kept_rows, rejected_rows = one(
        "select sum(u - wasted), sum(accepted + 1), sum(rows - 1 - accepted) from unions where $"
    )
    same(f"{where}.marginal_kept", stats["marginal_kept"], kept / kept_rows)
    rejected = None if kept_only or not rejected_rows else wasted / rejected_rows
    same(f"{where}.marginal_rejected", stats["marginal_rejected"], rejected)
    same(f"{where}.wasted_mean", stats["wasted_mean"], None if kept_only else wasted / windows)
    late = dict(every("select first, count(*) from touched where $ and first > accepted group by first"))
    same(f"{where}.wasted_by_row", stats["wasted_by_row"], None if kept_only else [late.get(i, 0) / windows for i in range(rows)])

    overlap = {(i, j): n for i, j, n in every("select i, j, avg(n) from pairs where $ group by i, j")}
    matrix = [[float(k) if i == j else overlap[min(i, j), max(i, j)] for j in range(rows)] for i in range(rows)]
    same(f"{where}.pairwise", stats["pairwise"], matrix)
    lags = {d: (o, jac) for d, o, jac in every(f"select j - i as d, avg(n) / {k}, avg(n / (2.0 * {k} - n)) from pairs where $ group by d")}
    same(f"{where}.lag_overlap_frac", stats["lag_overlap_frac"], [1.0] + [lags[d][0] for d in range(1, rows)])
    same(f"{where}.lag_jaccard", stats["lag_jaccard"], [1.0] + [lags[d][1] for d in range(1, rows)])
    same(f"{where}.step_reuse", stats["step_reuse"], one("select avg(shared / u) from reuse where $")[0])

    uniform = experts * (1 - (1 - k / experts) ** rows)
    same(f"{where}.uniform_union", stats["uniform_union"], uniform)
    # Over several layers the expectation weighs each by its windows.
    by_layer = dict(every("select layer, count(*) from unions where $ group by layer"))
    expected = sum(n * sum(1 - (1 - p) ** rows for p in popular[layer]) for layer, n in by_layer.items()) / windows
    same(f"{where}.popularity_union", stats["popularity_union"], expected)
    for key, value in [("lift", uniform), ("popularity_lift", expected)]:
        same(f"{where}.{key}", stats[key], (value - mean) / (value - k) if value - k > 1e-9 else None)


def check_coverage(db, where, found, layers, rows, k, weights):
    """Mean share of the gate mass of the best B experts, B = 1...rows k."""
    if not weights:
        same(where, found, None)
        return
    slots = " union all ".join(
        f"select step_id, layer, e{i} as id, w{i}::double as w from routes where module::varchar = 'target'" for i in range(k)
    )
    curves = db.execute(f"""
        with mass as (
            select s.step_id, s.layer, s.id, sum(s.w) as m
            from ({slots}) s join windows v using (step_id, layer)
            where v.rows = {rows} and v.layer in ({','.join(map(str, layers))}) group by all),
        ranked as (select *, row_number() over (partition by step_id, layer order by m desc, id) as b from mass),
        windowed as (select step_id, layer, max(b) as u, list(m order by b) as ms, sum(m) as total from ranked group by all)
        select ms, total from windowed where total > 0""").fetchall()
    sums = [0.0] * (rows * k)
    for masses, total in curves:
        held = 0.0
        for b in range(rows * k):
            held += masses[b] if b < len(masses) else 0.0
            sums[b] += held / total
    same(where, found, [s / len(curves) for s in sums], 1e-8)


def check_acceptance(db, report):
    a = report["acceptance"]
    steps = db.execute("select rows, accepted from verify").fetchall()
    if not steps:
        same("acceptance.tokens_per_step", a["tokens_per_step"], None)
        return
    accepted = [n for _, n in steps]
    same("acceptance.accepted_drafts_mean", a["accepted_drafts_mean"], sum(accepted) / len(steps))
    same("acceptance.tokens_per_step", a["tokens_per_step"], sum(accepted) / len(steps) + 1)
    gamma = max(rows for rows, _ in steps) - 1
    emitted = db.execute("select sum(len(emitted_tokens)) from steps where phase::varchar = 'verify'").fetchone()[0]
    same("acceptance.emitted_per_step", a["emitted_per_step"], emitted / len(steps))
    same("acceptance.histogram", a["histogram"], [accepted.count(n) for n in range(gamma + 1)])
    share = lambda x, y: x / y if y else None
    had = [[n for rows, n in steps if rows > i] for i in range(1, gamma + 1)]
    same("acceptance.by_position", a["by_position"], [share(sum(n >= i for n in ns), len(ns)) for i, ns in enumerate(had, 1)])
    given = [share(sum(n >= i for n in ns), sum(n >= i - 1 for n in ns)) for i, ns in enumerate(had, 1)]
    same("acceptance.conditional_by_position", a["conditional_by_position"], given)
    clusters = db.execute("select sum(accepted + 1), count(*) from verify group by request_id").fetchall()
    interval("acceptance.tokens_per_step_ci95", a["tokens_per_step_ci95"], clusters)


def check_requests(db, report, rows, kept_only):
    """Requests with steps, their windows of the report's number of rows."""
    steps = db.execute("""
        select request_id, count(*) filter (phase::varchar = 'verify'), sum(accepted) filter (phase::varchar = 'verify')
        from steps group by request_id order by request_id""").fetchall()
    same("by_request.length", len(report["by_request"]), len(steps))
    unions = {r: (u, w) for r, u, w in db.execute(f"select request_id, avg(u), avg(wasted) from unions where rows = {rows} group by all").fetchall()}
    for found, (request, verify, accepted) in zip(report["by_request"], steps):
        where = f"by_request[{request}]"
        same(f"{where}.request_id", found["request_id"], request)
        same(f"{where}.verify_steps", found["verify_steps"], verify)
        same(f"{where}.tokens_per_step", found["tokens_per_step"], accepted / verify + 1 if verify else None)
        union, wasted = unions.get(request, (None, None))
        same(f"{where}.union_mean", found["union_mean"], union)
        same(f"{where}.wasted_mean", found["wasted_mean"], None if kept_only else wasted)
        same(f"{where}.accepted", found["accepted"], accepted or 0)
        check_sums(db, where, found["sums"], request, rows, [layer["layer"] for layer in report["layers"]], kept_only)
        same(f"{where}.identity", [found["identity"][of] for of in ["prompt", "output", "windows"]], identity(db, request))


def check_sums(db, where, found, request, rows, layers, kept_only):
    """A request's windows, unions and wasted experts, layer by layer."""
    query = f"select layer, count(*), sum(u)::bigint, sum(wasted)::bigint from unions where rows = {rows} and request_id = {request} group by layer"
    sums = {layer: counts for layer, *counts in db.execute(query).fetchall()}
    columns = list(zip(*(sums.get(layer, [0, 0, 0]) for layer in layers)))
    same(f"{where}.sums.windows", found["windows"], columns[0])
    same(f"{where}.sums.union", found["union"], columns[1])
    same(f"{where}.sums.wasted", found["wasted"], None if kept_only else columns[2])


def identity(db, request):
    """Fingerprints of prompt, output and windows: the first half of a SHA-256 over little-endian u32."""
    digest = lambda tokens: hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()[:32]
    steps = db.execute(f"select phase::varchar, rows, accepted, input_tokens, emitted_tokens from steps where request_id = {request} order by step_id").fetchall()
    prompt = [token for phase, _, _, tokens, _ in steps if phase == "prefill" for token in tokens]
    output = [token for *_, emitted in steps for token in emitted]
    windows = [x for phase, rows, accepted, tokens, _ in steps if phase == "verify" for x in [rows, accepted, *tokens]]
    length = db.execute(f"select prompt_tokens from requests where request_id = {request}").fetchone()
    known = any(prompt) and (length is None or length[0] == len(prompt))
    return [digest(prompt) if known else None, digest(output), digest(windows)]


def check_routers(db, report, key, module, phase, k, experts):
    """Rows that are no windows: the draft module's in verify steps, the target's in prefill steps."""
    chosen = f"select step_id from steps where phase::varchar = '{phase}'"
    layers = db.execute(f"""
        select layer, count(*) from routes semi join ({chosen}) using (step_id)
        where module::varchar = '{module}' group by layer order by layer""").fetchall()
    if not layers:
        same(key, report[key], None)
        return
    same(f"{key}.layers.length", len(report[key]["layers"]), len(layers))
    for found, (layer, rows) in zip(report[key]["layers"], layers):
        same(f"{key}[{layer}].layer", found["layer"], layer)
        same(f"{key}[{layer}].rows", found["rows"], rows)
        slots = " union all ".join(f"select step_id, e{i} as id from routes where module::varchar = '{module}' and layer = {layer}" for i in range(k))
        counts = dict(db.execute(f"select id, count(*) from ({slots}) semi join ({chosen}) using (step_id) group by id").fetchall())
        check_load(f"{key}[{layer}].load", found["load"], counts, experts)


def check_telemetry(db, found, manifest):
    """Means of the samples over at most 96 spans of equal length."""
    count = db.execute("select count(*) from telemetry").fetchone()[0] if manifest["tables"].get("telemetry") else 0
    if not count:
        same("telemetry", found, None)
        return
    same("telemetry.samples", found["samples"], count)
    first, last = db.execute("select min(time_ns), max(time_ns) from telemetry").fetchone()
    spans, length = min(count, 96), max(last - first, 1)
    columns = {
        "host_load": "host_load", "cpu_mhz": "cpu_mhz", "sm_clock_mhz": "sm_clock_mhz", "power_w": "power_w",
        "temperature_c": "temperature_c", "memory_bytes": "coalesce(memory_used_bytes, rss_bytes)",
    }
    for key, sql in columns.items():
        groups = [[] for _ in range(spans)]
        for time, value in db.execute(f"select time_ns, {sql} from telemetry").fetchall():
            if value is not None:
                groups[min(int((time - first) / length * spans), spans - 1)].append(float(value))
        same(f"telemetry.{key}", found[key], [math.fsum(g) / len(g) if g else None for g in groups])
    began = (first - manifest["started_unix_ns"]) / 1e9
    same("telemetry.time_s", found["time_s"], [began + (i + 0.5) / spans * length / 1e9 for i in range(spans)])


def main():
    trace, report_path, schema_path = map(Path, sys.argv[1:4])
    report = json.loads(report_path.read_text())
    jsonschema.Draft202012Validator(json.loads(schema_path.read_text())).validate(report)

    db = duckdb.connect()
    manifest = tables(db, trace)
    model = manifest["model"]
    k, experts = model["experts_per_token"], model["experts"]
    kept_only = manifest["window_completeness"] == "accepted_only"
    prepare(db, k, kept_only)
    for key in ["format_version", "complete", "model", "drafter", "sampling", "device", "window_completeness", "token_hash", "emulated"]:
        if report["run"][key] != manifest[key]:
            failures.append(f"run.{key}: {report['run'][key]!r}, manifest {manifest[key]!r}")

    totals = report["totals"]
    phases = dict(db.execute("select phase::varchar, count(*) from steps group by all").fetchall())
    for phase in ["prefill", "decode", "verify"]:
        same(f"totals.{phase}_steps", totals[f"{phase}_steps"], phases.get(phase, 0))
    same("totals.steps", totals["steps"], sum(phases.values()))
    same("totals.tokens_emitted", totals["tokens_emitted"], db.execute("select sum(len(emitted_tokens))::bigint from steps").fetchone()[0])
    requests = "select request_id from steps union select request_id from requests"
    same("totals.requests", totals["requests"], db.execute(f"select count(*) from ({requests})").fetchone()[0])
    check_acceptance(db, report)
    check_telemetry(db, report["telemetry"], manifest)

    lengths = db.execute("select rows, count(*) from windows group by rows order by count(*) desc, rows desc").fetchall()
    dominant = lengths[0][0]
    others = sorted(rows for rows, _ in lengths[1:])
    layers = sorted(model["moe_layers"])
    same("layers", [layer["layer"] for layer in report["layers"]], layers)
    popular, loads = {}, []
    for layer in layers:
        popular[layer], counts = popularity(db, layer, experts)
        found = report["layers"][layers.index(layer)]
        where = f"layers[{layer}]"
        same(f"{where}.rows", found["rows"], dominant)
        same(f"{where}.k", found["k"], k)
        same(f"{where}.experts", found["experts"], experts)
        check_load(f"{where}.load", found["load"], counts, experts)
        same(f"{where}.load_by_expert", found["load_by_expert"], [counts.get(e, 0) for e in range(experts)] if counts else None)
        loads.append(found["load"])
        check_windows(db, where, found, [layer], k, experts, popular, kept_only)
        check_coverage(db, f"{where}.mass_coverage", found["mass_coverage"], [layer], dominant, k, manifest["router_weights"])
        same(f"{where}.by_rows", [s["rows"] for s in found["by_rows"]], others)
        for stats in found["by_rows"]:
            check_windows(db, f"{where}.by_rows[{stats['rows']}]", stats, [layer], k, experts, popular, kept_only)

    overall = report["overall"]
    same("overall.rows", overall["rows"], dominant)
    check_windows(db, "overall", overall, layers, k, experts, popular, kept_only)
    check_coverage(db, "overall.mass_coverage", overall["mass_coverage"], layers, dominant, k, manifest["router_weights"])
    same("overall.by_rows", [s["rows"] for s in overall["by_rows"]], others)
    for stats in overall["by_rows"]:
        check_windows(db, f"overall.by_rows[{stats['rows']}]", stats, layers, k, experts, popular, kept_only)
    for key in overall["load"]:
        same(f"overall.load.{key}", overall["load"][key], sum(load[key] for load in loads) / len(loads))
    means = db.execute(f"select layer, avg(u) from unions where rows = {dominant} group by layer order by avg(u) desc, layer").fetchall()
    same("overall.worst_layer", overall["worst_layer"], means[0][0])
    values = [mean for _, mean in means]
    centre = sum(values) / len(values)
    spread = {"min": min(values), "max": max(values), "sd": math.sqrt(sum((v - centre) ** 2 for v in values) / len(values))}
    for key, value in spread.items():
        same(f"overall.layer_spread.{key}", overall["layer_spread"][key], value)
    check_requests(db, report, dominant, kept_only)
    check_routers(db, report, "draft", "draft", "verify", k, experts)
    check_routers(db, report, "prefill", "target", "prefill", k, experts)
    sections.check_groups(db, report, manifest, same, interval)
    sections.check_parallel(db, report, manifest, same)
    resamples = None if kept_only else cost.check(db, report, manifest, dominant, layers, k, same, failures)
    advice.check(db, report, manifest, same, interval, resamples, failures)

    if failures:
        print("\n".join(failures[:20]), f"{len(failures)} of {compared} numbers differ", sep="\n")
        sys.exit(1)
    print(f"{compared} numbers agree")


if __name__ == "__main__":
    main()
