//! Copies and cache groups of blocks: what of them is left when one goes.
//!
//! The index keeps a set of placements. vLLM sends a store and a removal for each
//! physical copy of a block and for each cache group that holds it; SGLang sends a
//! store again to replace and one removal for all. So a stream is read as a set or as
//! a count of copies, and a removal goes on only when nothing is left.
//!
//! By itself the reading follows what arrives: values that only vLLM sends ask for
//! counts, values that only SGLang sends for a set. Until one is seen copies are counted
//! but read as a set.
//!
//! Groups: where the worker's spec has components, a placement has the components of
//! all groups that hold the block. Without a spec it needs a group of full attention,
//! if one is known, as no prefix is usable past a block without it.
//!
//! A stream whose mirror is kept on disk keeps its copies there too: each change is
//! noted as the value that it left, in order, and the notes restore all of it.
//!
//! Memory: nothing for SGLang. For counts and groups one entry of 16 bytes, as much
//! again for room, for each block, tier and group, at most [`ENTRIES_MAX`] in all; blocks
//! past it are read as a set and told of.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use nohash_hasher::NoHashHasher;

use super::chunker::Chunker;
use super::event::{Change, Dialect, Event, FULL, GroupKind, MAMBA, SWA};
use crate::pb::TierType as Tier;

/// Most entries: blocks at a tier and in a group.
pub const ENTRIES_MAX: usize = 8 * 1024 * 1024;

/// Most groups at all tiers; models have a handful.
const PLACES_MAX: usize = 256;

/// How a stream's stores and removals are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reading {
    /// By what arrives: a count for vLLM, else a set.
    #[default]
    Auto,
    /// One removal takes a block away.
    Set,
    /// As many removals as stores take it away.
    Count,
}

type Counts = HashMap<i64, u32, BuildHasherDefault<NoHashHasher<i64>>>;

/// A change of what is known of copies, as the value that it left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// Nothing is held.
    Cleared,
    /// The stream's engine was recognised.
    Seen(Dialect),
    /// A group is of this kind.
    Kind(u32, GroupKind),
    /// How many copies there are of a block at a place; 0 for none.
    Copies { tier: Tier, group: Option<u32>, block_tokens: u32, hash: i64, count: u32 },
}

#[derive(Debug)]
struct Place {
    tier: Tier,
    group: Option<u32>,
    block_tokens: u32,
    counts: Counts,
}

/// Copies of one stream's blocks.
#[derive(Debug)]
pub struct Copies {
    reading: Reading,
    seen: Option<Dialect>,
    /// Whether the worker's spec has components.
    components: bool,
    places: Vec<Place>,
    kinds: Vec<(u32, GroupKind)>,
    entries: usize,
    entries_max: usize,
    overflows: u64,
    /// Changes since they were last taken, where they are asked for.
    notes: Option<Vec<Note>>,
}

impl Copies {
    /// Nothing is held; `components` when the worker's spec has some.
    pub fn new(reading: Reading, components: bool) -> Self {
        Copies::with_max(reading, components, ENTRIES_MAX)
    }

    /// With another bound: for tests.
    #[doc(hidden)]
    pub fn with_max(reading: Reading, components: bool, entries_max: usize) -> Self {
        let (seen, places, kinds) = (None, Vec::new(), Vec::new());
        Copies {
            reading,
            seen,
            components,
            places,
            kinds,
            entries: 0,
            entries_max,
            overflows: 0,
            notes: None,
        }
    }

    /// Notes changes from now on.
    pub(super) fn note_changes(&mut self) {
        self.notes = Some(Vec::new());
    }

    /// Whether changes are noted.
    pub(super) fn notes_changes(&self) -> bool {
        self.notes.is_some()
    }

