//! The index's memory: blocks, placement sets, workers.

mod hashes;
mod ids;
mod mutation;
mod shared;
mod view;
mod workers;

pub use hashes::PackedHashes;
pub use ids::{Tier, WorkerId};
pub use mutation::{Action, Batch, BatchError, CacheSpec};
pub use shared::{Index, ReadGuard};
pub use view::ReadView;
pub use workers::{Label, Labels};
