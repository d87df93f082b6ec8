//! Lanes: slots that may hold one chain, as a scan walks them.
//!
//! A lane begins at a block and ends before the next mark that a stretch was stored
//! from there on, or after [`LANE_MAX`] slots. Its chunk is looked up once, and everything that a scan wants to
//! know of it is read from there: hashes, sets, where the set changes, tokens.

use super::bits;
use super::blocks::CHUNK_SLOTS;
use super::chunk::{Chunk, Tokens};
use super::departures::Leg;
use super::ids::{BlockId, SetId};
use super::sets::Sets;

/// Most slots of a lane. Its marks are searched whole before anything is compared, so a request
/// that leaves every lane after its first block pays for all of it each time; one that
/// stays pays for a next lane after so many blocks.
const LANE_MAX: usize = 2_048;

/// The slots of a chunk from one on, which are numbered as places.
// What a call that is not inlined gets of a lane: two words, which it gets in registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slots<'a> {
    chunk: &'a Chunk,
    slot: usize,
}

impl<'a> Slots<'a> {
    /// The slot at place 0.
    #[inline]
    pub(crate) fn first(self) -> usize {
        self.slot
    }

    /// The set at a place; the empty one if the slot is free.
    #[inline]
    pub(crate) fn set(self, place: usize) -> SetId {
        self.chunk.sets[self.slot + place]
    }

    /// What departs from place `from` on, to at most place `to`; an arrival ends it if `arrivals` says so.
    #[inline]
    pub(super) fn leg(self, from: usize, to: usize, arrivals: bool, sets: &Sets) -> Leg<'a> {
        let leg = self.chunk.leg(self.slot + from, self.slot + to, arrivals, sets);
        Leg { to: leg.to - self.slot, until: leg.until - self.slot, ..leg }
    }

    /// The first place from `from` on and before `to` where the set changes, else `to`.
    #[inline]
    pub(crate) fn next_edge(self, from: usize, to: usize) -> usize {
        bits::next(self.slot + from, self.slot + to, |word| self.chunk.marks[word].edge) - self.slot
    }

    /// Sum of the tokens of the blocks from `place` to before `to`.
    pub(crate) fn tokens(self, place: usize, to: usize) -> u64 {
        match &self.chunk.tokens {
            Tokens::Same(same) => u64::from(*same) * (to - place) as u64,
            Tokens::Each(each) => {
                each[self.slot + place..self.slot + to].iter().map(|tokens| u64::from(*tokens)).sum()
            }
        }
    }
}

/// Slots of one chunk, at least one; the first holds a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lane<'a> {
    slots: Slots<'a>,
    number: usize,
    blocks: usize,
    /// How many of them, from the first on, have one set.
    even: usize,
    /// Where a chain went on that came to its end, as of when the lane was made.
    link: Option<BlockId>,
}

impl<'a> Lane<'a> {
    /// The lane of at most `most` slots, one at least, from `slot` of chunk `number` on; `None` if the slot is free.
    // Always, as a lane that is returned through memory is waited for: 20 % of a conversation's scan.
    #[inline(always)]
    pub(super) fn new(chunk: &'a Chunk, number: usize, slot: usize, most: usize) -> Option<Self> {
        debug_assert!(most > 0, "a lane has its first block");
        if chunk.sets[slot] == SetId::EMPTY {
            return None;
        }
        let to = CHUNK_SLOTS.min(slot + most.min(LANE_MAX));
        let (edge, end) = chunk.next_edge_and_start(slot + 1, to);
        let link = chunk.marks[(end - 1) / 64].link(end - 1);
        Some(Lane { slots: Slots { chunk, slot }, number, blocks: end - slot, even: edge - slot, link })
    }

    /// Its slots, and those after them.
    #[inline]
    pub(crate) fn slots(&self) -> Slots<'a> {
        self.slots
    }

    /// How many slots.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.blocks
    }

    /// How many slots, from the first on, have one set.
    #[inline]
    pub(crate) fn even(&self) -> usize {
        self.even
    }

    /// The first block.
    #[inline]
    pub(crate) fn first(&self) -> BlockId {
        BlockId::new(self.number, self.slots.slot)
    }

    /// The set of the first block.
    #[inline]
    pub(crate) fn set(&self) -> SetId {
        self.slots.chunk.sets[self.slots.slot]
    }

    /// The hash column.
    #[inline]
    pub(crate) fn hashes(&self) -> &'a [[u8; 8]] {
        &self.slots.chunk.hashes[self.slots.slot..][..self.len()]
    }

    /// The set column; free slots have the empty set.
    #[inline]
    pub(crate) fn sets(&self) -> &'a [SetId] {
        &self.slots.chunk.sets[self.slots.slot..][..self.len()]
    }

    /// Where a chain went on that came to the end of this lane, if that is remembered.
    ///
    /// A hint, as of when the lane was made: the block may hold another hash by now, or be gone with its chunk.
    #[inline]
    pub(super) fn link(&self) -> Option<BlockId> {
        self.link
    }

    /// Whether a block stands in the slot behind this lane, where [`Lane::behind`] finds it: in its chunk.
    #[inline]
    pub(super) fn is_right_before(&self, block: BlockId) -> bool {
        block.chunk() == self.number && block.slot() == self.slots.slot + self.blocks
    }

    /// Remembers where a chain goes on that has come to the end of this lane.
    pub(super) fn put_link(&self, block: BlockId) {
        let last = self.slots.slot + self.len() - 1;
        self.slots.chunk.marks[last / 64].put_link(last, block);
    }

    /// The lane behind this one, of at most `most` slots, if it begins with a block of this hash.
    #[inline]
    pub(crate) fn behind(&self, hash: [u8; 8], most: usize) -> Option<Lane<'a>> {
        let slot = self.slots.slot + self.len();
        if *self.slots.chunk.hashes.get(slot)? != hash {
            return None;
        }
        Lane::new(self.slots.chunk, self.number, slot, most)
    }
}
