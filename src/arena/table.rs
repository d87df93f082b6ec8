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
//!
//! A segment that has some hundreds or thousands of ids is split into sixteen by the next bits: many segments are
//! what a large table needs to grow in small steps, and few are what a small one needs to
//! have them all in the nearest cache. Segments are split at different sizes, for the same reason.

use super::blocks::{Blocks, Located};
use super::hashes::PackedHashes;
use super::idle::Idle;
use super::ids::BlockId;
use super::mix::Mix;
use super::segment::{Candidate, Home, Moved, Segment};

/// Hashes looked up together: more than a processor has cache misses under way at once.
pub(crate) const TOGETHER: usize = 32;

/// How far ahead of a look-up in turn its bucket is fetched, and what the bucket points to. Each is time for some
/// look-ups and what is done with them: more than memory takes to answer.
const BUCKETS_AHEAD: usize = 16;
const BLOCKS_AHEAD: usize = 8;

/// Look-ups under way at once, and room for what is known of them.
const UPCOMING: usize = 32;

const _: () =
    assert!(BLOCKS_AHEAD < BUCKETS_AHEAD && BUCKETS_AHEAD < UPCOMING, "each has a place of its own");

/// Segments of an empty table, as a power of two, unless set otherwise.
pub(crate) const SEGMENT_BITS: u32 = 8;

/// Segments into which one is split, as a power of two.
const SPLIT_BITS: u32 = 4;

/// Ids from which on a segment that is full is split, at the latest, unless set otherwise: up to 7,000, in 0.2 ms. Its
/// pieces grow on: at 20 million blocks each has 5,000 ids and grows in about 50 µs, at 1 billion 250,000 in 3 ms.
pub(crate) const SEGMENT_IDS: usize = 4_096;

/// Look-ups of hashes one after another, whose blocks lie apart.
///
/// In a large table each misses the cache for its bucket and then for its block. So the bucket of the
/// hash after the next ones is fetched, then what a bucket fetched before names, then a hash is looked up
/// of which all is there; what is done with its block meanwhile costs no waiting.
#[derive(Debug, Default)]
pub(crate) struct Upcoming {
    /// The position up to which buckets have been fetched, and that up to which blocks have.
    buckets: usize,
    blocks: usize,
    /// Of the positions before `buckets`, the last ones' mixed hashes.
    mixed: [u64; UPCOMING],
    /// Of those before `blocks`, what the bucket named, if it named any.
    likely: [Option<BlockId>; UPCOMING],
}

impl Upcoming {
    /// Goes over to other hashes.
    pub(crate) fn clear(&mut self) {
        (self.buckets, self.blocks) = (0, 0);
    }
}

/// Segments that were given back; dropping them may take a while.
#[derive(Debug)]
pub(crate) struct Segments {
    _segments: Box<[Segment]>,
    _whole: Box<[Option<Segment>]>,
}

/// The table. Invariant: it holds each id at most once, under its block's hash.
#[derive(Debug)]
pub(crate) struct Table {
    /// All of them, or while they are being split those that others were split into.
    segments: Box<[Segment]>,
    /// How far a mixed hash is shifted to give its segment, less one.
    shift: u32,
    /// While they are being split, those that are not yet; else none.
    whole: Box<[Option<Segment>]>,
    /// How many of `whole` are left to be split.
    left: usize,
    segment_bits: u32,
    segment_ids: usize,
    mix: Mix,
    moved: Moved,
}

fn empty(segments: usize) -> Box<[Segment]> {
    (0..segments).map(|_| Segment::default()).collect()
}

impl Table {
    /// Begins with two to the power of `segment_bits` segments, which are split with `segment_ids` ids at the latest.
    pub(crate) fn new(mix: Mix, segment_bits: u32, segment_ids: usize) -> Self {
        Table {
            segments: empty(1 << segment_bits),
            shift: 63 - segment_bits,
            whole: Box::default(),
            left: 0,
            segment_bits,
            segment_ids,
            mix,
            moved: Moved::default(),
        }
    }

    #[inline]
    fn segment_of(&self, mixed: u64) -> usize {
        ((mixed >> 1) >> self.shift) as usize
    }

    #[inline]
    fn segment(&self, mixed: u64) -> &Segment {
        let number = self.segment_of(mixed);
        match self.whole.get(number >> SPLIT_BITS) {
            Some(Some(whole)) => whole,
            _ => &self.segments[number],
        }
    }

