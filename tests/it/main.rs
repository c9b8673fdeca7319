//! All integration tests: one binary, a module for each subject.

mod advise;
mod checkpoint;
mod dependencies;
mod diff;
mod doctor;
mod export;
mod goldens;
mod help;
mod inspect;
mod layers;
mod pages;
mod readme;
mod record;
mod report;
mod shapes;
mod speculation;
mod sweep;
mod text;
mod trace;
