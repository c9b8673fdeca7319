//! Numbers as PyTorch's profiler writes them.

/// A small number, written plainly or as `0x0`.
pub fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// µs with or without decimals to ns. At the size of Unix times a float would lose them.
pub fn nanoseconds(text: &str) -> Option<i64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if fraction.bytes().all(|b| b.is_ascii_digit()) {
        let mut decimals: String = fraction.chars().take(3).collect();
        while decimals.len() < 3 {
            decimals.push('0');
        }
        if let (Ok(whole_us), Ok(ns)) = (whole.parse::<i64>(), decimals.parse::<i64>()) {
            let below_zero = whole.starts_with('-');
            return whole_us.checked_mul(1000)?.checked_add(if below_zero { -ns } else { ns });
        }
    }
    let us: f64 = text.parse().ok()?;
    let ns = us * 1000.0;
    (ns.is_finite() && ns.abs() < 9e18).then_some(ns as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn microseconds_keep_their_decimals() {
        assert_eq!(nanoseconds("1707417525512194"), Some(1_707_417_525_512_194_000));
        assert_eq!(nanoseconds("1419247333430.849"), Some(1_419_247_333_430_849));
        assert_eq!((nanoseconds("1.5"), nanoseconds("0.0009"), nanoseconds("-1.25")), (Some(1500), Some(0), Some(-1250)));
        assert_eq!((nanoseconds("2e3"), nanoseconds("nan"), nanoseconds(""), nanoseconds("9e99")), (Some(2_000_000), None, None, None));
    }

    #[test]
    fn streams_may_be_hexadecimal() {
        assert_eq!((number("7"), number("0x0"), number("0x1f"), number("-1"), number("")), (Some(7), Some(0), Some(31), None, None));
    }
}
