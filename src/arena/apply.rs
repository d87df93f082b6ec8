//! Changes of the arena, a stretch of blocks at a time.
//!
//! A report names blocks in chain order, and chains lie in consecutive slots, so
//! most work is per stretch: blocks that lie side by side, have the same set and
//! change alike get their new set in one go, and one range goes into the
//! worker's bitmap. Only where the guess "the next block is in the next slot"
//! fails is the table asked.
//!
//! A block of a report is one of three things:
//!
//! 1. *held* by somebody: its set changes;
//! 2. a *ghost*, free but remembered: it comes back to its old slot, unless it
//!    is a splinter that would break the report's chain into pieces;
//! 3. *new*: with the unknown ones after it, it gets free slots, the ones right
//!    after the report's previous block if they are free.
//!
//! Clears and what they leave behind: see [`super::clear`]. Clean-up is paid by
//! later applies in proportion to their size, and by [`Arena::maintain`].

use super::Arena;
use roaring::RoaringBitmap;
use smallvec::SmallVec;

use super::blocks::Stretch;
use super::ids::{BlockId, SetId, Tier, WorkerId};
use super::mutation::{Action, Batch, BatchError};
use super::sets::{Changed, Holder};
use super::table::TOGETHER;
use super::workers::WORKERS_MAX;

/// Most new blocks looked up before the first of them is stored. The look-ups do not
/// depend on each other, so their cache misses overlap; the table's lines are
/// still near when the blocks are stored.
const NEW_BLOCKS_AHEAD: usize = 128;

/// Fewer ghosts in a row than this are splinters: storing them anew beside the
/// report's other blocks costs less than the breaks that every later scan meets.
const GHOSTS_WORTH_REVIVING: usize = 8;

/// Placements cleaned up by an apply, at least and per hash of it: at about 5 ns
/// each, less than the apply itself takes.
const CLEANED_PER_APPLY: usize = 256;
const CLEANED_PER_HASH: usize = 4;

/// Stretches shorter than this on average are put into a bitmap block by block: a range costs more.
const RANGES_WORTH_KEEPING: usize = 4;

/// So many ids are sorted by their bytes, which costs a third as much as by comparing; of fewer, counting costs more.
const RADIX_SORTED_MIN: usize = 256;

/// Blocks there are ids for. A chunk is kept back for what fragmentation costs.
pub(super) const BLOCKS_MAX: usize = (u32::MAX - u16::MAX as u32) as usize;

/// A report's fields, with the worker's place in the sets.
#[derive(Clone, Copy)]
struct Report<'a> {
    worker: WorkerId,
    tier: Tier,
    generation: usize,
    holder: Holder,
    /// Not empty, in a batch that has been checked.
    hashes: &'a [[u8; 8]],
    masks: &'a [u32],
    tokens: &'a [u32],
}

impl<'a> Report<'a> {
    fn mask(&self, at: usize) -> u32 {
        self.masks.get(at).copied().unwrap_or(0)
    }

    /// How many blocks from `at` on, at most `most`, have the mask of the first.
    fn alike(&self, at: usize, most: usize) -> usize {
        let most = most.min(self.hashes.len() - at);
        match self.masks.get(at..at + most) {
            None => most,
            Some(masks) => masks.iter().take_while(|mask| **mask == masks[0]).count(),
        }
    }

    fn tokens(&self, at: usize, blocks: usize) -> &'a [u32] {
        self.tokens.get(at..at + blocks).unwrap_or(&[])
    }
}

/// What an action changes of a holding, to be written into it at the action's end.
///
/// A bitmap pays for every range that is put into the middle of it, so blocks that
/// lie apart are gathered and sorted first. Mostly an action is one stretch, and that
/// goes in as it is.
#[derive(Default)]
struct Noted {
    /// Stretches with a placement that had none, or the other way round; an action has one kind.
    stretches: SmallVec<[Stretch; 1]>,
    /// By how much the number of placements with components grows.
    masked: i64,
}

impl Noted {
    /// Notes that the placements of a stretch went from mask `old` to `new`.
    #[inline]
    fn change(&mut self, stretch: Stretch, old: Option<u32>, new: Option<u32>) {
        if old.is_none() != new.is_none() {
            self.stretches.push(stretch);
        }
        let masked = |mask: Option<u32>| i64::from(mask.is_some_and(|mask| mask != 0));
        self.masked += (masked(new) - masked(old)) * stretch.blocks as i64;
    }

