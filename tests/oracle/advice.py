"""Recomputes a report's `advice` from the trace, draft length by draft length, with SQL and plain sums."""

import json

import numpy as np

from resample import RESAMPLES, Costs, compare


def best_of(speedups):
    best = 0
    for at, speedup in enumerate(speedups):
        if speedup > speedups[best]:
            best = at
    return best


def windows(db, rows, layers):
    """Per step of `rows` rows with all layers: step, request, accepted, experts of rows 0...j summed over the layers, draft probabilities."""
    prefixes = ", ".join(f"count(*) filter (t.first <= {j})" for j in range(rows))
    found = db.execute(f"""
        select t.step_id, t.request_id, any_value(t.accepted), any_value(s.draft_probs), {prefixes}
        from touched t join steps s using (step_id)
        where t.rows = {rows}
        group by t.step_id, t.request_id
        having count(distinct t.layer) = {layers}
        order by t.step_id""").fetchall()
    return [(step, request, accepted, probs, list(prefix)) for step, request, accepted, probs, *prefix in found]


def tags_of(text):
    tags = json.loads(text)
    if isinstance(tags, dict):
        return {f"{k}={v if isinstance(v, str) else json.dumps(v, separators=(',', ':'))}" for k, v in tags.items()}
    return {f"{word}=yes" for word in tags}


def coefficients(report, manifest, decode_experts, experts, gamma):
    """Whether costs are known, the cost of (steps, rows, experts, drafts), a decode step's, and where they are from."""
    cost, fit = report["cost"] or {}, (report["overall"]["cost"] or {}).get("us_per_expert")
    decodes = sum(c["decode_steps"] for c in cost.get("contexts", []) if c["verify_steps"])
    if cost.get("source") and decodes >= 10 and cost["verify_ratio"] is not None and cost["step_ratio"] is not None and not (fit and fit > 0):
        # No time of an expert: windows of the recorded length alone have a cost.
        return True, None, cost["decode_step_us"], "measured"
    if cost.get("source") and decodes >= 10 and cost["verify_ratio"] is not None and cost["step_ratio"] is not None:
        # Through the mean decode and verify step, with the fitted slope of an expert.
        decode, verify = cost["decode_step_us"], cost["decode_step_us"] * cost["step_ratio"]
        passes = cost["decode_us"] * (cost["verify_ratio"] - 1)
        draft = (verify - decode - passes) / gamma
        row = (passes - fit * (experts - decode_experts)) / gamma
        fixed = decode - fit * decode_experts - row
        return True, lambda n, w, x, d: fixed * n + row * w + fit * x + draft * d, decode, "measured"
    other, draft = manifest["model"]["bytes_other_per_step"], manifest["drafter"].get("bytes_per_draft")
    expert = manifest["model"]["bytes_per_expert"]
    if other is None or draft is None:
        return False, None, None, None
    return True, lambda n, w, x, d: other * n + expert * x + draft * d, other + expert * decode_experts, "model"


class Drawn:
    """Tokens, experts and measured step costs of the same resamples."""

    def __init__(self, db, resamples, clusters, decode_experts, gamma):
        of = lambda number: np.array([sum(map(number, clusters.get(r, []))) for r in resamples.requests], dtype=float)
        self.resamples, self.gamma = resamples, gamma
        self.steps = of(lambda w: 1)
        self.tokens = [of(lambda w: min(w[2], length) + 1) for length in range(gamma + 1)]
        self.experts = [of(lambda w: w[4][length]) for length in range(gamma + 1)]
        layers = [layer for (layer,) in db.execute("select distinct layer from points order by layer").fetchall()]
        self.costs = Costs(resamples, layers, self.steps, self.experts[-1], decode_experts, gamma)

    def left_out(self):
        return int((~self.costs.usable).sum()) if self.costs.known else None

    def speedups(self, counts, length):
        """Ratios and speedups of requests drawn so often, one row for each resample."""
        with np.errstate(all="ignore"):
            steps = counts @ self.steps
            ratios = self.costs.ratio(length, counts @ self.experts[length] / steps)
            return ratios, counts @ self.tokens[length] / steps / ratios

    def of_all(self, length):
        return self.speedups(self.resamples.counts, length) if self.costs.known else (None, None)

    def of_some(self, requests):
        """Of a group's requests, drawn apart from the costs unless they are all; a single one is what it is."""
        if not self.costs.known:
            return None
        chosen = np.array([r in requests for r in self.resamples.requests])
        n = int(chosen.sum())
        if n == int((self.steps > 0).sum()) and n > 1:
            return self.of_all(self.gamma)[1]
        counts = np.zeros((RESAMPLES, len(chosen)))
        counts[:, chosen] = self.resamples.rng.multinomial(n, [1 / n] * n, size=RESAMPLES)
        return self.speedups(counts, self.gamma)[1]


