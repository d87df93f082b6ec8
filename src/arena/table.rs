//! From a block's hash to its slot.
//!
//! An open-addressing table of 32-bit slot ids. Twelve ids, their one-byte tags
//! and a count of overflows share one 64-byte bucket, so that a look-up touches
//! one line of the table and, for a hit, one of the hash column:
//!
//! | bytes | content |
//! |---|---|
//! | 0–47 | slot ids |
//! | 48–59 | tags, 0 where there is no id |
//! | 60–63 | how many ids passed this bucket because it was full |
//!
//! An id whose home bucket is full goes to the next one with room and is counted
//! in every bucket it passed. A look-up goes on only past a bucket with a count,
//! and a removal takes its counts back, so nothing is left behind by removals.
//!
//! The table is split into segments by the top bits of the mixed hash; a segment
//! grows by itself, by three quarters, when it is seven eighths full. Growth therefore
//! moves a few thousand ids at a time and no apply stalls readers for long.
//! Segments start from different sizes so that they do not all grow at once,
//! which would make bytes per block swing with the number of blocks. Home
//! buckets come from the middle bits and tags from the lowest eight, so that the
//! three say different things about a hash.

use smallvec::SmallVec;
use wide::u8x16;

use super::blocks::Blocks;
use super::ids::BlockId;
use super::mix::Mix;

/// Ids in one bucket.
const BUCKET_IDS: usize = 12;

/// A segment grows once it is fuller than this share of its places, in eighths.
/// Fuller buckets overflow too often: at seven eighths a quarter of them do.
const LOAD_MAX_EIGHTHS: usize = 7;

/// Hashes looked up together: more than a processor has cache misses under way at once.
pub(crate) const TOGETHER: usize = 32;

/// Segments unless set otherwise. At 20 million blocks a segment has 5,000 ids
/// and grows in about 50 µs; at 1 billion it has 250,000 and takes about 3 ms.
pub(crate) const SEGMENT_BITS: u32 = 12;

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    ids: [u32; BUCKET_IDS],
    /// The tags and, in the last four bytes, the count: sixteen bytes, which one instruction compares.
    tags: [u8; 16],
}

const _: () = assert!(size_of::<Bucket>() == 64, "a bucket is one cache line");

const EMPTY_BUCKET: Bucket = Bucket { ids: [0; BUCKET_IDS], tags: [0; 16] };

/// Some of the places of a bucket, one bit each.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Places(u32);

impl Places {
    const NONE: Places = Places(0);

    /// The first of them; there is one.
    #[inline]
    fn first(self) -> usize {
        self.0.trailing_zeros() as usize
    }

    #[inline]
    fn without_first(self) -> Places {
        Places(self.0 & (self.0 - 1))
    }
}

impl Bucket {
    /// Places with this tag.
    #[inline]
    fn places(&self, tag: u8) -> Places {
        let equal = u8x16::new(self.tags).simd_eq(u8x16::splat(tag));
        Places(equal.to_bitmask() & ((1 << BUCKET_IDS) - 1))
    }

    /// How many ids passed this bucket because it was full.
    #[inline]
    fn passed(&self) -> u32 {
        let [.., a, b, c, d] = self.tags;
        u32::from_le_bytes([a, b, c, d])
    }

    fn put_passed(&mut self, passed: u32) {
        self.tags[BUCKET_IDS..].copy_from_slice(&passed.to_le_bytes());
    }
}

#[derive(Debug, Default)]
struct Segment {
    buckets: Box<[Bucket]>,
    ids: usize,
}

/// The table. Invariant: it holds each id at most once, under its block's hash.
#[derive(Debug)]
pub(crate) struct Table {
    segments: Box<[Segment]>,
    segment_bits: u32,
    mix: Mix,
}

impl Table {
    pub(crate) fn new(mix: Mix, segment_bits: u32) -> Self {
        let segments = (0..1usize << segment_bits).map(|_| Segment::default()).collect();
        Table { segments, segment_bits, mix }
    }

    #[inline]
    fn segment_of(&self, mixed: u64) -> usize {
        ((mixed >> 1) >> (63 - self.segment_bits)) as usize
    }

    /// The block with this hash, also if it is free and only remembered.
    #[inline]
    pub(crate) fn find(&self, hash: i64, blocks: &Blocks) -> Option<BlockId> {
        let mixed = self.mix.mix(hash as u64);
        self.segments[self.segment_of(mixed)].find(mixed, hash, blocks)
    }