    #[inline]
    fn segment_mut(&mut self, mixed: u64) -> &mut Segment {
        let number = self.segment_of(mixed);
        match self.whole.get_mut(number >> SPLIT_BITS) {
            Some(Some(whole)) => whole,
            _ => &mut self.segments[number],
        }
    }

    fn is_small(&self) -> bool {
        self.segments.len() == 1 << self.segment_bits
    }

    /// Makes room for one more id with this mixed hash.
    #[inline(never)]
    fn make_room(&mut self, mixed: u64, blocks: &Blocks) {
        let number = self.segment_of(mixed);
        let part = if self.is_small() { number } else { number >> SPLIT_BITS };
        let split_at = split_at(part, self.segment_ids);
        if self.is_small() && self.segments[number].ids >= split_at {
            let pieces = empty(self.segments.len() << SPLIT_BITS);
            let whole = std::mem::replace(&mut self.segments, pieces);
            self.left = whole.len();
            self.whole = whole.into_iter().map(Some).collect();
            self.shift -= SPLIT_BITS;
        }
        let whole = self.whole.get_mut(part).and_then(|whole| whole.take_if(|whole| whole.ids >= split_at));
        if let Some(whole) = whole {
            self.split(part, &whole, blocks);
        }
        let number = self.segment_of(mixed);
        let Table { segments, whole, mix, moved, .. } = self;
        let (segment, number) = match whole.get_mut(part) {
            Some(Some(whole)) => (whole, part),
            _ => (&mut segments[number], number),
        };
        if segment.is_full() {
            segment.grow(number, *mix, moved, blocks);
        }
    }

    /// Spreads the ids of a segment over the pieces it is split into.
    fn split(&mut self, part: usize, whole: &Segment, blocks: &Blocks) {
        let (first, shift) = (part << SPLIT_BITS, self.shift);
        let mut all = Vec::with_capacity(whole.ids);
        let mut counts = [0; 1 << SPLIT_BITS];
        self.moved.each(whole, self.mix, blocks, |mixed, block| {
            let place = ((mixed >> 1) >> shift) as usize - first;
            counts[place] += 1;
            all.push((place, mixed, block));
        });
        let pieces = &mut self.segments[first..first + counts.len()];
        for (place, (piece, count)) in pieces.iter_mut().zip(counts).enumerate() {
            *piece = Segment::with_room(count, first + place);
        }
        for (place, mixed, block) in all {
            pieces[place].add(mixed, block);
        }
        self.left -= 1;
        if self.left == 0 {
            self.whole = Box::default();
        }
    }

    /// The block with this hash, also if it is free and only remembered.
    // Always, as a call saves and restores all that a scan keeps in registers: 3 % of a conversation's.
    #[inline(always)]
    pub(crate) fn find(&self, hash: i64, blocks: &Blocks) -> Option<BlockId> {
        self.find_mixed(self.mix.mix(hash as u64), hash.to_le_bytes(), blocks)
    }

    #[inline]
    fn find_mixed(&self, mixed: u64, hash: [u8; 8], blocks: &Blocks) -> Option<BlockId> {
        self.segment(mixed).find(mixed, i64::from_le_bytes(hash), blocks)
    }

    /// The block with the hash at a position, looked up while those to come are fetched; see [`Upcoming`].
    ///
    /// Positions only grow, and may leave some out: nothing is fetched twice.
    pub(crate) fn find_in_turn(
        &self,
        hashes: &[[u8; 8]],
        at: usize,
        upcoming: &mut Upcoming,
        blocks: &Blocks,
    ) -> Option<BlockId> {
        let ahead = |most: usize| hashes.len().min(at + most + 1);
        let new = at.max(upcoming.buckets)..ahead(BUCKETS_AHEAD);
        for (place, hash) in new.clone().zip(hashes.get(new).unwrap_or_default()) {
            let mixed = self.mix.mix(u64::from_le_bytes(*hash));
            upcoming.mixed[place % UPCOMING] = mixed;
            self.segment(mixed).home_of(mixed).fetch();
        }
        upcoming.buckets = ahead(BUCKETS_AHEAD);
        for place in at.max(upcoming.blocks)..ahead(BLOCKS_AHEAD) {
            let mixed = upcoming.mixed[place % UPCOMING];
            let likely = self.segment(mixed).home_of(mixed).candidate().likely();
            if let Some(block) = likely {
                blocks.fetch(block);
            }
            upcoming.likely[place % UPCOMING] = likely;
        }
        upcoming.blocks = ahead(BLOCKS_AHEAD);
        let likely = upcoming.likely[at % UPCOMING].filter(|block| blocks.stands(*block, hashes[at]));
        likely.or_else(|| self.find_mixed(upcoming.mixed[at % UPCOMING], hashes[at], blocks))
    }

