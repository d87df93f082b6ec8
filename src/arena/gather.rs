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
//! blocks are moved only if most of them lie apart, and not if many hold them: engines store the start of a prompt
//! that many share in long stretches, and each holder's bitmap changes with a move. Room is taken only where it is
//! or where a new chunk is nearly due, so one chunk more than otherwise is free at the most (see [`super::blocks`]):
//! a large index whose every block lies apart is laid in order as far as that goes, and further when blocks come and go.
//!
//! Wishes are few and short, and a step of maintenance grants one, which takes some 15 µs: whoever asks for
//! the same blocks in ever another order has them moved to and fro for some hundredths of the time.

use std::collections::VecDeque;

use parking_lot::Mutex;
use roaring::RoaringBitmap;

use super::Arena;
use super::apply::BLOCKS_MAX;
use super::blocks::{Located, Stretch};
use super::ids::{BlockId, SetId};
use super::table::TOGETHER;

/// Blocks of one wish, at most: one step of maintenance moves as many.
const WISHED_MAX: usize = 256;

/// Wishes that wait, at most; further ones are dropped, as the next scan will have them again.
const WISHES_MAX: usize = 64;

/// Blocks with more holders than this stay where they are.
const HOLDERS_MAX: u32 = 8;

/// Blocks that lie side by side in fewer pieces than one for so many blocks stay where they are.
const PIECE_MAX: usize = 4;

/// Fewer blocks that share a set stay where they are.
const RUN_MIN: usize = 8;

/// What scans found apart, each wish a part of a prompt.
#[derive(Debug, Default)]
pub(super) struct Wishes(Mutex<VecDeque<Box<[[u8; 8]]>>>);

impl Wishes {
    /// Asks for blocks of a prompt, in its order, to be laid side by side.
    ///
    /// Readers call this, so nothing waits: if another one is at it, the wish is dropped.
    pub(super) fn add(&self, hashes: &[[u8; 8]]) {
        let Some(mut wishes) = self.0.try_lock() else { return };
        if wishes.len() < WISHES_MAX && !wishes.iter().any(|wish| wish.first() == hashes.first()) {
            wishes.push_back(hashes[..hashes.len().min(WISHED_MAX)].into());
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

    /// Grants one wish, as far as it is worth it.
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
        let mut at = 0;
        let mut before = None;
        for run in located.chunk_by(|left, right| left.set == right.set) {
            let moved = self.gather(&hashes[at..at + run.len()], run, before);
            before = moved.or(run.last().and_then(|last| last.held()));
            at += run.len();
        }
    }

    /// Lays blocks that share a set side by side, behind the block `before` if that is where there is room; gives
    /// the last one's new slot.
    fn gather(&mut self, hashes: &[[u8; 8]], run: &[Located], before: Option<BlockId>) -> Option<BlockId> {
        let set = run.first()?.set;
        let is_apart = |pair: &&[Located]| pair[0].block.0.wrapping_add(1) != pair[1].block.0;
        let pieces = 1 + run.windows(2).filter(is_apart).count();
        let is_worth_it =
            self.is_worth_gathering(set) && run.len() >= RUN_MIN && pieces * PIECE_MAX >= run.len();
        let (mut at, mut before, mut last) = (0, before, None);
        while is_worth_it && at < run.len() {
            let left = run.len() - at;
            if self.blocks.slots() + left > BLOCKS_MAX {
                break;
            }
            let Some(room) = self.blocks.find_room(left) else { break };
            self.move_to(room, set, &hashes[at..at + room.blocks], &run[at..at + room.blocks]);
            if before.is_some_and(|before| self.blocks.next(before) == Some(room.first)) {
                self.blocks.join(room.first);
            }
            at += room.blocks;
            (before, last) = (Some(room.last()), Some(room.last()));
        }
        last
    }

    /// Moves blocks that share a set to free slots.
    fn move_to(&mut self, room: Stretch, set: SetId, hashes: &[[u8; 8]], from: &[Located]) {
        if self.blocks.has_ghosts(room) {
            self.forget_ghosts(room, room.blocks);
        }
        let tokens: Vec<u32> = from.iter().map(|located| self.blocks.tokens(located.block)).collect();
        self.blocks.write_hashes(room.first, hashes);
        self.blocks.take(room, set, &tokens);
        let mut ids: Vec<u32> = from.iter().map(|located| located.block.0).collect();
        for (old, new) in ids.iter().map(|id| BlockId(*id)).zip(room.iter()) {
            self.table.put_elsewhere(old, new, &self.blocks);
            self.blocks.vacate(old);
            self.chunks_may_be_idle |= self.blocks.is_idle(old);
            let hits = self.hits.get_mut();
            if let Some(count) = hits.remove(&old.0) {
                hits.insert(new.0, count);
            }
        }
        ids.sort_unstable();
        let gone = RoaringBitmap::from_sorted_iter(ids);
        let gone = gone.unwrap_or_else(|_| unreachable!("they are sorted, and no block stands there twice"));
        for entry in self.sets.entries(set) {
            for worker in entry.workers() {
                let holding = self.workers.holding_mut(worker, entry.tier(), entry.generation());
                holding.blocks -= &gone;
                holding.blocks.insert_range(room.ids());
            }
        }
    }
}