    /// Looks `hashes` up together, into `found`.
    ///
    /// In a large table each look-up misses the cache twice, for its bucket and for
    /// its block's hash. Only loads without a branch between them overlap, so all
    /// buckets are fetched first, then all hashes that a tag points to.
    pub(crate) fn find_all(
        &self,
        hashes: &[[u8; 8]],
        blocks: &Blocks,
        found: &mut SmallVec<[Option<BlockId>; TOGETHER]>,
    ) {
        found.clear();
        for hashes in hashes.chunks(TOGETHER) {
            let mut mixed = [0; TOGETHER];
            let mut fetched = 0;
            for (hash, mixed) in hashes.iter().zip(&mut mixed) {
                *mixed = self.mix.mix(u64::from_le_bytes(*hash));
                fetched ^= self.segments[self.segment_of(*mixed)].passed(*mixed);
            }
            for mixed in &mixed[..hashes.len()] {
                if let Some(block) = self.segments[self.segment_of(*mixed)].candidate(*mixed) {
                    fetched ^= blocks.hash(block) as u32;
                }
            }
            std::hint::black_box(fetched);
            found.extend(hashes.iter().zip(&mixed).map(|(hash, mixed)| {
                self.segments[self.segment_of(*mixed)].find(*mixed, i64::from_le_bytes(*hash), blocks)
            }));
        }
    }

    /// Fetches the buckets of `hashes`, which are about to be taken out; see [`Table::find_all`].
    pub(crate) fn fetch(&self, hashes: impl Iterator<Item = i64>) {
        let fetched = hashes.fold(0, |fetched, hash| {
            let mixed = self.mix.mix(hash as u64);
            fetched ^ self.segments[self.segment_of(mixed)].passed(mixed)
        });
        std::hint::black_box(fetched);
    }

    /// Adds `block` under `hash`, whose column entry is already written.
    ///
    /// Returns a block that already stands there instead, if one does.
    pub(crate) fn insert(&mut self, hash: i64, block: BlockId, blocks: &Blocks) -> Result<(), BlockId> {
        let mixed = self.mix.mix(hash as u64);
        let number = self.segment_of(mixed);
        let segment = &mut self.segments[number];
        if let Some(other) = segment.find(mixed, hash, blocks) {
            return Err(other);
        }
        if (segment.ids + 1) * 8 > segment.buckets.len() * BUCKET_IDS * LOAD_MAX_EIGHTHS {
            segment.resize(grown(segment.buckets.len(), number), self.mix, blocks);
        }
        segment.add(mixed, block);
        Ok(())
    }

    /// Takes `block` out, which stands under `hash`.
    pub(crate) fn remove(&mut self, hash: i64, block: BlockId, blocks: &Blocks) {
        let mixed = self.mix.mix(hash as u64);
        let number = self.segment_of(mixed);
        let segment = &mut self.segments[number];
        let removed = segment.take(mixed, block);
        debug_assert!(removed, "{block:?} stands in the table");
        let places = segment.buckets.len() * BUCKET_IDS;
        if segment.ids == 0 {
            *segment = Segment::default();
        } else if segment.ids * 4 < places && segment.buckets.len() > 1 {
            segment.resize(segment.buckets.len().div_ceil(2), self.mix, blocks);
        }
    }

    /// Forgets every id at once.
    pub(crate) fn reset(&mut self) {
        for segment in &mut self.segments {
            *segment = Segment::default();
        }
    }

    /// Ids in the table.
    pub(crate) fn len(&self) -> usize {
        self.segments.iter().map(|segment| segment.ids).sum()
    }

    /// Bytes of its buckets and segments.
    pub(crate) fn bytes(&self) -> usize {
        let buckets: usize =
            self.segments.iter().map(|segment| size_of_val::<[Bucket]>(&segment.buckets)).sum();
        buckets + size_of_val::<[Segment]>(&self.segments)
    }

    /// Checks each segment by itself; the arena's audit checks ids against blocks.
    pub(crate) fn audit(&self) -> Result<(), String> {
        for (number, segment) in self.segments.iter().enumerate() {
            let ids: usize = segment
                .buckets
                .iter()
                .map(|bucket| bucket.tags[..BUCKET_IDS].iter().filter(|tag| **tag != 0).count())
                .sum();
            if ids != segment.ids {
                return Err(format!("segment {number} counts {} ids and has {ids}", segment.ids));
            }
        }
        Ok(())
    }
}

