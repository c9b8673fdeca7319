//! All integration tests: one binary, a module for each subject.

mod advise;
mod checkpoint;
mod dependencies;
mod diff;
mod doctor;
mod export;
mod goldens;
mod help;
mod import;
mod inspect;
mod layers;
mod pages;
mod readme;
mod record;
mod report;
mod speculation;
mod sweep;
mod text;
mod trace;
