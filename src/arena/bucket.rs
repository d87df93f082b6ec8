//! Buckets: one cache line of twelve slot ids, their tags and a count.
//!
//! What they are for is told in [`super::table`]; this file holds what one bucket can say.

use std::ops::Range;

use wide::{u8x16, u32x4};

use super::blocks::Blocks;
use super::idle::Idle;
use super::ids::BlockId;

/// Ids in one bucket.
pub(super) const BUCKET_IDS: usize = 12;

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Bucket {
    pub(super) ids: [u32; BUCKET_IDS],
    /// The tags and, in the last four bytes, the count: sixteen bytes, which one instruction compares.
    pub(super) tags: [u8; 16],
}

const _: () = assert!(size_of::<Bucket>() == 64, "a bucket is one cache line");

pub(super) const EMPTY_BUCKET: Bucket = Bucket { ids: [0; BUCKET_IDS], tags: [0; 16] };

/// A bit for each place of a bucket.
const ALL_PLACES: u32 = (1 << BUCKET_IDS) - 1;

/// Some of the places of a bucket, one bit each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Places(u32);

impl Places {
    pub(super) const NONE: Places = Places(0);

    /// The first of them; there is one.
    #[inline]
    pub(super) fn first(self) -> usize {
        self.0.trailing_zeros() as usize
    }

    #[inline]
    pub(super) fn without_first(self) -> Places {
        Places(self.0 & (self.0 - 1))
    }
}

impl Bucket {
    /// Places with this tag.
    #[inline]
    pub(super) fn places(&self, tag: u8) -> Places {
        let equal = u8x16::new(self.tags).simd_eq(u8x16::splat(tag));
        Places(equal.to_bitmask() & ALL_PLACES)
    }

    /// Places with an id of one of these chunks, without a branch, as none could be foretold: four at a time
    /// where the chunks lie side by side, else each for itself.
    #[inline]
    pub(super) fn of_chunks(&self, chunks: &Idle) -> Places {
        let places = match chunks.range() {
            Some(range) => self.of_range(range),
            None => {
                let one = |id: u32| u32::from(chunks.contains(BlockId(id).chunk()));
                self.ids.iter().enumerate().fold(0, |places, (place, id)| places | one(*id) << place)
            }
        };
        Places(places & !self.places(0).0)
    }

    #[inline]
    fn of_range(&self, chunks: Range<u32>) -> u32 {
        let (first, count) = (u32x4::splat(chunks.start), u32x4::splat(chunks.end - chunks.start));
        let (fours, _) = self.ids.as_chunks::<4>();
        let within = |ids: &[u32; 4]| ((u32x4::new(*ids) >> 16u32) - first).simd_lt(count).to_bitmask();
        fours.iter().enumerate().fold(0, |places, (four, ids)| places | within(ids) << (4 * four))
    }

    /// The block here that has this tag and hash.
    #[inline]
    pub(super) fn find(&self, tag: u8, hash: i64, blocks: &Blocks) -> Option<BlockId> {
        let mut places = self.places(tag);
        while places != Places::NONE {
            let block = BlockId(self.ids[places.first()]);
            if blocks.hash(block) == hash {
                return Some(block);
            }
            places = places.without_first();
        }
        None
    }

    /// Puts `block` into the first free place; says whether there was one.
    #[inline]
    pub(super) fn put(&mut self, tag: u8, block: BlockId) -> bool {
        let free = self.places(0);
        if free != Places::NONE {
            self.ids[free.first()] = block.0;
            self.tags[free.first()] = tag;
        }
        free != Places::NONE
    }

    /// The place of `block`, if it is here.
    #[inline]
    pub(super) fn place_of(&self, tag: u8, block: BlockId) -> Option<usize> {
        let mut places = self.places(tag);
        while places != Places::NONE {
            if self.ids[places.first()] == block.0 {
                return Some(places.first());
            }
            places = places.without_first();
        }
        None
    }

    /// How many ids passed this bucket because it was full.
    #[inline]
    pub(super) fn passed(&self) -> u32 {
        let [.., a, b, c, d] = self.tags;
        u32::from_le_bytes([a, b, c, d])
    }

    #[inline]
    pub(super) fn put_passed(&mut self, passed: u32) {
        self.tags[BUCKET_IDS..].copy_from_slice(&passed.to_le_bytes());
    }
}
