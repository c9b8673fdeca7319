//! Experts by a seeded plan instead of the router's choice: so that a model with made-up weights routes like one with known
//! statistics, or that a pass has exactly the union whose cost is to be measured.
//!
//! The plan of a [`Routing`] is a function of seed, layer and position in the text alone, never of the pass that a row is in: a rejected
//! row that is run again chooses as before, and speculative output stays equal to plain output. The plan of an exact union is one of the
//! pass, and serves measurements alone. The router itself still runs, and gives the planned experts their gate weights. Groups of
//! experts are not looked at. All of it is arithmetic of integers.

use super::config::ModelConfig;
use super::error::EngineError;
use std::fmt;
use std::str::FromStr;

/// How the target's routed layers choose experts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Routing {
    /// By the router.
    #[default]
    Model,
    /// k distinct experts, all sets alike.
    Uniform,
    /// k distinct experts drawn one after the other, with chances by rank^-S; each layer has ranks of its own.
    Zipf(f64),
    /// The share F of a row's experts, in expectation, is that of the row before; all experts are equally popular.
    Overlap(f64),
}

/// Largest exponent: beyond it the first expert takes everything that a weight can tell.
const MAX_EXPONENT: f64 = 8.0;

impl FromStr for Routing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |value: &str| value.parse::<f64>().ok().filter(|v| v.is_finite());
        match text.split_once(':') {
            None if text == "model" => Ok(Self::Model),
            None if text == "uniform" => Ok(Self::Uniform),
            Some(("zipf", s)) => match number(s).filter(|s| (0.0..=MAX_EXPONENT).contains(s)) {
                Some(s) => Ok(Self::Zipf(s)),
                None => Err(format!("zipf:{s}: the exponent is a number from 0 to {MAX_EXPONENT}")),
            },
            Some(("overlap", f)) => match number(f).filter(|f| (0.0..=1.0).contains(f)) {
                Some(f) => Ok(Self::Overlap(f)),
                None => Err(format!("overlap:{f}: the share is a number from 0 to 1")),
            },
            _ => Err(format!("{text:?} is none of model, uniform, zipf:S, overlap:F")),
        }
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model => f.write_str("model"),
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(s) => write!(f, "zipf:{s}"),
            Self::Overlap(share) => write!(f, "overlap:{share}"),
        }
    }
}

/// A plan for one model.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingPlan {
    rule: Rule,
    seed: u64,
    experts: usize,
    k: usize,
}

#[derive(Debug, Clone, PartialEq)]
enum Rule {
    Uniform,
    /// Where the weights of each rank end, the most popular first, one rank's after the other's.
    Zipf(Vec<u64>),
    /// Slot j draws from the experts e with e mod k = j, and draws anew at a position when a random word is below its entry.
    Overlap(Vec<u64>),
    /// So many distinct experts a pass.
    Union(usize),
}

impl RoutingPlan {
    /// The plan of a routing for a model; `None` for the router's own choice.
    ///
    /// # Errors
    /// [`EngineError::Request`] when the model's experts cannot overlap so little.
    pub fn new(routing: Routing, seed: u64, config: &ModelConfig) -> Result<Option<Self>, EngineError> {
        let (experts, k) = (config.experts, config.experts_per_token);
        let rule = match routing {
            Routing::Model => return Ok(None),
            Routing::Uniform => Rule::Uniform,
            Routing::Zipf(exponent) => {
                // 2^40 for the first rank; the sum over 65 536 experts stays far below 2^64.
                let weight = |rank: usize| ((1u64 << 40) as f64 * ((rank + 1) as f64).powf(-exponent)) as u64;
                let sum = |end: &mut u64, rank| {
                    *end += weight(rank).max(1);
                    Some(*end)
                };
                Rule::Zipf((0..experts).scan(0, sum).collect())
            }
            Routing::Overlap(share) => Rule::Overlap((0..k).map(|slot| renewal(share, class(experts, k, slot))).collect::<Result<_, _>>()?),
        };
        Ok(Some(Self { rule, seed, experts, k }))
    }