    /// All of several stretches, which do not overlap.
    #[inline(never)]
    fn gather(&mut self) -> RoaringBitmap {
        let blocks: usize = self.stretches.iter().map(|stretch| stretch.blocks).sum();
        if blocks < self.stretches.len() * RANGES_WORTH_KEEPING {
            let mut ids = Vec::with_capacity(blocks);
            if blocks == self.stretches.len() {
                ids.extend(self.stretches.iter().map(|stretch| stretch.first.0));
            } else {
                ids.extend(self.stretches.iter().flat_map(|stretch| stretch.ids()));
            }
            if blocks < RADIX_SORTED_MIN {
                ids.sort_unstable();
            } else {
                radsort::sort(&mut ids);
            }
            let gathered = RoaringBitmap::from_sorted_iter(ids);
            return gathered.unwrap_or_else(|_| unreachable!("they are sorted, and no block is noted twice"));
        }
        self.stretches.sort_unstable_by_key(|stretch| stretch.first.0);
        let mut gathered = RoaringBitmap::new();
        for stretch in &self.stretches {
            gathered.insert_range(stretch.ids());
        }
        gathered
    }

    fn put_into(&mut self, holding: &mut RoaringBitmap) {
        match self.stretches[..] {
            [] => {}
            [Stretch { first, blocks: 1 }] => drop(holding.insert(first.0)),
            [stretch] => drop(holding.insert_range(stretch.ids())),
            _ => *holding |= self.gather(),
        }
    }

    fn take_from(&mut self, holding: &mut RoaringBitmap) {
        match self.stretches[..] {
            [] => {}
            [Stretch { first, blocks: 1 }] => drop(holding.remove(first.0)),
            [stretch] => drop(holding.remove_range(stretch.ids())),
            _ => *holding -= self.gather(),
        }
    }
}

/// How far the report at hand has come.
struct Progress {
    noted: Noted,
    /// Hashes before this position were not in the table when they were looked up.
    unknown_until: usize,
    /// How many are to be looked up next, so that few known ones are among them.
    ahead: usize,
}

/// Length of the common prefix of two lists of hashes.
fn common(ours: &[[u8; 8]], theirs: &[[u8; 8]]) -> usize {
    ours.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count()
}

impl Arena {
    /// Applies a batch of `hashes` hashes that has been checked, unless there is no room for it; says
    /// whether its worker is new.
    pub(super) fn apply(&mut self, batch: &Batch<'_>, hashes: usize) -> Result<bool, BatchError> {
        if let Some(Action::Report { hashes, .. } | Action::Revoke { hashes, .. }) = batch.actions.first() {
            self.table.fetch_first(*hashes);
        }
        let known = self.workers.find(batch.worker_id);
        if known.is_none() && self.workers.len() == WORKERS_MAX || self.blocks.slots() + hashes > BLOCKS_MAX {
            return Err(BatchError::Full);
        }
        let worker = known.unwrap_or_else(|| self.workers.add(batch.worker_id, batch.worker_address));
        self.workers.record(worker, batch.worker_address, batch.cache_spec, batch.seq);
        for action in batch.actions {
            match *action {
                Action::Report { tier, hashes, masks, tokens } => {
                    let generation = self.workers.get(worker).current(tier);
                    let holder = Holder::new(worker, tier, generation);
                    let hashes = hashes.as_bytes();
                    self.report(Report { worker, tier, generation, holder, hashes, masks, tokens });
                }
                Action::Revoke { tier, hashes } => self.revoke(worker, tier, hashes.as_bytes()),
                Action::ClearTier { tier } => self.clear_tier(worker, tier),
            }
        }
        self.gathers_after = self.gathers_after.saturating_sub(hashes);
        if !self.cleared.is_empty() {
            self.clean(CLEANED_PER_APPLY + CLEANED_PER_HASH * hashes);
        }
        Ok(known.is_none())
    }

    fn find(&self, hash: [u8; 8]) -> Option<BlockId> {
        self.table.find(i64::from_le_bytes(hash), &self.blocks)
    }

    /// The block of the hash at a position: in `guess` if it stands there, else wherever the table says.
    ///
    /// `apart` says that the blocks before lay apart; then those of the hashes to come are
    /// fetched meanwhile, as the guess will fail for them too.
    #[inline]
    fn locate(
        &mut self,
        hashes: &[[u8; 8]],
        at: usize,
        guess: Option<BlockId>,
        apart: bool,
    ) -> Option<BlockId> {
        match guess.filter(|guess| self.blocks.stands(*guess, hashes[at])) {
            None if apart => self.table.find_in_turn(hashes, at, &mut self.upcoming, &self.blocks),
            None => self.find(hashes[at]),
            found => found,
        }
    }

