"""Recomputes the sections that a report has when asked for: `groups` and `expert_parallel`."""

import json
import math


def check_groups(db, report, manifest, same, interval):
    groups = report.get("groups")
    if not groups:
        return
    rows = report["overall"]["rows"]
    kept_only = manifest["window_completeness"] == "accepted_only"
    by = groups["by"]
    if by == "request":
        keys = {r: str(r) for (r,) in db.execute("select distinct request_id from verify").fetchall()}
        key_of = lambda step, request: keys[request]
        order = lambda key: int(key)
    elif by == "context":
        contexts = dict(db.execute("select step_id, context_len from steps").fetchall())

        def key_of(step, request):
            low, high = 0, 64
            while contexts[step] >= high:
                low, high = high, 2 * high
            return f"{low}-{high - 1}"

        order = lambda key: int(key.split("-")[0])
    elif by.startswith("tag:"):
        name = by[4:]
        values = {}
        for request, text in db.execute("select request_id, tags from requests").fetchall():
            tags = json.loads(text)
            if name in tags:
                value = tags[name] if isinstance(tags, dict) else "yes"
                values[request] = value if isinstance(value, str) else json.dumps(value)
        key_of = lambda step, request: values.get(request, f"(no {name})")
        order = lambda key: (key == f"(no {name})", key)
    else:
        layers = {str(layer["layer"]): layer for layer in report["layers"]}
        same("groups.layers", [g["key"] for g in groups["groups"]], list(layers))
        for g in groups["groups"]:
            same(f"groups[{g['key']}].union_mean", g["union_mean"], layers[g["key"]]["union"]["mean"])
        return

    steps = {}
    for step, request, accepted in db.execute("select step_id, request_id, accepted from verify").fetchall():
        steps.setdefault(key_of(step, request), []).append((step, request, accepted))
    windows = {}
    for step, request, u, wasted, accepted in db.execute(f"select step_id, request_id, u, wasted, accepted from unions where rows = {rows}").fetchall():
        windows.setdefault(key_of(step, request), []).append((request, u, wasted, accepted))
    same("groups.keys", [g["key"] for g in groups["groups"]], sorted(steps, key=order))
    for g in groups["groups"]:
        where = f"groups[{g['key']}]"
        mine, held = steps[g["key"]], windows.get(g["key"], [])
        same(f"{where}.verify_steps", g["verify_steps"], len(mine))
        same(f"{where}.requests", g["requests"], len({r for _, r, _ in mine}))
        same(f"{where}.tokens_per_step", g["acceptance"]["tokens_per_step"], sum(a + 1 for *_, a in mine) / len(mine))
        same(f"{where}.windows", g["windows"], len(held))
        if not held:
            same(f"{where}.union_mean", g["union_mean"], None)
            continue
        union, wasted = sum(u for _, u, _, _ in held), sum(w for _, _, w, _ in held)
        kept, rejected = sum(a + 1 for *_, a in held), sum(rows - 1 - a for *_, a in held)
        same(f"{where}.union_mean", g["union_mean"], union / len(held))
        clusters = {}
        for request, u, _, _ in held:
            n, d = clusters.get(request, (0, 0))
            clusters[request] = (n + u, d + 1)
        interval(f"{where}.union_ci95", g["union_ci95"], list(clusters.values()))
        same(f"{where}.prefix_union", g["prefix_union"][-1], union / len(held))
        same(f"{where}.marginal_kept", g["marginal_kept"], (union - wasted) / kept)
        same(f"{where}.marginal_rejected", g["marginal_rejected"], wasted / rejected if rejected and not kept_only else None)
        same(f"{where}.wasted_mean", g["wasted_mean"], None if kept_only else wasted / len(held))


def balanced(loads, ranks):
    """Greedy: the heaviest expert to the lightest rank that has room."""
    room = math.ceil(len(loads) / ranks)
    total, held, rank_of = [0] * ranks, [0] * ranks, [0] * len(loads)
    for expert in sorted(range(len(loads)), key=lambda e: (-loads[e], e)):
        rank = min((r for r in range(ranks) if held[r] < room), key=lambda r: (total[r], r))
        total[rank] += loads[expert]
        held[rank] += 1
        rank_of[expert] = rank
    return rank_of


