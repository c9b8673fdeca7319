//! Report structs to text, Markdown, CSV, JSON and HTML. Knows widths and colours, not where the numbers come from.

pub mod advice;
mod bars;
mod cost;
pub mod costs;
pub mod html;
pub mod json;
mod lookup;
pub mod markdown;
mod sections;
mod shapes;
pub mod side_by_side;
mod svg;
pub mod sweep;
pub mod table;
pub mod tables;
pub mod text;
mod words;
pub(crate) mod wrap;

pub use text::TextOptions;