    fn report(&mut self, report: Report<'_>) {
        let mut progress = Progress { noted: Noted::default(), unknown_until: 0, ahead: NEW_BLOCKS_AHEAD };
        self.upcoming.clear();
        let mut at = 0;
        let mut next = None;
        let mut found = self.find(report.hashes[0]);
        loop {
            let stretch = match found {
                Some(block) if self.blocks.set(block) != SetId::EMPTY => {
                    self.report_held(&report, at, block, &mut progress)
                }
                Some(ghost) => match self.revive(&report, at, ghost, found == next, &mut progress) {
                    Some(stretch) => stretch,
                    None => {
                        self.forget(&[ghost]);
                        self.store(&report, at, next, &mut progress)
                    }
                },
                None => self.store(&report, at, next, &mut progress),
            };
            if Some(stretch.first) == next {
                self.blocks.join(stretch.first);
            }
            at += stretch.blocks;
            if at == report.hashes.len() {
                break;
            }
            next = self.blocks.next(stretch.last());
            found = self.locate(report.hashes, at, next, stretch.blocks == 1);
        }
        let Report { worker, tier, generation, .. } = report;
        progress.noted.put_into(&mut self.workers.holding_mut(worker, tier, generation).blocks);
        self.workers.count_masked(worker, tier, generation, progress.noted.masked);
    }

    /// Reports a stretch that somebody holds, from `block` on.
    fn report_held(
        &mut self,
        report: &Report<'_>,
        at: usize,
        block: BlockId,
        progress: &mut Progress,
    ) -> Stretch {
        let blocks = match report.hashes.len() - at {
            1 => 1,
            // Blocks that lie apart are told by one look.
            _ if !self.blocks.is_before(block, report.hashes[at + 1]) => 1,
            left => {
                let alike = report.alike(at, self.blocks.same_set(block, left));
                common(&self.blocks.hashes_from(block)[..alike], &report.hashes[at..])
            }
        };
        let stretch = Stretch { first: block, blocks };
        let old = self.blocks.set(block);
        if !self.cleared.is_empty() && !self.is_held(old) {
            self.forget_history(stretch);
        }
        let mask = report.mask(at);
        let changed = self.sets.change(old, blocks, report.holder, Some(mask));
        self.follow(stretch, old, changed, Some(mask));
        progress.noted.change(stretch, changed.old, Some(mask));
        self.blocks.put_tokens(stretch, report.tokens(at, blocks));
        self.blocks.join_within(stretch);
        stretch
    }

    /// Brings a stretch of ghosts back, unless it is a splinter.
    #[inline(never)]
    fn revive(
        &mut self,
        report: &Report<'_>,
        at: usize,
        ghost: BlockId,
        adjacent: bool,
        progress: &mut Progress,
    ) -> Option<Stretch> {
        let ghosts = report.alike(at, self.blocks.ghosts_from(ghost, report.hashes.len() - at));
        let blocks = common(&self.blocks.hashes_from(ghost)[..ghosts], &report.hashes[at..]);
        if !adjacent && blocks < GHOSTS_WORTH_REVIVING && at + blocks < report.hashes.len() {
            return None;
        }
        let stretch = Stretch { first: ghost, blocks };
        let mask = report.mask(at);
        let set = self.sets.change(SetId::EMPTY, blocks, report.holder, Some(mask)).set;
        self.blocks.revive(stretch, set, report.tokens(at, blocks));
        progress.noted.change(stretch, None, Some(mask));
        Some(stretch)
    }

    /// Stores the new blocks from `at` on, in `next` if it is free.
    #[inline(never)]
    fn store(
        &mut self,
        report: &Report<'_>,
        at: usize,
        next: Option<BlockId>,
        progress: &mut Progress,
    ) -> Stretch {
        if at >= progress.unknown_until {
            // The first is unknown, or was until its ghost was forgotten.
            progress.unknown_until = at + 1;
            if report.hashes.len() > at + 1 {
                self.look_ahead(report, at, progress);
            }
        }
        let hashes = &report.hashes[at..progress.unknown_until];
        let new = hashes.len();
        let in_place = next.map_or(0, |next| self.blocks.free_from(next, new));
        let mut stretch = match next {
            Some(first) if in_place > 0 => Stretch { first, blocks: in_place },
            _ => self.blocks.find_free(new, report.hashes.len()),
        };
        if self.blocks.has_ghosts(stretch) {
            self.forget_ghosts(stretch, stretch.blocks);
        }
        let hashes = &hashes[..stretch.blocks];
        self.blocks.write_hashes(stretch.first, hashes);
        for (block, hash) in stretch.iter().zip(hashes) {
            // A hash repeated within the stretch: what follows is held by now.
            if self.table.insert(i64::from_le_bytes(*hash), block, &self.blocks).is_err() {
                stretch.blocks = block.slot() - stretch.first.slot();
                break;
            }
        }
        let mask = report.mask(at);
        let set = self.sets.change(SetId::EMPTY, stretch.blocks, report.holder, Some(mask)).set;
        self.blocks.take(stretch, set, report.tokens(at, stretch.blocks));
        progress.noted.change(stretch, None, Some(mask));
        stretch
    }

