//! All integration tests: one binary, a module for each subject.

mod advise;
mod checkpoint;
mod cuda;
mod dependencies;
mod diff;
mod doctor;
mod export;
mod goldens;
mod help;
mod inspect;
mod kernels;
mod layers;
mod pages;
mod readme;
mod record;
mod report;
mod speculation;
mod sweep;
mod text;
mod trace;
