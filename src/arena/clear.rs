//! Clears, and the clean-up that they and removals put off.
//!
//! A clear makes placements belong to nobody at once; see [`super::workers`]. They are
//! taken out of the sets afterwards, some by each apply and some by each step of
//! [`Arena::maintain`]. Blocks that are left without a holder become ghosts, and a chunk
//! that has nothing else is given back, once its ghosts have left the table: where many
//! are to go by a sweep over its segments, else by looking up each. No step takes longer
//! than some tenths of a millisecond, so nothing here is done at once that can be large.

use smallvec::SmallVec;

use super::Arena;
use super::blocks::{Columns, Stretch};
use super::gather::Wishes;
use super::idle::Idle;
use super::ids::{BlockId, Tier, WorkerId};
use super::sets::Holder;
use super::table::{Segments, TOGETHER};

/// A clear of at most this many placements is carried out at once.
const CLEARED_AT_ONCE: u64 = 1024;

/// Placements cleaned up by one step of maintenance, and ghosts forgotten by
/// one: about a tenth of a millisecond each.
const CLEANED_PER_STEP: usize = 4_096;
const FORGOTTEN_PER_STEP: usize = 2_048;

/// The table is swept for ghosts of idle chunks if that looks at fewer blocks for each than this;
/// else each is looked up. One step looks at so many blocks: about a tenth of a millisecond.
const SWEPT_PER_GHOST: usize = 8;
const SWEPT_PER_STEP: usize = 4_096;

/// What is to be dropped once the lock is let go: memory in so many pieces that it may take milliseconds.
#[derive(Debug)]
#[expect(dead_code, reason = "only ever dropped")]
pub(super) struct Released(Columns, Option<Segments>);

impl Arena {
    /// Removes a worker and all that it holds; its id is free once the clean-up is done.
    pub(super) fn remove_worker(&mut self, worker: WorkerId) {
        for tier in Tier::ALL {
            self.clear_tier(worker, tier);
        }
        self.workers.let_go(worker);
        self.workers.free_if_clean(worker);
    }

    /// Whether [`Arena::maintain`] has anything to do.
    pub(super) fn maintenance_due(&mut self) -> bool {
        !self.cleared.is_empty() || self.chunks_may_be_idle || !self.wishes.is_empty()
    }

    /// One bounded step of clean-up. Says whether there is more, and gives what is to be dropped.
    pub(super) fn maintain(&mut self) -> (bool, Option<Released>) {
        let released = if !self.cleared.is_empty() {
            self.clean(CLEANED_PER_STEP);
            None
        } else if self.blocks.live() == 0 {
            self.wishes = Wishes::default();
            self.swept = 0;
            self.chunks_may_be_idle = false;
            self.sets.reset();
            Some(Released(self.blocks.release_all(), Some(self.table.reset())))
        } else if self.chunks_may_be_idle || self.wishes.is_empty() {
            self.maintain_idle()
        } else {
            self.gather_next();
            None
        };
        (self.maintenance_due(), released)
    }

    /// One step towards giving back chunks without blocks: their ghosts have to leave the table first.
    fn maintain_idle(&mut self) -> Option<Released> {
        let Some((chunk, ghosts)) = self.blocks.idle_chunks().min_by_key(|(_, ghosts)| *ghosts) else {
            self.swept = 0;
            self.chunks_may_be_idle = false;
            return None;
        };
        if ghosts == 0 {
            return Some(Released(self.blocks.release(chunk.first.chunk()), None));
        }
        let all: usize = self.blocks.idle_chunks().map(|(_, ghosts)| ghosts).sum();
        let known = self.blocks.live() + self.blocks.remembered();
        if self.swept > 0 || all * SWEPT_PER_GHOST > known {
            let idle = Idle::new(self.blocks.idle_chunks().map(|(chunk, _)| chunk.first.chunk()));
            self.swept = self.table.sweep(self.swept, SWEPT_PER_STEP, &idle, &mut self.blocks).unwrap_or(0);
        } else {
            self.forget_ghosts(chunk, FORGOTTEN_PER_STEP);
        }
        None
    }

