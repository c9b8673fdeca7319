//! The machine's state over the run, thinned to what a strip of a page can show.

use crate::metric::report::Telemetry;
use crate::trace::TelemetrySample;
use crate::trace::throttling::slowing;

/// Spans at most.
const SPANS: usize = 96;

/// Means of the samples over spans of equal length: `None` without samples.
///
/// Span i of n holds the samples with `floor(n (time - first) / (last - first))` = i (the last sample in the last span);
/// n is the number of samples, at most 96. A quantity is unknown in a span in which no sample has it.
pub fn strip(samples: &[TelemetrySample], began_ns: i64) -> Option<Telemetry> {
    let first = samples.iter().map(|s| s.time_ns).min()?;
    let last = samples.iter().map(|s| s.time_ns).max()?;
    let (spans, length) = (samples.len().min(SPANS), last.saturating_sub(first).max(1));
    let span_of = |s: &TelemetrySample| {
        let share = s.time_ns.saturating_sub(first) as f64 / length as f64;
        ((share * spans as f64) as usize).min(spans - 1)
    };
    let mean = |of: &dyn Fn(&TelemetrySample) -> Option<f64>| {
        let mut sums = vec![(0.0, 0u64); spans];
        for sample in samples {
            if let (Some(value), Some((sum, n))) = (of(sample).filter(|v| v.is_finite()), sums.get_mut(span_of(sample))) {
                *sum += value;
                *n += 1;
            }
        }
        sums.into_iter().map(|(sum, n)| (n > 0).then(|| sum / n as f64)).collect::<Vec<_>>()
    };
    let middle = |i: usize| first.saturating_sub(began_ns) as f64 / 1e9 + (i as f64 + 0.5) / spans as f64 * (length as f64 / 1e9);
    let bytes = |s: &TelemetrySample| s.memory_used_bytes.or(s.rss_bytes).map(|b| b as f64);
    Some(Telemetry {
        samples: samples.len() as u64,
        time_s: (0..spans).map(middle).collect(),
        host_load: mean(&|s| s.host_load),
        cpu_mhz: mean(&|s| s.cpu_mhz),
        sm_clock_mhz: mean(&|s| s.sm_clock_mhz.map(f64::from)),
        power_w: mean(&|s| s.power_w),
        temperature_c: mean(&|s| s.temperature_c),
        memory_bytes: mean(&bytes),
        throttled: mean(&|s| slowing(s).map(|mut reasons| f64::from(u8::from(reasons.next().is_some())))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(time_ns: i64, host_load: Option<f64>, rss: u64) -> TelemetrySample {
        TelemetrySample { time_ns, host_load, rss_bytes: Some(rss), ..TelemetrySample::default() }
    }

    #[test]
    fn worked_example_of_three_samples() {
        let samples = [sample(1_000, None, 10), sample(1_500, Some(0.25), 20), sample(4_000, Some(0.75), 40)];
        // Spans of 1 µs from 1 µs on: the first two samples are in the first, nobody in the second.
        let mut samples = samples;
        samples[0].throttle_reasons = Some("sw_power_cap".into());
        samples[1].throttle_reasons = Some("gpu_idle".into());
        let strip = strip(&samples, 0).unwrap();
        assert_eq!(strip.throttled, [Some(0.5), None, None]);
        assert_eq!((strip.samples, strip.time_s.len()), (3, 3));
        assert!(strip.time_s.iter().zip([1.5e-6, 2.5e-6, 3.5e-6]).all(|(a, b)| (a - b).abs() < 1e-12), "{:?}", strip.time_s);
        assert_eq!(strip.host_load, [Some(0.25), None, Some(0.75)]);
        assert_eq!(strip.memory_bytes, [Some(15.0), None, Some(40.0)]);
        assert_eq!(strip.power_w, [None; 3]);
    }

    #[test]
    fn many_samples_become_few_and_hostile_times_do_no_harm() {
        let samples: Vec<_> = (0..10_000).map(|i| sample(i * 200_000_000, Some((i % 2) as f64), 1)).collect();
        let strip = strip(&samples, 0).unwrap();
        assert_eq!((strip.samples, strip.time_s.len()), (10_000, SPANS));
        assert!(strip.host_load.iter().all(|l| (l.unwrap() - 0.5).abs() < 0.01));
        assert_eq!(super::strip(&[], 0), None);
        let odd = super::strip(&[sample(i64::MAX, None, 1), sample(i64::MIN, None, 2)], i64::MIN).unwrap();
        assert_eq!(odd.time_s.len(), 2);
    }
}
