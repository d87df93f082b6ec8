//! Placement sets: who holds a block, where, with which components.
//!
//! Neighbouring blocks nearly always have the same holders, so a set is stored
//! once and blocks carry its id. A set is a sorted list of entries; an entry
//! says for 64 neighbouring workers, as bits, which of them hold the block at
//! one tier with one component mask:
//!
//! | field | meaning |
//! |---|---|
//! | `key` | workers' word (id / 64), tier, generation, in this order of weight |
//! | `mask` | component mask of all these placements |
//! | `bits` | one bit per worker of the word |
//!
//! A system prompt held by 256 workers is four entries, and a scan weighs all
//! 64 workers of an entry at once. Two sets with equal placements have equal
//! entries, so equality is that of the lists. The *generation* is what makes a
//! clear cheap: see [`super::workers`].
//!
//! A set's content hash is the exclusive-or of its placements' mixed keys, so
//! the hash after adding or removing one placement costs O(1). Sets lie in slabs
//! of a fixed size and the map from content hash to set is split, both so that
//! growth never copies more than a few thousand of them. What changes made over again look
//! at, stamp, count and next of the same hash, stands apart from entries in a column of heads;
//! see [`super::changes`].

use std::collections::HashSet;

use nohash_hasher::IntMap;
use slab::Slab;
use smallvec::SmallVec;

use super::bits;
use super::changes::{Change, Changes, Stamp};
use super::ids::{SetId, Tier, WorkerId};
use super::mix::Mix;

/// Sets of one slab: 56 KiB, and 16 KiB for their heads.
const PAGE_SETS: usize = 1024;

/// Maps from content hash to set. With a million sets each has 4,000.
const MAPS: usize = 256;

/// A worker's place in the sets: its word and bit, at one tier in one generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    key: u32,
    bit: u32,
}

impl Holder {
    pub(crate) fn new(worker: WorkerId, tier: Tier, generation: usize) -> Self {
        let place = (tier.index() << 1 | generation) as u32;
        Holder { key: ((worker.0 / 64) << 3) | place, bit: worker.0 % 64 }
    }

    fn bits(self) -> u64 {
        1 << self.bit
    }

    /// A number that differs from its neighbours'.
    #[inline]
    pub(super) fn number(self) -> usize {
        (self.key as usize) << 3 ^ self.bit as usize
    }
}

/// Workers of one word that hold a block alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    /// Key in the upper, mask in the lower half: entries are sorted by this.
    place: u64,
    pub(crate) bits: u64,
}

const _: () = assert!(size_of::<Entry>() == 16, "four entries to a cache line");

fn place(key: u32, mask: u32) -> u64 {
    u64::from(key) << 32 | u64::from(mask)
}

impl Entry {
    fn key(self) -> u32 {
        (self.place >> 32) as u32
    }

    /// The workers' word: their ids divided by 64.
    #[inline]
    pub(crate) fn word(self) -> usize {
        (self.place >> 35) as usize
    }

    /// The tier's index, 0 for HBM.
    #[inline]
    pub(crate) fn tier_index(self) -> usize {
        (self.place >> 33 & 3) as usize
    }

    pub(crate) fn tier(self) -> Tier {
        Tier::ALL[self.tier_index()]
    }

    #[inline]
    pub(crate) fn generation(self) -> usize {
        (self.place >> 32 & 1) as usize
    }

    /// The workers.
    pub(crate) fn workers(self) -> impl Iterator<Item = WorkerId> {
        bits::ones(0, 64, move |_| self.bits).map(move |bit| WorkerId((self.word() * 64 + bit) as u32))
    }

    /// The same for other workers of the word.
    #[inline]
    pub(crate) fn of(self, bits: u64) -> Entry {
        Entry { bits, ..self }
    }

    /// Zero if both are about the same workers' word, tier, generation and mask.
    #[inline]
    pub(crate) fn apart(self, other: Entry) -> u64 {
        self.place ^ other.place
    }

