//! Router-mass coverage: how much of a window's gate mass its best B experts hold.
//!
//! C(B) = Σ of the B largest m_e / Σ m_e, m_e = the window's summed gate weights of expert e.
//! Two rows {a: .75, b: .25} {a: .5, c: .5}: m = a 1.25, c .5, b .25, so C = .625, .875, 1.

use super::counts::WindowCounts;

/// Scratch of one thread.
#[derive(Debug)]
pub struct Coverage {
    mass: Vec<f64>,
    touched: Vec<u16>,
    sorted: Vec<f64>,
}

impl Coverage {
    /// Scratch for a layer of `experts`.
    pub fn new(experts: usize) -> Self {
        Self { mass: vec![-1.0; experts], touched: Vec::new(), sorted: Vec::new() }
    }

    /// C(1), C(2), ... of one window up to where it is 1; `ids` and `weights` are `[rows, k]`. `None` of a window without mass, or with
    /// a weight that is not a finite number of at least 0.
    pub fn curve(&mut self, ids: &[u16], weights: &[f32]) -> Option<&[f64]> {
        self.touched.clear();
        for (&id, &w) in ids.iter().zip(weights) {
            if let Some(mass) = self.mass.get_mut(usize::from(id)) {
                if *mass < 0.0 {
                    *mass = 0.0;
                    self.touched.push(id);
                }
                // A poisoned weight must not leave a mass behind: it becomes infinite and the window is left out below.
                *mass += if w >= 0.0 { f64::from(w) } else { f64::INFINITY };
            }
        }
        self.sorted.clear();
        for &id in &self.touched {
            if let Some(mass) = self.mass.get_mut(usize::from(id)) {
                self.sorted.push(std::mem::replace(mass, -1.0));
            }
        }
        self.sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        let total: f64 = self.sorted.iter().sum();
        if !(total > 0.0 && total.is_finite()) {
            return None;
        }
        let mut sum = 0.0;
        for mass in &mut self.sorted {
            sum += *mass;
            *mass = sum / total;
        }
        // The whole, whatever rounding says.
        if let Some(last) = self.sorted.last_mut() {
            *last = 1.0;
        }
        Some(&self.sorted)
    }

    /// Adds the curve of one window. Windows that have none are left out.
    pub fn add(&mut self, ids: &[u16], weights: &[f32], counts: &mut WindowCounts, one: f64) {
        let slots = ids.len();
        let Some(curve) = self.curve(ids, weights) else {
            counts.coverage_left_out += 1;
            return;
        };
        if counts.coverage.len() < slots {
            counts.coverage.resize(slots, 0);
        }
        counts.coverage_windows += 1;
        for (b, entry) in counts.coverage.iter_mut().take(slots).enumerate() {
            *entry += (curve.get(b).copied().unwrap_or(1.0) * one).round() as u128;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_example() {
        let mut counts = WindowCounts::new(2, 2, 4);
        let mut coverage = Coverage::new(4);
        coverage.add(&[0, 1, 0, 2], &[0.75, 0.25, 0.5, 0.5], &mut counts, 1000.0);
        assert_eq!((counts.coverage_windows, counts.coverage.as_slice()), (1, &[625, 875, 1000, 1000][..]));
        // No mass, or no number: not a window of the curve, and no trace of it in the next one.
        coverage.add(&[0, 1, 0, 2], &[0.0; 4], &mut counts, 1000.0);
        coverage.add(&[0, 1, 0, 2], &[f32::NAN, 0.25, 0.5, 0.5], &mut counts, 1000.0);
        assert_eq!((counts.coverage_windows, counts.coverage_left_out), (1, 2));
        coverage.add(&[3, 1, 3, 2], &[0.75, 0.25, 0.5, 0.5], &mut counts, 1000.0);
        assert_eq!(counts.coverage, [1250, 1750, 2000, 2000]);
    }
}
