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

/// Slots of one chunk, at least one; the first holds a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lane<'a> {
    chunk: &'a Chunk,
    number: usize,
    slot: usize,
    blocks: usize,
    /// How many of them, from the first on, have one set.
    even: usize,
}

impl<'a> Lane<'a> {
    /// The lane of at most `most` slots from `slot` of chunk `number` on; `None` if the slot is free.
    // Always, as a lane that is returned through memory is waited for: 20 % of a conversation's scan.
    #[inline(always)]
    pub(super) fn new(chunk: &'a Chunk, number: usize, slot: usize, most: usize) -> Option<Self> {
        if chunk.sets[slot] == SetId::EMPTY {
            return None;
        }
        let to = CHUNK_SLOTS.min(slot + most.min(LANE_MAX));
        let end = bits::next(slot + 1, to, |word| chunk.marks[word].start);
        let edge = bits::next(slot + 1, end, |word| chunk.marks[word].edge);
        Some(Lane { chunk, number, slot, blocks: end - slot, even: edge - slot })
    }

    /// Its slots.
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
        BlockId::new(self.number, self.slot)
    }

    /// The set of the first block.
    #[inline]
    pub(crate) fn set(&self) -> SetId {
        self.chunk.sets[self.slot]
    }

    /// The hash column.
    #[inline]
    pub(crate) fn hashes(&self) -> &'a [[u8; 8]] {
        &self.chunk.hashes[self.slot..][..self.len()]
    }

    /// The set column; free slots have the empty set.
    #[inline]
    pub(crate) fn sets(&self) -> &'a [SetId] {
        &self.chunk.sets[self.slot..][..self.len()]
    }

    /// What departs from place `from` on, to at most place `to`; an arrival ends it if `arrivals` says so.
    #[inline]
    pub(super) fn leg(&self, from: usize, to: usize, arrivals: bool, sets: &Sets) -> Leg<'a> {
        let leg = self.chunk.leg(self.slot + from, self.slot + to, arrivals, sets);
        Leg { to: leg.to - self.slot, until: leg.until - self.slot, ..leg }
    }

    /// The first place from `from` on and before `to` where the set changes, else `to`.
    #[inline]
    pub(crate) fn next_edge(&self, from: usize, to: usize) -> usize {
        bits::next(self.slot + from, self.slot + to, |word| self.chunk.marks[word].edge) - self.slot
    }

    /// The slot of the first block.
    #[inline]
    pub(crate) fn slot(&self) -> usize {
        self.slot
    }

    /// Sum of the tokens of the blocks from `place` to before `to`.
    pub(crate) fn tokens(&self, place: usize, to: usize) -> u64 {
        match &self.chunk.tokens {
            Tokens::Same(same) => u64::from(*same) * (to - place) as u64,
            Tokens::Each(each) => {
                each[self.slot + place..self.slot + to].iter().map(|tokens| u64::from(*tokens)).sum()
            }
        }
    }

    /// Where a chain went on that came to the end of this lane, if that is remembered.
    ///
    /// A hint: the block may hold another hash by now, or be gone with its chunk.
    #[inline]
    pub(super) fn link(&self) -> Option<BlockId> {
        let last = self.slot + self.len() - 1;
        self.chunk.marks[last / 64].link(last)
    }

    /// Whether a block stands in the slot behind this lane, where [`Lane::behind`] finds it: in its chunk.
    #[inline]
    pub(super) fn is_right_before(&self, block: BlockId) -> bool {
        block.chunk() == self.number && block.slot() == self.slot + self.blocks
    }

    /// Remembers where a chain goes on that has come to the end of this lane.
    pub(super) fn put_link(&self, block: BlockId) {
        let last = self.slot + self.len() - 1;
        self.chunk.marks[last / 64].put_link(last, block);
    }

    /// The lane behind this one, of at most `most` slots, if it begins with a block of this hash.
    #[inline]
    pub(crate) fn behind(&self, hash: [u8; 8], most: usize) -> Option<Lane<'a>> {
        let slot = self.slot + self.len();
        if *self.chunk.hashes.get(slot)? != hash {
            return None;
        }
        Lane::new(self.chunk, self.number, slot, most)
    }
}
