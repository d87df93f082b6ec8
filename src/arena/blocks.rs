//! Blocks: columns of hash, placement set and tokens, and which slots are free.
//!
//! A block is a slot in a chunk of 65,536. A chunk is a few parallel columns,
//! so growth copies nothing, and a chunk is one container of a roaring bitmap.
//! Consecutive slots hold consecutive blocks of a chain wherever the order of
//! reports allowed it: a scan then compares whole stretches of the hash column
//! with the request. Beside the columns stand four bitmaps:
//!
//! | bitmap | a bit says |
//! |---|---|
//! | `used` | the slot holds a block |
//! | `ghosts` | the slot is free but its old hash still stands in the table |
//! | `edges` | the slot's set differs from its left neighbour's |
//! | `starts` | a stretch was stored from here on; hint of a break in a chain |
//!
//! A chain that is stored turn by turn, with other chains' turns in between, lies in
//! several stretches. For every 16 slots a *link* remembers where a scan went on that
//! came to the end of a stretch there, so that the next one need not ask the table. Links
//! are set by scans, which own nothing, so they are atomic; and they are hints: what
//! stands at a link's end is checked by its hash like any other guess.
//!
//! Where neighbouring slots have sets that differ by a few workers, who *departs* where is listed for
//! scans when they ask; see [`super::departures`].
//!
//! A freed slot remembers its block as a *ghost* until the slot is given away.
//! A block that is evicted and stored again, which engines do all the time,
//! comes back to its old place beside its old neighbours, so that layouts do not
//! decay; and a removal never touches the table.
//!
//! Which free slots are given away is told in [`room`].

mod room;

use std::ops::RangeInclusive;

use super::bits::{self, WORDS};
use super::chunk::{Chunk, Tokens};
use super::fetch::fetch;
use super::ids::{BlockId, SetId};
use super::lane::Lane;
use super::sets::Sets;

use room::Cursor;
pub(super) use room::LONG;

/// Slots of a chunk: one container of a roaring bitmap.
pub(crate) const CHUNK_SLOTS: usize = 1 << 16;

/// Most blocks looked at for one set. A list that leaves every run of blocks after its first one
/// pays for looking at all of it each time.
const SAME_SET_MAX: usize = 2_048;

/// A stretch of consecutive slots of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) first: BlockId,
    pub(crate) blocks: usize,
}

impl Stretch {
    /// The last block; a stretch has at least one.
    pub(crate) fn last(self) -> BlockId {
        BlockId(self.first.0 + self.blocks as u32 - 1)
    }

    /// The blocks' ids, as they stand in a bitmap.
    pub(crate) fn ids(self) -> RangeInclusive<u32> {
        self.first.0..=self.last().0
    }

    /// What is left of it behind one of its blocks, if anything.
    pub(crate) fn behind(self, block: BlockId) -> Option<Stretch> {
        let blocks = (self.last().0 - block.0) as usize;
        (blocks > 0).then(|| Stretch { first: BlockId(block.0 + 1), blocks })
    }

    /// The blocks in order.
    pub(crate) fn iter(self) -> impl Iterator<Item = BlockId> {
        self.ids().map(BlockId)
    }
}

/// Columns that were given back; dropping them may take a while.
#[derive(Debug)]
pub(crate) struct Columns(#[expect(dead_code, reason = "only ever dropped")] Vec<Option<Chunk>>);

/// All chunks, and where the next block goes.
#[derive(Debug)]
pub(crate) struct Blocks {
    chunks: Vec<Option<Chunk>>,
    /// Where long stretches go, and where short ones do.
    long: Cursor,
    short: Cursor,
    /// The chunk opened last, which is not given back.
    opened: usize,
    live: usize,
    remembered: usize,
    /// Slots of a chunk in use: all but in tests.
    chunk_slots: usize,
    /// Leaves a slot free after every block, for tests: every guess of a scan fails.
    scattered: bool,
}

/// A block and its placement set, which is the empty one if nobody holds it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Located {
    pub(crate) block: BlockId,
    pub(crate) set: SetId,
}

impl Located {
    /// In no slot.
    pub(crate) const NOWHERE: Located = Located { block: BlockId(u32::MAX), set: SetId::EMPTY };

    /// The block, if anybody holds it or did a moment ago.
    pub(crate) fn held(self) -> Option<BlockId> {
        (self.set != SetId::EMPTY).then_some(self.block)
    }
}

