//! Whether the components of a pass add up to its time on the device.

use super::collect::{Collected, Place};
use super::{component_times, us};
use crate::metric::Unit;
use crate::metric::cost::TimeSource;
use crate::trace::Component;

/// Share of a pass's device time by which the sum of its components may miss it.
const MOST_MISSED: f64 = 0.03;

/// What is wrong with a verify or a decode pass whose components, idle time included, do not add up to its time on the device: |Σ_c t_c / t - 1|
/// beyond [`MOST_MISSED`], drafting apart on both sides.
pub(super) fn warning(collected: &Collected, source: Option<TimeSource>) -> Option<String> {
    if source != Some(TimeSource::Device) || !collected.has_operations {
        return None;
    }
    let components = component_times(collected, Place::Everything);
    let passes = [collected.verify_mean_ns(|c| c.pass_ns), collected.compared_decode_ns()];
    let missed = ["verify", "decode"].into_iter().zip(passes).enumerate().filter_map(|(phase, (name, pass))| {
        let sum: f64 = components.iter().filter(|(c, _)| *c != Component::Draft).filter_map(|(_, both)| both[phase]).sum();
        let pass = pass.filter(|ns| *ns > 0.0)?;
        let off = sum / pass - 1.0;
        (off.abs() > MOST_MISSED).then(|| {
            format!(
                "{name} passes take {} on the device and their components {}",
                Unit::Microseconds.show(us(pass)),
                Unit::Microseconds.show(us(sum))
            )
        })
    });
    let missed: Vec<_> = missed.collect();
    (!missed.is_empty()).then(|| {
        format!(
            "{}: more than {:.0} % apart, so shares of components are not shares of the pass; kernels that ran side by side count twice, and those              without a record not at all",
            missed.join("; "),
            MOST_MISSED * 100.0
        )
    })
}
