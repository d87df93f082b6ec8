//! Gathering: blocks of a chain that lie apart are laid side by side.
//!
//! An engine that decodes stores a block at a time, in turn with those of its other
//! requests, and a report does not say which block its first one follows. So an answer's blocks
//! lie in as many places as there are, until somebody asks for the prompt that goes on from them: only
//! a scan knows that they are a chain. It leaves a *wish* then, the hashes it found apart, and
//! maintenance moves them to consecutive slots, a bounded number at a time. The next turn's scan finds
//! one lane.
//!
//! A block that moves keeps its hash, set, tokens and hits; its slot changes in the table, in its holders'
//! bitmaps and nowhere else, as links are hints and lists of departures are dropped with their slots' sets.
//! The old slot is free and no ghost, as its hash stands elsewhere.
//!
//! What it costs: some 0.12 µs a block, once, against 0.01 to 0.04 µs that each later scan of it takes less. So
//! blocks are moved only where fewer than eight lie side by side, and not if many hold them: engines store the start
//! of a prompt that many share in long stretches, and each holder's bitmap changes with a move. Room is taken only
//! where it is, or where a new chunk is nearly due: a chunk more than the eighth of all slots may be free that may be
//! anyway (see [`super::blocks`]). A large index whose every block lies apart is laid in order as far as that goes,
//! and further when blocks come and go. Once there is no room wishes are refused until some thousand hashes have
//! been applied.
//!
//! Wishes are few and short, and a step of maintenance grants one, which takes some 15 to 30 µs: whoever asks for
//! the same blocks in ever another order has them moved to and fro for some hundredths of the time.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::Arena;
use super::apply::BLOCKS_MAX;
use super::blocks::{LONG, Located, Stretch};
use super::ids::{BlockId, SetId};
use super::table::TOGETHER;

/// Blocks of one wish, at most: one step of maintenance moves as many.
const WISHED_MAX: usize = 256;

/// Wishes that wait, at most; further ones are dropped, as the next scan will have them again.
const WISHES_MAX: usize = 64;

/// Blocks with more holders than this stay where they are.
const HOLDERS_MAX: u32 = 8;

/// Hashes to be applied, once there was no room, before it is looked for again: what was evicted meanwhile may be some.
const APPLIED_BEFORE_ROOM: usize = 1_024;

/// What scans found apart, each wish a part of a prompt.
#[derive(Debug, Default)]
pub(super) struct Wishes(Mutex<VecDeque<Box<[[u8; 8]]>>>);

impl Wishes {
    /// Asks for blocks of a prompt, in its order, to be laid side by side.
    ///
    /// Readers call this, so nothing waits: if another one is at it, the wish is dropped.
    pub(super) fn add(&self, hashes: &[[u8; 8]]) {
        let Some(mut wishes) = self.0.try_lock() else { return };
        let hashes = &hashes[..hashes.len().min(WISHED_MAX)];
        // A scan that finds its way by a link meanwhile begins its wish later in the same chain.
        let is_waiting = |wish: &[[u8; 8]]| wish.first() == hashes.first() || wish.last() == hashes.last();
        if wishes.len() < WISHES_MAX && !wishes.iter().any(|wish| is_waiting(wish)) {
            wishes.push_back(hashes.into());
        }
    }

    pub(super) fn is_empty(&mut self) -> bool {
        self.0.get_mut().is_empty()
    }

    fn take(&mut self) -> Option<Box<[[u8; 8]]>> {
        self.0.get_mut().pop_front()
    }
}

impl Arena {
    /// Whether blocks with this set are moved: not many hold them, and somebody does.
    pub(super) fn is_worth_gathering(&self, set: SetId) -> bool {
        let holders: u32 = self.sets.entries(set).iter().map(|entry| entry.bits.count_ones()).sum();
        (1..=HOLDERS_MAX).contains(&holders)
    }

    /// Grants one wish, as far as it is worth it. If there is no room, all wishes are dropped.
    pub(super) fn gather_next(&mut self) {
        let Some(hashes) = self.wishes.take() else { return };
        let mut located = Vec::with_capacity(hashes.len());
        for some in hashes.chunks(TOGETHER) {
            let mut all = [Located::NOWHERE; TOGETHER];
            self.table.locate_all(some, &self.blocks, &mut all);
            located.extend_from_slice(&all[..some.len()]);
        }
        let mut held: Vec<BlockId> = located.iter().filter_map(|located| located.held()).collect();
        held.sort_unstable();
        if held.windows(2).any(|pair| pair[0] == pair[1]) {
            // No chain has a block twice, and what has been moved is no longer where it was found.
            return;
        }
        let stays = self.stays(&located);
        let (mut at, mut before) = (0, None);
        for same in stays.chunk_by(|left, right| left == right) {
            let to = at + same.len();
            if same.len() >= LONG && !same[0] && !self.gather(&hashes[at..to], &located[at..to], before) {
                self.wishes = Wishes::default();
                self.gathers_after = APPLIED_BEFORE_ROOM;
                return;
            }
            before = located[to - 1].held();
            at = to;
        }
    }

    /// Which blocks of a wish stay where they are: those side by side already, those of many holders or none.
    fn stays(&self, located: &[Located]) -> Vec<bool> {
        let mut stays = Vec::with_capacity(located.len());
        let are_neighbours = |left: &Located, right: &Located| left.block.0.wrapping_add(1) == right.block.0;
        for piece in located.chunk_by(are_neighbours) {
            stays
                .extend(piece.iter().map(|block| piece.len() >= LONG || !self.is_worth_gathering(block.set)));
        }
        stays
    }