    /// Looks up what comes after the new block at `at`.
    #[inline(never)]
    fn look_ahead(&self, report: &Report<'_>, at: usize, progress: &mut Progress) {
        let hashes = &report.hashes[at + 1..at + report.alike(at, progress.ahead)];
        let mut new = 1;
        for some in hashes.chunks(TOGETHER) {
            let unknown = self.table.unknown(some, &self.blocks);
            new += unknown;
            if unknown < some.len() {
                progress.ahead = new;
                break;
            }
        }
        progress.unknown_until = at + new;
        progress.ahead = NEW_BLOCKS_AHEAD.min(2 * progress.ahead);
    }

    fn revoke(&mut self, worker: WorkerId, tier: Tier, hashes: &[[u8; 8]]) {
        let generation = self.workers.get(worker).current(tier);
        let holder = Holder::new(worker, tier, generation);
        let mut noted = Noted::default();
        self.upcoming.clear();
        let mut at = 0;
        let mut found = self.find(hashes[0]);
        loop {
            let held = found.filter(|block| self.blocks.set(*block) != SetId::EMPTY);
            let (blocks, last) = match held {
                None => (1, None),
                Some(block) => {
                    let (stretch, last) = self.stretch_of(block, &hashes[at..]);
                    noted.change(stretch, self.withdraw(holder, stretch), None);
                    (stretch.blocks, Some(last))
                }
            };
            at += blocks;
            if at == hashes.len() {
                break;
            }
            let next = last.and_then(|block| self.blocks.next(block));
            let before = last.and_then(|block| self.blocks.before(block));
            let guess = next.filter(|next| self.blocks.hash(*next).to_le_bytes() == hashes[at]).or(before);
            found = self.locate(hashes, at, guess, blocks == 1);
        }
        noted.take_from(&mut self.workers.holding_mut(worker, tier, generation).blocks);
        self.workers.count_masked(worker, tier, generation, noted.masked);
    }

    /// The stretch with the set of `block` that has the first of `hashes`, up or down, and its last block in their order.
    fn stretch_of(&self, block: BlockId, hashes: &[[u8; 8]]) -> (Stretch, BlockId) {
        if hashes.len() == 1 {
            return (Stretch { first: block, blocks: 1 }, block);
        }
        let same = self.blocks.same_set(block, hashes.len());
        let ascending = common(&self.blocks.hashes_from(block)[..same], hashes);
        let descending = self.blocks.descending(block, hashes);
        if ascending >= descending {
            let stretch = Stretch { first: block, blocks: ascending };
            (stretch, stretch.last())
        } else {
            let first = BlockId(block.0 + 1 - descending as u32);
            (Stretch { first, blocks: descending }, first)
        }
    }

    /// Takes a worker's placement from a stretch that shares a set; gives its mask, if there was one.
    ///
    /// The worker's holding is the caller's to mend.
    pub(super) fn withdraw(&mut self, holder: Holder, stretch: Stretch) -> Option<u32> {
        let old = self.blocks.set(stretch.first);
        let changed = self.sets.change(old, stretch.blocks, holder, None);
        if changed.set == SetId::EMPTY {
            self.forget_hits(stretch);
            self.blocks.free(stretch);
            self.chunks_may_be_idle |= self.blocks.is_idle(stretch.first);
        } else {
            self.follow(stretch, old, changed, None);
        }
        changed.old
    }

    /// Has the blocks of a stretch, in use with the set `old` before and after, follow a change of it to `mask`.
    #[inline(always)]
    fn follow(&mut self, stretch: Stretch, old: SetId, changed: Changed, mask: Option<u32>) {
        if changed.set != old {
            self.blocks.change_set(stretch, changed.set);
        } else if changed.old != mask {
            self.blocks.changed_in_place(stretch);
        }
    }

    /// Whether any worker holds a block with this set; placements waiting for clean-up do not count.
    pub(super) fn is_held(&self, set: SetId) -> bool {
        let fleet = self.workers.fleet();
        self.sets.entries(set).iter().any(|entry| fleet[entry.word()].current(*entry) != 0)
    }

    /// Forgets tokens and hits of blocks that nobody held any more.
    fn forget_history(&mut self, stretch: Stretch) {
        self.blocks.forget_tokens(stretch);
        self.forget_hits(stretch);
    }

    fn forget_hits(&mut self, stretch: Stretch) {
        let hits = self.hits.get_mut();
        if hits.is_empty() {
            return;
        }
        for id in stretch.ids() {
            hits.remove(&id);
        }
        if hits.len() * 8 < hits.capacity() {
            hits.shrink_to_fit();
        }
    }
}
