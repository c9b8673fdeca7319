//! Whole reports of traces in memory, against naive sets and against routings whose statistics are known.

pub mod memory;
mod naive;
mod shapes;
mod truth;