    /// Lays blocks side by side, behind the block `before` if that is where there is room; says whether there was any.
    fn gather(&mut self, hashes: &[[u8; 8]], located: &[Located], mut before: Option<BlockId>) -> bool {
        let mut at = 0;
        while at < located.len() {
            let left = located.len() - at;
            if self.blocks.slots() + left > BLOCKS_MAX {
                return false;
            }
            let Some(room) = self.blocks.find_room(left) else { return false };
            let mut first = room.first;
            for run in located[at..at + room.blocks].chunk_by(|left, right| left.set == right.set) {
                let stretch = Stretch { first, blocks: run.len() };
                self.move_to(stretch, &hashes[at..at + run.len()], run);
                if before.is_some_and(|before| self.blocks.next(before) == Some(first)) {
                    self.blocks.join(first);
                }
                at += run.len();
                before = Some(stretch.last());
                first = BlockId(first.0.wrapping_add(run.len() as u32));
            }
        }
        true
    }

    /// Moves blocks that share a set to free slots.
    fn move_to(&mut self, room: Stretch, hashes: &[[u8; 8]], from: &[Located]) {
        let set = from[0].set;
        if self.blocks.has_ghosts(room) {
            self.forget_ghosts(room, room.blocks);
        }
        let tokens: Vec<u32> = from.iter().map(|located| self.blocks.tokens(located.block)).collect();
        self.blocks.write_hashes(room.first, hashes);
        self.blocks.take(room, set, &tokens);
        for (old, new) in from.iter().map(|located| located.block).zip(room.iter()) {
            self.table.put_elsewhere(old, new, &self.blocks);
            self.blocks.vacate(old);
            self.chunks_may_be_idle |= self.blocks.is_idle(old);
            let hits = self.hits.get_mut();
            if let Some(count) = hits.remove(&old.0) {
                hits.insert(new.0, count);
            }
        }
        for entry in self.sets.entries(set) {
            for worker in entry.workers() {
                let holding = self.workers.holding_mut(worker, entry.tier(), entry.generation());
                // One by one, as a difference of bitmaps writes every container anew that it touches.
                for located in from {
                    holding.blocks.remove(located.block.0);
                }
                holding.blocks.insert_range(room.ids());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Action, Batch, Index, PackedHashes, Tier, Tuning};
    use crate::scan::{PrefixScratch, prefix};

    fn report(index: &Index, hashes: &[i64]) {
        let packed = PackedHashes::pack(hashes);
        let hashes = PackedHashes::new(&packed).expect("packed");
        let actions = [Action::Report { tier: Tier::Hbm, hashes, masks: &[], tokens: &[] }];
        let batch =
            Batch { worker_id: "w", worker_address: "a", cache_spec: None, seq: 0, actions: &actions };
        index.apply(&batch).expect("a good batch");
    }

    /// Chains of so many blocks, stored block by block in turn, in an index without room side by side if `scattered`.
    fn decoded(chains: i64, blocks: i64, scattered: bool) -> (Index, Vec<Vec<i64>>) {
        let index = Index::with_tuning(Tuning { scattered, ..Tuning::default() });
        let chains: Vec<Vec<i64>> =
            (0..chains).map(|chain| (0..blocks).map(|place| 1 + chain * blocks + place).collect()).collect();
        for place in 0..blocks as usize {
            chains.iter().for_each(|chain| report(&index, &chain[place..=place]));
        }
        (index, chains)
    }

    fn scan(index: &Index, chain: &[i64]) {
        let packed = PackedHashes::pack(chain);
        let mut scratch = PrefixScratch::default();
        prefix(&index.read(), PackedHashes::new(&packed).expect("packed"), &mut scratch);
        assert_eq!(scratch.matches().len(), 1, "the worker has the chain");
    }

    fn waiting(index: &Index) -> usize {
        index.read().arena.wishes.0.lock().len()
    }

    #[test]
    fn wishes_are_few_and_none_is_made_twice() {
        let (index, chains) = decoded(100, 20, false);
        for chain in chains.iter().take(3).chain(&chains[..2]) {
            scan(&index, chain);
        }
        assert_eq!(waiting(&index), 3);
        chains.iter().for_each(|chain| scan(&index, chain));
        assert_eq!(waiting(&index), WISHES_MAX);
        let longest = decoded(2, 600, false);
        scan(&longest.0, &longest.1[0]);
        let length = longest.0.read().arena.wishes.0.lock().front().map(|wish| wish.len());
        assert_eq!(length, Some(WISHED_MAX));
        while index.maintain() {}
        assert_eq!(waiting(&index), 0);
    }

    #[test]
    fn without_room_nothing_is_wished_for_until_some_hashes_have_been_applied() {
        let (index, chains) = decoded(5, 40, true);
        chains.iter().for_each(|chain| scan(&index, chain));
        assert_eq!(waiting(&index), 5);
        while index.maintain() {}
        chains.iter().for_each(|chain| scan(&index, chain));
        assert_eq!(waiting(&index), 0, "there was no room a moment ago");
        let others: Vec<i64> = (1_000_000..).take(APPLIED_BEFORE_ROOM).collect();
        report(&index, &others[1..]);
        scan(&index, &chains[0]);
        assert_eq!(waiting(&index), 0, "one hash is missing");
        report(&index, &others[..1]);
        scan(&index, &chains[0]);
        assert_eq!(waiting(&index), 1);
    }
}
