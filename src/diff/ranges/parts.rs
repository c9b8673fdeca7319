//! What a number can be by others: a union by its rows, a mean by its parts.

use super::SLACK;
use crate::metric::report::{Load, Report, WindowStats};

/// Checks what numbers can be by others.
///
/// # Errors
/// The path of the first key whose number cannot be, and what it can be.
pub fn check_report(report: &Report) -> Result<(), String> {
    for (i, layer) in report.layers.iter().enumerate() {
        let path = format!("layers[{i}]");
        let scope = Scope { path: &path, k: layer.k, experts: layer.experts };
        scope.windows(&layer.stats, "")?;
        layer.by_rows.iter().enumerate().try_for_each(|(at, stats)| scope.windows(stats, &format!(".by_rows[{at}]")))?;
        layer.load.as_ref().map_or(Ok(()), |load| scope.load(load))?;
        if layer.load_by_expert.as_ref().is_some_and(|load| load.len() > usize::from(layer.experts)) {
            return Err(format!("{path}.load_by_expert: more entries than the layer's {} experts", layer.experts));
        }
    }
    if let Some(overall) = &report.overall {
        let scope = Scope { path: "overall", k: overall.k, experts: overall.experts };
        scope.windows(&overall.stats, "")?;
        overall.by_rows.iter().enumerate().try_for_each(|(at, stats)| scope.windows(stats, &format!(".by_rows[{at}]")))?;
        overall.load.as_ref().map_or(Ok(()), |load| scope.load(load))?;
    }
    acceptance(report)?;
    requests(report)
}

/// A layer, or all of them.
struct Scope<'a> {
    path: &'a str,
    k: u16,
    experts: u16,
}

impl Scope<'_> {
    fn windows(&self, s: &WindowStats, sub: &str) -> Result<(), String> {
        let (k, experts, rows) = (f64::from(self.k), f64::from(self.experts), usize::from(s.rows));
        if self.k > self.experts {
            return Err(format!("{}.k: {} experts of {}", self.path, self.k, self.experts));
        }
        let most = (rows as f64 * k).min(experts);
        let at_most = |key: &str, value: f64, most: f64| {
            let fits = value <= most * (1.0 + SLACK);
            let why = || format!("{}{sub}.{key}: {value} is above {most}, the most of {rows} rows of {k} out of {experts}", self.path);
            if fits { Ok(()) } else { Err(why()) }
        };
        let each = |key: &str, values: &[f64], entries: usize, most: &dyn Fn(usize) -> f64| {
            if values.len() > entries {
                return Err(format!("{}{sub}.{key}: {} entries for {rows} rows", self.path, values.len()));
            }
            values.iter().enumerate().try_for_each(|(i, &v)| at_most(&format!("{key}[{i}]"), v, most(i)))
        };
        if let Some(u) = &s.union {
            at_most("union.mean", u.mean, most)?;
            at_most("union.max", f64::from(u.max), most)?;
            let ranks = [("p50", u.p50), ("p90", u.p90), ("p99", u.p99), ("max", u.max)];
            if let Some([low, high]) = ranks.windows(2).find_map(|pair| <[_; 2]>::try_from(pair).ok().filter(|[a, b]| a.1 > b.1)) {
                return Err(format!("{}{sub}.union.{}: {} is above {}, {}", self.path, low.0, low.1, high.0, high.1));
            }
            if let Some([low, high]) = u.ci95 {
                at_most("union.ci95", high, most)?;
                at_most("union.ci95", -low, 0.0)?;
            }
            at_most("union.histogram", u.histogram.len() as f64 - 1.0, most)?;
        }
        each("prefix_union", &s.prefix_union, rows, &|j| ((j + 1) as f64 * k).min(experts))?;
        each("marginal", &s.marginal, rows, &|_| k)?;
        each("wasted_by_row", s.wasted_by_row.as_deref().unwrap_or_default(), rows, &|_| k)?;
        each("lag_overlap_frac", s.lag_overlap_frac.as_deref().unwrap_or_default(), rows, &|_| 1.0)?;
        each("lag_jaccard", s.lag_jaccard.as_deref().unwrap_or_default(), rows, &|_| 1.0)?;
        let pairwise = s.pairwise.as_deref().unwrap_or_default();
        if pairwise.len() > rows {
            return Err(format!("{}{sub}.pairwise: {} entries for {rows} rows", self.path, pairwise.len()));
        }
        pairwise.iter().enumerate().try_for_each(|(i, row)| each(&format!("pairwise[{i}]"), row, rows, &|_| k))?;
        let numbers = [
            ("marginal_kept", s.marginal_kept, k),
            ("marginal_rejected", s.marginal_rejected, k),
            ("wasted_mean", s.wasted_mean, most),
            ("uniform_union", s.uniform_union, most),
            ("popularity_union", s.popularity_union, most),
        ];
        numbers.into_iter().try_for_each(|(key, value, most)| value.map_or(Ok(()), |value| at_most(key, value, most)))
    }

    fn load(&self, load: &Load) -> Result<(), String> {
        let experts = f64::from(self.experts);
        let numbers = [
            ("entropy_bits", load.entropy_bits, experts.log2()),
            ("effective_experts", load.effective_experts, experts),
            ("max_over_mean", load.max_over_mean, experts),
        ];
        let above = numbers.into_iter().find(|&(_, value, most)| value > most * (1.0 + SLACK) + SLACK);
        above.map_or(Ok(()), |(key, value, most)| {
            Err(format!("{}.load.{key}: {value} is above {most}, the most of {experts} experts", self.path))
        })
    }
}

