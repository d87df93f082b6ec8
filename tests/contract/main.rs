//! The wire contract, row by row, over real connections to a server of its own.
//!
//! Numbers stand here as the contract has them and not as the crate names them.

mod served;

#[path = "../common/ops.rs"]
mod ops;
#[path = "../common/raw.rs"]
mod raw;

mod bounds;
mod encodings;
mod histories;
mod matching;
mod prefixes;
mod state;
