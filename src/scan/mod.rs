//! Answers to queries.

pub mod lookup;

use crate::arena::{PackedHashes, ReadView, WorkerId};

/// How many leading blocks one worker can reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Who.
    pub worker: WorkerId,
    /// Leading blocks, at least 1.
    pub blocks: u32,
}

/// Working memory of [`prefix`], kept between calls so that warm scans allocate nothing.
#[derive(Debug, Default)]
pub struct PrefixScratch {
    matches: Vec<PrefixMatch>,
}

impl PrefixScratch {
    /// The last scan's matches, longest first, equal ones in a repeatable order.
    pub fn matches(&self) -> &[PrefixMatch] {
        &self.matches
    }
}

/// Finds how many leading blocks of `hashes` each routable worker can reuse.
///
/// Leaves the matches in `scratch` and returns how many positions were looked at.
pub fn prefix(_view: &ReadView, _hashes: PackedHashes<'_>, _scratch: &mut PrefixScratch) -> u32 {
    unimplemented!()
}