    #[inline]
    pub(crate) fn mask(self) -> u32 {
        self.place as u32
    }
}

type Entries = SmallVec<[Entry; 2]>;

#[derive(Debug)]
struct Set {
    entries: Entries,
    content: u64,
}

/// What is known of a set without its entries: all that a change made over again looks at.
#[derive(Debug, Clone, Copy)]
struct Head {
    stamp: Stamp,
    blocks: u32,
    /// The next set with the same content hash.
    next: SetId,
}

impl Head {
    /// What stands where there is no set.
    const NONE: Head = Head { stamp: Stamp::NONE, blocks: 0, next: SetId::EMPTY };

    /// Counts `blocks` fewer blocks with the set, unless they are the last; says whether it did.
    #[inline]
    fn leave(&mut self, blocks: usize) -> bool {
        let stays = self.blocks as usize > blocks;
        self.blocks -= if stays { blocks as u32 } else { 0 };
        stays
    }
}

/// The heads of a page's sets.
type Heads = Box<[Head; PAGE_SETS]>;

const _: () = assert!(size_of::<Option<Set>>() + size_of::<Head>() <= 72, "a million sets take 72 MB");

/// All placement sets.
///
/// Invariants: no two sets have equal entries; no set is without entries or
/// has one without bits; entries are sorted by key and mask; under one key no
/// bit stands in two entries; `blocks` is the number of blocks with the set and
/// above zero between two changes of the arena; no two sets ever have one stamp.
#[derive(Debug)]
pub(crate) struct Sets {
    pages: Vec<Slab<Set>>,
    /// Those of each page with any sets, close together.
    heads: Vec<Option<Heads>>,
    /// Pages with room, perhaps more than once.
    roomy: Vec<usize>,
    /// Made with the first set.
    by_content: Vec<IntMap<u64, SetId>>,
    count: usize,
    changes: Changes,
    /// The stamp given last.
    stamp: Stamp,
    mix: Mix,
}

/// What became of blocks when a placement of all of them changed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Changed {
    /// The set they have now: the one they had, if nothing had to change or it was changed itself.
    pub(crate) set: SetId,
    /// The mask that the holder had in it before, if it was there.
    pub(crate) old: Option<u32>,
}

impl Sets {
    pub(crate) fn new(mix: Mix) -> Self {
        Sets {
            pages: Vec::new(),
            heads: Vec::new(),
            roomy: Vec::new(),
            by_content: Vec::new(),
            count: 0,
            changes: Changes::default(),
            stamp: Stamp::NONE,
            mix,
        }
    }

    /// Number of distinct sets.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Bytes of slabs, maps and of entries outside their set.
    pub(crate) fn bytes(&self) -> usize {
        let spilled =
            |set: &Set| if set.entries.spilled() { set.entries.capacity() * size_of::<Entry>() } else { 0 };
        let pages: usize = self
            .pages
            .iter()
            .map(|page| {
                let slots = page.capacity() * (size_of::<Option<Set>>() + size_of::<Head>());
                slots + page.iter().map(|(_, set)| spilled(set)).sum::<usize>()
            })
            .sum();
        let maps: usize = self.by_content.iter().map(|map| map.capacity() * 8 / 7 * 17).sum();
        pages + maps
    }

    fn set(&self, id: SetId) -> &Set {
        let index = id.0 as usize - 1;
        &self.pages[index / PAGE_SETS][index % PAGE_SETS]
    }

    fn set_mut(&mut self, id: SetId) -> &mut Set {
        let index = id.0 as usize - 1;
        &mut self.pages[index / PAGE_SETS][index % PAGE_SETS]
    }

    /// The entries of a set; none for the empty one.
    #[inline]
    pub(crate) fn entries(&self, id: SetId) -> &[Entry] {
        if id == SetId::EMPTY { &[] } else { &self.set(id).entries }
    }

