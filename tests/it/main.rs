//! All integration tests: one binary, a module for each subject.

mod advise;
mod browser;
mod checkpoint;
mod dependencies;
mod diff;
mod doctor;
mod dspark;
mod dspark_speculation;
mod export;
mod goldens;
mod help;
mod import;
mod inspect;
mod layers;
mod pages;
mod quantised;
mod readme;
mod record;
mod report;
mod safetensors_files;
mod speculation;
mod sweep;
mod text;
mod trace;
mod workloads;
