//! The router's choice: which experts a row goes to, and with what weight.
//!
//! All in `f32` (ling3.md 3.5). Scores are sigmoids; a bias added to them decides the choice, first of
//! groups by the sum of their two best biased scores, then of experts within the kept groups; the
//! weights come from the scores without the bias.

use super::config::ModelConfig;
use super::norm::sigmoid;

/// The numbers of the choice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Routing {
    experts: usize,
    chosen: usize,
    groups: usize,
    groups_kept: usize,
    scaling: f32,
    normalise: bool,
}

impl Routing {
    /// The routing of `config`.
    pub fn new(config: &ModelConfig) -> Self {
        Self {
            experts: config.experts,
            chosen: config.experts_per_token,
            groups: config.groups.max(1),
            groups_kept: config.groups_kept,
            scaling: config.routed_scaling,
            normalise: config.norm_topk,
        }
    }

    /// Chooses for one row. `scores` holds the router's logits and is left with their sigmoids; `biased`
    /// is scratch of the same length. `ids` and `weights` (one per chosen expert) are filled in
    /// descending order of the biased score, the lower index first among equals. A NaN counts as -inf.
    pub fn choose(&self, scores: &mut [f32], bias: &[f32], biased: &mut [f32], ids: &mut [u16], weights: &mut [f32]) {
        for ((s, b), o) in scores.iter_mut().zip(bias).zip(biased.iter_mut()) {
            *s = sigmoid(*s);
            let sum = *s + *b;
            *o = if sum.is_nan() { f32::NEG_INFINITY } else { sum };
        }
        let size = (self.experts / self.groups).max(1);
        if self.groups_kept < self.groups {
            drop_groups(biased, size, self.groups, self.groups_kept);
        }
        let ids = &mut ids[..self.chosen];
        let mut filled = 0;
        for (e, &score) in biased.iter().enumerate() {
            // Dropped experts are NaN by now and never enter.
            if score.is_nan() {
                continue;
            }
            let better = |id: &u16| biased[usize::from(*id)] >= score;
            let place = ids[..filled].iter().rposition(better).map_or(0, |p| p + 1);
            if place < ids.len() {
                filled = (filled + 1).min(ids.len());
                ids.copy_within(place..filled - 1, place + 1);
                ids[place] = e as u16;
            }
        }
        self.weigh(scores, ids, weights);
    }

    /// The weights of a row's experts `ids`, by the sigmoids that [`Routing::choose`] left in `scores`.
    pub fn weigh(&self, scores: &[f32], ids: &[u16], weights: &mut [f32]) {
        let sum: f32 = if self.normalise { ids.iter().map(|id| scores[usize::from(*id)]).sum::<f32>() + 1e-20 } else { 1.0 };
        for (w, id) in weights.iter_mut().zip(ids.iter()) {
            *w = scores[usize::from(*id)] / sum * self.scaling;
        }
    }

    /// Takes experts that somebody else chose: puts them in descending order of their scores, as [`Routing::choose`] left these, and
    /// weighs them.
    pub fn adopt(&self, scores: &[f32], ids: &mut [u16], weights: &mut [f32]) {
        let score = |id: &u16| scores[usize::from(*id)];
        ids.sort_unstable_by(|a, b| score(b).total_cmp(&score(a)).then(a.cmp(b)));
        self.weigh(scores, ids, weights);
    }
}

/// Marks the experts of all but the best groups as NaN.
fn drop_groups(biased: &mut [f32], size: usize, groups: usize, kept: usize) {
    let score = |group: &[f32]| {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &b in group {
            if b > first {
                (first, second) = (b, first);
            } else if b > second {
                second = b;
            }
        }
        // A group of one expert has its score alone.
        if group.len() == 1 { first } else { first + second }
    };
    // A group stays when fewer than `kept` are better; few groups, so no sorting. Groups that were marked
    // already are not counted again: their scores were taken first.
    let mut scores = [0.0_f32; super::router::MAX_GROUPS];
    let groups = groups.min(scores.len());
    for (s, group) in scores.iter_mut().zip(biased.chunks_exact(size)) {
        *s = score(group);
    }
    for g in 0..groups {
        let better = (0..groups).filter(|&o| scores[o] > scores[g] || (scores[o] == scores[g] && o < g)).count();
        if better >= kept {
            biased[g * size..][..size].fill(f32::NAN);
        }
    }
}