    /// The component mask with which `holder` is in the set, if it is.
    pub(crate) fn mask_of(&self, id: SetId, holder: Holder) -> Option<u32> {
        let held = |entry: &&Entry| entry.key() == holder.key && entry.bits & holder.bits() != 0;
        self.entries(id).iter().find(held).map(|entry| entry.mask())
    }

    fn placement(&self, holder: Holder, mask: u32) -> u64 {
        let place = u64::from(holder.key) << 6 | u64::from(holder.bit);
        self.mix.mix(self.mix.mix(place) ^ u64::from(mask))
    }

    /// Moves `blocks` blocks from set `from` to the one that has `holder` under `mask`, or for `None` has it not.
    ///
    /// Mostly it is a change over again, and only the counts of two sets differ.
    #[inline]
    pub(crate) fn change(
        &mut self,
        from: SetId,
        blocks: usize,
        holder: Holder,
        mask: Option<u32>,
    ) -> Changed {
        if let Some(Change { from_stamp, to, to_stamp, old, .. }) = self.changes.get(from, holder, mask)
            && self.stamp_of(to) == to_stamp
        {
            let leaves = match self.head_mut(from) {
                None => from_stamp == Stamp::NONE,
                Some(head) => head.stamp == from_stamp && head.leave(blocks),
            };
            if leaves {
                self.add_blocks(to, blocks);
                return Changed { set: to, old };
            }
        }
        self.change_anew(from, blocks, holder, mask)
    }

    /// The stamp of a set; 0 of the empty one and of one that is gone.
    #[inline]
    fn stamp_of(&self, id: SetId) -> Stamp {
        self.head(id).map_or(Stamp::NONE, |head| head.stamp)
    }

    /// A stamp that no set had yet.
    fn next_stamp(&mut self) -> Stamp {
        self.stamp = self.stamp.next();
        self.stamp
    }

    #[inline]
    fn head(&self, id: SetId) -> Option<&Head> {
        let index = (id.0 as usize).wrapping_sub(1);
        Some(&self.heads.get(index / PAGE_SETS)?.as_ref()?[index % PAGE_SETS])
    }

    #[inline]
    fn head_mut(&mut self, id: SetId) -> Option<&mut Head> {
        let index = (id.0 as usize).wrapping_sub(1);
        Some(&mut self.heads.get_mut(index / PAGE_SETS)?.as_mut()?[index % PAGE_SETS])
    }

    /// The next set with the same content hash.
    fn next(&self, id: SetId) -> SetId {
        self.head(id).map_or(SetId::EMPTY, |head| head.next)
    }

    fn put_next(&mut self, id: SetId, next: SetId) {
        if let Some(head) = self.head_mut(id) {
            head.next = next;
        }
    }

    /// The same where the change is none of the latest, or takes the last blocks from a set.
    #[inline(never)]
    fn change_anew(&mut self, from: SetId, blocks: usize, holder: Holder, mask: Option<u32>) -> Changed {
        let old = self.mask_of(from, holder);
        if old == mask {
            return Changed { set: from, old };
        }
        let content = if from == SetId::EMPTY { 0 } else { self.set(from).content };
        let content = content ^ self.difference(holder, old, mask);
        if self.is_free_to_change(from, blocks, holder, mask) && !self.is_known(content) {
            self.unlink(from);
            let stamp = self.next_stamp();
            if let Some(head) = self.head_mut(from) {
                (head.stamp, head.next) = (stamp, SetId::EMPTY);
            }
            let set = self.set_mut(from);
            change(&mut set.entries, holder, old, mask);
            set.entries.shrink_to_fit();
            set.content = content;
            self.by_content[map_of(content)].insert(content, from);
            return Changed { set: from, old };
        }
        let mut entries: Entries = SmallVec::from_slice(self.entries(from));
        change(&mut entries, holder, old, mask);
        entries.shrink_to_fit();
        let to = self.intern(entries, content, blocks);
        let [from_stamp, to_stamp] = [from, to].map(|id| self.stamp_of(id));
        self.changes.keep(from, Change { from_stamp, holder, mask, old, to, to_stamp });
        if self.head_mut(from).is_some_and(|head| !head.leave(blocks)) {
            self.forget(from);
        }
        Changed { set: to, old }
    }