impl Blocks {
    pub(crate) fn new(chunk_slots: usize, scattered: bool) -> Self {
        debug_assert!((1..=CHUNK_SLOTS).contains(&chunk_slots), "a chunk has 1 to 65,536 slots");
        let (long, short, opened) = Default::default();
        Blocks { chunks: Vec::new(), long, short, opened, live: 0, remembered: 0, chunk_slots, scattered }
    }

    /// Blocks held.
    pub(crate) fn live(&self) -> usize {
        self.live
    }

    /// Free slots whose old hash still stands in the table.
    pub(crate) fn remembered(&self) -> usize {
        self.remembered
    }

    /// Slots there are ids for by now, in use or not.
    pub(crate) fn slots(&self) -> usize {
        self.chunks.len() * CHUNK_SLOTS
    }

    /// Bytes of all columns.
    pub(crate) fn bytes(&self) -> usize {
        self.chunks.iter().flatten().map(Chunk::bytes).sum()
    }

    /// Runs of blocks with one set, of all blocks.
    pub(crate) fn runs(&self) -> usize {
        let runs = |chunk: &Chunk| -> u32 {
            (0..WORDS).map(|word| (chunk.marks[word].edge & chunk.used[word]).count_ones()).sum()
        };
        self.chunks.iter().flatten().map(|chunk| runs(chunk) as usize).sum()
    }

    /// The chunk of a block that the table or a bitmap names, so it exists.
    #[inline]
    fn chunk(&self, block: BlockId) -> &Chunk {
        match &self.chunks[block.chunk()] {
            Some(chunk) => chunk,
            None => unreachable!("{block:?} is in no chunk"),
        }
    }

    #[inline]
    fn chunk_mut(&mut self, block: BlockId) -> &mut Chunk {
        match &mut self.chunks[block.chunk()] {
            Some(chunk) => chunk,
            None => unreachable!("{block:?} is in no chunk"),
        }
    }

    /// The hash that stands in a slot, also of a ghost.
    #[inline]
    pub(crate) fn hash(&self, block: BlockId) -> i64 {
        i64::from_le_bytes(self.chunk(block).hashes[block.slot()])
    }

    /// The hash column from `block` to its chunk's end.
    #[inline]
    pub(crate) fn hashes_from(&self, block: BlockId) -> &[[u8; 8]] {
        &self.chunk(block).hashes[block.slot()..]
    }

    /// The block's placement set, [`SetId::EMPTY`] if the slot is free.
    #[inline]
    pub(crate) fn set(&self, block: BlockId) -> SetId {
        self.chunk(block).sets[block.slot()]
    }

    /// Has all fetched that a change of a block reads of it, or a scan of the lane that begins with it; the block
    /// may be of a chunk that is gone.
    #[inline]
    pub(crate) fn fetch(&self, block: BlockId) {
        if let Some(Some(chunk)) = self.chunks.get(block.chunk()) {
            let slot = block.slot();
            fetch(&chunk.hashes[slot]);
            fetch(&chunk.sets[slot]);
            fetch(&chunk.marks[slot / 64].edge);
        }
    }

    /// Has all fetched that tells a block's hash and set.
    #[inline]
    pub(crate) fn fetch_set(&self, block: BlockId) {
        let (chunk, slot) = (self.chunk(block), block.slot());
        fetch(&chunk.hashes[slot]);
        fetch(&chunk.sets[slot]);
    }

    /// Whether somebody holds a block that may be of a chunk that is gone.
    pub(crate) fn is_in_use(&self, block: BlockId) -> bool {
        let chunk = self.chunks.get(block.chunk()).and_then(Option::as_ref);
        chunk.is_some_and(|chunk| chunk.sets[block.slot()] != SetId::EMPTY)
    }

