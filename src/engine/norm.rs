//! Normalisations and activations, all in `f32`.

use super::simd;

/// `out = x / sqrt(mean(x^2) + eps) * weight`. Weights are plain multipliers.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = rms_scale(x, eps);
    for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
        *o = v * scale * w;
    }
}

/// [`rms_norm`] over each row of `x`, whose rows are as long as `weight`.
pub(super) fn rms_norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len().max(1);
    for (row, o) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        rms_norm(row, weight, eps, o);
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
pub(super) fn rms_scale(x: &[f32], eps: f32) -> f32 {
    1.0 / (simd::dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// Added inside the square root of the L2 norm of KDA's queries and keys.
const L2_EPS: f32 = 1e-6;

/// `x / sqrt(sum(x^2) + 1e-6) * scale`, in place.
pub(super) fn l2_norm(x: &mut [f32], scale: f32) {
    let norm = 1.0 / (simd::dot(x, x) + L2_EPS).sqrt();
    for v in x {
        *v = *v * norm * scale;
    }
}

/// `1 / (1 + e^-x)`.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// `min(silu(gate), limit) * clamp(up, -limit, limit)`; a limit of 0 is none. The clamp comes after
/// SiLU and only from above; a NaN stays one, so that damage is found where it arises.
pub(super) fn swiglu(gate: f32, up: f32, limit: f32) -> f32 {
    let mut a = silu(gate);
    let mut u = up;
    if limit > 0.0 {
        if a > limit {
            a = limit;
        }
        if u > limit {
            u = limit;
        } else if u < -limit {
            u = -limit;
        }
    }
    a * u
}

/// Whether every number is finite.
pub(super) fn all_finite(x: &[f32]) -> bool {
    // An infinity or NaN times zero is NaN, and NaN stays in the sum.
    x.iter().fold(0.0_f32, |sum, v| sum + v * 0.0) == 0.0
}

/// The name of a tensor in which a number is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Damage(pub &'static str);

/// Fails with `name` unless every number is finite. Called where a later step could hide the damage: a
/// sigmoid turns an infinity into 0 or 1, a clamp into its limit.
pub(super) fn check(x: &[f32], name: &'static str) -> Result<(), Damage> {
    if all_finite(x) { Ok(()) } else { Err(Damage(name)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_l2_epsilon_is_inside_the_square_root() {
        let mut x = [3e-4_f32, 4e-4];
        l2_norm(&mut x, 1.0);
        // sqrt(25e-8 + 1e-6) = 1.118e-3; outside it would be 5e-4 + 1e-6.
        let want = 3e-4 / (25e-8_f64 + 1e-6).sqrt();
        assert!((f64::from(x[0]) - want).abs() < 1e-6, "{} {want}", x[0]);
    }

    #[test]
    fn rms_norm_is_the_formula() {
        let x: Vec<f32> = (0..40).map(|i| (i as f32 * 0.7).sin()).collect();
        let w: Vec<f32> = (0..40).map(|i| 1.0 + i as f32 * 0.01).collect();
        let mut out = vec![0.0; 40];
        rms_norm(&x, &w, 1e-6, &mut out);
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 40.0;
        for i in 0..40 {
            let want = f64::from(x[i]) / (mean + 1e-6).sqrt() * f64::from(w[i]);
            assert!((f64::from(out[i]) - want).abs() < 1e-6);
        }
    }

    #[test]
    fn swiglu_clamps_after_silu_and_only_with_a_limit() {
        // silu(10) = 9.9995; a clamp before SiLU would give silu(4) = 3.928.
        assert_eq!(swiglu(10.0, 10.0, 4.0), 16.0);
        assert_eq!(swiglu(10.0, -10.0, 4.0), -16.0);
        assert!((swiglu(10.0, 10.0, 0.0) - 99.9954).abs() < 1e-3);
        // The lower side of SiLU is not clamped.
        assert!((swiglu(-1.0, 0.1, 0.05) + 0.268_941_4 * 0.05).abs() < 1e-6);
        assert!(swiglu(f32::NAN, 1.0, 4.0).is_nan() && swiglu(1.0, f32::NAN, 4.0).is_nan());
    }

    #[test]
    fn finite_means_neither_nan_nor_infinity() {
        assert!(all_finite(&[0.0, -1.0, f32::MAX, f32::MIN]));
        assert!(!all_finite(&[0.0, f32::NAN]) && !all_finite(&[f32::INFINITY, 1.0]) && !all_finite(&[f32::NEG_INFINITY]));
    }
}
