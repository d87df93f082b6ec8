//! What can be done to the index, as plain borrowed values.
//!
//! A [`Batch`] is one worker's changes in order. It is checked as a whole
//! before anything is touched; what is left to do then cannot fail.

use std::fmt;

use super::{PackedHashes, Tier};

/// How a worker's caches decide what of a prefix can be reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheSpec {
    /// Version of the rules; above [`CacheSpec::VERSION_MAX`] nothing matches.
    pub version: u32,
    /// Caches the worker has: [`CacheSpec::FULL`], [`CacheSpec::SWA`], [`CacheSpec::MAMBA`].
    pub components: u32,
    /// Tokens of sliding-window attention needed before a boundary.
    pub swa_window_tokens: u32,
    /// Tiers from which FULL blocks can be reused, as bits `1 << tier`.
    pub full_tier_mask: u32,
    /// The same for SWA blocks.
    pub swa_tier_mask: u32,
    /// The same for Mamba states.
    pub mamba_tier_mask: u32,
}

impl CacheSpec {
    /// The newest version of the rules known here; 0 means the same.
    pub const VERSION_MAX: u32 = 1;
    /// Bit of full attention, in a spec's components and in a placement's mask.
    pub const FULL: u32 = 1;
    /// Bit of sliding-window attention.
    pub const SWA: u32 = 2;
    /// Bit of Mamba state.
    pub const MAMBA: u32 = 4;
}

/// One worker's changes, applied in order and all at once.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The worker's name, not empty.
    pub worker_id: &'a str,
    /// URL under which routers reach it; empty makes it unroutable.
    pub worker_address: &'a str,
    /// Rules of its caches; `None` means whole blocks at any tier.
    pub cache_spec: Option<CacheSpec>,
    /// The sender's count of batches, kept for diagnosis.
    pub seq: u64,
    /// Changes in order; may be empty.
    pub actions: &'a [Action<'a>],
}

/// One change to a worker's placements.
#[derive(Debug, Clone, Copy)]
pub enum Action<'a> {
    /// The worker holds these blocks at this tier.
    Report {
        /// Where.
        tier: Tier,
        /// Blocks, not empty; in chain order where it is known.
        hashes: PackedHashes<'a>,
        /// Component mask of each block; empty means 0, a whole block.
        masks: &'a [u32],
        /// Tokens of each block; empty or 0 means unknown and erases nothing.
        tokens: &'a [u32],
    },
    /// The worker no longer holds these blocks at this tier.
    Revoke {
        /// Where.
        tier: Tier,
        /// Blocks, not empty.
        hashes: PackedHashes<'a>,
    },
    /// The worker holds nothing at this tier any more.
    ClearTier {
        /// Where.
        tier: Tier,
    },
}

/// Why a batch was refused; nothing of it was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchError {
    /// The worker's id is empty.
    EmptyWorkerId,
    /// A report or revoke names no block.
    NoHashes {
        /// Place of the action in the batch.
        action: usize,
    },
    /// Masks or token counts are neither absent nor one per block.
    MetadataLength {
        /// Place of the action in the batch.
        action: usize,
        /// Number of blocks.
        hashes: usize,
        /// Number of masks or token counts.
        metadata: usize,
    },
    /// No id is left for a further worker or for as many blocks.
    Full,
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BatchError::EmptyWorkerId => write!(f, "worker_id is empty"),
            BatchError::NoHashes { action } => write!(f, "action {action} names no hashes"),
            BatchError::MetadataLength { action, hashes, metadata } => {
                write!(f, "action {action} has {hashes} hashes but {metadata} values of metadata for them")
            }
            BatchError::Full => write!(f, "the index is full: no id is left for a further worker or block"),
        }
    }
}

impl std::error::Error for BatchError {}

impl Batch<'_> {
    /// Checks all that can be wrong with a batch by itself; gives the number of hashes over all actions.
    pub(super) fn check(&self) -> Result<usize, BatchError> {
        if self.worker_id.is_empty() {
            return Err(BatchError::EmptyWorkerId);
        }
        let mut all = 0;
        for (number, action) in self.actions.iter().enumerate() {
            let (hashes, metadata) = match action {
                Action::Report { hashes, masks, tokens, .. } => (hashes.len(), [masks.len(), tokens.len()]),
                Action::Revoke { hashes, .. } => (hashes.len(), [0, 0]),
                Action::ClearTier { .. } => continue,
            };
            if hashes == 0 {
                return Err(BatchError::NoHashes { action: number });
            }
            if let Some(metadata) = metadata.into_iter().find(|length| *length != 0 && *length != hashes) {
                return Err(BatchError::MetadataLength { action: number, hashes, metadata });
            }
            all += hashes;
        }
        Ok(all)
    }
}