/// Most groups that a config may name: one per expert.
pub(super) const MAX_GROUPS: usize = crate::trace::expert_set::MAX_EXPERTS;

#[cfg(test)]
mod tests {
    use super::*;

    fn routing(experts: usize, chosen: usize, groups: usize, groups_kept: usize) -> Routing {
        Routing { experts, chosen, groups, groups_kept, scaling: 2.5, normalise: true }
    }

    fn logit(p: f32) -> f32 {
        (p / (1.0 - p)).ln()
    }

    fn choose(routing: Routing, scores: &[f32], bias: &[f32]) -> (Vec<u16>, Vec<f32>) {
        let mut logits: Vec<f32> = scores.iter().map(|p| logit(*p)).collect();
        let (mut ids, mut weights) = (vec![0; routing.chosen], vec![0.0; routing.chosen]);
        let mut biased = vec![0.0; scores.len()];
        routing.choose(&mut logits, bias, &mut biased, &mut ids, &mut weights);
        (ids, weights)
    }

    #[test]
    fn groups_are_chosen_by_their_two_best_and_weights_ignore_the_bias() {
        // Group sums: 0.9+0.1, 0.6+0.5, 0.7+0.6, 0.2+0.2: groups 1 and 2 stay although 0.9 is the best score.
        let scores = [0.9, 0.1, 0.6, 0.5, 0.7, 0.6, 0.2, 0.2];
        let (ids, weights) = choose(routing(8, 3, 4, 2), &scores, &[0.0; 8]);
        assert_eq!(ids, [4, 2, 5]);
        let sum = 0.7 + 0.6 + 0.6;
        for (w, s) in weights.iter().zip([0.7, 0.6, 0.6]) {
            assert!((w - 2.5 * s / sum).abs() < 1e-5);
        }
    }

    #[test]
    fn dropped_groups_stay_out_when_all_biased_scores_are_negative() {
        // With 0 instead of -inf as the mask the dropped experts would win.
        let scores = [0.5, 0.4, 0.6, 0.3, 0.2, 0.1, 0.3, 0.3];
        let (ids, weights) = choose(routing(8, 2, 4, 1), &scores, &[-3.0; 8]);
        assert_eq!(ids, [0, 1], "equal group sums: the lower group stays");
        assert!((weights[0] - 2.5 * 0.5 / 0.9).abs() < 1e-5);
        let mut bias = [-3.0; 8];
        bias[7] = -0.5;
        assert_eq!(choose(routing(8, 2, 4, 1), &scores, &bias).0, [7, 6]);
    }

    #[test]
    fn equal_scores_go_to_the_lower_index() {
        let (ids, _) = choose(routing(8, 4, 1, 1), &[0.5; 8], &[0.0; 8]);
        assert_eq!(ids, [0, 1, 2, 3]);
    }

    #[test]
    fn not_a_number_still_gives_distinct_experts() {
        let r = routing(8, 4, 4, 2);
        let (mut ids, mut weights) = ([0; 4], [0.0; 4]);
        r.choose(&mut [f32::NAN; 8], &[0.0; 8], &mut [0.0; 8], &mut ids, &mut weights);
        assert_eq!(ids, [0, 1, 2, 3]);
        assert!(weights.iter().all(|w| w.is_nan()));
    }

    #[test]
    fn experts_of_a_plan_are_weighed_by_their_own_scores() {
        let r = Routing { normalise: true, scaling: 2.0, ..routing(4, 2, 1, 1) };
        let (mut ids, mut weights) = ([0, 3], [0.0; 2]);
        r.adopt(&[0.25, 0.9, 0.8, 0.75], &mut ids, &mut weights);
        assert_eq!((ids, weights), ([3, 0], [1.5, 0.5]));
    }
}
