//! Report structs to text and JSON. Knows widths and colours, not where the numbers come from.
