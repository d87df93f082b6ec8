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

use wide::u8x16;

use super::blocks::Blocks;
use super::fetch::fetch;
use super::hashes::PackedHashes;
use super::ids::BlockId;
use super::mix::Mix;

/// Ids in one bucket.
const BUCKET_IDS: usize = 12;

/// A segment grows once it is fuller than this share of its places, in eighths.
/// Fuller buckets overflow too often: at seven eighths a quarter of them do.
const LOAD_MAX_EIGHTHS: usize = 7;

/// Hashes looked up together: more than a processor has cache misses under way at once.
pub(crate) const TOGETHER: usize = 32;

/// How far ahead of a look-up in turn its bucket is fetched, and what the bucket points to. Each is time for some
/// look-ups and what is done with them: more than memory takes to answer.
const BUCKETS_AHEAD: usize = 16;
const BLOCKS_AHEAD: usize = 8;

/// Look-ups under way at once, and room for their mixed hashes.
const UPCOMING: usize = 32;

const _: () =
    assert!(BLOCKS_AHEAD < BUCKETS_AHEAD && BUCKETS_AHEAD < UPCOMING, "each has a place of its own");

/// Buckets of a segment whose ids are moved together when it grows, for the same reason.
const RESIZED_TOGETHER: usize = 64;

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

/// A bit for each place of a bucket.
const ALL_PLACES: u32 = (1 << BUCKET_IDS) - 1;

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
        Places(equal.to_bitmask() & ALL_PLACES)
    }

    /// Places with an id of a chunk whose flag is set, without a branch, as none could be foretold.
    #[inline]
    fn of_chunks(&self, flags: &[bool]) -> Places {
        let flag = |id: u32| flags.get(BlockId(id).chunk()).copied().unwrap_or(false);
        let set = |places, (place, id): (usize, &u32)| places | u32::from(flag(*id)) << place;
        Places(self.ids.iter().enumerate().fold(0, set) & !self.places(0).0)
    }

    /// The block here that has this tag and hash.
    #[inline]
    fn find(&self, tag: u8, hash: i64, blocks: &Blocks) -> Option<BlockId> {
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
    fn put(&mut self, tag: u8, block: BlockId) -> bool {
        let free = self.places(0);
        if free != Places::NONE {
            self.ids[free.first()] = block.0;
            self.tags[free.first()] = tag;
        }
        free != Places::NONE
    }

    /// Takes `block` out; says whether it was here.
    #[inline]
    fn take(&mut self, tag: u8, block: BlockId) -> bool {
        let mut places = self.places(tag);
        while places != Places::NONE {
            let place = places.first();
            if self.ids[place] == block.0 {
                self.tags[place] = 0;
                return true;
            }
            places = places.without_first();
        }
        false
    }

    /// How many ids passed this bucket because it was full.
    #[inline]
    fn passed(&self) -> u32 {
        let [.., a, b, c, d] = self.tags;
        u32::from_le_bytes([a, b, c, d])
    }

    #[inline]
    fn put_passed(&mut self, passed: u32) {
        self.tags[BUCKET_IDS..].copy_from_slice(&passed.to_le_bytes());
    }
}

#[derive(Debug, Default)]
struct Segment {
    buckets: Box<[Bucket]>,
    ids: usize,
}

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
}

impl Upcoming {
    /// Goes over to other hashes.
    pub(crate) fn clear(&mut self) {
        (self.buckets, self.blocks) = (0, 0);
    }
}

