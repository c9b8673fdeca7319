"""Recomputes what a report says of trees and of shared passes from the trace's Parquet files with SQL.

Usage: shapes.py TRACE REPORT.json SCHEMA.json

Shares no code with specprof. Counts must be equal, means within 1e-9; an interval must hold its mean. Prints how many numbers
were compared; exits 1 with the first differences.
"""

import json
import sys
from pathlib import Path

import duckdb
import jsonschema

failures = []
compared = 0


def same(where, found, expected):
    global compared
    compared += 1
    if found is None or expected is None or isinstance(expected, int):
        ok = found == expected
    else:
        ok = abs(found - expected) <= 1e-9 * max(1.0, abs(expected))
    if not ok:
        failures.append(f"{where}: report {found!r}, recomputed {expected!r}")


def tables(db, trace, k):
    experts = ", ".join(f"e{i}" for i in range(k))
    db.execute(f"create table s as select * from read_parquet('{trace}/steps/*.parquet')")
    db.execute(
        f"create table r as select step_id, layer, row, unnest([{experts}]) as expert "
        f"from read_parquet('{trace}/routes/*.parquet') where module = 'target'"
    )
    db.execute(
        """create table t as select step_id, rows, accepted, emitted_tokens, parents is null as chain,
        unnest(range(rows)) as row, unnest(coalesce(parents, range(-1, rows - 1))) as parent, unnest(input_tokens) as token
        from s where phase = 'verify'"""
    )
    db.execute(
        """create table d as with recursive d as (
            select step_id, rows, row, 0 as depth from t where parent = -1
            union all
            select t.step_id, t.rows, t.row, d.depth + 1 from t join d on t.step_id = d.step_id and t.parent = d.row
        ) select * from d"""
    )
    # Every way down from the anchor by the accepted number of rows whose tokens are the emitted ones.
    db.execute(
        """create table kept as with recursive p as (
            select step_id, row, 0 as depth, accepted, [row] as path from t where parent = -1
            union all
            select t.step_id, t.row, p.depth + 1, t.accepted, list_append(p.path, t.row)
            from t join p on t.step_id = p.step_id and t.parent = p.row
            where p.depth < t.accepted
              and (t.chain or len(t.emitted_tokens) <= p.depth or t.token = t.emitted_tokens[p.depth + 1])
        ) select step_id, any_value(path) as path from p where depth = accepted group by step_id having count(*) = 1"""
    )


def check_trees(db, where, stats, layers):
    """Compares one layer's statistics, or those of all layers together."""
    rows, chosen = stats["rows"], ", ".join(map(str, layers))
    one = lambda sql: db.execute(sql).fetchone()
    windows, trees = one(f"select count(*), count(parents) from s where phase = 'verify' and rows = {rows}")
    if trees == 0:
        same(f"{where}.by_depth", stats.get("by_depth"), None)
        return
    windows *= len(layers)
    same(f"{where}.windows", stats["windows"], windows)
    (deepest,) = one(f"select max(depth) from d where rows = {rows}")
    same(f"{where}.by_depth", len(stats["by_depth"]) > deepest, True)
    before = 0
    for found in stats["by_depth"]:
        at = f"{where}.by_depth[{found['depth']}]"
        having, n = one(f"select count(distinct step_id), count(*) from d where rows = {rows} and depth = {found['depth']}")
        union_of = (
            "select coalesce(sum(u), 0) from (select count(distinct r.expert) as u from r join d using (step_id, row) "
            f"where d.rows = {rows} and r.layer in ({chosen}) and d.depth {{}} {found['depth']} group by r.step_id, r.layer)"
        )
        (own,), (prefix,) = one(union_of.format("=")), one(union_of.format("<="))
        same(f"{at}.windows", found["windows"], having * len(layers))
        same(f"{at}.rows_mean", found["rows_mean"], n * len(layers) / windows)
        same(f"{at}.union_mean", found["union_mean"], own / (having * len(layers)))
        same(f"{at}.prefix_union", found["prefix_union"], prefix / windows)
        same(f"{at}.marginal", found["marginal"], (prefix - before) / windows)
        before = prefix
    path = stats["accepted_path"]
    known, kept_rows = one(f"select count(*), sum(len(path)) from kept join s using (step_id) where rows = {rows}")
    same(f"{where}.path.windows", path["windows"], known * len(layers))
    same(f"{where}.path.unknown", path["unknown_windows"], windows - known * len(layers))
    kept, union = one(
        f"""select sum(k), sum(u) from (
            select count(distinct expert) filter (list_contains(path, row)) as k, count(distinct expert) as u
            from r join kept using (step_id) join s using (step_id)
            where s.rows = {rows} and r.layer in ({chosen}) group by r.step_id, r.layer)"""
    )
    same(f"{where}.path.rows_mean", path["rows_mean"], kept_rows / known)
    same(f"{where}.path.union_mean", path["union_mean"], kept / (known * len(layers)))
    same(f"{where}.path.wasted_mean", path["wasted_mean"], (union - kept) / (known * len(layers)))
    told = known * len(layers) == windows
    same(f"{where}.wasted_mean", stats["wasted_mean"], (union - kept) / windows if told else None)
    same(f"{where}.marginal_kept", stats["marginal_kept"], kept / (kept_rows * len(layers)) if told else None)


