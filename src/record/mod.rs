//! Runs a workload on the engine and writes the trace: prompts in, steps out, Ctrl-C survived.

pub mod machine;
