//! All that a reader may ask.
//!
//! A scan walks slots, runs and sets; none of these leave the crate. What does
//! are labels and sizes.

use std::ops::Range;

use nohash_hasher::IntMap;

use super::workers::Workers;
use super::{Arena, BlockId, CacheSpec, Entry, FleetWord, Labels, SetId, Stretch, Tier, WorkerId};

/// The index at one moment.
#[derive(Debug)]
pub struct ReadView {
    pub(super) arena: Arena,
}

/// How large the index is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Workers known.
    pub workers: usize,
    /// Distinct blocks held, those that only wait for clean-up included.
    pub blocks: usize,
    /// Blocks no longer held that are remembered for their place.
    pub ghosts: usize,
    /// Distinct placement sets.
    pub sets: usize,
    /// Runs of neighbouring blocks with one set: fewer is faster.
    pub runs: usize,
    /// Bytes of the columns.
    pub block_bytes: usize,
    /// Bytes of the hash table.
    pub table_bytes: usize,
    /// Bytes of the sets.
    pub set_bytes: usize,
    /// Bytes of the workers' bitmaps.
    pub holding_bytes: usize,
}

/// What a worker's report said of one block at one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// The block.
    pub hash: i64,
    /// Component mask of the placement.
    pub mask: u32,
    /// Length of the block, 0 if unknown.
    pub tokens: u32,
}

impl ReadView {
    /// The labels of all workers, to be kept after the view is let go.
    pub fn labels(&self) -> Labels {
        self.arena.workers.labels().clone()
    }

    /// The worker with this name.
    pub fn find_worker(&self, name: &str) -> Option<WorkerId> {
        self.arena.workers.find(name)
    }

    /// The ids of all workers, ascending.
    pub fn workers(&self) -> impl Iterator<Item = WorkerId> {
        self.arena.workers.iter().filter(|(_, worker)| !worker.is_gone()).map(|(id, _)| id)
    }

    /// Workers' ids are below this.
    pub fn worker_slots(&self) -> usize {
        self.arena.workers.fleet().len() * 64
    }

    /// The workers whose ids are in this range, ascending, each with its [`ReadView::heard`]: for those
    /// who look at all of them a stretch at a time.
    pub fn heard_of(&self, ids: Range<usize>) -> impl Iterator<Item = (WorkerId, u64)> {
        let ids = ids.start..ids.end.min(self.worker_slots());
        ids.map(|id| WorkerId(id as u32)).filter_map(|id| Some((id, self.heard(id)?)))
    }

    /// A number that each batch of a worker changes, and that no other worker had before;
    /// `None` if there is no such worker any more.
    pub fn heard(&self, worker: WorkerId) -> Option<u64> {
        self.arena.workers.get_if_known(worker).map(|worker| worker.heard)
    }

    /// Whether a worker of this view is left out of answers.
    pub fn is_silent(&self, worker: WorkerId) -> bool {
        self.arena.workers.get(worker).is_silent()
    }

    /// The cache spec of a worker of this view.
    pub fn cache_spec(&self, worker: WorkerId) -> Option<CacheSpec> {
        self.arena.workers.get(worker).spec
    }

    /// The sequence number of the worker's last batch.
    pub fn last_seq(&self, worker: WorkerId) -> u64 {
        self.arena.workers.get(worker).seq
    }

    /// How many blocks a worker of this view holds at a tier.
    pub fn holdings(&self, worker: WorkerId, tier: Tier) -> u64 {
        self.arena.workers.get(worker).holding(tier).blocks.len()
    }

    /// Distinct blocks held, those that only wait for clean-up included.
    pub fn blocks(&self) -> usize {
        self.arena.blocks.live()
    }

    /// Visits what a worker of this view holds at a tier, in the order of slots, which is
    /// mostly that of chains: from slot `from` on, at most `most` placements.
    ///
    /// Returns the slot to go on from, `None` at the end. A block keeps its slot for as
    /// long as anybody holds it.
    pub fn holdings_from(
        &self,
        worker: WorkerId,
        tier: Tier,
        from: u32,
        most: usize,
        mut visit: impl FnMut(Placement),
    ) -> Option<u32> {
        let holder = self.arena.workers.holder(worker, tier);
        let mut last = (SetId::EMPTY, 0);
        let mut slots = self.arena.workers.get(worker).holding(tier).blocks.iter();
        slots.advance_to(from);
        for slot in slots.by_ref().take(most) {
            let block = BlockId(slot);
            let set = self.set(block);
            if set != last.0 {
                last = (set, self.arena.sets.mask_of(set, holder).unwrap_or(0));
            }
            visit(Placement {
                hash: self.arena.blocks.hash(block),
                mask: last.1,
                tokens: self.tokens(block),
            });
        }
        slots.next()
    }