    /// How many of the first of `hashes`, at most [`TOGETHER`], stand nowhere; see [`Table::look_up`].
    pub(crate) fn unknown(&self, hashes: &[[u8; 8]], blocks: &Blocks) -> usize {
        let mut looked = [Candidate::Absent; TOGETHER];
        self.look_up(hashes, blocks, &mut looked);
        let known = |(hash, candidate): (&[u8; 8], &Candidate)| match candidate {
            Candidate::Absent => false,
            Candidate::Likely(block) if blocks.hash(*block).to_le_bytes() == *hash => true,
            _ => self.find(i64::from_le_bytes(*hash), blocks).is_some(),
        };
        hashes.iter().zip(&looked).position(known).unwrap_or(hashes.len())
    }

    /// Where the blocks with these hashes stand, at most [`TOGETHER`]; see [`Table::look_up`].
    pub(crate) fn locate_all(&self, hashes: &[[u8; 8]], blocks: &Blocks, located: &mut [Located; TOGETHER]) {
        let mut looked = [Candidate::Absent; TOGETHER];
        self.look_up(hashes, blocks, &mut looked);
        for ((hash, candidate), located) in hashes.iter().zip(&looked).zip(located) {
            let likely = match candidate {
                Candidate::Absent => Some(Located::NOWHERE),
                Candidate::Likely(block) => blocks.locate(*block, *hash),
                Candidate::Elsewhere => None,
            };
            *located = likely.unwrap_or_else(|| self.locate(*hash, blocks));
        }
    }

    /// Where a block stands whose place its home bucket does not tell at once.
    #[inline(never)]
    fn locate(&self, hash: [u8; 8], blocks: &Blocks) -> Located {
        let found = self.find(i64::from_le_bytes(hash), blocks);
        found.and_then(|block| blocks.locate(block, hash)).unwrap_or(Located::NOWHERE)
    }

    /// Fetches the bucket of the first of some hashes: it misses the cache while other things are looked up.
    #[inline]
    pub(crate) fn fetch_first(&self, hashes: PackedHashes<'_>) {
        if let Some(hash) = hashes.get(0) {
            self.fetch_bucket(hash);
        }
    }

    /// Fetches the bucket of a hash that will be looked up soon.
    #[inline]
    pub(crate) fn fetch_bucket(&self, hash: i64) {
        let mixed = self.mix.mix(hash as u64);
        self.segment(mixed).home_of(mixed).fetch();
    }

    /// Looks into the buckets of hashes and has that fetched which they name, and what stands beside it.
    ///
    /// In a large table each look-up misses the cache twice, for its bucket and for its block's
    /// hash. All buckets are fetched first, then what all tags point to.
    #[inline]
    fn look_up(&self, hashes: &[[u8; 8]], blocks: &Blocks, looked: &mut [Candidate; TOGETHER]) {
        debug_assert!(hashes.len() <= TOGETHER, "more hashes than are looked up together");
        let mut homes = [Home::NONE; TOGETHER];
        for (hash, home) in hashes.iter().zip(&mut homes) {
            let mixed = self.mix.mix(u64::from_le_bytes(*hash));
            *home = self.segment(mixed).home_of(mixed);
            home.fetch();
        }
        for (home, candidate) in homes[..hashes.len()].iter().zip(looked) {
            *candidate = home.candidate();
            if let Candidate::Likely(block) = *candidate {
                blocks.fetch_set(block);
            }
        }
    }

    /// Adds `block` under `hash`, whose column entry is already written.
    ///
    /// Returns a block that already stands there instead, if one does.
    pub(crate) fn insert(&mut self, hash: i64, block: BlockId, blocks: &Blocks) -> Result<(), BlockId> {
        let mixed = self.mix.mix(hash as u64);
        let mut segment = self.segment_mut(mixed);
        if let Some(other) = segment.find(mixed, hash, blocks) {
            return Err(other);
        }
        if segment.is_full() {
            self.make_room(mixed, blocks);
            segment = self.segment_mut(mixed);
        }
        segment.add(mixed, block);
        Ok(())
    }