fn acceptance(report: &Report) -> Result<(), String> {
    let a = &report.acceptance;
    let most = a.histogram.len().saturating_sub(1) as f64;
    if let Some((mean, tokens)) = a.accepted_drafts_mean.zip(a.tokens_per_step)
        && (tokens - mean - 1.0).abs() > SLACK * tokens
    {
        return Err(format!("acceptance.tokens_per_step: {tokens} is not one more than accepted_drafts_mean, {mean}"));
    }
    if let Some(mean) = a.accepted_drafts_mean.filter(|&mean| mean > most * (1.0 + SLACK)) {
        return Err(format!("acceptance.accepted_drafts_mean: {mean} is above {most}, the most drafts of the histogram"));
    }
    let positions = [("by_position", a.by_position.len()), ("conditional_by_position", a.conditional_by_position.len())];
    let longer = positions.into_iter().find(|&(_, n)| n as f64 > most);
    longer.map_or(Ok(()), |(key, n)| Err(format!("acceptance.{key}: {n} positions, windows have {most} drafts at most")))
}

/// Largest sum of one request: sums over layers must not overflow.
const LARGEST_SUM: u64 = 1 << 40;

fn requests(report: &Report) -> Result<(), String> {
    let layers = report.layers.len();
    let drafts = report.acceptance.histogram.len().saturating_sub(1) as u64;
    let most = report.overall.as_ref().map(|o| (u64::from(o.stats.rows) * u64::from(o.k)).min(u64::from(o.experts)));
    for (i, request) in report.by_request.iter().enumerate() {
        let path = format!("by_request[{i}]");
        let id = request.request_id;
        if request.verify_steps > LARGEST_SUM || request.accepted.is_some_and(|n| n > request.verify_steps.saturating_mul(drafts)) {
            return Err(format!("{path}.accepted: request {id} has accepted more drafts than its verify steps had"));
        }
        if let Some((mean, most)) = request.union_mean.zip(most).filter(|&(mean, most)| mean > most as f64 * (1.0 + SLACK)) {
            return Err(format!("{path}.union_mean: {mean} is above {most}, the most of a window"));
        }
        let Some(sums) = &request.sums else { continue };
        let wasted = sums.wasted.as_ref().map_or(layers, Vec::len);
        if sums.windows.len() != layers || sums.union.len() != layers || wasted != layers {
            return Err(format!("{path}.sums: those of request {id} are not of {layers} layers"));
        }
        for (slot, (&windows, &union)) in sums.windows.iter().zip(&sums.union).enumerate() {
            let wasted = sums.wasted.as_ref().and_then(|w| w.get(slot)).copied().unwrap_or(0);
            if windows > LARGEST_SUM || union > LARGEST_SUM {
                return Err(format!("{path}.sums: those of request {id} are larger than a trace can have"));
            }
            if most.is_some_and(|most| union > windows.saturating_mul(most)) || wasted > union {
                return Err(format!("{path}.sums: in layer {slot} of the list, request {id} has more experts than its windows can"));
            }
        }
    }
    Ok(())
}
