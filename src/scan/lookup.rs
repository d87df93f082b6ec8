//! Exact-block match and hit counts.

use crate::arena::{PackedHashes, ReadView, Tier, WorkerId};

/// What of a list of blocks is held, by whom and where.
#[derive(Debug, Default)]
pub struct BlockMatches {
    /// One row per worker that holds any of the blocks.
    pub workers: Vec<WorkerBlocks>,
    /// Tokens of the block at each position of the request; 0 where unknown or not held.
    pub tokens: Vec<u32>,
}

/// Blocks held by one worker.
#[derive(Debug)]
pub struct WorkerBlocks {
    /// Who.
    pub worker: WorkerId,
    /// One row per tier with any of the blocks, ascending.
    pub tiers: Vec<TierBlocks>,
}

/// Blocks held by one worker at one tier.
#[derive(Debug)]
pub struct TierBlocks {
    /// Where.
    pub tier: Tier,
    /// Positions in the request, ascending; a repeated hash stands at its first place only.
    pub positions: Vec<u32>,
    /// Component masks, one per position.
    pub masks: Vec<u32>,
}

/// Looks each of `hashes` up by itself; `count` adds one to the hit count of each that matched.
pub fn match_blocks(_view: &ReadView, _hashes: PackedHashes<'_>, _count: bool) -> BlockMatches {
    unimplemented!()
}

/// Position and hit count of each of `hashes` that has a count, repeats left out.
pub fn hit_counts(_view: &ReadView, _hashes: PackedHashes<'_>) -> Vec<(u32, u64)> {
    unimplemented!()
}