    /// Takes some blocks out, each of which stands under its hash, at most [`TOGETHER`].
    ///
    /// All their buckets are fetched first; see [`Table::look_up`].
    pub(crate) fn remove_all(&mut self, some: &[BlockId], blocks: &Blocks) {
        debug_assert!(some.len() <= TOGETHER, "more blocks than are looked up together");
        let mut mixed = [0; TOGETHER];
        for (block, mixed) in some.iter().zip(&mut mixed) {
            *mixed = self.mix.mix(blocks.hash(*block) as u64);
            self.segment(*mixed).home_of(*mixed).fetch();
        }
        for (block, mixed) in some.iter().zip(mixed) {
            self.remove(mixed, *block, blocks);
        }
    }

    fn remove(&mut self, mixed: u64, block: BlockId, blocks: &Blocks) {
        let number = self.segment_of(mixed);
        let Table { segments, whole, mix, moved, .. } = self;
        let segment = match whole.get_mut(number >> SPLIT_BITS) {
            Some(Some(whole)) => whole,
            _ => &mut segments[number],
        };
        let removed = segment.take(mixed, block);
        debug_assert!(removed, "{block:?} stands in the table");
        segment.shrink(*mix, moved, blocks);
    }

    /// Has a block that stands under its hash stand in another slot, whose column entry is already written.
    pub(crate) fn put_elsewhere(&mut self, block: BlockId, slot: BlockId, blocks: &Blocks) {
        let mixed = self.mix.mix(blocks.hash(block) as u64);
        let replaced = self.segment_mut(mixed).replace(mixed, block, slot);
        debug_assert!(replaced, "{block:?} stands in the table");
    }

    /// Takes out the blocks of idle chunks and forgets their ghosts, from place `from` on until `most` blocks
    /// have been looked at; gives the place to go on from, if any.
    ///
    /// Places number the segments that there are once all parts are split.
    pub(crate) fn sweep(
        &mut self,
        from: usize,
        mut most: usize,
        idle: &Idle,
        blocks: &mut Blocks,
    ) -> Option<usize> {
        let is_small = self.is_small();
        let Table { segments, whole, segment_bits, mix, moved, .. } = self;
        let mut place = from;
        while place < 1 << (*segment_bits + SPLIT_BITS) {
            if most == 0 {
                return Some(place);
            }
            let part = place >> SPLIT_BITS;
            let (segment, next) = match whole.get_mut(part) {
                Some(Some(whole)) => (whole, (part + 1) << SPLIT_BITS),
                _ if is_small => (&mut segments[part], (part + 1) << SPLIT_BITS),
                _ => (&mut segments[place], place + 1),
            };
            most = most.saturating_sub(segment.ids);
            segment.sweep(*mix, idle, blocks);
            segment.shrink(*mix, moved, blocks);
            place = next;
        }
        None
    }

    /// Forgets every id at once.
    pub(crate) fn reset(&mut self) -> Segments {
        self.shift = 63 - self.segment_bits;
        self.left = 0;
        self.moved = Moved::default();
        Segments {
            _segments: std::mem::replace(&mut self.segments, empty(1 << self.segment_bits)),
            _whole: std::mem::take(&mut self.whole),
        }
    }

    /// Ids in the table.
    pub(crate) fn len(&self) -> usize {
        self.segments().map(|segment| segment.ids).sum()
    }

    /// Bytes of its buckets and segments.
    pub(crate) fn bytes(&self) -> usize {
        let buckets: usize = self.segments().map(|segment| size_of_val(&*segment.buckets)).sum();
        buckets + size_of_val(&*self.segments) + size_of_val(&*self.whole)
    }

    fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.whole.iter().flatten().chain(&self.segments)
    }

    /// Checks what each segment counts; the arena's audit checks ids against blocks.
    pub(crate) fn audit(&self, blocks: &Blocks) -> Result<(), String> {
        let left = self.whole.iter().flatten().count();
        if left != self.left || self.whole.is_empty() != (left == 0) {
            return Err(format!("{left} segments are not split, {} are counted", self.left));
        }
        let audit = |(number, segment): (usize, &Segment)| {
            segment.audit(self.mix, blocks).map_err(|fault| format!("segment {number} {fault}"))
        };
        self.segments().enumerate().try_for_each(audit)
    }
}

/// Ids from which on segment `number` is split when it is full: between a sixteenth and all of `most`, as many of
/// them in each doubling, so that at any number of blocks as many segments are about to be split as at any other.
///
/// The product puts them into another order than that in which they grow.
fn split_at(number: usize, most: usize) -> usize {
    let own = (number as u32).wrapping_mul(0x9e37_79b9) >> 16;
    let (doublings, rest) = (own >> 14, (own % (1 << 14)) as usize);
    let least = most / 16;
    (least + ((least * rest) >> 14)) << doublings
}