    /// The lane of at most `most` slots from `block` on, unless its slot is free.
    #[inline]
    pub(crate) fn lane(&self, block: BlockId, most: usize) -> Option<Lane<'_>> {
        Lane::new(self.chunk(block), block.chunk(), block.slot(), most)
    }

    /// The same if the block has this hash; it may be of a chunk that is gone.
    #[inline]
    pub(crate) fn lane_of(&self, block: BlockId, hash: [u8; 8], most: usize) -> Option<Lane<'_>> {
        let chunk = self.chunks.get(block.chunk())?.as_ref()?;
        if chunk.hashes[block.slot()] != hash {
            return None;
        }
        Lane::new(chunk, block.chunk(), block.slot(), most)
    }

    /// The block's length in tokens, 0 if unknown.
    pub(crate) fn tokens(&self, block: BlockId) -> u32 {
        match &self.chunk(block).tokens {
            Tokens::Same(same) => *same,
            Tokens::Each(each) => each[block.slot()],
        }
    }

    /// Blocks from `block` on that share its set, in this chunk, at most `most` and
    /// [`SAME_SET_MAX`].
    #[inline]
    pub(crate) fn same_set(&self, block: BlockId, most: usize) -> usize {
        let (slot, marks) = (block.slot(), &self.chunk(block).marks);
        let most = most.min(SAME_SET_MAX);
        bits::next(slot + 1, CHUNK_SLOTS.min(slot + most), |word| marks[word].edge) - slot
    }

    /// The slot after a block, if the chunk has one.
    pub(crate) fn next(&self, block: BlockId) -> Option<BlockId> {
        (block.slot() + 1 < CHUNK_SLOTS).then(|| BlockId(block.0 + 1))
    }

    /// Whether this hash stands in the slot behind a block.
    #[inline]
    pub(crate) fn is_before(&self, block: BlockId, hash: [u8; 8]) -> bool {
        self.chunk(block).hashes.get(block.slot() + 1) == Some(&hash)
    }

    /// Where the block with this hash stands, if it is this one.
    #[inline]
    pub(crate) fn locate(&self, block: BlockId, hash: [u8; 8]) -> Option<Located> {
        let (chunk, slot) = (self.chunk(block), block.slot());
        (chunk.hashes[slot] == hash).then(|| Located { block, set: chunk.sets[slot] })
    }

    /// The block in the slot behind another one, if somebody holds it and it has this hash.
    #[inline]
    pub(crate) fn behind(&self, block: BlockId, hash: [u8; 8]) -> Option<BlockId> {
        let (chunk, slot) = (self.chunk(block), block.slot() + 1);
        let stands = chunk.hashes.get(slot) == Some(&hash) && chunk.sets[slot] != SetId::EMPTY;
        stands.then_some(BlockId(block.0 + 1))
    }

    /// The slot before a block, if the chunk has one.
    pub(crate) fn before(&self, block: BlockId) -> Option<BlockId> {
        (block.slot() > 0).then(|| BlockId(block.0 - 1))
    }

    /// Whether a slot's hash stands in the table.
    pub(crate) fn is_known(&self, block: BlockId) -> bool {
        self.set(block) != SetId::EMPTY || bits::get(&self.chunk(block).ghosts, block.slot())
    }

    /// Whether the block with this hash stands in a slot.
    #[inline]
    pub(crate) fn stands(&self, block: BlockId, hash: [u8; 8]) -> bool {
        self.chunk(block).hashes[block.slot()] == hash && self.is_known(block)
    }

    /// How many of `hashes` stand in `block` and the slots before it with the same set.
    pub(crate) fn descending(&self, block: BlockId, hashes: &[[u8; 8]]) -> usize {
        let chunk = self.chunk(block);
        let slots = (0..=block.slot()).rev();
        let set = chunk.sets[block.slot()];
        slots
            .zip(hashes)
            .take_while(|(slot, hash)| chunk.hashes[*slot] == **hash && chunk.sets[*slot] == set)
            .count()
    }

    /// Gives the blocks of a stretch, all in use with one set, another one, not empty.
    #[inline]
    pub(crate) fn change_set(&mut self, stretch: Stretch, set: SetId) {
        let from = stretch.first.slot();
        let to = from + stretch.blocks;
        let chunk = self.chunk_mut(stretch.first);
        if stretch.blocks == 1 {
            chunk.sets[from] = set;
        } else {
            chunk.sets[from..to].fill(set);
        }
        chunk.mend_edges(from, to);
    }

    /// Forgets what was listed of the set of a stretch's blocks, all that have it, as it has been changed where it stands.
    #[inline]
    pub(crate) fn changed_in_place(&mut self, stretch: Stretch) {
        let from = stretch.first.slot();
        self.chunk_mut(stretch.first).forget_departures(from, from + stretch.blocks);
    }

    /// Writes known tokens, none or one count per block, over those of a stretch in use.
    #[inline]
    pub(crate) fn put_tokens(&mut self, stretch: Stretch, tokens: &[u32]) {
        self.chunk_mut(stretch.first).put_tokens(stretch.first.slot(), stretch.blocks, tokens, false);
    }

    /// Forgets the tokens of a stretch in use.
    pub(crate) fn forget_tokens(&mut self, stretch: Stretch) {
        self.chunk_mut(stretch.first).put_tokens(stretch.first.slot(), stretch.blocks, &[], true);
    }

    /// Forgets that a stretch was stored from `block` on: a report named it after its left neighbour.
    pub(crate) fn join(&mut self, block: BlockId) {
        let slot = block.slot();
        bits::put(&mut self.chunk_mut(block).marks[slot / 64].start, slot, false);
    }

    /// The same for all but the first block of a stretch.
    #[inline]
    pub(crate) fn join_within(&mut self, stretch: Stretch) {
        let slot = stretch.first.slot();
        self.chunk_mut(stretch.first).clear_starts(slot + 1, slot + stretch.blocks);
    }

    /// Frees a stretch in use and remembers its blocks as ghosts.
    #[inline]
    pub(crate) fn free(&mut self, stretch: Stretch) {
        let (from, to) = (stretch.first.slot(), stretch.first.slot() + stretch.blocks);
        let chunk = self.chunk_mut(stretch.first);
        chunk.sets[from..to].fill(SetId::EMPTY);
        bits::put_range(&mut chunk.used, from, to, false);
        bits::put_range(&mut chunk.ghosts, from, to, true);
        for (word, mask) in bits::masks(from, to) {
            chunk.marks[word].edge &= !mask;
        }
        chunk.mend_edges(from, to);
        chunk.live -= stretch.blocks;
        chunk.remembered += stretch.blocks;
        if chunk.live == 0 {
            chunk.tokens = Tokens::Same(0);
        }
        self.live -= stretch.blocks;
        self.remembered += stretch.blocks;
    }

    /// Frees the slot of a block that has moved to another one.
    pub(crate) fn vacate(&mut self, block: BlockId) {
        self.free(Stretch { first: block, blocks: 1 });
        self.forget(block);
    }

    /// Takes a stretch of ghosts into use again, with one set and these tokens, if any.
    pub(crate) fn revive(&mut self, stretch: Stretch, set: SetId, tokens: &[u32]) {
        let (from, to) = (stretch.first.slot(), stretch.first.slot() + stretch.blocks);
        let chunk = self.chunk_mut(stretch.first);
        bits::put_range(&mut chunk.ghosts, from, to, false);
        chunk.remembered -= stretch.blocks;
        self.remembered -= stretch.blocks;
        self.take(stretch, set, tokens);
    }

    /// Takes a stretch of free slots without ghosts into use, hashes already written.
    #[inline]
    pub(crate) fn take(&mut self, stretch: Stretch, set: SetId, tokens: &[u32]) {
        let (from, to) = (stretch.first.slot(), stretch.first.slot() + stretch.blocks);
        let chunk = self.chunk_mut(stretch.first);
        chunk.sets[from..to].fill(set);
        bits::put_range(&mut chunk.used, from, to, true);
        chunk.mend_edges(from, to);
        chunk.live += stretch.blocks;
        chunk.put_tokens(from, stretch.blocks, tokens, true);
        self.live += stretch.blocks;
    }

    /// Writes the hashes of blocks that are about to be taken into use.
    #[inline]
    pub(crate) fn write_hashes(&mut self, first: BlockId, hashes: &[[u8; 8]]) {
        let slot = first.slot();
        let chunk = self.chunk_mut(first);
        chunk.hashes[slot..slot + hashes.len()].copy_from_slice(hashes);
        chunk.clear_starts(slot + 1, slot + hashes.len());
        bits::put(&mut chunk.marks[slot / 64].start, slot, true);
        let last = slot + hashes.len() - 1;
        chunk.marks[last / 64].clear_link(last);
    }

    /// Ghosts from `block` on without a gap, at most `most`.
    pub(crate) fn ghosts_from(&self, block: BlockId, most: usize) -> usize {
        let ghosts = &self.chunk(block).ghosts;
        let slot = block.slot();
        bits::next(slot, CHUNK_SLOTS.min(slot + most), |word| !ghosts[word]) - slot
    }

    /// Forgets a ghost that has been taken out of the table.
    #[inline]
    pub(crate) fn forget(&mut self, block: BlockId) {
        let slot = block.slot();
        let chunk = self.chunk_mut(block);
        bits::put(&mut chunk.ghosts[slot / 64], slot, false);
        chunk.remembered -= 1;
        self.remembered -= 1;
    }

    /// Forgets all ghosts of a stretch of free slots, `ghosts` in number.
    pub(crate) fn forget_all(&mut self, stretch: Stretch, ghosts: usize) {
        let (from, to) = (stretch.first.slot(), stretch.first.slot() + stretch.blocks);
        let chunk = self.chunk_mut(stretch.first);
        bits::put_range(&mut chunk.ghosts, from, to, false);
        chunk.remembered -= ghosts;
        self.remembered -= ghosts;
    }

    /// Whether a stretch of free slots has ghosts.
    #[inline]
    pub(crate) fn has_ghosts(&self, stretch: Stretch) -> bool {
        self.ghosts_in(stretch).next().is_some()
    }

    /// The ghosts of a stretch of free slots, ascending.
    #[inline]
    pub(crate) fn ghosts_in(&self, stretch: Stretch) -> impl Iterator<Item = BlockId> {
        let (from, to) = (stretch.first.slot(), stretch.first.slot() + stretch.blocks);
        let chunk = stretch.first.chunk();
        let ghosts = &self.chunk(stretch.first).ghosts;
        bits::ones(from, to, |word| ghosts[word]).map(move |slot| BlockId::new(chunk, slot))
    }

    /// Whether the chunk of `block` has no block left.
    pub(crate) fn is_idle(&self, block: BlockId) -> bool {
        self.chunk(block).live == 0
    }

    /// All slots and the number of ghosts of each chunk without blocks that is not being filled.
    pub(crate) fn idle_chunks(&self) -> impl Iterator<Item = (Stretch, usize)> {
        self.chunks.iter().enumerate().filter_map(|(number, chunk)| {
            let all = Stretch { first: BlockId::new(number, 0), blocks: CHUNK_SLOTS };
            let idle = chunk.as_ref().filter(|chunk| chunk.live == 0 && number != self.opened)?;
            Some((all, idle.remembered))
        })
    }

    /// Gives back the columns of a chunk without blocks and ghosts.
    pub(crate) fn release(&mut self, number: usize) -> Columns {
        debug_assert!(self.chunks[number].as_ref().is_some_and(|chunk| chunk.live + chunk.remembered == 0));
        let released = Columns(vec![self.chunks[number].take()]);
        while self.chunks.last().is_some_and(Option::is_none) {
            self.chunks.pop();
        }
        released
    }

    /// Gives back everything; there is no block left and the table is empty.
    pub(crate) fn release_all(&mut self) -> Columns {
        debug_assert_eq!(self.live, 0);
        self.remembered = 0;
        (self.long, self.short, self.opened) = Default::default();
        Columns(std::mem::take(&mut self.chunks))
    }

    /// Every slot of every chunk that is in use or a ghost, with whether it is in use.
    pub(super) fn known(&self) -> impl Iterator<Item = (BlockId, bool)> {
        let chunks =
            self.chunks.iter().enumerate().filter_map(|(number, chunk)| Some((number, chunk.as_ref()?)));
        chunks.flat_map(|(number, chunk)| {
            let known = |word: usize| chunk.used[word] | chunk.ghosts[word];
            let mut slot = 0;
            std::iter::from_fn(move || {
                slot = bits::next(slot, CHUNK_SLOTS, known) + 1;
                (slot <= CHUNK_SLOTS)
                    .then(|| (BlockId::new(number, slot - 1), bits::get(&chunk.used, slot - 1)))
            })
        })
    }

    /// Checks the columns and bitmaps of each chunk against each other.
    pub(super) fn audit(&self, sets: &Sets) -> Result<(), String> {
        let (mut live, mut remembered) = (0, 0);
        for (number, chunk) in
            self.chunks.iter().enumerate().filter_map(|(number, chunk)| Some((number, chunk.as_ref()?)))
        {
            for word in 0..WORDS {
                let sets = &chunk.sets[word * 64..word * 64 + 64];
                let bits = chunk.used[word] | chunk.ghosts[word] | chunk.marks[word].edge;
                if bits != 0 || sets.iter().any(|set| *set != SetId::EMPTY) {
                    (word * 64..word * 64 + 64)
                        .try_for_each(|slot| chunk.audit_slot(BlockId::new(number, slot)))?;
                }
            }
            let counted = (bits::count(&chunk.used), bits::count(&chunk.ghosts));
            if counted != (chunk.live, chunk.remembered) {
                return Err(format!("I2: chunk {number} counts its slots wrong: {counted:?}"));
            }
            if let Some(slot) = chunk.audit_departures(sets) {
                let block = BlockId::new(number, slot);
                return Err(format!("I9: others depart in the section of {block:?} than are listed"));
            }
            live += chunk.live;
            remembered += chunk.remembered;
        }
        if (live, remembered) != (self.live, self.remembered) {
            return Err("I2: the chunks' counts do not add up".to_owned());
        }
        Ok(())
    }
}
