//! The index against the oracle: random histories, every answer compared.

#[path = "../common/ops.rs"]
mod ops;
#[path = "../common/pair.rs"]
mod pair;

mod chunks;
mod clears;
mod decoded;
mod fleet;
mod growth;
mod histories;
mod holes;
mod ragged;
mod walk;
