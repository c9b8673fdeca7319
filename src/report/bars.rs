//! Bars and sparklines out of block characters, or ASCII where the locale has none.

const EIGHTHS: [char; 8] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const ASCII_HEIGHTS: [char; 8] = ['_', '.', ',', '-', '=', '+', '*', '#'];

/// A bar of `share` (0...1) of `width` columns.
pub fn bar(share: f64, width: usize, unicode: bool) -> String {
    let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
    if !unicode {
        return "#".repeat((share * width as f64).round() as usize);
    }
    let eighths = (share * (width * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(EIGHTHS[eighths % 8 - 1]);
    }
    bar
}

/// One character a value, its height between `low` and `high`; unknown values are blank.
pub fn spark(values: impl IntoIterator<Item = Option<f64>>, low: f64, high: f64, unicode: bool) -> String {
    let heights = if unicode { HEIGHTS } else { ASCII_HEIGHTS };
    let of = |value: Option<f64>| match value {
        Some(v) if v.is_finite() => {
            let share = if high > low { ((v - low) / (high - low)).clamp(0.0, 1.0) } else { 1.0 };
            heights[((share * 7.0).round() as usize).min(7)]
        }
        _ => ' ',
    };
    values.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_fill_by_eighths() {
        assert_eq!((bar(1.0, 3, true), bar(0.5, 3, true), bar(0.0, 3, true)), ("███".into(), "█▌".into(), String::new()));
        assert_eq!((bar(0.5, 4, false), bar(7.0, 2, false), bar(f64::NAN, 2, true)), ("##".into(), "##".into(), String::new()));
    }

    #[test]
    fn sparks_show_gaps() {
        assert_eq!(spark([Some(0.0), None, Some(7.0), Some(3.0)], 0.0, 7.0, true), "▁ █▄");
        assert_eq!(spark([Some(0.0), Some(7.0)], 0.0, 7.0, false), "_#");
        assert_eq!(spark([Some(5.0)], 5.0, 5.0, true), "█");
    }
}
