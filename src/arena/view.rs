//! All that a reader may ask.
//!
//! A scan walks slots, runs and sets; none of these leave the crate. What does
//! are labels and sizes.

use std::ops::Range;

use nohash_hasher::IntMap;

use super::workers::Workers;
use super::{
    Arena, BlockId, CacheSpec, Entry, FleetWord, Labels, Lane, Leg, Located, SetId, Slots, TOGETHER, Tier,
    WorkerId,
};

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
    /// long as anybody holds it, unless prompts are scanned: [`Index::maintain`](super::Index::maintain) moves
    /// blocks that scans found apart.
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

    /// Where the blocks with these hashes stand, at most [`TOGETHER`]: found faster together than one by one.
    #[inline]
    pub(crate) fn locate_all(&self, hashes: &[[u8; 8]], located: &mut [Located; TOGETHER]) {
        self.arena.table.locate_all(hashes, &self.arena.blocks, located);
    }

    /// Has maintenance lay blocks side by side that a scan found apart, if that is worth it; of most of them
    /// `set` is the set.
    pub(crate) fn wish(&self, hashes: &[[u8; 8]], set: SetId) {
        if self.arena.gathers_after == 0 && self.arena.is_worth_gathering(set) {
            self.arena.wishes.add(hashes);
        }
    }

    /// The lane of at most `most` slots from a block on that somebody holds.
    pub(crate) fn lane_from(&self, block: BlockId, most: usize) -> Option<Lane<'_>> {
        self.arena.blocks.lane(block, most)
    }

    /// The lane of at most `most` slots that begins with the block of this hash, if anybody holds it
    /// or did a moment ago.
    #[inline(always)]
    pub(crate) fn lane(&self, hash: i64, most: usize) -> Option<Lane<'_>> {
        self.arena.table.find(hash, &self.arena.blocks).and_then(|block| self.arena.blocks.lane(block, most))
    }

    /// The lane of at most `most` slots with which a chain goes on, with this hash, after `lane`: if it stands
    /// where the link says that a chain went on before, or right behind.
    ///
    /// Else it is for the table to say, where what a look-up reads is fetched meanwhile.
    #[inline]
    pub(crate) fn follow<'a>(&'a self, lane: &Lane<'a>, hash: [u8; 8], most: usize) -> Option<Lane<'a>> {
        let linked = lane.link().and_then(|block| self.arena.blocks.lane_of(block, hash, most));
        if linked.is_some() {
            return linked;
        }
        let behind = lane.behind(hash, most);
        if behind.is_none() {
            self.arena.table.fetch_bucket(i64::from_le_bytes(hash));
        }
        behind
    }

    /// Has that fetched which [`ReadView::follow`] will look at after `lane`.
    #[inline(always)]
    pub(crate) fn fetch_next(&self, lane: &Lane<'_>, hash: [u8; 8]) {
        match lane.link() {
            Some(block) => self.arena.blocks.fetch(block),
            None => self.arena.table.fetch_bucket(i64::from_le_bytes(hash)),
        }
    }

    /// Has the link of a lane lead to `next`, with which a chain went on that came to its end.
    ///
    /// A link that leads to another chain stays, unless `replace` says otherwise: where many
    /// chains go on from one lane, readers would take its cache line from each other.
    #[inline]
    pub(crate) fn link(&self, lane: &Lane<'_>, next: BlockId, replace: bool) {
        let link = lane.link();
        if link == Some(next) || lane.is_right_before(next) {
            return;
        }
        if replace || !link.is_some_and(|block| self.arena.blocks.is_in_use(block)) {
            lane.put_link(next);
        }
    }

    /// The block behind another one, if it has this hash.
    #[inline]
    pub(crate) fn behind(&self, block: BlockId, hash: [u8; 8]) -> Option<BlockId> {
        self.arena.blocks.behind(block, hash)
    }

    #[inline]
    pub(crate) fn set(&self, block: BlockId) -> SetId {
        self.arena.blocks.set(block)
    }

    #[inline]
    pub(crate) fn entries(&self, set: SetId) -> &[Entry] {
        self.arena.sets.entries(set)
    }

    /// What departs along a lane from place `from` on, to at most place `to`; an arrival ends it if `arrivals` says so.
    #[inline]
    pub(crate) fn leg<'a>(&self, slots: Slots<'a>, from: usize, to: usize, arrivals: bool) -> Leg<'a> {
        slots.leg(from, to, arrivals, &self.arena.sets)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Action, Batch, Index, PackedHashes};
    use crate::scan::{PrefixScratch, prefix};

    fn apply(index: &Index, action: impl FnOnce(PackedHashes<'_>) -> Action<'_>, hashes: &[i64]) {
        let packed = PackedHashes::pack(hashes);
        let actions = [action(PackedHashes::new(&packed).expect("packed"))];
        let batch =
            Batch { worker_id: "w", worker_address: "a", cache_spec: None, seq: 0, actions: &actions };
        index.apply(&batch).expect("a good batch");
    }

    fn report(hashes: PackedHashes<'_>) -> Action<'_> {
        Action::Report { tier: Tier::Hbm, hashes, masks: &[], tokens: &[] }
    }

    fn revoke(hashes: PackedHashes<'_>) -> Action<'_> {
        Action::Revoke { tier: Tier::Hbm, hashes }
    }

    fn follow(index: &Index, before: i64, hash: i64) -> (Option<BlockId>, Option<BlockId>) {
        let view = index.read();
        let lane = || view.lane(before, 1).expect("held");
        let next = view.follow(&lane(), hash.to_le_bytes(), 9).or_else(|| view.lane(hash, 9));
        if let Some(next) = next {
            view.link(&lane(), next.first(), false);
        }
        assert!(
            next.is_none_or(|next| next.hashes()[0] == hash.to_le_bytes()),
            "another block than asked for"
        );
        (next.map(|next| next.first()), lane().link())
    }

    #[test]
    fn a_link_leads_where_the_chain_went_on_before() {
        let index = Index::new();
        for turn in [[1, 2], [11, 12], [3, 4], [13, 14]] {
            apply(&index, report, &turn);
        }
        let found = index.read().find(3);
        assert!(found.is_some());
        assert_eq!(follow(&index, 2, 3), (found, found));
        assert_eq!(follow(&index, 2, 3), (found, found), "by the link");
        assert_eq!(follow(&index, 2, 99), (None, found), "a hash that nobody has");
        let other = index.read().find(13);
        assert_eq!(follow(&index, 2, 13), (other, found), "another way to go on, which changes nothing");
        apply(&index, revoke, &[3, 4]);
        assert_eq!(follow(&index, 2, 13), (other, other), "until the first is gone");
    }

    #[test]
    fn a_chain_that_goes_on_in_the_next_chunk_is_linked() {
        let index = Index::new();
        let chain: Vec<i64> = (1..=70_000).collect();
        chain.chunks(10_000).for_each(|blocks| apply(&index, report, blocks));
        let next = index.read().find(65_537);
        assert_eq!(next, Some(BlockId::new(1, 0)), "the block behind the first chunk's last");
        assert_eq!(follow(&index, 65_536, 65_537), (next, next));
    }

    #[test]
    fn a_scan_links_where_it_came_to_the_end_of_a_lane() {
        let index = Index::new();
        let turns: [&[i64]; 4] = [&[1, 2, 3, 4], &[21, 22], &[5, 6], &[31, 32]];
        turns.into_iter().for_each(|turn| apply(&index, report, turn));
        let mut scratch = PrefixScratch::default();
        let mut scan = |prompt: &[i64]| {
            let packed = PackedHashes::pack(prompt);
            prefix(&index.read(), PackedHashes::new(&packed).expect("packed"), &mut scratch);
        };
        let link = || index.read().lane(1, 9).expect("held").link();
        scan(&[1, 2, 33, 34, 31]);
        assert_eq!(link(), None, "it left the lane before its end");
        scan(&[1, 2, 3, 4, 5, 6]);
        assert_eq!(link(), index.read().find(5));
        // Links to other chains are replaced once in a while.
        (0..16).for_each(|_| scan(&[1, 2, 3, 4, 31]));
        assert_eq!(link(), index.read().find(31));
    }

    #[test]
    fn a_link_to_what_is_gone_leads_nowhere() {
        let index = Index::new();
        let filler: Vec<i64> = (1_000..140_000).collect();
        let (before, after) = filler.split_at(70_000);
        let each = |hashes: &[i64], action: fn(PackedHashes<'_>) -> Action<'_>| {
            hashes.chunks(10_000).for_each(|hashes| apply(&index, action, hashes));
        };
        apply(&index, report, &[1, 2]);
        each(before, report);
        apply(&index, report, &[3, 4]);
        each(after, report);
        let (found, _) = follow(&index, 2, 3);
        assert_eq!(found.map(BlockId::chunk), Some(1), "neither the first chunk nor the one being filled");
        let full = index.read().sizes().block_bytes;

        apply(&index, revoke, &[3, 4]);
        assert_eq!(follow(&index, 2, 3), (None, found), "a ghost");
        each(&filler, revoke);
        while index.maintain() {}
        assert_eq!(index.read().sizes().block_bytes * 3, full * 2, "one chunk of three has gone");
        assert_eq!(follow(&index, 2, 3), (None, found), "a chunk that is gone");

        apply(&index, report, &[5, 6]);
        apply(&index, report, &[3, 4]);
        let again = index.read().find(3);
        assert!(again.is_some());
        assert_eq!(follow(&index, 2, 3).0, again);
        index.audit().expect("in order");
    }
}