    /// What a worker of this view holds of a block at a tier.
    pub fn placement(&self, worker: WorkerId, tier: Tier, hash: i64) -> Option<Placement> {
        let block = self.find(hash)?;
        let mask = self.arena.sets.mask_of(self.set(block), self.arena.workers.holder(worker, tier))?;
        Some(Placement { hash, mask, tokens: self.tokens(block) })
    }

    /// How large the index is. Counts every chunk, so it is for people, not for every query.
    pub fn sizes(&self) -> Sizes {
        let Arena { blocks, table, sets, workers, .. } = &self.arena;
        Sizes {
            workers: self.workers().count(),
            blocks: blocks.live(),
            ghosts: blocks.remembered(),
            sets: sets.len(),
            runs: blocks.runs(),
            block_bytes: blocks.bytes(),
            table_bytes: table.bytes(),
            set_bytes: sets.bytes(),
            holding_bytes: holding_bytes(workers),
        }
    }

    /// The block with this hash, if anybody holds it or did a moment ago.
    #[inline]
    pub(crate) fn find(&self, hash: i64) -> Option<BlockId> {
        self.arena.table.find(hash, &self.arena.blocks).filter(|block| self.set(*block) != SetId::EMPTY)
    }

    /// The hash column from `block` to its chunk's end.
    #[inline]
    pub(crate) fn hashes_from(&self, block: BlockId) -> &[[u8; 8]] {
        self.arena.blocks.hashes_from(block)
    }

    /// Where in a stretch the set changes, as places after its first block, ascending.
    #[inline]
    pub(crate) fn edges(&self, stretch: Stretch) -> impl Iterator<Item = usize> {
        self.arena.blocks.edges(stretch)
    }

    /// Slots from `block` on, at most `most`, that may hold one chain.
    #[inline]
    pub(crate) fn stretch(&self, block: BlockId, most: usize) -> Stretch {
        self.arena.blocks.stretch(block, most)
    }

    /// The slot after a stretch, which may be free.
    #[inline]
    pub(crate) fn after(&self, stretch: Stretch) -> Option<BlockId> {
        self.arena.blocks.after(stretch)
    }

    #[inline]
    pub(crate) fn set(&self, block: BlockId) -> SetId {
        self.arena.blocks.set(block)
    }

    /// The sets of a stretch's slots.
    #[inline]
    pub(crate) fn sets_of(&self, stretch: Stretch) -> &[SetId] {
        self.arena.blocks.sets_of(stretch)
    }

    #[inline]
    pub(crate) fn entries(&self, set: SetId) -> &[Entry] {
        self.arena.sets.entries(set)
    }

    /// Whether anybody holds a block with this set.
    pub(crate) fn is_held(&self, set: SetId) -> bool {
        self.arena.is_held(set)
    }

    #[inline]
    pub(crate) fn fleet(&self) -> &[FleetWord] {
        self.arena.workers.fleet()
    }

    pub(crate) fn tokens(&self, block: BlockId) -> u32 {
        self.arena.blocks.tokens(block)
    }

    pub(crate) fn tokens_of(&self, stretch: Stretch) -> u64 {
        self.arena.blocks.tokens_of(stretch)
    }

    /// Tokens of sliding-window attention that a worker's spec asks for.
    pub(crate) fn swa_window(&self, worker: WorkerId) -> u64 {
        self.cache_spec(worker).map_or(0, |spec| u64::from(spec.swa_window_tokens))
    }

    /// Runs `count` on the hit counts by slot, while no block can come or go.
    pub(crate) fn with_hits<T>(&self, count: impl FnOnce(&mut IntMap<u32, u64>) -> T) -> T {
        count(&mut self.arena.hits.lock())
    }
}

fn holding_bytes(workers: &Workers) -> usize {
    let generations = workers.iter().flat_map(|(_, worker)| worker.holdings.iter().flatten());
    generations
        .map(|holding| {
            let statistics = holding.blocks.statistics();
            (statistics.n_bytes_array_containers
                + statistics.n_bytes_run_containers
                + statistics.n_bytes_bitset_containers) as usize
        })
        .sum()
}
