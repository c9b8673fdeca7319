//! Trace tables to report structs. The only place with polars.