    /// Whether a set can itself become what `blocks` blocks need: they are all that have it, and
    /// it is not left empty.
    ///
    /// Blocks whose holders all differ keep their sets this way, and no slab or list of
    /// entries is given back and made again.
    fn is_free_to_change(&self, id: SetId, blocks: usize, holder: Holder, mask: Option<u32>) -> bool {
        if self.head(id).is_none_or(|head| head.blocks as usize != blocks) {
            return false;
        }
        let entries = self.entries(id);
        mask.is_some() || entries.len() > 1 || entries[0].bits != holder.bits()
    }

    /// Whether a set has this content hash.
    fn is_known(&self, content: u64) -> bool {
        self.by_content[map_of(content)].contains_key(&content)
    }

    /// What a content hash changes by when `holder` goes from `old` to `new`.
    fn difference(&self, holder: Holder, old: Option<u32>, new: Option<u32>) -> u64 {
        let placement = |mask| self.placement(holder, mask);
        old.map_or(0, placement) ^ new.map_or(0, placement)
    }

    /// The set with these entries, made if there is none, for `blocks` more blocks.
    fn intern(&mut self, entries: Entries, content: u64, blocks: usize) -> SetId {
        if entries.is_empty() {
            return SetId::EMPTY;
        }
        if self.by_content.is_empty() {
            self.by_content.resize_with(MAPS, IntMap::default);
        }
        let first = self.by_content[map_of(content)].get(&content).copied().unwrap_or(SetId::EMPTY);
        let mut id = first;
        while id != SetId::EMPTY {
            if self.set(id).entries == entries {
                self.add_blocks(id, blocks);
                return id;
            }
            id = self.next(id);
        }
        let page = loop {
            match self.roomy.last() {
                Some(page) if self.pages[*page].len() < PAGE_SETS => break *page,
                Some(_) => drop(self.roomy.pop()),
                None => {
                    self.pages.push(Slab::new());
                    self.heads.push(None);
                    self.roomy.push(self.pages.len() - 1);
                }
            }
        };
        if self.pages[page].capacity() == 0 {
            self.pages[page].reserve_exact(PAGE_SETS);
        }
        let place = self.pages[page].insert(Set { entries, content });
        let stamp = self.next_stamp();
        let heads = self.heads[page].get_or_insert_with(|| Box::new([Head::NONE; PAGE_SETS]));
        heads[place] = Head { stamp, blocks: blocks as u32, next: first };
        let id = SetId((page * PAGE_SETS + place) as u32 + 1);
        self.by_content[map_of(content)].insert(content, id);
        self.count += 1;
        id
    }

    /// Counts `blocks` more blocks with this set.
    #[inline]
    fn add_blocks(&mut self, id: SetId, blocks: usize) {
        if let Some(head) = self.head_mut(id) {
            head.blocks += blocks as u32;
        }
    }

    /// Forgets a set that no block has any more.
    fn forget(&mut self, id: SetId) {
        self.unlink(id);
        let index = id.0 as usize - 1;
        let (page, place) = (index / PAGE_SETS, index % PAGE_SETS);
        let was_full = self.pages[page].len() == PAGE_SETS;
        self.pages[page].remove(place);
        if let Some(head) = self.head_mut(id) {
            *head = Head::NONE;
        }
        if self.pages[page].is_empty() {
            self.pages[page] = Slab::new();
            self.heads[page] = None;
        }
        if was_full {
            self.roomy.push(page);
        }
        self.count -= 1;
        if self.count == 0 {
            self.pages = Vec::new();
            self.heads = Vec::new();
            self.roomy = Vec::new();
        }
    }

    /// Gives back what is kept for sets to come, if there are none.
    pub(crate) fn reset(&mut self) {
        if self.count == 0 {
            self.by_content = Vec::new();
        }
    }

