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
//! growth never copies more than a few thousand of them.

use nohash_hasher::IntMap;
use slab::Slab;
use smallvec::SmallVec;

use super::ids::{SetId, Tier, WorkerId};
use super::mix::Mix;

/// Sets of one slab: 64 KiB.
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
    blocks: u32,
    /// The next set with the same content hash.
    next: SetId,
}

/// All placement sets.
///
/// Invariants: no two sets have equal entries; no set is without entries or
/// has one without bits; entries are sorted by key and mask; under one key no
/// bit stands in two entries; `last` names sets that exist; `blocks` is the number of blocks with the set and
/// above zero between two changes of the arena.
#[derive(Debug)]
pub(crate) struct Sets {
    pages: Vec<Slab<Set>>,
    /// Pages with room, perhaps more than once.
    roomy: Vec<usize>,
    by_content: Box<[IntMap<u64, SetId>]>,
    count: usize,
    /// The last change made, as blocks that are changed together change alike.
    last: Option<Change>,
    mix: Mix,
}

/// That `from` becomes `to` when `holder` gets `mask` or goes.
#[derive(Debug, Clone, Copy)]
struct Change {
    from: SetId,
    holder: Holder,
    mask: Option<u32>,
    to: SetId,
}

impl Sets {
    pub(crate) fn new(mix: Mix) -> Self {
        let by_content = (0..MAPS).map(|_| IntMap::default()).collect();
        Sets { pages: Vec::new(), roomy: Vec::new(), by_content, count: 0, last: None, mix }
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
                let slots = page.capacity() * (size_of::<Set>() + size_of::<usize>());
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

    /// The set that is `id` with `holder` in it under `mask`, whatever its mask was.
    ///
    /// The result counts no block yet: [`Sets::add_blocks`] must follow.
    pub(crate) fn with(&mut self, id: SetId, holder: Holder, mask: u32) -> SetId {
        self.changed(id, holder, Some(mask))
    }

    /// The set that is `id` without `holder`; see [`Sets::with`].
    pub(crate) fn without(&mut self, id: SetId, holder: Holder) -> SetId {
        self.changed(id, holder, None)
    }

    fn changed(&mut self, id: SetId, holder: Holder, mask: Option<u32>) -> SetId {
        if let Some(last) = self.last.filter(|last| (last.from, last.holder, last.mask) == (id, holder, mask))
        {
            return last.to;
        }
        let old_mask = self.mask_of(id, holder);
        if old_mask == mask {
            return id;
        }
        let mut entries: Entries = SmallVec::from_slice(self.entries(id));
        change(&mut entries, holder, old_mask, mask);
        entries.shrink_to_fit();
        let content = if id == SetId::EMPTY { 0 } else { self.set(id).content };
        let to = self.intern(entries, content ^ self.difference(holder, old_mask, mask));
        self.last = Some(Change { from: id, holder, mask, to });
        to
    }

    /// Changes a set itself, if `blocks` are all that have it and no other set becomes equal.
    ///
    /// Blocks whose holders all differ keep their sets this way, and nothing is
    /// allocated or freed. Says whether it did; if not, nothing has changed.
    pub(crate) fn change_in_place(
        &mut self,
        id: SetId,
        blocks: usize,
        holder: Holder,
        mask: Option<u32>,
    ) -> bool {
        let Set { content, blocks: having, .. } = *self.set(id);
        if having as usize != blocks {
            return false;
        }
        let old_mask = self.mask_of(id, holder);
        let changed = content ^ self.difference(holder, old_mask, mask);
        if self.by_content[map_of(changed)].contains_key(&changed) {
            return false;
        }
        let left_empty = mask.is_none() && {
            let entries = self.entries(id);
            entries.len() == 1 && entries[0].bits == holder.bits()
        };
        if left_empty {
            return false;
        }
        self.unlink(id);
        let set = self.set_mut(id);
        change(&mut set.entries, holder, old_mask, mask);
        set.entries.shrink_to_fit();
        set.content = changed;
        set.next = SetId::EMPTY;
        self.by_content[map_of(changed)].insert(changed, id);
        self.forget_change(id);
        true
    }

    /// What a content hash changes by when `holder` goes from `old` to `new`.
    fn difference(&self, holder: Holder, old: Option<u32>, new: Option<u32>) -> u64 {
        let placement = |mask| self.placement(holder, mask);
        old.map_or(0, placement) ^ new.map_or(0, placement)
    }

    /// Forgets the last change if it is about a set that becomes another one.
    fn forget_change(&mut self, id: SetId) {
        if self.last.is_some_and(|last| last.from == id || last.to == id) {
            self.last = None;
        }
    }

    /// The set with these entries, made if there is none.
    fn intern(&mut self, entries: Entries, content: u64) -> SetId {
        if entries.is_empty() {
            return SetId::EMPTY;
        }
        let first = self.by_content[map_of(content)].get(&content).copied().unwrap_or(SetId::EMPTY);
        let mut id = first;
        while id != SetId::EMPTY {
            let set = self.set(id);
            if set.entries == entries {
                return id;
            }
            id = set.next;
        }
        let page = loop {
            match self.roomy.last() {
                Some(page) if self.pages[*page].len() < PAGE_SETS => break *page,
                Some(_) => drop(self.roomy.pop()),
                None => {
                    self.pages.push(Slab::new());
                    self.roomy.push(self.pages.len() - 1);
                }
            }
        };
        if self.pages[page].capacity() == 0 {
            self.pages[page].reserve_exact(PAGE_SETS);
        }
        let index = self.pages[page].insert(Set { entries, content, blocks: 0, next: first });
        let id = SetId((page * PAGE_SETS + index) as u32 + 1);
        self.by_content[map_of(content)].insert(content, id);
        self.count += 1;
        id
    }

    /// Counts `blocks` more blocks with this set.
    pub(crate) fn add_blocks(&mut self, id: SetId, blocks: usize) {
        if id != SetId::EMPTY {
            self.set_mut(id).blocks += blocks as u32;
        }
    }

    /// Counts `blocks` fewer blocks with this set and forgets it with the last one.
    pub(crate) fn remove_blocks(&mut self, id: SetId, blocks: usize) {
        if id == SetId::EMPTY {
            return;
        }
        let set = self.set_mut(id);
        set.blocks -= blocks as u32;
        if set.blocks > 0 {
            return;
        }
        self.forget_change(id);
        self.unlink(id);
        let index = id.0 as usize - 1;
        let (page, place) = (index / PAGE_SETS, index % PAGE_SETS);
        let was_full = self.pages[page].len() == PAGE_SETS;
        self.pages[page].remove(place);
        if self.pages[page].is_empty() {
            self.pages[page] = Slab::new();
        }
        if was_full {
            self.roomy.push(page);
        }
        self.count -= 1;
        if self.count == 0 {
            self.pages = Vec::new();
            self.roomy = Vec::new();
        }
    }

    /// Takes a set out of the map of contents.
    fn unlink(&mut self, id: SetId) {
        let Set { content, next, .. } = *self.set(id);
        let map = &mut self.by_content[map_of(content)];
        let first = map.get(&content).copied().unwrap_or(SetId::EMPTY);
        if first != id {
            let mut before = first;
            while self.set(before).next != id {
                before = self.set(before).next;
            }
            self.set_mut(before).next = next;
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
        self.pages.iter().enumerate().flat_map(|(page, sets)| {
            sets.iter().map(move |(index, set)| {
                (SetId((page * PAGE_SETS + index) as u32 + 1), set.entries.as_slice(), set.blocks as usize)
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
                found = self.set(found).next;
            }
            if found != id {
                return Err(format!("{id:?} is not found under its content"));
            }
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
