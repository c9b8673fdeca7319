//! All integration tests: one binary, a module for each subject.

mod checkpoint;
mod dependencies;
mod doctor;
mod goldens;
mod help;
mod import;
mod inspect;
mod layers;
mod readme;
mod record;
mod report;
mod speculation;
mod text;
mod trace;