    /// The changes since this was last asked.
    pub(super) fn take_notes(&mut self) -> Vec<Note> {
        self.notes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Notes that make these copies of none.
    pub(super) fn all_notes(&self) -> impl Iterator<Item = Note> {
        let seen = self.seen.map(Note::Seen);
        let kinds = self.kinds.iter().map(|(group, kind)| Note::Kind(*group, *kind));
        let copies = self.places.iter().flat_map(|Place { tier, group, block_tokens, counts }| {
            let (tier, group, block_tokens) = (*tier, *group, *block_tokens);
            counts.iter().map(move |(hash, count)| Note::Copies {
                tier,
                group,
                block_tokens,
                hash: *hash,
                count: *count,
            })
        });
        seen.into_iter().chain(kinds).chain(copies)
    }

    /// Makes a change that was noted; what is past a bound is left out.
    pub(super) fn restore(&mut self, note: Note) {
        match note {
            Note::Cleared => self.clear(),
            Note::Seen(dialect) => self.see(Some(dialect)),
            Note::Kind(group, kind) => self.learn(group, kind),
            Note::Copies { tier, group, block_tokens, hash, count } => {
                let Some(at) = self.place(tier, group) else { return };
                let is_full = self.entries >= self.entries_max;
                let Some(place) = self.places.get_mut(at) else { return };
                place.block_tokens = block_tokens;
                if count == 0 {
                    self.entries -= usize::from(place.counts.remove(&hash).is_some());
                } else if let Some(known) = place.counts.get_mut(&hash) {
                    *known = count;
                } else if !is_full {
                    place.counts.insert(hash, count);
                    self.entries += 1;
                }
            }
        }
    }

    /// Makes a change as if an event had made it: for tests.
    #[cfg(test)]
    pub(super) fn restore_noted(&mut self, note: Note) {
        let kinds = self.kinds.len();
        self.restore(note);
        if self.kinds.len() == kinds {
            self.note(note);
        }
    }

    fn note(&mut self, note: Note) {
        if let Some(notes) = &mut self.notes {
            notes.push(note);
        }
    }

    fn learn(&mut self, group: u32, kind: GroupKind) {
        if !self.kinds.iter().any(|(known, _)| *known == group) && self.kinds.len() < PLACES_MAX {
            self.kinds.push((group, kind));
            self.note(Note::Kind(group, kind));
        }
    }

    /// The reading in force.
    pub fn reading(&self) -> Reading {
        match (self.reading, self.seen) {
            (Reading::Auto, Some(Dialect::Vllm)) => Reading::Count,
            (Reading::Auto, _) => Reading::Set,
            (told, _) => told,
        }
    }

    /// Blocks that were not followed, as too many were.
    pub fn overflows(&self) -> u64 {
        self.overflows
    }

    /// Takes note of the engine that an event is of. The first one seen counts.
    pub fn see(&mut self, dialect: Option<Dialect>) {
        if let (None, Some(recognised)) = (self.seen, dialect) {
            self.seen = dialect;
            self.note(Note::Seen(recognised));
            if self.reading() == Reading::Set {
                self.places.retain(|place| place.group.is_some());
                self.entries = self.places.iter().map(|place| place.counts.len()).sum();
            }
        }
    }

    /// Nothing is held any more.
    pub fn clear(&mut self) {
        // Groups keep their kinds: they are the model's. What a cache once took is given back.
        if !self.places.is_empty() {
            self.note(Note::Cleared);
        }
        self.places.clear();
        self.entries = 0;
    }

    /// Pushes what an event changes.
    pub fn apply(&mut self, event: &Event, hashes: impl Iterator<Item = i64>, changes: &mut Chunker) {
        if let (Some(group), Some(kind)) = (event.group, event.kind) {
            self.learn(group, kind);
        }
        let follows = event.group.is_some()
            || self.reading() == Reading::Count
            || (self.reading == Reading::Auto && self.seen.is_none());
        match event.change {
            Change::Stored { tier, mask, block_tokens } if follows => {
                self.store(event, tier, mask, block_tokens, hashes, changes);
            }
            Change::Removed { tier } if follows => self.remove(event, tier, hashes, changes),
            Change::Stored { tier, mask, block_tokens } => changes.report(tier, mask, block_tokens, hashes),
            Change::Removed { tier } => changes.revoke(tier, hashes),
            Change::Cleared => self.clear(),
        }
    }

    fn store(
        &mut self,
        event: &Event,
        tier: Tier,
        mask: u32,
        block_tokens: u32,
        hashes: impl Iterator<Item = i64>,
        changes: &mut Chunker,
    ) {
        let counts = self.reading() == Reading::Count || event.group.is_none();
        let place = self.place(tier, event.group);
        for hash in hashes {
            match place.and_then(|at| self.places.get_mut(at)) {
                Some(place) => {
                    place.block_tokens = block_tokens;
                    let count = match place.counts.get_mut(&hash) {
                        Some(count) => {
                            *count = if counts { count.saturating_add(1) } else { 1 };
                            Some(*count)
                        }
                        None if self.entries < self.entries_max => {
                            place.counts.insert(hash, 1);
                            self.entries += 1;
                            Some(1)
                        }
                        None => None,
                    };
                    match count {
                        Some(count) => {
                            let group = event.group;
                            self.note(Note::Copies { tier, group, block_tokens, hash, count });
                        }
                        None => self.overflows += 1,
                    }
                }
                None => self.overflows += 1,
            }
            if event.group.is_none() {
                changes.report(tier, mask, block_tokens, std::iter::once(hash));
            } else if let Some(mask) = self.left(tier, hash) {
                changes.report(tier, mask, block_tokens, std::iter::once(hash));
            }
        }
    }

    fn remove(
        &mut self,
        event: &Event,
        tier: Tier,
        hashes: impl Iterator<Item = i64>,
        changes: &mut Chunker,
    ) {
        let counts = self.reading() == Reading::Count;
        let place = self.places.iter().position(|place| (place.tier, place.group) == (tier, event.group));
        let block_tokens = place.and_then(|at| self.places.get(at)).map_or(0, |place| place.block_tokens);
        for hash in hashes {
            if let Some(place) = place.and_then(|at| self.places.get_mut(at))
                && let Some(count) = place.counts.get_mut(&hash)
            {
                let left = if counts { *count - 1 } else { 0 };
                if left > 0 {
                    *count = left;
                } else {
                    place.counts.remove(&hash);
                    self.entries -= 1;
                }
                self.note(Note::Copies { tier, group: event.group, block_tokens, hash, count: left });
                if left > 0 {
                    continue;
                }
            }
            match self.left(tier, hash) {
                Some(_) if !self.components => {}
                Some(mask) => changes.report(tier, mask, block_tokens, std::iter::once(hash)),
                None => changes.revoke(tier, std::iter::once(hash)),
            }
        }
    }

    /// The mask of a block's placement over all groups that hold it, `None` when there is none.
    fn left(&self, tier: Tier, hash: i64) -> Option<u32> {
        let (mut mask, mut held, mut whole) = (0, false, false);
        let places = self.places.iter().filter(|place| place.tier == tier);
        for place in places.filter(|place| place.counts.contains_key(&hash)) {
            held = true;
            match place.group.map(|group| self.kind(group)) {
                None => whole = true,
                Some(Some(kind)) => mask |= component(kind),
                // A group whose kind was never told is thought the only one of its model.
                Some(None) => mask |= FULL,
            }
        }
        if !held {
            return None;
        }
        if whole {
            return Some(0);
        }
        if self.components {
            return (mask != 0).then_some(mask);
        }
        let has_full = self.kinds.iter().any(|(_, kind)| *kind == GroupKind::Full);
        (mask & FULL != 0 || !has_full).then_some(0)
    }

    fn kind(&self, group: u32) -> Option<GroupKind> {
        self.kinds.iter().find(|(known, _)| *known == group).map(|(_, kind)| *kind)
    }

    fn place(&mut self, tier: Tier, group: Option<u32>) -> Option<usize> {
        let found = self.places.iter().position(|place| (place.tier, place.group) == (tier, group));
        if found.is_none() && self.places.len() < PLACES_MAX {
            self.places.push(Place { tier, group, block_tokens: 0, counts: Counts::default() });
            return Some(self.places.len() - 1);
        }
        found
    }
}

fn component(kind: GroupKind) -> u32 {
    match kind {
        GroupKind::Full => FULL,
        GroupKind::SlidingWindow => SWA,
        GroupKind::Mamba => MAMBA,
        GroupKind::Other => 0,
    }
}