/// The number of buckets after `buckets` in segment `number`.
///
/// By three quarters each time, from a start that differs between neighbours. Doubling
/// would move fewer ids and cost half a byte more per block.
fn grown(buckets: usize, number: usize) -> usize {
    if buckets < 8 { (buckets * 2 + 1).min(8 + number % 6) } else { buckets * 7 / 4 }
}

/// Tag of a mixed hash, never 0.
#[inline]
fn tag_of(mixed: u64) -> u8 {
    (mixed as u8).max(1)
}

impl Segment {
    #[inline]
    fn home(&self, mixed: u64) -> usize {
        ((u64::from((mixed >> 16) as u32) * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline]
    fn find(&self, mixed: u64, hash: i64, blocks: &Blocks) -> Option<BlockId> {
        let tag = tag_of(mixed);
        let mut number = self.home(mixed);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[number];
            let mut places = bucket.places(tag);
            while places != Places::NONE {
                let block = BlockId(bucket.ids[places.first()]);
                if blocks.hash(block) == hash {
                    return Some(block);
                }
                places = places.without_first();
            }
            if bucket.passed() == 0 {
                return None;
            }
            number += 1;
            if number == self.buckets.len() {
                number = 0;
            }
        }
        None
    }

    /// The count of the home bucket: what is read does not matter, that it is fetched does.
    #[inline]
    fn passed(&self, mixed: u64) -> u32 {
        self.buckets.get(self.home(mixed)).map_or(0, Bucket::passed)
    }

    /// The first block of the home bucket with the tag, most likely the one.
    #[inline]
    fn candidate(&self, mixed: u64) -> Option<BlockId> {
        let bucket = self.buckets.get(self.home(mixed))?;
        let places = bucket.places(tag_of(mixed));
        (places != Places::NONE).then(|| BlockId(bucket.ids[places.first()]))
    }

    /// Adds `block`; there is room.
    fn add(&mut self, mixed: u64, block: BlockId) {
        let mut number = self.home(mixed);
        loop {
            let bucket = &mut self.buckets[number];
            let free = bucket.places(0);
            if free != Places::NONE {
                let place = free.first();
                bucket.ids[place] = block.0;
                bucket.tags[place] = tag_of(mixed);
                self.ids += 1;
                return;
            }
            bucket.put_passed(bucket.passed() + 1);
            number += 1;
            if number == self.buckets.len() {
                number = 0;
            }
        }
    }

    fn take(&mut self, mixed: u64, block: BlockId) -> bool {
        let tag = tag_of(mixed);
        let home = self.home(mixed);
        let mut number = home;
        for _ in 0..self.buckets.len() {
            let bucket = &mut self.buckets[number];
            for place in 0..BUCKET_IDS {
                if bucket.tags[place] == tag && bucket.ids[place] == block.0 {
                    bucket.tags[place] = 0;
                    self.ids -= 1;
                    let mut passed = home;
                    while passed != number {
                        let passed_by = self.buckets[passed].passed();
                        self.buckets[passed].put_passed(passed_by - 1);
                        passed = (passed + 1) % self.buckets.len();
                    }
                    return true;
                }
            }
            if bucket.passed() == 0 {
                return false;
            }
            number = (number + 1) % self.buckets.len();
        }
        false
    }

    fn resize(&mut self, buckets: usize, mix: Mix, blocks: &Blocks) {
        let old = std::mem::replace(&mut self.buckets, vec![EMPTY_BUCKET; buckets].into_boxed_slice());
        // First every hash is fetched, then every id placed: the fetches miss the
        // cache, and only without a branch on what they bring do they overlap.
        let mut placed = Vec::with_capacity(self.ids);
        for bucket in &old {
            for (id, tag) in bucket.ids.iter().zip(&bucket.tags) {
                if *tag != 0 {
                    placed.push((mix.mix(blocks.hash(BlockId(*id)) as u64), BlockId(*id)));
                }
            }
        }
        self.ids = 0;
        for (mixed, block) in placed {
            self.add(mixed, block);
        }
    }
}
