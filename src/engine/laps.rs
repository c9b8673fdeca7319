//! Times of a pass's operations, lap by lap: the end of one is the begin of the next, so that each costs one look at the
//! clock. A tap that wants no times costs one comparison an operation and no look at the clock.

use super::clock::Clock;
use super::tap::ForwardTap;
use crate::trace::{Component, Module};

/// A stop watch over the operations of one module in one layer, or outside layers.
pub(super) struct Laps<'t> {
    /// The pass's tap.
    pub tap: &'t mut dyn ForwardTap,
    clock: Option<Clock>,
    module: Module,
    layer: Option<usize>,
    since: i64,
}

impl<'t> Laps<'t> {
    /// Starts the first lap, if the tap wants times.
    pub fn start(tap: &'t mut dyn ForwardTap, module: Module, layer: Option<usize>) -> Self {
        let clock = tap.clock();
        let since = clock.map_or(0, |c| c.now_ns());
        Self { tap, clock, module, layer, since }
    }

    /// Ends a lap, which was spent on `component`, and starts the next.
    pub fn lap(&mut self, component: Component) {
        if let Some(clock) = self.clock {
            let now = clock.now_ns();
            self.tap.operation(self.module, self.layer, component, self.since, now);
            self.since = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Ops(Option<Clock>, Vec<(Option<usize>, Component, i64, i64)>);

    impl ForwardTap for Ops {
        fn clock(&self) -> Option<Clock> {
            self.0
        }

        fn operation(&mut self, _: Module, layer: Option<usize>, component: Component, begin_ns: i64, end_ns: i64) {
            self.1.push((layer, component, begin_ns, end_ns));
        }
    }

    #[test]
    fn laps_follow_each_other_without_a_gap() {
        let mut ops = Ops(Some(Clock::start()), Vec::new());
        let mut laps = Laps::start(&mut ops, Module::Target, Some(3));
        laps.lap(Component::Norm);
        laps.lap(Component::Kda);
        laps.lap(Component::Router);
        let [norm, kda, router] = ops.1.as_slice() else { panic!("{:?}", ops.1) };
        assert_eq!((norm.0, norm.1, kda.1, router.1), (Some(3), Component::Norm, Component::Kda, Component::Router));
        assert_eq!((norm.3, kda.3), (kda.2, router.2));
        assert!(norm.2 <= norm.3 && router.2 <= router.3);
    }

    #[test]
    fn without_a_clock_nothing_is_told() {
        let mut ops = Ops::default();
        let mut laps = Laps::start(&mut ops, Module::Target, None);
        laps.lap(Component::Norm);
        assert_eq!(laps.since, 0);
        assert!(ops.1.is_empty());
    }
}