def check(db, report, manifest, same, interval, resamples, failures):
    advice = report["advice"]
    model = manifest["model"]
    verify = db.execute("select count(*) from verify").fetchone()[0]
    dominant = report["overall"] and report["overall"]["rows"]
    if manifest["window_completeness"] != "full" or not dominant or not verify:
        same("advice", advice, None)
        return
    gamma = dominant - 1
    layers = db.execute(f"select max(n) from (select count(distinct layer) as n from windows where rows = {dominant} group by step_id)").fetchone()[0]
    steps = windows(db, dominant, layers)
    same("advice.recorded_draft_len", advice["recorded_draft_len"], gamma)
    same("advice.steps", advice["steps"], len(steps))
    same("advice.steps_left_out", advice["steps_left_out"], verify - len(steps))

    k = model["experts_per_token"]
    known, cost_of, decode, source = coefficients(report, manifest, k * layers, sum(w[4][-1] for w in steps) / len(steps), gamma)
    same("advice.cost_source", advice["cost_source"], source)

    def curve(chosen, perfect=False, overlap=False, free=False):
        """Tokens, mean union, ratio and speedup by draft length."""
        points = []
        n = len(chosen)
        for length in range(gamma + 1):
            tokens = length + 1 if perfect else sum(min(a, length) + 1 for _, _, a, _, _ in chosen) / n
            experts = sum(p[0 if overlap else length] for *_, p in chosen) / n
            ratio = None
            if known and cost_of is None:
                # Of whole windows alone, whatever experts they have.
                ratio = {0: 1.0, gamma: report["cost"]["step_ratio"]}.get(length)
            elif known:
                ratio = cost_of(1, length + 1, experts, 0 if free else length) / decode if length else 1.0
            points.append((tokens, experts / layers, ratio, tokens / ratio if ratio else None))
        return points

    points = curve(steps)
    if known and cost_of is None:
        same("advice.other_lengths_unknown_because", advice["other_lengths_unknown_because"] is not None, True)
        same("advice.what_if", advice["what_if"], None)
        for length, ((tokens, union, ratio, speedup), found) in enumerate(zip(points, advice["by_draft_len"])):
            same(f"advice.by_draft_len[{length}].tokens_per_step", found["tokens_per_step"], tokens)
            same(f"advice.by_draft_len[{length}].union_mean", found["union_mean"], union)
            same(f"advice.by_draft_len[{length}].step_ratio", found["step_ratio"], ratio)
            same(f"advice.by_draft_len[{length}].speedup", found["speedup"], speedup)
        same("advice.best_draft_len", advice["best_draft_len"], gamma if points[gamma][3] > 1 else 0)
        return
    clusters = {}
    for window in steps:
        clusters.setdefault(window[1], []).append(window)
    same("advice.requests", advice["requests"], len(clusters))
    drawn = Drawn(db, resamples, clusters, k * layers, gamma) if source == "measured" else None
    left_out = drawn and drawn.left_out()
    if left_out is None:
        same("advice.resamples_left_out", advice["resamples_left_out"], None)
    elif abs(advice["resamples_left_out"] - left_out) > 0.05 * RESAMPLES:
        failures.append(f"advice.resamples_left_out: {advice['resamples_left_out']}, recomputed about {left_out}")
    same("advice.by_draft_len.length", len(advice["by_draft_len"]), gamma + 1)
    for length, ((tokens, union, ratio, speedup), found) in enumerate(zip(points, advice["by_draft_len"])):
        where = f"advice.by_draft_len[{length}]"
        same(f"{where}.draft_len", found["draft_len"], length)
        same(f"{where}.tokens_per_step", found["tokens_per_step"], tokens)
        same(f"{where}.union_mean", found["union_mean"], union)
        same(f"{where}.step_ratio", found["step_ratio"], ratio)
        same(f"{where}.speedup", found["speedup"], speedup)
        interval(f"{where}.tokens_per_step_ci95", found["tokens_per_step_ci95"], [(sum(min(w[2], length) + 1 for w in ws), len(ws)) for ws in clusters.values()])
        interval(f"{where}.union_ci95", found["union_ci95"], [(sum(w[4][length] for w in ws), len(ws) * layers) for ws in clusters.values()])
        if not known:
            same(f"{where}.ci95", found["ci95"], None)
            continue
        if source == "measured":
            ratios, speedups = drawn.of_all(length)
            compare(f"{where}.step_ratio_ci95", found["step_ratio_ci95"], ratios, failures)
            compare(f"{where}.ci95", found["ci95"], speedups, failures)
        else:
            cost = lambda ws: sum(cost_of(1, length + 1, w[4][length], length) for w in ws) if length else decode * len(ws)
            interval(f"{where}.ci95", found["ci95"], [(decode * sum(min(w[2], length) + 1 for w in ws), cost(ws)) for ws in clusters.values()])
            interval(f"{where}.step_ratio_ci95", found["step_ratio_ci95"], [(cost(ws), decode * len(ws)) for ws in clusters.values()])
        if length:
            before = points[length - 1]
            same(f"{where}.marginal_utility", found["marginal_utility"], (tokens - before[0]) / (ratio - before[2]), 1e-6)
    best = best_of([p[3] for p in points]) if known else None
    same("advice.best_draft_len", advice["best_draft_len"], best)
    if known:
        own = [curve(ws)[best][3] for ws in clusters.values()]
        same("advice.request_speedup_mean", advice["request_speedup_mean"], sum(own) / len(own))
        ideals = {"as_recorded": {}, "perfect_drafter": {"perfect": True}, "perfect_overlap": {"overlap": True}, "free_drafting": {"free": True}, "both": {"perfect": True, "overlap": True}}
        for name, ideal in ideals.items():
            speedups = [p[3] for p in curve(steps, **ideal)]
            at = best_of(speedups)
            same(f"advice.what_if.{name}.draft_len", advice["what_if"][name]["draft_len"], at)
            same(f"advice.what_if.{name}.speedup", advice["what_if"][name]["speedup"], speedups[at])

    def check_group(where, found, chosen):
        points = curve(chosen)
        same(f"{where}.steps", found["steps"], len(chosen))
        same(f"{where}.requests", found["requests"], len({w[1] for w in chosen}))
        same(f"{where}.tokens_per_step", found["tokens_per_step"], points[-1][0])
        same(f"{where}.speedup", found["speedup"], points[-1][3])
        if source == "measured":
            compare(f"{where}.ci95", found["ci95"], drawn.of_some({w[1] for w in chosen}), failures)
        if known:
            at = best_of([p[3] for p in points])
            same(f"{where}.best_draft_len", found["best_draft_len"], at)
            same(f"{where}.best_speedup", found["best_speedup"], points[at][3])

    same("advice.by_request", [g["key"] for g in advice["by_request"]], [str(r) for r in sorted(clusters)])
    for found in advice["by_request"]:
        check_group(f"advice.by_request[{found['key']}]", found, clusters[int(found["key"])])
    tagged = {}
    for request, text in db.execute("select request_id, tags from requests").fetchall():
        for tag in tags_of(text):
            tagged.setdefault(tag, []).extend(clusters.get(request, []))
    tagged = {tag: chosen for tag, chosen in tagged.items() if chosen}
    same("advice.by_tag", [g["key"] for g in advice["by_tag"]], sorted(tagged))
    for found in advice["by_tag"]:
        check_group(f"advice.by_tag[{found['key']}]", found, tagged[found["key"]])

    if any(probs is None or len(probs) != gamma for _, _, _, probs, _ in steps):
        same("advice.confidence", advice["confidence"], None)
    else:
        for found in advice["confidence"]:
            where, threshold = f"advice.confidence[{found['threshold']}]", found["threshold"]
            tokens = drafts = experts = spent = 0
            for _, _, accepted, probs, prefix in steps:
                verified = 0
                while verified < gamma and probs[verified] >= threshold:
                    verified += 1
                tokens += min(accepted, verified) + 1
                drafts += verified
                experts += prefix[verified]
                if known:
                    made = min(verified + 1, gamma)
                    spent += cost_of(1, verified + 1, prefix[verified], made) if verified else decode + cost_of(0, 0, 0, made)
            same(f"{where}.tokens_per_step", found["tokens_per_step"], tokens / len(steps))
            same(f"{where}.drafts_mean", found["drafts_mean"], drafts / len(steps))
            same(f"{where}.union_mean", found["union_mean"], experts / len(steps) / layers)
            same(f"{where}.step_ratio", found["step_ratio"], spent / decode / len(steps) if known else None)
            same(f"{where}.speedup", found["speedup"], tokens * decode / spent if known else None)

    coverage = report["overall"]["mass_coverage"]
    if coverage is None:
        same("advice.expert_budget", advice["expert_budget"], None)
        return
    budgets = []
    for mass in [0.8, 0.9, 0.95, 0.98, 0.99, 0.999]:
        experts = next(b for b, c in enumerate(coverage, 1) if c >= mass)
        if experts not in budgets:
            budgets.append(experts)
    same("advice.expert_budget", [b["experts"] for b in advice["expert_budget"]], budgets)
    for found in advice["expert_budget"]:
        where = f"advice.expert_budget[{found['experts']}]"
        mean = db.execute(f"select avg(least(u, {found['experts']})) from unions where rows = {dominant}").fetchone()[0]
        same(f"{where}.union_mean", found["union_mean"], mean)
        if known:
            ratio = cost_of(1, gamma + 1, mean * layers, gamma) / decode
            same(f"{where}.step_ratio", found["step_ratio"], ratio)
            same(f"{where}.speedup", found["speedup"], points[-1][0] / ratio)
