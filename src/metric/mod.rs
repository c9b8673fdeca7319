//! What every reported number is: the report's structs, a registry of meanings, and how units are shown.

pub mod advice;
pub mod batch;
pub mod bounds;
pub mod bytes;
pub mod cost;
pub mod costs;
pub mod groups;
pub mod parallel;
pub mod registry;
pub mod report;
pub mod sweep;
pub mod trees;
pub mod unit;

pub use registry::{Better, METRICS, Metric, Noise, find};
pub use report::{Interval, Report, SCHEMA};
pub use unit::{Unit, counted_plain};
