//! The same question put to an index of this process.
//!
//! There is no network, so there is no deadline and nothing to fall back from; a
//! scan runs where it is asked for unless it is so long that it would hold up what
//! else runs on that thread. Its owner feeds the index with [`Index::apply`].

use std::cell::RefCell;
use std::sync::Arc;

use super::{Answer, Asked, ErrorClass, PrefixIndex, Prompt, QueryError};
use crate::arena::Index;
use crate::scan::{PrefixScratch, prefix};

/// Most hashes that are scanned on the asking thread: looked up one by one at 100 ns
/// each, the worst there is, they take 1.6 ms.
const INLINE_HASHES_MAX: usize = 16_384;

thread_local! {
    /// Working memory of the scans that run on this thread, one at a time.
    static SCRATCH: RefCell<PrefixScratch> = RefCell::default();
}

/// An index of this process, asked as a server is.
#[derive(Debug, Clone)]
pub struct Embedded {
    index: Arc<Index>,
}

impl Embedded {
    /// Asks `index`.
    pub fn new(index: Arc<Index>) -> Self {
        Embedded { index }
    }

    /// Asks how many leading blocks of `prompt` each worker can reuse, here and now.
    ///
    /// It takes the index's read lock once, for low milliseconds at most.
    pub fn scan(&self, prompt: &Prompt) -> Answer {
        SCRATCH.with_borrow_mut(|scratch| {
            let (blocks_read, labels) = {
                let view = self.index.read();
                (prefix(&view, prompt.hashes(), scratch), view.labels())
            };
            Answer::found(scratch.matches(), labels, blocks_read, prompt)
        })
    }
}

impl PrefixIndex for Embedded {
    /// A long prompt is scanned on a thread of tokio's that may be kept busy, so it has
    /// to be asked inside of a runtime. A panic of the scan is passed on.
    fn match_prefix<'a>(&'a self, prompt: &'a Prompt) -> Asked<'a> {
        Box::pin(async move {
            if prompt.hashes().len() <= INLINE_HASHES_MAX {
                return Ok(self.scan(prompt));
            }
            let (embedded, prompt) = (self.clone(), prompt.clone());
            match tokio::task::spawn_blocking(move || embedded.scan(&prompt)).await {
                Ok(answer) => Ok(answer),
                Err(error) => match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(_) => Err(QueryError::here(ErrorClass::Unreachable, "the runtime stops")),
                },
            }
        })
    }
}
