//! The meaning, unit and direction of every number of a report.

use super::unit::Unit;

/// Which way is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Smaller is better.
    Lower,
    /// Larger is better.
    Higher,
    /// Neither: a description.
    Neither,
}

/// Whether the same trace always gives the same value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Noise {
    /// A function of the recorded tokens and routes alone.
    Exact,
    /// Depends on clocks and load.
    Noisy,
}

/// One reported number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Its name in the report, under `layers[]`, `overall` or `acceptance`.
    pub id: &'static str,
    /// What it counts.
    pub unit: Unit,
    /// Which way is better.
    pub better: Better,
    /// Exact or noisy.
    pub noise: Noise,
    /// One line.
    pub meaning: &'static str,
    /// How it is computed.
    pub formula: &'static str,
}

const fn exact(id: &'static str, unit: Unit, better: Better, meaning: &'static str, formula: &'static str) -> Metric {
    Metric { id, unit, better, noise: Noise::Exact, meaning, formula }
}

const fn noisy(id: &'static str, unit: Unit, better: Better, meaning: &'static str, formula: &'static str) -> Metric {
    Metric { id, unit, better, noise: Noise::Noisy, meaning, formula }
}

/// Every metric that a report of this version can hold.
pub const METRICS: &[Metric] = &[
    exact("accepted_drafts_mean", Unit::Tokens, Better::Higher, "drafts kept per verify step", "mean of accepted, bonus token excluded"),
    exact("tokens_per_step", Unit::Tokens, Better::Higher, "tokens per verify step (τ)", "mean of accepted + 1"),
    exact("emitted_per_step", Unit::Tokens, Better::Higher, "tokens a verify step added to the output", "mean; cut where a request ended"),
    exact(
        "by_position",
        Unit::Share,
        Better::Higher,
        "share of windows that accepted draft i",
        "windows with accepted >= i / windows with rows > i",
    ),
    exact(
        "conditional_by_position",
        Unit::Share,
        Better::Higher,
        "share that accepted draft i once all before it were",
        "windows with rows > i and accepted >= i / windows with rows > i and accepted >= i - 1",
    ),
    exact("union", Unit::Experts, Better::Lower, "distinct experts of a window in one layer", "|R(0) ∪ ... ∪ R(rows - 1)|"),
    exact("prefix_union", Unit::Experts, Better::Lower, "distinct experts of rows 0...j", "|R(0) ∪ ... ∪ R(j)|"),
    exact("marginal", Unit::Experts, Better::Lower, "experts that row i adds", "prefix_union[i] - prefix_union[i - 1]"),
    exact("marginal_kept", Unit::Experts, Better::Neither, "experts added per kept row", "Σ marginal of rows i <= accepted / their number"),
    exact(
        "marginal_rejected",
        Unit::Experts,
        Better::Lower,
        "experts added per rejected row",
        "Σ marginal of rows i > accepted / their number",
    ),
    exact("wasted_mean", Unit::Experts, Better::Lower, "experts that only rejected rows touched", "union - prefix_union[accepted]"),
    exact("pairwise", Unit::Experts, Better::Higher, "experts that rows i and j share", "mean of |R(i) ∩ R(j)|"),
    exact(
        "lag_overlap_frac",
        Unit::Share,
        Better::Higher,
        "share of a row's experts that the row at distance d chose as well",
        "mean over pairs with j - i = d of |R(i) ∩ R(j)| / k",
    ),
    exact(
        "lag_jaccard",
        Unit::Share,
        Better::Higher,
        "Jaccard index of rows at distance d",
        "mean over pairs with j - i = d of o / (2k - o), o = |R(i) ∩ R(j)|",
    ),
    exact(
        "step_reuse",
        Unit::Share,
        Better::Higher,
        "share of the union that the request's previous window had as well",
        "mean of |U(t) ∩ U(t - 1)| / |U(t)| over windows that have a previous one",
    ),
    exact("uniform_union", Unit::Experts, Better::Neither, "union expected of independent uniform rows", "E (1 - (1 - k/E)^rows)"),
    exact(
        "popularity_union",
        Unit::Experts,
        Better::Neither,
        "union expected of independent rows with the observed popularity",
        "Σ_e (1 - (1 - p_e)^rows), p_e = share of the layer's verify rows that chose e",
    ),
    exact(
        "lift",
        Unit::Share,
        Better::Higher,
        "how far rows agree: 0 as chance, 1 all the same",
        "(uniform_union - union) / (uniform_union - k)",
    ),
    exact(
        "popularity_lift",
        Unit::Share,
        Better::Higher,
        "the same beyond what unequal popularity explains",
        "(popularity_union - union) / (popularity_union - k)",
    ),
    exact("load.entropy_bits", Unit::Bits, Better::Neither, "entropy H of the experts' shares of slots", "-Σ q_e log2 q_e"),
    exact("load.effective_experts", Unit::Experts, Better::Neither, "equally loaded experts of the same entropy", "2^H"),
    exact(
        "load.top_1pct_share",
        Unit::Share,
        Better::Neither,
        "share of slots on the most loaded 1 %",
        "Σ of the ceil(E / 100) largest q_e",
    ),
    exact("load.max_over_mean", Unit::Ratio, Better::Neither, "most loaded expert against the mean", "E max q_e"),
    exact(
        "mass_coverage",
        Unit::Share,
        Better::Higher,
        "share of a window's gate mass in its best B experts",
        "mean of Σ of the B largest summed gate weights / Σ of all",
    ),
    noisy(
        "cost.verify_ratio",
        Unit::Ratio,
        Better::Lower,
        "time of the target's pass, verify against decode",
        "mean verify / mean decode over octaves of context length that have both, weighed by verify steps",
    ),
    noisy(
        "cost.step_ratio",
        Unit::Ratio,
        Better::Lower,
        "the same of whole steps, with drafting, sampling and commit",
        "as verify_ratio, of host_end - host_begin",
    ),
    noisy("cost.break_even", Unit::Tokens, Better::Lower, "tokens per step at which speculation costs what it gains", "step_ratio"),
    noisy("cost.speedup", Unit::Ratio, Better::Higher, "speed against plain decoding", "tokens_per_step / step_ratio"),
    noisy(
        "cost.all_rows.tokens_per_step",
        Unit::Tokens,
        Better::Higher,
        "tokens per verify step with times, of any number of rows",
        "mean of accepted + 1 over them",
    ),
    noisy(
        "cost.all_rows.step_ratio",
        Unit::Ratio,
        Better::Lower,
        "the step ratio over verify steps of every number of rows",
        "as step_ratio, of all of them",
    ),
    noisy(
        "cost.all_rows.speedup",
        Unit::Ratio,
        Better::Higher,
        "speed against plain decoding over verify steps of every number of rows",
        "all_rows.tokens_per_step / all_rows.step_ratio",
    ),
    noisy(
        "cost.unattributed_us",
        Unit::Microseconds,
        Better::Neither,
        "difference of the steps that no operation accounts for",
        "(verify step - decode step) - sum of the components' differences",
    ),
    noisy("time.verify_us", Unit::Microseconds, Better::Lower, "time of a layer in a verify step", "mean sum of its operations"),
    noisy("time.decode_us", Unit::Microseconds, Better::Lower, "time of a layer in a decode step", "mean sum of its operations"),
    noisy(
        "cost.us_per_expert",
        Unit::Microseconds,
        Better::Lower,
        "time of one more distinct expert in a layer",
        "b of the least squares T = a + b U + c W, U distinct experts, W rows",
    ),
    noisy("cost.us_per_row", Unit::Microseconds, Better::Lower, "time of one more row of the same experts", "c of that fit"),
    noisy("cost.intercept_us", Unit::Microseconds, Better::Lower, "time of a layer's experts besides", "a of that fit"),
    noisy(
        "cost.r2",
        Unit::Share,
        Better::Higher,
        "share of the times' variance that the fit explains",
        "1 - residual / total sum of squares",
    ),
    noisy(
        "cost.implied_gb_per_s",
        Unit::Ratio,
        Better::Higher,
        "how fast experts seem to be read, GB/s",
        "bytes_per_expert / us_per_expert",
    ),
];

/// The metric of this name.
pub fn find(id: &str) -> Option<&'static Metric> {
    METRICS.iter().find(|m| m.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_found() {
        for (i, metric) in METRICS.iter().enumerate() {
            assert_eq!(METRICS.iter().position(|m| m.id == metric.id), Some(i), "{}", metric.id);
            assert_eq!(find(metric.id), Some(metric));
            assert!(!metric.meaning.is_empty() && !metric.formula.is_empty());
        }
        assert_eq!(find("no such metric"), None);
    }
}