/// Segments that were given back; dropping them may take a while.
#[derive(Debug)]
pub(crate) struct Segments(#[expect(dead_code, reason = "only ever dropped")] Box<[Segment]>);

/// What a hash's home bucket says of where its block is.
#[derive(Debug, Clone, Copy)]
enum Candidate {
    /// In no bucket.
    Absent,
    /// Most likely this block: it is the first with the hash's tag.
    Likely(BlockId),
    /// In a later bucket, if anywhere.
    Elsewhere,
}

/// Ids on their way to other buckets, with room for one more that is not kept.
///
/// First the ids of many buckets are gathered, then their hashes fetched, then the ids
/// placed: the fetches miss the cache, and only without a branch between them do they overlap.
#[derive(Debug)]
struct Moved {
    blocks: [BlockId; RESIZED_TOGETHER * BUCKET_IDS + 1],
    hashes: [u64; RESIZED_TOGETHER * BUCKET_IDS],
}

/// The table. Invariant: it holds each id at most once, under its block's hash.
#[derive(Debug)]
pub(crate) struct Table {
    segments: Box<[Segment]>,
    segment_bits: u32,
    mix: Mix,
    moved: Box<Moved>,
}

impl Table {
    pub(crate) fn new(mix: Mix, segment_bits: u32) -> Self {
        let segments = (0..1usize << segment_bits).map(|_| Segment::default()).collect();
        let moved = Moved {
            blocks: [BlockId(0); RESIZED_TOGETHER * BUCKET_IDS + 1],
            hashes: [0; RESIZED_TOGETHER * BUCKET_IDS],
        };
        Table { segments, segment_bits, mix, moved: Box::new(moved) }
    }

    #[inline]
    fn segment_of(&self, mixed: u64) -> usize {
        ((mixed >> 1) >> (63 - self.segment_bits)) as usize
    }

    /// The block with this hash, also if it is free and only remembered.
    #[inline]
    pub(crate) fn find(&self, hash: i64, blocks: &Blocks) -> Option<BlockId> {
        self.find_mixed(self.mix.mix(hash as u64), hash.to_le_bytes(), blocks)
    }

    #[inline]
    fn find_mixed(&self, mixed: u64, hash: [u8; 8], blocks: &Blocks) -> Option<BlockId> {
        self.segments[self.segment_of(mixed)].find(mixed, i64::from_le_bytes(hash), blocks)
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
            self.segments[self.segment_of(mixed)].fetch(mixed);
        }
        upcoming.buckets = ahead(BUCKETS_AHEAD);
        for place in at.max(upcoming.blocks)..ahead(BLOCKS_AHEAD) {
            let mixed = upcoming.mixed[place % UPCOMING];
            if let Candidate::Likely(block) = self.segments[self.segment_of(mixed)].candidate(mixed) {
                blocks.fetch(block);
            }
        }
        upcoming.blocks = ahead(BLOCKS_AHEAD);
        self.find_mixed(upcoming.mixed[at % UPCOMING], hashes[at], blocks)
    }

    /// How many of the first of `hashes`, at most [`TOGETHER`], stand nowhere; see [`Table::fetch`].
    pub(crate) fn unknown(&self, hashes: &[[u8; 8]], blocks: &Blocks) -> usize {
        let (mixed, absent) = self.fetch(hashes, blocks);
        (0..hashes.len())
            .find(|place| {
                absent >> place & 1 == 0 && self.find_mixed(mixed[*place], hashes[*place], blocks).is_some()
            })
            .unwrap_or(hashes.len())
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
        self.segments[self.segment_of(mixed)].fetch(mixed);
    }

    /// Mixes hashes and fetches what look-ups of them will read, and what stands beside their
    /// blocks; a bit says that one stands nowhere.
    ///
    /// In a large table each look-up misses the cache twice, for its bucket and for its block's
    /// hash. All buckets are fetched first, then what all tags point to.
    fn fetch(&self, hashes: &[[u8; 8]], blocks: &Blocks) -> ([u64; TOGETHER], u64) {
        debug_assert!(hashes.len() <= TOGETHER, "more hashes than are looked up together");
        let mut mixed = [0; TOGETHER];
        for (hash, mixed) in hashes.iter().zip(&mut mixed) {
            *mixed = self.mix.mix(u64::from_le_bytes(*hash));
            self.segments[self.segment_of(*mixed)].fetch(*mixed);
        }
        let mut absent = 0;
        for (place, (mixed, _)) in mixed.iter().zip(hashes).enumerate() {
            match self.segments[self.segment_of(*mixed)].candidate(*mixed) {
                Candidate::Absent => absent |= 1 << place,
                Candidate::Likely(block) => blocks.fetch(block),
                Candidate::Elsewhere => {}
            }
        }
        (mixed, absent)
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
            segment.resize(grown(segment.buckets.len(), number), self.mix, &mut self.moved, blocks);
        }
        segment.add(mixed, block);
        Ok(())
    }

    /// Takes some blocks out, each of which stands under its hash, at most [`TOGETHER`].
    ///
    /// All their buckets are fetched first; see [`Table::fetch`].
    pub(crate) fn remove_all(&mut self, some: &[BlockId], blocks: &Blocks) {
        debug_assert!(some.len() <= TOGETHER, "more blocks than are looked up together");
        let mut mixed = [0; TOGETHER];
        for (block, mixed) in some.iter().zip(&mut mixed) {
            *mixed = self.mix.mix(blocks.hash(*block) as u64);
            self.segments[self.segment_of(*mixed)].fetch(*mixed);
        }
        for (block, mixed) in some.iter().zip(mixed) {
            self.remove(mixed, *block, blocks);
        }
    }

    fn remove(&mut self, mixed: u64, block: BlockId, blocks: &Blocks) {
        let number = self.segment_of(mixed);
        let segment = &mut self.segments[number];
        let removed = segment.take(mixed, block);
        debug_assert!(removed, "{block:?} stands in the table");
        segment.shrink(self.mix, &mut self.moved, blocks);
    }

    /// Takes out the blocks of idle chunks, as a flag of each chunk says, and forgets their ghosts, from
    /// segment `from` on until `most` blocks have been looked at; gives the segment to go on from, if any.
    pub(crate) fn sweep(
        &mut self,
        from: usize,
        mut most: usize,
        idle: &[bool],
        blocks: &mut Blocks,
    ) -> Option<usize> {
        for (number, segment) in self.segments.iter_mut().enumerate().skip(from) {
            if most == 0 {
                return Some(number);
            }
            most = most.saturating_sub(segment.ids);
            segment.sweep(self.mix, idle, blocks);
            segment.shrink(self.mix, &mut self.moved, blocks);
        }
        None
    }

    /// Forgets every id at once.
    pub(crate) fn reset(&mut self) -> Segments {
        let empty = (0..self.segments.len()).map(|_| Segment::default()).collect();
        Segments(std::mem::replace(&mut self.segments, empty))
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

    /// Checks what each segment counts; the arena's audit checks ids against blocks.
    pub(crate) fn audit(&self, blocks: &Blocks) -> Result<(), String> {
        for (number, segment) in self.segments.iter().enumerate() {
            let mut counted = Segment { buckets: segment.buckets.clone(), ids: 0 };
            counted.buckets.iter_mut().for_each(|bucket| bucket.put_passed(0));
            for (place, bucket) in segment.buckets.iter().enumerate() {
                for (id, _) in bucket.ids.iter().zip(bucket.tags).filter(|(_, tag)| *tag != 0) {
                    let mut passed = segment.home(self.mix.mix(blocks.hash(BlockId(*id)) as u64));
                    while passed != place {
                        let bucket = &mut counted.buckets[passed];
                        bucket.put_passed(bucket.passed() + 1);
                        passed = segment.after(passed);
                    }
                    counted.ids += 1;
                }
            }
            if counted.ids != segment.ids {
                return Err(format!("segment {number} counts {} ids and has {}", segment.ids, counted.ids));
            }
            let alike = |(counted, bucket): (&Bucket, &Bucket)| counted.passed() == bucket.passed();
            if !counted.buckets.iter().zip(&segment.buckets).all(alike) {
                return Err(format!("segment {number} has buckets that count wrong who passed them"));
            }
        }
        Ok(())
    }
}

