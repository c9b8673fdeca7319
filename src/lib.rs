//! specprof measures what speculative decoding costs in a sparse mixture-of-experts model.
//!
//! Layers, each using only those below it (a test holds this):
//!
//! ```text
//! L5  cli        arguments, terminal, exit codes
//! L4  report     plain structs -> text, Markdown, CSV, JSON, HTML  (no polars, no arrow)
//! L4  export     trace -> timeline, lines of JSON
//! L4  diff       two reports -> verdicts, rules                 (beside it)
//! L3  analysis   trace tables -> report structs                 (the only place with polars)
//! L2  record     workload x engine -> trace
//! L1  engine     checkpoint -> forward passes, drafts, events
//! L1  import     other programs' files -> events
//! L0  metric     the report's structs, units
//! L0  trace      ids, expert sets, events, schema, files        (the only place with arrow, parquet)
//! ```
//!
//! The way of the data, from a checkpoint to the screen, is written down in `docs/design.md`.

pub mod analysis;
pub mod cli;
pub mod diff;
pub mod engine;
pub mod export;
pub mod import;
pub mod metric;
pub mod record;
pub mod report;
pub mod trace;
