//! The one lock.
use super::{Batch, BatchError, ReadView};

/// The index, shared between threads.
#[derive(Debug, Default)]
pub struct Index(());

/// The index at one moment; applies wait while it is held, so let it go soon.
#[derive(Debug)]
pub struct ReadGuard<'a>(&'a ReadView);

impl std::ops::Deref for ReadGuard<'_> {
    type Target = ReadView;
    fn deref(&self) -> &ReadView {
        self.0
    }
}

impl Index {
    /// An empty index.
    pub fn new() -> Self {
        Index(())
    }
    /// Applies a batch whole, or refuses it whole.
    ///
    /// # Errors
    /// The batch breaks a rule of [`BatchError`]; the index is as it was.
    pub fn apply(&self, _batch: &Batch<'_>) -> Result<(), BatchError> {
        unimplemented!()
    }
    /// The index as it is now.
    pub fn read(&self) -> ReadGuard<'_> {
        unimplemented!()
    }
    /// One bounded step of clean-up that applies have put off; `false` when nothing is left to do.
    ///
    /// A server calls it from a thread of its own until it says `false`, and again after
    /// [`Index::wait_for_maintenance`] returns.
    pub fn maintain(&self) -> bool {
        unimplemented!()
    }
}