/// The number of buckets after `buckets` in segment `number`.
///
/// Powers of 7/4 times a factor that is the segment's own, between 1 and 7/4, so that at
/// any number of blocks as many segments are about to grow as at any other. Doubling
/// would move fewer ids and cost half a byte more per block.
fn grown(buckets: usize, number: usize) -> usize {
    let own = u64::from((number as u32).reverse_bits() >> 16);
    let mut size = (1 << 16) + own * 3 / 4;
    while (size >> 16) as usize <= buckets {
        size = size * 7 / 4;
    }
    (size >> 16) as usize
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

    /// The bucket after one, the first after the last.
    #[inline]
    fn after(&self, number: usize) -> usize {
        if number + 1 == self.buckets.len() { 0 } else { number + 1 }
    }

    #[inline]
    fn find(&self, mixed: u64, hash: i64, blocks: &Blocks) -> Option<BlockId> {
        let bucket = self.buckets.get(self.home(mixed))?;
        let found = bucket.find(tag_of(mixed), hash, blocks);
        if found.is_some() || bucket.passed() == 0 { found } else { self.find_further(mixed, hash, blocks) }
    }

    /// The block if its home bucket was full.
    #[inline(never)]
    fn find_further(&self, mixed: u64, hash: i64, blocks: &Blocks) -> Option<BlockId> {
        let home = self.home(mixed);
        let mut number = self.after(home);
        while number != home {
            let bucket = &self.buckets[number];
            let found = bucket.find(tag_of(mixed), hash, blocks);
            if found.is_some() || bucket.passed() == 0 {
                return found;
            }
            number = self.after(number);
        }
        None
    }

    /// Has the home bucket fetched.
    #[inline]
    fn fetch(&self, mixed: u64) {
        if let Some(bucket) = self.buckets.get(self.home(mixed)) {
            fetch(bucket);
        }
    }

    /// What the home bucket says of a hash without a look at its blocks.
    #[inline]
    fn candidate(&self, mixed: u64) -> Candidate {
        let Some(bucket) = self.buckets.get(self.home(mixed)) else { return Candidate::Absent };
        match bucket.places(tag_of(mixed)) {
            Places::NONE if bucket.passed() == 0 => Candidate::Absent,
            Places::NONE => Candidate::Elsewhere,
            places => Candidate::Likely(BlockId(bucket.ids[places.first()])),
        }
    }

    /// Adds `block`; there is room.
    #[inline]
    fn add(&mut self, mixed: u64, block: BlockId) {
        let mut number = self.home(mixed);
        while !self.buckets[number].put(tag_of(mixed), block) {
            let bucket = &mut self.buckets[number];
            bucket.put_passed(bucket.passed() + 1);
            number = self.after(number);
        }
        self.ids += 1;
    }

    fn take(&mut self, mixed: u64, block: BlockId) -> bool {
        let home = self.home(mixed);
        let mut number = home;
        while !self.buckets[number].take(tag_of(mixed), block) {
            let next = self.after(number);
            if self.buckets[number].passed() == 0 || next == home {
                return false;
            }
            number = next;
        }
        self.ids -= 1;
        self.take_back(home, number);
        true
    }

    /// Takes back what an id counted on its way from its home bucket to another one.
    #[inline]
    fn take_back(&mut self, home: usize, number: usize) {
        let mut passed = home;
        while passed != number {
            let bucket = &mut self.buckets[passed];
            bucket.put_passed(bucket.passed() - 1);
            passed = self.after(passed);
        }
    }

    fn sweep(&mut self, mix: Mix, idle: &[bool], blocks: &mut Blocks) {
        let mut before = self.buckets.len().saturating_sub(1);
        for number in 0..self.buckets.len() {
            let mut places = self.buckets[number].of_chunks(idle);
            while places != Places::NONE {
                let (bucket, place) = (&mut self.buckets[number], places.first());
                let block = BlockId(bucket.ids[place]);
                bucket.tags[place] = 0;
                self.ids -= 1;
                // If nothing passed the bucket before, all that stand here are at home.
                if self.buckets[before].passed() > 0 {
                    self.take_back(self.home(mix.mix(blocks.hash(block) as u64)), number);
                }
                blocks.forget(block);
                places = places.without_first();
            }
            before = number;
        }
    }

    /// Gives memory back if the segment has become too large for its ids.
    #[inline]
    fn shrink(&mut self, mix: Mix, moved: &mut Moved, blocks: &Blocks) {
        let mut buckets = self.buckets.len();
        while self.ids * 4 < buckets * BUCKET_IDS && buckets > 1 {
            buckets = buckets.div_ceil(2);
        }
        if self.ids == 0 {
            *self = Segment::default();
        } else if buckets < self.buckets.len() {
            self.resize(buckets, mix, moved, blocks);
        }
    }

    #[inline(never)]
    fn resize(&mut self, buckets: usize, mix: Mix, moved: &mut Moved, blocks: &Blocks) {
        let old = std::mem::replace(&mut self.buckets, vec![EMPTY_BUCKET; buckets].into_boxed_slice());
        self.ids = 0;
        for buckets in old.chunks(RESIZED_TOGETHER) {
            let mut count = 0;
            for bucket in buckets {
                for (id, tag) in bucket.ids.iter().zip(bucket.tags) {
                    moved.blocks[count] = BlockId(*id);
                    count += usize::from(tag != 0);
                }
            }
            let from = &moved.blocks[..count];
            for (block, hash) in from.iter().zip(&mut moved.hashes) {
                *hash = blocks.hash(*block) as u64;
            }
            for (block, hash) in from.iter().zip(&moved.hashes) {
                self.add(mix.mix(*hash), *block);
            }
        }
    }
}
