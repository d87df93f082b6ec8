//! Segments of the table: buckets that are searched, filled and resized by themselves.
//!
//! What they are for is told in [`super::table`]. An id whose home bucket is full goes to the next
//! one with room and is counted in every bucket it passed, so that look-ups go on only past a bucket with a
//! count and a removal leaves nothing behind.

use super::blocks::Blocks;
use super::bucket::{BUCKET_IDS, Bucket, EMPTY_BUCKET, Places};
use super::fetch::fetch;
use super::idle::Idle;
use super::ids::BlockId;
use super::mix::Mix;

/// A segment grows once it is fuller than this share of its places, in eighths.
/// Fuller buckets overflow too often: at seven eighths a quarter of them do.
const LOAD_MAX_EIGHTHS: usize = 7;

/// Buckets of a segment whose ids are moved together when it grows: more than a processor has cache misses
/// under way at once.
const RESIZED_TOGETHER: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Segment {
    pub(super) buckets: Box<[Bucket]>,
    pub(super) ids: usize,
}

/// What a hash's home bucket says of where its block is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Candidate {
    /// In no bucket.
    Absent,
    /// Most likely this block: it is the first with the hash's tag.
    Likely(BlockId),
    /// In a later bucket, if anywhere.
    Elsewhere,
}

impl Candidate {
    #[inline]
    pub(super) fn likely(self) -> Option<BlockId> {
        if let Candidate::Likely(block) = self { Some(block) } else { None }
    }
}

/// A bucket, and the tag by which a hash is looked for in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Home<'a> {
    bucket: &'a Bucket,
    tag: u8,
}

impl Home<'_> {
    /// That of no hash.
    pub(super) const NONE: Home<'static> = Home { bucket: &EMPTY_BUCKET, tag: 0 };

    /// Has the bucket fetched.
    #[inline]
    pub(super) fn fetch(self) {
        fetch(self.bucket);
    }

    /// What the bucket says of the hash without a look at its blocks.
    #[inline]
    pub(super) fn candidate(self) -> Candidate {
        match self.bucket.places(self.tag) {
            Places::NONE if self.bucket.passed() == 0 => Candidate::Absent,
            Places::NONE => Candidate::Elsewhere,
            places => Candidate::Likely(BlockId(self.bucket.ids[places.first()])),
        }
    }
}

/// Ids on their way to other buckets.
///
/// First the ids of many buckets are gathered, then their hashes fetched, then the ids
/// placed: the fetches miss the cache, and only without a branch between them do they overlap.
#[derive(Debug, Default)]
pub(super) struct Moved(Option<Box<Room>>);

/// Room for ids of many buckets and their hashes, and for one more id that is not kept.
#[derive(Debug)]
struct Room {
    blocks: [BlockId; RESIZED_TOGETHER * BUCKET_IDS + 1],
    hashes: [u64; RESIZED_TOGETHER * BUCKET_IDS],
}

impl Default for Room {
    fn default() -> Self {
        Room {
            blocks: [BlockId(0); RESIZED_TOGETHER * BUCKET_IDS + 1],
            hashes: [0; RESIZED_TOGETHER * BUCKET_IDS],
        }
    }
}

impl Moved {
    /// Hands on each id of a segment with its mixed hash.
    pub(super) fn each(
        &mut self,
        from: &Segment,
        mix: Mix,
        blocks: &Blocks,
        mut visit: impl FnMut(u64, BlockId),
    ) {
        let room = &mut **self.0.get_or_insert_default();
        for buckets in from.buckets.chunks(RESIZED_TOGETHER) {
            let mut count = 0;
            for bucket in buckets {
                for (id, tag) in bucket.ids.iter().zip(bucket.tags) {
                    room.blocks[count] = BlockId(*id);
                    count += usize::from(tag != 0);
                }
            }
            let from = &room.blocks[..count];
            for (block, hash) in from.iter().zip(&mut room.hashes) {
                *hash = blocks.hash(*block) as u64;
            }
            for (block, hash) in from.iter().zip(&room.hashes) {
                visit(mix.mix(*hash), *block);
            }
        }
    }
}