def check_parallel(db, report, manifest, same):
    found = report.get("expert_parallel")
    if not found:
        return
    model, ranks = manifest["model"], found["ranks"]
    experts, k = model["experts"], model["experts_per_token"]
    rows = report["overall"]["rows"]
    row_bytes = 2 * model["hidden_size"]
    same("expert_parallel.row_bytes", found["row_bytes"], row_bytes)
    chosen = [e * ranks // experts if found["placement"] == "contiguous" else e % ranks for e in range(experts)]
    half = {r: at % 2 for at, (r,) in enumerate(db.execute("select distinct request_id from steps order by request_id").fetchall())}
    loads = {}
    for layer, request, expert, n in db.execute("select layer, request_id, id, count(*) from slots group by all").fetchall():
        loads.setdefault((layer, half[request]), [0] * experts)[expert] += n
    held_out = len({h for _, h in loads}) == 2

    windows = {}
    for layer, step, request, row, ids in db.execute(f"select layer, step_id, request_id, row, list(id) from slots where rows = {rows} group by all").fetchall():
        windows.setdefault((layer, step, request), {})[row] = ids

    def stats(chosen_windows, rank_of):
        """`rank_of` gives the placement of a (layer, request)."""
        n = len(chosen_windows)
        touched = token = weights = floor = union = 0
        busiest, imbalance = [], []
        for (layer, _, request), window in chosen_windows:
            place = rank_of(layer, request)
            distinct = {e for ids in window.values() for e in ids}
            by_rank = [sum(place[e] == r for e in distinct) for r in range(ranks)]
            union += len(distinct)
            touched += sum(c > 0 for c in by_rank)
            busiest.append(max(by_rank))
            imbalance.append(max(by_rank) * ranks / len(distinct))
            floor += math.ceil(len(distinct) / ranks)
            token += sum(len({place[e] for e in ids}) for ids in window.values())
            weights += len(distinct)
        p99 = math.ceil(0.99 * n) - 1
        away = (ranks - 1) / ranks
        return {
            "windows": n,
            "union_mean": union / n,
            "ranks_touched_mean": touched / n,
            "busiest_mean": sum(busiest) / n,
            "busiest_p99": sorted(busiest)[p99],
            "busiest_floor_mean": floor / n,
            "imbalance_mean": sum(imbalance) / n,
            "imbalance_p99": sorted(imbalance)[p99],
            "token_dispatch_bytes": token * away * row_bytes / n,
            "expert_dispatch_bytes": float(rows * k * away * row_bytes),
            "weight_dispatch_bytes": weights * away * model["bytes_per_expert"] / n,
        }

    made = {}

    def judged_by(layer, request):
        own = half[request]
        if (layer, own) not in made:
            none = [0] * experts
            even, odd = loads.get((layer, 0), none), loads.get((layer, 1), none)
            both = [a + b for a, b in zip(even, odd)]
            made[layer, own] = balanced((odd if own == 0 else even) if held_out else both, ranks)
        return made[layer, own]

    def compare(where, got, chosen_windows, rank_of):
        expected = stats(chosen_windows, rank_of)
        for key, value in expected.items():
            same(f"{where}.{key}", got[key], value)
        return expected

    every = list(windows.items())
    all_chosen = compare("expert_parallel.overall", found["overall"], every, lambda layer, request: chosen)
    all_balanced = compare("expert_parallel.balanced.stats", found["balanced"]["stats"], every, judged_by)
    same("expert_parallel.balanced.gain", found["balanced"]["gain"], 1 - all_balanced["busiest_mean"] / all_chosen["busiest_mean"])
    if found["balanced"]["held_out"] != held_out:
        same("expert_parallel.balanced.held_out", str(found["balanced"]["held_out"]), str(held_out))
    for layer in found["layers"]:
        mine = [(key, window) for key, window in every if key[0] == layer["layer"]]
        where = f"expert_parallel.layers[{layer['layer']}]"
        if not mine:
            same(f"{where}.stats", layer["stats"], None)
            continue
        compare(f"{where}.stats", layer["stats"], mine, lambda layer, request: chosen)
        compare(f"{where}.balanced", layer["balanced"], mine, judged_by)
