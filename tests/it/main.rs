//! The one integration-test binary.

mod dependencies;
mod layers;