def check_batch(db, report):
    batch = report.get("batch")
    db.execute("create table p as select *, coalesce('p' || pass_id, 's' || step_id) as pass from s")
    db.execute(
        """create table b as select pass, count(*) as n, sum(rows) as rows from p group by pass
        having bool_or(phase = 'verify') and not bool_or(phase = 'prefill')"""
    )
    (most,) = db.execute("select max(n) from b").fetchone()
    if most is None or most < 2:
        same("batch", batch, None)
        return
    passes, requests, rows = db.execute("select count(*), avg(n), avg(rows) from b").fetchone()
    same("batch.passes", batch["passes"], passes)
    same("batch.requests_per_pass", batch["requests_per_pass"], requests)
    same("batch.rows_per_pass", batch["rows_per_pass"], float(rows))
    db.execute(
        """create table u as
        with one as (select b.pass, r.layer, r.step_id, count(distinct expert) as u from r join p using (step_id) join b using (pass)
                     group by b.pass, r.layer, r.step_id),
             many as (select b.pass, r.layer, count(distinct expert) as u from r join p using (step_id) join b using (pass)
                      group by b.pass, r.layer)
        select m.pass, m.layer, b.n, m.u as whole, (select sum(one.u) from one where one.pass = m.pass and one.layer = m.layer) as parts
        from many m join b using (pass)"""
    )

    def stats(where, found, condition):
        n, steps, parts, whole = db.execute(f"select count(*), sum(n), sum(parts), sum(whole) from u where {condition}").fetchone()
        steps, parts, whole = int(steps), int(parts), int(whole)
        same(f"{where}.passes", found["passes"], n)
        for key, value in [
            ("request_union", parts / steps),
            ("union_sum", parts / n),
            ("pass_union", whole / n),
            ("sharing_ratio", parts / whole),
        ]:
            name = key if key == "sharing_ratio" else f"{key}_mean"
            same(f"{where}.{name}", found[name], value)
            ci = found[f"{key}_ci95"]
            if ci is not None and not ci[0] - 1e-9 <= value <= ci[1] + 1e-9:
                failures.append(f"{where}.{key}_ci95: {ci!r} does not hold {value!r}")

    stats("batch", batch["overall"], "true")
    for layer in batch["layers"]:
        stats(f"batch.layers[{layer['layer']}]", layer, f"layer = {layer['layer']}")
    for size in batch["by_requests"]:
        stats(f"batch.by_requests[{size['requests']}]", size, f"n = {size['requests']}")


def main():
    trace, report, schema = Path(sys.argv[1]), *(json.loads(Path(p).read_text()) for p in sys.argv[2:4])
    jsonschema.validate(report, schema)
    manifest = json.loads((trace / "manifest.json").read_text())
    db = duckdb.connect()
    tables(db, trace, manifest["model"]["experts_per_token"])
    for layer in report["layers"]:
        for stats in [layer, *layer["by_rows"]]:
            check_trees(db, f"layers[{layer['layer']}] of {stats['rows']} rows", stats, [layer["layer"]])
    overall = report["overall"]
    layers = [layer["layer"] for layer in report["layers"]]
    for stats in [overall, *overall["by_rows"]]:
        check_trees(db, f"overall of {stats['rows']} rows", stats, layers)
    check_batch(db, report)
    if failures:
        print("\n".join(failures[:20]))
        print(f"{len(failures)} of {compared} numbers differ")
        sys.exit(1)
    print(f"{compared} numbers agree")


main()