    /// The plan by which the rows of every pass together wake `union` experts in every layer.
    ///
    /// A pass of R rows can have any union U of k ... min(E, R k). U experts are drawn without replacement for each layer; rank j of row
    /// r gets the (r k + j mod U)-th of them. U >= k consecutive ones differ, so a row's experts are distinct, and R k >= U places hold all
    /// of them; a pass of fewer rows has a union of R k.
    ///
    /// # Errors
    /// [`EngineError::Request`] when no pass has such a union.
    pub fn exact_union(union: usize, seed: u64, config: &ModelConfig) -> Result<Self, EngineError> {
        let (experts, k) = (config.experts, config.experts_per_token);
        if !(k..=experts).contains(&union) {
            return Err(EngineError::Request(format!("a union of {union}: passes have {k} to {experts} distinct experts")));
        }
        Ok(Self { rule: Rule::Union(union), seed, experts, k })
    }

    /// Whether a row's experts depend on its position alone, not on the pass that it is in.
    pub fn is_by_position(&self) -> bool {
        !matches!(self.rule, Rule::Union(_))
    }

    /// Chooses for the rows of a pass that begins at position `first`: k distinct experts a row into `ids`, `[rows, k]`.
    pub fn choose(&self, layer: usize, first: usize, ids: &mut [u16]) {
        if let Rule::Union(union) = self.rule {
            return self.draw_union(union, layer, first, ids);
        }
        for (row, ids) in ids.chunks_exact_mut(self.k.max(1)).enumerate() {
            self.choose_row(layer, first + row, ids);
        }
    }

    /// See [`RoutingPlan::exact_union`].
    fn draw_union(&self, union: usize, layer: usize, first: usize, ids: &mut [u16]) {
        let mut random = Random::new(self.seed, layer as u64, first as u64);
        let mut drawn: Vec<u16> = (0..self.experts).map(|e| e as u16).collect();
        for i in 0..union {
            drawn.swap(i, i + random.below((self.experts - i) as u64) as usize);
        }
        ids.iter_mut().enumerate().for_each(|(place, id)| *id = drawn[place % union]);
    }

    fn choose_row(&self, layer: usize, position: usize, ids: &mut [u16]) {
        let position = position as u64;
        let mut random = Random::new(self.seed, layer as u64, position);
        match &self.rule {
            Rule::Union(_) => {}
            Rule::Uniform => {
                // Floyd: for j = E-k ... E-1 a number up to j, or j itself when that one is taken.
                for (filled, j) in (self.experts - self.k..self.experts).enumerate() {
                    let drawn = random.below(j as u64 + 1) as u16;
                    let taken = ids[..filled].contains(&drawn);
                    ids[filled] = if taken { j as u16 } else { drawn };
                }
            }
            Rule::Zipf(ends) => {
                let shuffle = Shuffle::new(self.seed, layer as u64, u64::MAX, self.experts);
                let begin = |rank: usize| rank.checked_sub(1).map_or(0, |before| ends[before]);
                let mut left = ends.last().copied().unwrap_or(0);
                // Ranks drawn so far, ascending.
                let mut taken = Vec::with_capacity(ids.len());
                for id in ids.iter_mut() {
                    // A place among the weights of the others; those that were drawn before are passed over.
                    let mut at = random.below(left);
                    for &rank in &taken {
                        if at >= begin(rank) {
                            at += ends[rank] - begin(rank);
                        }
                    }
                    let rank = ends.partition_point(|end| *end <= at);
                    left -= ends[rank] - begin(rank);
                    taken.insert(taken.partition_point(|t| *t < rank), rank);
                    *id = shuffle.of(rank) as u16;
                }
            }
            Rule::Overlap(renewals) => {
                for (slot, (id, &below)) in ids.iter_mut().zip(renewals).enumerate() {
                    // The last position at which the slot drew.
                    let draw = |at: u64| Random::new(self.seed ^ SLOTS, (layer * self.k + slot) as u64, at);
                    let drew = if below == 0 { 0 } else { (1..=position).rev().find(|at| draw(*at).next() < below).unwrap_or(0) };
                    let mut random = draw(drew);
                    // The first word was for whether to draw.
                    random.next();
                    let member = random.below(class(self.experts, self.k, slot) as u64) as usize;
                    *id = (member * self.k + slot) as u16;
                }
            }
        }
    }
}

/// Set apart from the words of other draws.
const SLOTS: u64 = 0x736c_6f74_735f_7631;

/// Experts e below `experts` with e mod k = slot.
fn class(experts: usize, k: usize, slot: usize) -> usize {
    (experts - slot).div_ceil(k)
}

