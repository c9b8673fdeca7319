//! Report structs to text and JSON. Knows widths and colours, not where the numbers come from.

mod bars;
pub mod json;
mod table;
pub mod text;
mod wrap;

pub use text::TextOptions;
