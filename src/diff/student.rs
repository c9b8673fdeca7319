//! Student's t distribution, self-contained: its tails and its quantiles.

/// ln Γ(x) for x > 0 by Lanczos' approximation (g = 7, nine terms), good to 1e-14.
fn ln_gamma(x: f64) -> f64 {
    const COEFFICIENTS: [f64; 8] = [
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let base = x + 7.5;
    let series = COEFFICIENTS.iter().zip(1..).fold(0.999_999_999_999_809_9, |sum, (c, i)| sum + c / (x + f64::from(i)));
    0.5 * (2.0 * std::f64::consts::PI).ln() + (x + 0.5) * base.ln() - base + series.ln()
}

/// Regularised incomplete beta function I_x(a, b) by Lentz' continued fraction (Numerical Recipes, §6.4).
fn incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return f64::from(u8::from(x >= 1.0));
    }
    // The fraction converges fast below the mean; above it the mirrored one does.
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(1.0 - x, b, a);
    }
    const TINY: f64 = 1e-300;
    let front = (ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (1.0 - x).ln()).exp() / a;
    let solid = |v: f64| if v.abs() < TINY { TINY } else { v };
    let (mut c, mut d) = (1.0, 1.0 / solid(1.0 - (a + b) * x / (a + 1.0)));
    let mut fraction = d;
    for m in 1..500 {
        let m = f64::from(m);
        for term in
            [m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m)), -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0))]
        {
            d = 1.0 / solid(1.0 + term * d);
            c = solid(1.0 + term / c);
            fraction *= c * d;
        }
        if (c * d - 1.0).abs() < 1e-15 {
            break;
        }
    }
    front * fraction
}

/// Beyond this many degrees of freedom the gamma functions' difference loses digits.
const MANY: f64 = 2000.0;

/// P(T > t) of Student's t with `df` degrees of freedom: I_x(df/2, 1/2) / 2 with x = df / (df + t²) for t >= 0.
///
/// df 10, t 2.228: 0.025.
pub fn upper_tail(t: f64, df: f64) -> f64 {
    if t.is_nan() {
        return 1.0;
    }
    if t.is_infinite() {
        return f64::from(u8::from(t < 0.0));
    }
    if t < 0.0 {
        return 1.0 - upper_tail(-t, df);
    }
    let (t, df) = if df > MANY { (of_fewer(t, df), MANY) } else { (t, df.max(1e-3)) };
    0.5 * incomplete_beta(df / (df + t * t), 0.5 * df, 0.5)
}

/// The t of [`MANY`] degrees of freedom that has the tail of a t of even more, by way of the normal deviate that has it:
/// z = (8 df + 1) / (8 df + 3) sqrt(df ln(1 + t² / df)) (Wallace 1959), whose error falls with 1 / df².
fn of_fewer(t: f64, df: f64) -> f64 {
    let slope = |df: f64| (8.0 * df + 1.0) / (8.0 * df + 3.0);
    let z = slope(df) * (df * (t * t / df).ln_1p()).sqrt() / slope(MANY);
    (MANY * (z * z / MANY).exp_m1()).sqrt().min(1e150)
}

/// The t above which `tail` (0 < tail < 0.5) of the distribution lies, by false position (Illinois) on the tail's logarithm.
///
/// df 1, tail 0.025: 12.706; df ∞: 1.960.
pub fn quantile(tail: f64, df: f64) -> f64 {
    let miss = |t: f64| (upper_tail(t, df) / tail).ln();
    let (mut low, mut high) = (0.0, 1.0);
    let (mut at_low, mut at_high) = (miss(low), miss(high));
    while at_high > 0.0 && high < 1e12 {
        (low, at_low) = (high, at_high);
        high *= 2.0;
        at_high = miss(high);
    }
    let mut side = 0;
    for _ in 0..200 {
        // A tail of 0 has no logarithm: the middle then.
        let guess = (low * at_high - high * at_low) / (at_high - at_low);
        let guess = if guess.is_finite() && guess > low && guess < high { guess } else { 0.5 * (low + high) };
        let at = miss(guess);
        if at == 0.0 || high - low <= 1e-12 * high {
            return guess;
        }
        // An end that stays twice is pulled in, or the other would creep.
        if at > 0.0 {
            (low, at_low) = (guess, at);
            at_high *= if side == 1 { 0.5 } else { 1.0 };
            side = 1;
        } else {
            (high, at_high) = (guess, at);
            at_low *= if side == -1 { 0.5 } else { 1.0 };
            side = -1;
        }
        if at.abs() < 1e-13 {
            return guess;
        }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        // (df, tail, t) of printed tables.
        for (df, tail, t) in [
            (1.0, 0.025, 12.7062),
            (2.0, 0.025, 4.302_65),
            (4.0, 0.05, 2.131_85),
            (10.0, 0.025, 2.228_14),
            (30.0, 0.005, 2.749_996),
            (63.0, 0.025, 1.998_34),
            (120.0, 0.2, 0.844_64),
            (1e9, 0.025, 1.959_964),
            (2001.0, 0.025, 1.961_15),
            (1e4, 0.005, 2.576_321),
        ] {
            assert!((quantile(tail, df) - t).abs() < 2e-4, "df {df}, tail {tail}: {}", quantile(tail, df));
        }
        // df 1 is Cauchy's: P(T > 1) = 1/4; df 2 has P(T > t) = (1 - t / sqrt(2 + t²)) / 2.
        assert!((upper_tail(1.0, 1.0) - 0.25).abs() < 1e-12);
        assert!((upper_tail(3.0, 2.0) - 0.5 * (1.0 - 3.0 / 11f64.sqrt())).abs() < 1e-12);
    }

    #[test]
    fn gamma_of_whole_numbers() {
        assert!((ln_gamma(5.0) - 24f64.ln()).abs() < 1e-12);
        assert!((ln_gamma(0.5) - std::f64::consts::PI.sqrt().ln()).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn quantile_and_tail_undo_each_other(tail in 1e-6f64..0.49, df in 1f64..500.0) {
            prop_assert!((upper_tail(quantile(tail, df), df) / tail - 1.0).abs() < 1e-6);
        }

        #[test]
        fn tails_are_symmetric_and_fall(t in -50f64..50.0, more in 0f64..5.0, df in 0.5f64..1e6) {
            prop_assert!((upper_tail(t, df) + upper_tail(-t, df) - 1.0).abs() < 1e-12);
            prop_assert!(upper_tail(t + more, df) <= upper_tail(t, df) + 1e-12);
            // Few and many degrees of freedom meet.
            prop_assert!((upper_tail(t, 2000.0) - upper_tail(t, 2000.001)).abs() < 1e-7);
        }
    }
}