/// The bound below which a 64-bit word makes a slot draw anew, so that it keeps its expert from one row to the next with
/// probability `share`.
///
/// A slot that draws anew among m experts with probability r may draw the same one: share = 1 - r + r/m, r = (1 - share) m / (m - 1).
/// m = 16 and share 0.7: r = 0.32. A share below 1/m, which independent rows have, is refused.
fn renewal(share: f64, experts: usize) -> Result<u64, EngineError> {
    let m = experts as f64;
    if experts == 1 && share < 1.0 || share < 1.0 / m {
        let text = format!("routing overlap:{share}: rows that choose independently share {:.4} already; give that or more", 1.0 / m);
        return Err(EngineError::Request(text));
    }
    let renewal = if experts == 1 { 0.0 } else { (1.0 - share) * m / (m - 1.0) };
    // Saturates: 2^64 and above is always.
    Ok((renewal * 2f64.powi(64)) as u64)
}

/// Words by counter: splitmix64 of a key made of seed, stream and position.
struct Random {
    key: u64,
    drawn: u64,
}

impl Random {
    fn new(seed: u64, stream: u64, position: u64) -> Self {
        Self { key: mix(mix(mix(seed).wrapping_add(stream)).wrapping_add(position)), drawn: 0 }
    }

    fn next(&mut self) -> u64 {
        self.drawn += 1;
        mix(self.key.wrapping_add(self.drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// A number below `bound` (above 0); off from equal chances by less than bound / 2^64.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
pub(super) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// A one-to-one map of the numbers below `n`, without a table: `(a x + b) mod n` with a seeded a that has no divisor in common with n.
struct Shuffle {
    a: u64,
    b: u64,
    n: u64,
}

impl Shuffle {
    fn new(seed: u64, stream: u64, position: u64, n: usize) -> Self {
        let n = n.max(1) as u64;
        let mut random = Random::new(seed.rotate_left(32), stream, position);
        let b = random.below(n);
        // Some a in 1..=n is coprime to n, 1 at the latest.
        let first = random.below(n);
        let a = (0..n).map(|step| (first + step) % n + 1).find(|a| gcd(*a, n) == 1).unwrap_or(1);
        Self { a, b, n }
    }

    fn of(&self, x: usize) -> usize {
        ((self.a * x as u64 + self.b) % self.n) as usize
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::bytes::uniform_union;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn config(experts: usize, k: usize) -> ModelConfig {
        let config = crate::engine::presets::Preset::find("ling-3.0-flash").unwrap().model().unwrap();
        ModelConfig { experts, experts_per_token: k, ..config }
    }

    fn plan(routing: Routing, experts: usize, k: usize) -> RoutingPlan {
        RoutingPlan::new(routing, 7, &config(experts, k)).unwrap().unwrap()
    }

    fn row(plan: &RoutingPlan, layer: usize, position: usize) -> Vec<u16> {
        let mut ids = vec![0; plan.k];
        plan.choose(layer, position, &mut ids);
        ids
    }

    fn distinct(plan: &RoutingPlan, ids: &[u16]) -> bool {
        ids.iter().collect::<BTreeSet<_>>().len() == plan.k && ids.iter().all(|id| usize::from(*id) < plan.experts)
    }

    /// Mean, and four standard errors of it.
    fn mean(values: &[f64]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
        (mean, 4.0 * (variance / n).sqrt())
    }

    #[test]
    fn words_and_plans() {
        for text in ["model", "uniform", "zipf:1.2", "zipf:0", "overlap:0.6", "overlap:1"] {
            assert_eq!(text.parse::<Routing>().unwrap().to_string(), text);
        }
        for text in ["", "Uniform", "zipf", "zipf:-1", "zipf:9", "zipf:nan", "overlap:1.1", "overlap:x", "overlap", "model:1"] {
            assert!(text.parse::<Routing>().is_err(), "{text}");
        }
        assert_eq!(RoutingPlan::new(Routing::Model, 0, &config(64, 4)).unwrap(), None);
        let refused = RoutingPlan::new(Routing::Overlap(0.05), 0, &config(64, 4)).unwrap_err().to_string();
        assert!(refused.contains("share 0.0625 already"), "{refused}");
        assert!((renewal(0.7, 16).unwrap() as f64 / 2f64.powi(64) - 0.32).abs() < 1e-12);
        assert_eq!((renewal(1.0, 16).unwrap(), renewal(1.0 / 16.0, 16).unwrap()), (0, u64::MAX));
    }

    /// Windows of uniform rows have the union that the formula says; every expert is chosen as often as another.
    #[test]
    fn uniform_rows_have_the_uniform_union() {
        let plan = plan(Routing::Uniform, 512, 8);
        for rows in [2, 4, 9] {
            let union =
                |window: usize| (0..rows).flat_map(|i| row(&plan, window % 5, window * rows + i)).collect::<BTreeSet<_>>().len() as f64;
            let (mean, tolerance) = mean(&(0..4000).map(union).collect::<Vec<_>>());
            assert!((mean - uniform_union(512, 8, rows)).abs() < tolerance && tolerance < 0.15, "{rows} rows: {mean} +- {tolerance}");
        }
        let mut counts = [0.0; 512];
        (0..16_000).for_each(|p| row(&plan, 3, p).iter().for_each(|id| counts[usize::from(*id)] += 1.0));
        // Chi-square of 511 degrees: mean 511, standard deviation 32; draws without replacement lie below.
        let chi: f64 = counts.iter().map(|n| (n - 250.0_f64).powi(2) / 250.0).sum();
        assert!((350.0..640.0).contains(&chi), "{chi}");
    }

    /// The first expert of a row is drawn by the weights alone, the second by those of the others.
    #[test]
    fn zipf_rows_have_the_popularities_of_their_ranks() {
        let (experts, n) = (64, 40_000);
        for exponent in [0.0, 0.8, 1.5] {
            let plan = plan(Routing::Zipf(exponent), experts, 4);
            let shuffle = Shuffle::new(7, 2, u64::MAX, experts);
            let weights: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-exponent)).collect();
            let total: f64 = weights.iter().sum();
            let (mut first, mut second) = (vec![0.0; experts], vec![0.0; experts]);
            for p in 0..n {
                let ids = row(&plan, 2, p);
                first[usize::from(ids[0])] += 1.0;
                second[usize::from(ids[1])] += 1.0;
            }
            for rank in [0, 1, 5, 40] {
                let share = weights[rank] / total;
                let after = |other: usize| weights[other] / total * weights[rank] / (total - weights[other]);
                let then: f64 = (0..experts).filter(|other| *other != rank).map(after).sum();
                for (counts, share) in [(&first, share), (&second, then)] {
                    let seen = counts[shuffle.of(rank)] / n as f64;
                    let tolerance = 4.5 * (share * (1.0 - share) / n as f64).sqrt();
                    assert!((seen - share).abs() < tolerance, "zipf:{exponent}, rank {rank}: {seen}, not {share} +- {tolerance}");
                }
            }
        }
    }

    /// Neighbouring rows share F of their experts, rows at distance d the share of a chain of such steps.
    #[test]
    fn overlapping_rows_share_what_was_asked_for() {
        for (share, experts, k) in [(0.7, 64, 4), (0.25, 512, 8), (0.95, 60, 7), (1.0, 64, 4), (1.0 / 16.0, 64, 4)] {
            let plan = plan(Routing::Overlap(share), experts, k);
            let shared = |p: usize, lag: usize| {
                let (a, b) = (row(&plan, 1, p), row(&plan, 1, p + lag));
                a.iter().filter(|id| b.contains(id)).count() as f64 / k as f64
            };
            // Neighbouring pairs are not independent: one in 40 is looked at, which share no draw but at 0.95 and above.
            let (seen, tolerance) = mean(&(0..3000).map(|i| shared(i * 40, 1)).collect::<Vec<_>>());
            assert!((seen - share).abs() <= tolerance.max(1e-9), "overlap:{share} of {experts}: {seen} +- {tolerance}");
            if experts % k == 0 {
                let m = (experts / k) as f64;
                let kept = (share - 1.0 / m) / (1.0 - 1.0 / m);
                let wanted = 1.0 / m + (1.0 - 1.0 / m) * kept.powi(3);
                let (seen, tolerance) = mean(&(0..3000).map(|i| shared(i * 40, 3)).collect::<Vec<_>>());
                assert!((seen - wanted).abs() <= tolerance.max(1e-9), "overlap:{share} at lag 3: {seen}, not {wanted} +- {tolerance}");
            }
        }
    }

    /// The rule in other words: ranks that were drawn are left out, and the weights of the others are walked through.
    #[test]
    fn zipf_ranks_are_those_of_a_walk() {
        let (experts, k) = (40, 8);
        let plan = plan(Routing::Zipf(1.1), experts, k);
        let Rule::Zipf(ends) = &plan.rule else { panic!() };
        let weights: Vec<u64> = (0..experts).map(|r| ends[r] - if r == 0 { 0 } else { ends[r - 1] }).collect();
        let shuffle = Shuffle::new(7, 2, u64::MAX, experts);
        for position in 0..200 {
            let mut random = Random::new(7, 2, position as u64);
            let mut walked: Vec<usize> = Vec::new();
            for _ in 0..k {
                let others: Vec<usize> = (0..experts).filter(|r| !walked.contains(r)).collect();
                let mut at = random.below(others.iter().map(|r| weights[*r]).sum());
                let rank = others
                    .into_iter()
                    .find(|r| {
                        weights[*r] > at || {
                            at -= weights[*r];
                            false
                        }
                    })
                    .unwrap();
                walked.push(rank);
            }
            let walked: Vec<u16> = walked.into_iter().map(|rank| shuffle.of(rank) as u16).collect();
            assert_eq!(row(&plan, 2, position), walked);
        }
    }

    #[test]
    fn worked_example_of_an_exact_union() {
        // Three rows of two among five: four experts fill six places, the first two twice.
        let plan = RoutingPlan::exact_union(4, 7, &config(5, 2)).unwrap();
        let mut ids = [0; 6];
        plan.choose(3, 9, &mut ids);
        assert_eq!(ids[..2], ids[4..]);
        assert_eq!(BTreeSet::from(ids).len(), 4);
        assert!(!plan.is_by_position());
        for union in [1, 6] {
            assert!(RoutingPlan::exact_union(union, 7, &config(5, 2)).unwrap_err().to_string().contains("2 to 5 distinct"));
        }
    }

    #[test]
    fn every_expert_is_drawn_as_often_for_an_exact_union() {
        let (mut counts, mut ids) = ([0u32; 16], [0; 6]);
        for seed in 0..4000 {
            RoutingPlan::exact_union(4, seed, &config(16, 2)).unwrap().choose(1, 40, &mut ids);
            BTreeSet::from(ids).into_iter().for_each(|id| counts[usize::from(id)] += 1);
        }
        // 1000 each, with a standard deviation of some 27.
        assert!(counts.iter().all(|&n| (860..1140).contains(&n)), "{counts:?}");
    }

    proptest! {
        #[test]
        fn every_plan_gives_distinct_experts_that_depend_on_position_alone(
            (experts, k) in (1usize..80).prop_flat_map(|e| (Just(e), 1..=e.min(12))),
            which in 0usize..4, seed: u64, layer in 0usize..50, first in 0usize..3000, row in 0usize..16
        ) {
            let config = config(experts, k);
            let routing = [Routing::Uniform, Routing::Zipf(1.3), Routing::Overlap(1.0), Routing::Overlap(0.9)][which];
            // 0.9 is less than two classes of one expert share.
            let Ok(plan) = RoutingPlan::new(routing, seed, &config) else { return Ok(()) };
            let plan = plan.unwrap();
            let (mut ids, mut again) = (vec![0; (row + 1) * k], vec![0; k]);
            plan.choose(layer, first, &mut ids);
            plan.choose(layer, first + row, &mut again);
            prop_assert!(distinct(&plan, &again), "{again:?}");
            prop_assert_eq!(&ids[row * k..], again);
        }

        #[test]
        fn a_pass_of_an_exact_union_has_it(experts in 1usize..300, k in 1usize..9, rows in 1usize..17, at in 0.0f64..=1.0, seed: u64) {
            prop_assume!(k <= experts);
            let most = (rows * k).min(experts);
            let union = k + ((most - k) as f64 * at) as usize;
            let plan = RoutingPlan::exact_union(union, seed, &config(experts, k)).unwrap();
            let mut ids = vec![0; rows * k];
            for layer in 0..3 {
                plan.choose(layer, 40, &mut ids);
                prop_assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), union);
                prop_assert!(ids.chunks(k).all(|row| distinct(&plan, row)));
            }
        }
    }
}
