//! Measured values and their text for Prometheus.
//!
//! Recording is a few relaxed atomic additions: no lock, no allocation, no
//! look-up of a label. So series are fixed fields of whoever records, each a
//! [`Counter`] or a [`Histogram`], and labels are named only when somebody reads.
//! prometheus-client writes the text; its own histogram is not used, as it
//! takes a lock at each value. This must not know what is measured.
//!
//! Each value is read alone and orders nothing, so `Relaxed` is enough everywhere.

mod histogram;
mod text;

use std::sync::atomic::{AtomicU64, Ordering};

pub use histogram::{Histogram, Reading, Scale};
pub use text::{Writer, expose};

/// Bounds of a call's duration, in nanoseconds: 5 µs to 5 s.
pub const CALL_NANOSECONDS: &[u64] = &[
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    1_000_000_000,
    5_000_000_000,
];

/// Bounds of work in memory, in nanoseconds: 100 ns to 100 ms.
pub const WORK_NANOSECONDS: &[u64] = &[
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    1_000_000,
    5_000_000,
    25_000_000,
    100_000_000,
];

/// Bounds of a count of blocks or hashes: none to a million.
pub const BLOCKS: &[u64] =
    &[0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 16_384, 65_536, 262_144, 1_048_576];

/// A count that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts one.
    pub fn count(&self) {
        self.count_up();
    }

    /// Counts one and gives the new count.
    pub fn count_up(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A count of what is there now.
#[derive(Debug, Default)]
pub struct Level(AtomicU64);

impl Level {
    /// One more.
    pub fn rise(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One less; there must be one.
    pub fn fall(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// How many there are.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
