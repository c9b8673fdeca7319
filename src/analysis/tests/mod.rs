//! Whole reports of traces in memory, against naive sets and against routings whose statistics are known.

pub mod memory;
pub mod naive;
pub mod shapes;
mod truth;