    /// Makes a worker hold nothing at a tier: few placements at once, many by turning over.
    ///
    /// If the generation to turn to still waits for clean-up, the smaller of both is cleaned
    /// up here. That is little where maintenance runs, which is faster than reports come; without
    /// it applies clean up four times what they report, all workers' clears in order, and a
    /// worker that is cleared, filled and cleared again meanwhile may find much to do.
    #[inline(never)]
    pub(super) fn clear_tier(&mut self, worker: WorkerId, tier: Tier) {
        let held = self.workers.get(worker).holding(tier).blocks.len();
        let waiting = self.workers.get(worker).cleared(tier).blocks.len();
        let current = self.workers.get(worker).current(tier);
        if held <= CLEARED_AT_ONCE || waiting > held {
            self.clean_up(worker, tier, current, usize::MAX);
            return;
        }
        if waiting > 0 {
            self.clean_up(worker, tier, 1 - current, usize::MAX);
            self.cleared.retain(|cleared| *cleared != (worker, tier));
        }
        self.workers.turn_over(worker, tier);
        self.cleared.push_back((worker, tier));
    }

    /// Cleans up at most `most` placements of cleared generations.
    #[inline(never)]
    pub(super) fn clean(&mut self, mut most: usize) {
        while let Some((worker, tier)) = self.cleared.front().copied() {
            if most == 0 {
                return;
            }
            let generation = 1 - self.workers.get(worker).current(tier);
            most -= self.clean_up(worker, tier, generation, most);
            if self.workers.get(worker).cleared(tier).blocks.is_empty() {
                self.cleared.pop_front();
                self.workers.free_if_clean(worker);
            }
        }
    }

    /// Takes at most `most` placements of one generation out of the sets; says how many.
    fn clean_up(&mut self, worker: WorkerId, tier: Tier, generation: usize, most: usize) -> usize {
        let holding = self.workers.holding_mut(worker, tier, generation);
        let mut held = std::mem::take(&mut holding.blocks);
        let holder = Holder::new(worker, tier, generation);
        let (mut done, mut masked) = (0, 0);
        let mut iter = held.iter();
        while let Some(range) = iter.next_range() {
            let mut block = BlockId(*range.start());
            let mut left = ((range.end() - range.start()) as usize + 1).min(most - done);
            done += left;
            while left > 0 {
                let blocks = self.blocks.same_set(block, left);
                let mask = self.withdraw(holder, Stretch { first: block, blocks });
                masked -= if mask.is_some_and(|mask| mask != 0) { blocks as i64 } else { 0 };
                left -= blocks;
                block = BlockId(block.0.wrapping_add(blocks as u32));
            }
            if done == most {
                break;
            }
        }
        held.remove_smallest(done as u64);
        self.workers.holding_mut(worker, tier, generation).blocks = held;
        self.workers.count_masked(worker, tier, generation, masked);
        done
    }

    /// Forgets the first ghosts of a stretch of free slots, at most `most`; says how many.
    pub(super) fn forget_ghosts(&mut self, stretch: Stretch, most: usize) -> usize {
        let (mut left, mut forgotten) = (Some(stretch), 0);
        while let Some(stretch) = left.filter(|_| forgotten < most) {
            let some = self.blocks.ghosts_in(stretch).take(TOGETHER.min(most - forgotten));
            let some: SmallVec<[BlockId; TOGETHER]> = some.collect();
            let Some(last) = some.last() else { break };
            left = stretch.behind(*last);
            forgotten += some.len();
            self.forget(&some);
        }
        forgotten
    }

    /// Takes ghosts out of the table, at most [`TOGETHER`]: all of some free slots, ascending.
    pub(super) fn forget(&mut self, ghosts: &[BlockId]) {
        if let [first, ..] = *ghosts {
            self.table.remove_all(ghosts, &self.blocks);
            let last = ghosts[ghosts.len() - 1];
            self.blocks.forget_all(Stretch { first, blocks: (last.0 - first.0) as usize + 1 }, ghosts.len());
        }
    }
}