    /// Takes a set out of the map of contents.
    fn unlink(&mut self, id: SetId) {
        let (content, next) = (self.set(id).content, self.next(id));
        let map = &mut self.by_content[map_of(content)];
        let first = map.get(&content).copied().unwrap_or(SetId::EMPTY);
        if first != id {
            let mut before = first;
            while self.next(before) != id {
                before = self.next(before);
            }
            self.put_next(before, next);
        } else if next != SetId::EMPTY {
            map.insert(content, next);
        } else {
            map.remove(&content);
            if map.len() * 8 < map.capacity() {
                map.shrink_to_fit();
            }
        }
    }

    /// Every set with its entries and its number of blocks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SetId, &[Entry], usize)> {
        self.pages.iter().enumerate().flat_map(move |(page, sets)| {
            sets.iter().map(move |(index, set)| {
                let id = SetId((page * PAGE_SETS + index) as u32 + 1);
                (id, set.entries.as_slice(), self.head(id).map_or(0, |head| head.blocks as usize))
            })
        })
    }

    /// Checks the invariants that sets have by themselves.
    pub(crate) fn audit(&self) -> Result<(), String> {
        for (id, entries, blocks) in self.iter() {
            let sorted = entries.windows(2).all(|pair| pair[0].place < pair[1].place);
            let disjoint = entries.iter().enumerate().all(|(place, entry)| {
                entries[..place]
                    .iter()
                    .all(|other| other.key() != entry.key() || other.bits & entry.bits == 0)
            });
            if !sorted || !disjoint || entries.is_empty() || entries.iter().any(|entry| entry.bits == 0) {
                return Err(format!("{id:?} has disorderly entries {entries:?}"));
            }
            if blocks == 0 {
                return Err(format!("{id:?} counts no block"));
            }
            let content = entries.iter().fold(0, |content, entry| {
                (0..64).filter(|bit| entry.bits >> bit & 1 == 1).fold(content, |content, bit| {
                    content ^ self.placement(Holder { key: entry.key(), bit }, entry.mask())
                })
            });
            let mut found = self.by_content[map_of(content)].get(&content).copied().unwrap_or(SetId::EMPTY);
            while found != SetId::EMPTY && found != id {
                if self.entries(found) == entries {
                    return Err(format!("{id:?} and {found:?} have equal entries"));
                }
                found = self.next(found);
            }
            if found != id {
                return Err(format!("{id:?} is not found under its content"));
            }
        }
        let stamps: HashSet<Stamp> = self.iter().map(|(id, ..)| self.stamp_of(id)).collect();
        if stamps.len() != self.count || stamps.contains(&Stamp::NONE) {
            return Err("two sets have one stamp, or one has none".to_owned());
        }
        let mapped: usize = self.by_content.iter().map(IntMap::len).sum();
        if self.iter().count() != self.count || mapped > self.count {
            return Err(format!("{} sets are counted and {mapped} mapped", self.count));
        }
        Ok(())
    }
}

/// Takes `holder` out of entries, where it is under `old`, and puts it in under `new`.
fn change(entries: &mut Entries, holder: Holder, old: Option<u32>, new: Option<u32>) {
    let find =
        |entries: &Entries, mask| entries.binary_search_by_key(&place(holder.key, mask), |entry| entry.place);
    if let Some(found) = old.and_then(|old| find(entries, old).ok()) {
        entries[found].bits &= !holder.bits();
        if entries[found].bits == 0 {
            entries.remove(found);
        }
    }
    if let Some(new) = new {
        match find(entries, new) {
            Ok(found) => entries[found].bits |= holder.bits(),
            Err(gap) => entries.insert(gap, Entry { place: place(holder.key, new), bits: holder.bits() }),
        }
    }
}

/// The map of a content hash, by bits that the map itself looks at last.
fn map_of(content: u64) -> usize {
    (content >> 40) as usize % MAPS
}
