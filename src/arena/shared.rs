//! The one lock.
//!
//! An apply is atomic and a query sees one state, so one read-write lock guards
//! the whole arena. It is synchronous because everything under it is short: the
//! longest scan and the largest applies take low milliseconds, also where their
//! blocks lie all over an index of millions (`benches/stalls.rs`).
//! Nothing else may happen under it: no decoding or encoding of messages, no
//! logging, no waiting, no freeing of columns. Guards are born and dropped in this
//! file alone.

use std::ops::Deref;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{Arena, Batch, BatchError, ReadView, Tuning, WorkerId};

/// The index, shared between threads.
#[derive(Debug)]
pub struct Index {
    view: RwLock<ReadView>,
    /// Whether there is clean-up to do that nobody has been told of.
    due: Mutex<bool>,
    told: Condvar,
}

/// What became of a batch that may have been overtaken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was, and nothing of it applies.
    Overtaken,
    /// It is applied, and its worker was known.
    Known,
    /// It is applied, and its worker was not known, or no longer.
    New,
}

/// The index at one moment; applies wait while it is held, so let it go soon.
#[derive(Debug)]
pub struct ReadGuard<'a>(RwLockReadGuard<'a, ReadView>);

impl Deref for ReadGuard<'_> {
    type Target = ReadView;

    fn deref(&self) -> &ReadView {
        &self.0
    }
}

/// Ends the process if a change of the arena is left half done by a panic.
///
/// A parking_lot lock is not poisoned, so without this a reader would meet
/// half a batch. There is no good answer to give from such a state.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Makes a change that is carried out whole, or ends the process.
fn whole<T>(change: impl FnOnce() -> T) -> T {
    let whole = AbortOnUnwind;
    let outcome = change();
    drop(whole);
    outcome
}

impl Default for Index {
    fn default() -> Self {
        Index::new()
    }
}

impl Index {
    /// An empty index.
    pub fn new() -> Self {
        Index::with_tuning(Tuning::default())
    }

    /// An empty index with hostile settings, for tests.
    #[doc(hidden)]
    pub fn with_tuning(tuning: Tuning) -> Self {
        let view = RwLock::new(ReadView { arena: Arena::new(tuning) });
        Index { view, due: Mutex::new(false), told: Condvar::new() }
    }

    /// Applies a batch whole, or refuses it whole.
    ///
    /// # Errors
    /// The batch breaks a rule of [`BatchError`]; the index is as it was.
    pub fn apply(&self, batch: &Batch<'_>) -> Result<(), BatchError> {
        self.apply_if(batch, || true).map(|_| ())
    }

    /// The same if, once the lock is had, `still` says that it should be.
    ///
    /// For a batch that something may have overtaken while it waited. What `still` does happens
    /// under the lock, so it must be short.
    ///
    /// # Errors
    /// The batch breaks a rule of [`BatchError`]; the index is as it was.
    pub fn apply_if(&self, batch: &Batch<'_>, still: impl FnOnce() -> bool) -> Result<Outcome, BatchError> {
        let hashes = batch.check()?;
        let mut view = self.view.write();
        if !still() {
            return Ok(Outcome::Overtaken);
        }
        let outcome = whole(|| view.arena.apply(batch, hashes));
        self.tell(view);
        Ok(if outcome? { Outcome::New } else { Outcome::Known })
    }

    /// Removes a worker and all that it holds, as if it had never been; `false` if there is none of
    /// this name. It may come back under the same name at once.
    pub fn remove_worker(&self, name: &str) -> bool {
        let mut view = self.view.write();
        let Some(worker) = view.arena.workers.find(name) else { return false };
        whole(|| view.arena.remove_worker(worker));
        self.tell(view);
        true
    }

    /// Removes a worker of which nothing was heard since [`ReadView::heard`] gave `heard`; says whether it did.
    pub fn remove_if_unheard(&self, worker: WorkerId, heard: u64) -> bool {
        let mut view = self.view.write();
        if view.heard(worker) != Some(heard) {
            return false;
        }
        whole(|| view.arena.remove_worker(worker));
        self.tell(view);
        true
    }

    /// Leaves a worker out of answers, or takes it in again, if nothing was heard of it since
    /// [`ReadView::heard`] gave `heard`; says whether it did. Its next batch takes it in anyway.
    pub fn put_silent(&self, worker: WorkerId, heard: u64, silent: bool) -> bool {
        let mut view = self.view.write();
        let unheard = view.heard(worker) == Some(heard);
        if unheard {
            whole(|| view.arena.workers.put_silent(worker, silent));
        }
        unheard
    }

    /// Lets go of the lock and tells of clean-up that is due.
    #[inline]
    fn tell(&self, mut view: RwLockWriteGuard<'_, ReadView>) {
        let due = view.arena.maintenance_due();
        drop(view);
        if due {
            *self.due.lock() = true;
            self.told.notify_one();
        }
    }

    /// The index as it is now.
    pub fn read(&self) -> ReadGuard<'_> {
        ReadGuard(self.view.read())
    }

    /// One bounded step of the clean-up that applies put off, or of laying side by side what scans
    /// found apart; `false` once nothing is left to do.
    ///
    /// No answer depends on it. Applies do a share of the clean-up themselves, so calling this only gives memory back
    /// sooner, and makes later scans of the same prompts faster.
    pub fn maintain(&self) -> bool {
        let mut view = self.view.write();
        let (more, released) = whole(|| view.arena.maintain());
        // A caller that goes on at once would take the lock again before a reader has woken.
        RwLockWriteGuard::unlock_fair(view);
        drop(released);
        more
    }

    /// Waits until an apply leaves clean-up behind or finds that scans have left something to do, at most for `timeout`.
    ///
    /// For a thread that calls [`Index::maintain`] until it says `false`, and then this again.
    pub fn wait_for_maintenance(&self, timeout: Duration) {
        let mut due = self.due.lock();
        if !*due {
            self.told.wait_for(&mut due, timeout);
        }
        *due = false;
    }

    /// Checks every invariant of the arena; for tests.
    ///
    /// # Errors
    /// Names the first invariant that does not hold.
    #[doc(hidden)]
    pub fn audit(&self) -> Result<(), String> {
        self.view.read().arena.audit()
    }
}
