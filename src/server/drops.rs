//! Which batches a drop has overtaken.
//!
//! A worker can be dropped while batches of it wait for a thread or for the index's
//! lock. They must not bring it back, but one that is received later may. So each batch
//! notes on receipt how many drops there have been, and looks again once it has the
//! index's lock: mostly there was none meanwhile, and that is all it costs. Else it looks
//! through the later ones for its worker.
//!
//! [`Drops::begin`] comes before the removal. A batch that has the lock before the removal
//! either sees the drop and does nothing, or does not and is removed with the worker; one
//! that has the lock after it sees the drop, as the lock was passed on.
//!
//! The last [`REMEMBERED_MAX`] drops are remembered, each by a keyed hash of its worker's id,
//! so that neither many nor long ids cost memory. A batch that waited for more than these cannot
//! know, and is refused: sent again, it is a later one.

use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Drops that are remembered, 16 bytes each.
const REMEMBERED_MAX: usize = 1_024;

/// How many drops there had been when a batch was received.
#[derive(Debug, Clone, Copy)]
pub(super) struct Receipt(u64);

/// What became of a batch's worker since the batch was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Since {
    /// It was not dropped.
    Kept,
    /// It was dropped.
    Dropped,
    /// Too many workers were dropped to know.
    Forgotten,
}

/// A batch that waited for longer than drops are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Overtaken;

impl fmt::Display for Overtaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{REMEMBERED_MAX} workers were dropped while the batch waited; send it again")
    }
}

impl std::error::Error for Overtaken {}

/// The drops of a server's life.
#[derive(Debug, Default)]
pub(super) struct Drops {
    /// How many there were. Written under `last`; see the module for what it is ordered by.
    count: AtomicU64,
    /// The last ones' workers, hashed, oldest first.
    last: Mutex<VecDeque<u64>>,
    keys: RandomState,
}

impl Drops {
    /// To be noted as soon as a batch is received.
    pub(super) fn receipt(&self) -> Receipt {
        Receipt(self.count.load(Ordering::Acquire))
    }

    /// From now on no batch received before applies to the worker. To be followed by its removal.
    pub(super) fn begin(&self, worker_id: &str) {
        let worker = self.keys.hash_one(worker_id);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == REMEMBERED_MAX {
            last.pop_front();
        }
        last.push_back(worker);
        self.count.fetch_add(1, Ordering::Release);
    }

    /// What became of the worker since the receipt; to be asked under the index's lock.
    pub(super) fn since(&self, receipt: Receipt, worker_id: &str) -> Since {
        if self.count.load(Ordering::Acquire) == receipt.0 {
            return Since::Kept;
        }
        let worker = self.keys.hash_one(worker_id);
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let later = self.count.load(Ordering::Acquire) - receipt.0;
        let later = usize::try_from(later).unwrap_or(usize::MAX);
        if last.iter().rev().take(later).any(|dropped| *dropped == worker) {
            Since::Dropped
        } else if later > last.len() {
            Since::Forgotten
        } else {
            Since::Kept
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drop_overtakes_what_was_received_before_it_and_nothing_else() {
        let drops = Drops::default();
        let before = drops.receipt();
        assert_eq!(drops.since(before, "a"), Since::Kept);
        drops.begin("a");
        let between = drops.receipt();
        drops.begin("b");
        let after = drops.receipt();
        for (receipt, a, b) in [
            (before, Since::Dropped, Since::Dropped),
            (between, Since::Kept, Since::Dropped),
            (after, Since::Kept, Since::Kept),
        ] {
            assert_eq!((drops.since(receipt, "a"), drops.since(receipt, "b")), (a, b), "{receipt:?}");
            assert_eq!(drops.since(receipt, "c"), Since::Kept);
        }
    }

    #[test]
    fn what_is_forgotten_is_not_guessed() {
        let drops = Drops::default();
        let old = drops.receipt();
        drops.begin("a");
        let new = drops.receipt();
        (1..REMEMBERED_MAX).for_each(|_| drops.begin("b"));
        assert_eq!((drops.since(old, "a"), drops.since(old, "c")), (Since::Dropped, Since::Kept));
        drops.begin("b");
        assert_eq!(drops.since(old, "a"), Since::Forgotten);
        assert_eq!((drops.since(old, "b"), drops.since(new, "a")), (Since::Dropped, Since::Kept));
        assert_eq!(drops.last.lock().expect("whole").len(), REMEMBERED_MAX);
    }
}
