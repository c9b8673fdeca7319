//! Rotary positions on interleaved pairs `(0,1), (2,3), ...`, as in MLA, or on halves `(0,d/2), (1,d/2+1), ...`.

/// Angles of a pass's rows, shared by all layers.
#[derive(Debug, Default)]
pub(super) struct Rope {
    /// `theta^(-2j/d)`, `[d/2]`.
    frequencies: Vec<f64>,
    /// `(cos, sin)`, `[rows, d/2]`.
    angles: Vec<(f32, f32)>,
}

impl Rope {
    /// Frequencies of a rotated size `dim` with base `theta`.
    pub fn new(dim: usize, theta: f64) -> Self {
        let frequencies = (0..dim / 2).map(|j| theta.powf(-2.0 * j as f64 / dim as f64)).collect();
        Self { frequencies, angles: Vec::new() }
    }

    /// Computes the angles of positions `first..first + rows`.
    pub fn prepare(&mut self, first: usize, rows: usize) {
        self.angles.clear();
        for position in first..first + rows {
            self.angles.extend(self.frequencies.iter().map(|f| {
                let (sin, cos) = (position as f64 * f).sin_cos();
                (cos as f32, sin as f32)
            }));
        }
    }

    /// Rotates `x`, of the rotated size, to the position of row `row` of the pass.
    pub fn rotate(&self, row: usize, x: &mut [f32]) {
        let half = self.frequencies.len();
        let angles = &self.angles[row * half..][..half];
        for (pair, (cos, sin)) in x.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
            let [a, b] = *pair;
            *pair = [a * cos - b * sin, b * cos + a * sin];
        }
    }

    /// As [`Rope::rotate`], element `j` paired with `j + d/2`.
    pub fn rotate_halves(&self, row: usize, x: &mut [f32]) {
        let half = self.frequencies.len();
        let angles = &self.angles[row * half..][..half];
        let (first, second) = x.split_at_mut(half);
        for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_rotate_together() {
        let mut rope = Rope::new(4, 100.0);
        rope.prepare(2, 2);
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rope.rotate(1, &mut x);
        // Position 3: angles 3 * 100^0 and 3 * 100^(-2/4).
        let want = |a: f64, b: f64, t: f64| (a * t.cos() - b * t.sin(), b * t.cos() + a * t.sin());
        let ((a, b), (c, d)) = (want(1.0, 2.0, 3.0), want(3.0, 4.0, 0.3));
        for (x, w) in x.iter().zip([a, b, c, d]) {
            assert!((f64::from(*x) - w).abs() < 1e-6);
        }
    }

    #[test]
    fn halves_rotate_as_pairs_do_in_another_order() {
        let mut rope = Rope::new(6, 50.0);
        rope.prepare(7, 1);
        let (mut pairs, mut halves) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
        rope.rotate(0, &mut pairs);
        rope.rotate_halves(0, &mut halves);
        assert_eq!([pairs[0], pairs[2], pairs[4], pairs[1], pairs[3], pairs[5]], halves);
    }

    #[test]
    fn position_zero_changes_nothing() {
        let mut rope = Rope::new(8, 6e6);
        rope.prepare(0, 1);
        let mut x = [1.0, -2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        rope.rotate(0, &mut x);
        assert_eq!(x, [1.0, -2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    }
}
