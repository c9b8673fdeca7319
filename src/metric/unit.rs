//! Numbers to short words for people. JSON never passes through here.

/// What a number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Experts of one layer.
    Experts,
    /// A share, shown in percent.
    Share,
    /// Tokens.
    Tokens,
    /// Bits of entropy.
    Bits,
    /// A quotient without a unit.
    Ratio,
    /// Nanoseconds, scaled when shown.
    Nanoseconds,
    /// Microseconds, scaled when shown.
    Microseconds,
    /// Bytes, scaled by 1000 when shown, as bandwidths are.
    Bytes,
    /// A plain count.
    Count,
}

impl Unit {
    /// The unit's name as shown in explanations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Experts => "experts",
            Self::Share => "share",
            Self::Tokens => "tokens",
            Self::Bits => "bits",
            Self::Ratio => "ratio",
            Self::Nanoseconds => "ns",
            Self::Microseconds => "µs",
            Self::Bytes => "bytes",
            Self::Count => "count",
        }
    }

    /// The number in this unit; `-` when it is not finite.
    ///
    /// ```
    /// use specprof::metric::Unit;
    /// assert_eq!(Unit::Share.show(0.2536), "25.4 %");
    /// assert_eq!(Unit::Nanoseconds.show(1_234_000.0), "1.23 ms");
    /// assert_eq!(Unit::Bytes.show(2_949_120.0), "2.95 MB");
    /// assert_eq!(Unit::Count.show(1234567.0), "1 234 567");
    /// ```
    pub fn show(self, value: f64) -> String {
        if !value.is_finite() {
            return "-".to_owned();
        }
        match self {
            Self::Experts | Self::Bits => format!("{value:.2}"),
            Self::Tokens | Self::Ratio => format!("{value:.3}"),
            Self::Share => format!("{:.1} %", value * 100.0),
            Self::Nanoseconds => scaled(value, &["ns", "µs", "ms", "s"]),
            Self::Microseconds => scaled(value * 1000.0, &["ns", "µs", "ms", "s"]),
            Self::Bytes => scaled(value, &["B", "kB", "MB", "GB", "TB"]),
            Self::Count => grouped(value),
        }
    }

    /// [`Unit::show`] of a number that may be unknown.
    pub fn show_option(self, value: Option<f64>) -> String {
        value.map_or_else(|| "-".to_owned(), |v| self.show(v))
    }
}

/// Three significant digits in the largest unit that keeps the number at 1 or above.
fn scaled(value: f64, names: &[&str]) -> String {
    let mut scaled = value;
    let mut at = 0;
    // 999.5 would be shown as 1000: it belongs to the next unit.
    while scaled.abs() >= 999.5 && at + 1 < names.len() {
        scaled /= 1000.0;
        at += 1;
    }
    let name = names.get(at).copied().unwrap_or_default();
    let digits = match scaled.abs() {
        _ if at == 0 && scaled.fract() == 0.0 => 0,
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$} {name}")
}

/// An integer with a space between groups of three digits.
fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::with_capacity(digits.len() + digits.len() / 3 + 1);
    if value <= -0.5 {
        text.push('-');
    }
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// So many of a thing, in plain digits, as messages have them: `1 row`, `2 rows`, `3 passes`.
pub fn counted_plain(n: impl TryInto<u64>, noun: &str) -> String {
    let n = n.try_into().unwrap_or(u64::MAX);
    let plural = match noun {
        _ if n == 1 => "",
        noun if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{n} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_scale_and_round() {
        assert_eq!(Unit::Nanoseconds.show(0.0), "0 ns");
        assert_eq!(Unit::Nanoseconds.show(999.0), "999 ns");
        assert_eq!(Unit::Nanoseconds.show(999_700.0), "1.00 ms");
        assert_eq!(Unit::Nanoseconds.show(61.5e9), "61.5 s");
        assert_eq!(Unit::Microseconds.show(61_500.0), "61.5 ms");
        assert_eq!(Unit::Bytes.show(512.0), "512 B");
        assert_eq!(Unit::Bytes.show(1023.0), "1.02 kB");
        assert_eq!(Unit::Count.show(-1234.0), "-1 234");
        assert_eq!(Unit::Count.show(999.0), "999");
        assert_eq!(Unit::Experts.show(f64::NAN), "-");
        assert_eq!(Unit::Share.show_option(None), "-");
    }
}