/// Whether so many ids may stand in so many buckets.
#[inline]
fn has_room(ids: usize, buckets: usize) -> bool {
    ids * 8 <= buckets * BUCKET_IDS * LOAD_MAX_EIGHTHS
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
    /// An empty one with room for so many ids, as segment `number`.
    pub(super) fn with_room(ids: usize, number: usize) -> Self {
        let mut buckets = 0;
        while !has_room(ids, buckets) {
            buckets = grown(buckets, number);
        }
        Segment::with_buckets(buckets)
    }

    fn with_buckets(buckets: usize) -> Self {
        Segment { buckets: vec![EMPTY_BUCKET; buckets].into_boxed_slice(), ids: 0 }
    }

    /// Whether one more id would make it too full.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        !has_room(self.ids + 1, self.buckets.len())
    }

    /// Takes more buckets, as segment `number`.
    pub(super) fn grow(&mut self, number: usize, mix: Mix, moved: &mut Moved, blocks: &Blocks) {
        self.resize(grown(self.buckets.len(), number), mix, moved, blocks);
    }

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
    pub(super) fn find(&self, mixed: u64, hash: i64, blocks: &Blocks) -> Option<BlockId> {
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

    /// Checks the counts of ids and of those that passed a bucket.
    pub(super) fn audit(&self, mix: Mix, blocks: &Blocks) -> Result<(), String> {
        let mut counted = Segment { buckets: self.buckets.clone(), ids: 0 };
        counted.buckets.iter_mut().for_each(|bucket| bucket.put_passed(0));
        for (place, bucket) in self.buckets.iter().enumerate() {
            for (id, _) in bucket.ids.iter().zip(bucket.tags).filter(|(_, tag)| *tag != 0) {
                let mut passed = self.home(mix.mix(blocks.hash(BlockId(*id)) as u64));
                while passed != place {
                    let bucket = &mut counted.buckets[passed];
                    bucket.put_passed(bucket.passed() + 1);
                    passed = self.after(passed);
                }
                counted.ids += 1;
            }
        }
        if counted.ids != self.ids {
            return Err(format!("counts {} ids and has {}", self.ids, counted.ids));
        }
        let alike = |(counted, bucket): (&Bucket, &Bucket)| counted.passed() == bucket.passed();
        if !counted.buckets.iter().zip(&self.buckets).all(alike) {
            return Err("has buckets that count wrong who passed them".to_owned());
        }
        Ok(())
    }

    /// Where a mixed hash is at home.
    #[inline]
    pub(super) fn home_of(&self, mixed: u64) -> Home<'_> {
        Home { bucket: self.buckets.get(self.home(mixed)).unwrap_or(&EMPTY_BUCKET), tag: tag_of(mixed) }
    }

    /// Adds `block`; there is room.
    #[inline]
    pub(super) fn add(&mut self, mixed: u64, block: BlockId) {
        let mut number = self.home(mixed);
        while !self.buckets[number].put(tag_of(mixed), block) {
            let bucket = &mut self.buckets[number];
            bucket.put_passed(bucket.passed() + 1);
            number = self.after(number);
        }
        self.ids += 1;
    }

    /// The bucket and the place in it where `block` stands, if it does.
    #[inline]
    fn place_of(&self, mixed: u64, block: BlockId) -> Option<(usize, usize)> {
        let home = self.home(mixed);
        let mut number = home;
        loop {
            let bucket = self.buckets.get(number)?;
            if let Some(place) = bucket.place_of(tag_of(mixed), block) {
                return Some((number, place));
            }
            number = self.after(number);
            if bucket.passed() == 0 || number == home {
                return None;
            }
        }
    }

    /// Takes `block` out; says whether it was here.
    pub(super) fn take(&mut self, mixed: u64, block: BlockId) -> bool {
        let Some((number, place)) = self.place_of(mixed, block) else { return false };
        self.buckets[number].tags[place] = 0;
        self.ids -= 1;
        self.take_back(self.home(mixed), number);
        true
    }

    /// Puts `new` where `block` stands; says whether it was here.
    pub(super) fn replace(&mut self, mixed: u64, block: BlockId, new: BlockId) -> bool {
        let place = self.place_of(mixed, block);
        if let Some((number, place)) = place {
            self.buckets[number].ids[place] = new.0;
        }
        place.is_some()
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

    /// Takes out the ghosts of idle chunks and has them forgotten.
    // Never, as what its caller keeps in registers would cost it those of its loop.
    #[inline(never)]
    pub(super) fn sweep(&mut self, mix: Mix, idle: &Idle, blocks: &mut Blocks) {
        let mut before = self.buckets.len().saturating_sub(1);
        for number in 0..self.buckets.len() {
            let mut places = self.buckets[number].of_chunks(idle);
            // If nothing passed the bucket before, all that stand here are at home.
            let astray = self.buckets[before].passed() > 0;
            while places != Places::NONE {
                let (bucket, place) = (&mut self.buckets[number], places.first());
                let block = BlockId(bucket.ids[place]);
                bucket.tags[place] = 0;
                self.ids -= 1;
                if astray {
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
    pub(super) fn shrink(&mut self, mix: Mix, moved: &mut Moved, blocks: &Blocks) {
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
        let old = std::mem::replace(self, Segment::with_buckets(buckets));
        moved.each(&old, mix, blocks, |mixed, block| self.add(mixed, block));
    }
}
