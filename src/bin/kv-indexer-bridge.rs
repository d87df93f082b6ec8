//! The bridge.

fn main() {}
