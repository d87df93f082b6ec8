//! Departures: who leaves a chain, and where.
//!
//! A chain that many workers hold, each to another depth, goes through as many placement sets,
//! and each is the one before it less a worker. To weigh set against set costs a scan more than
//! the blocks between them. So it asks for a list of who departs where, which is made when it is
//! first asked for and kept: a scan whose candidates are the set's holders copies it into its answer.
//!
//! A worker departs where the set before has placements of it and the set after none. At an edge that is
//! listed at most [`AT_ONCE`] workers do, and all else is as before. At any other edge, at one of a
//! free slot and at those beyond [`LISTED_MAX`] departures of a section, sets have to be weighed.
//!
//! A list is of a *section*, 256 slots, and says nothing but what the sets of these slots and of
//! the one before them say. Whatever changes one of them, its id in the column or its entries
//! where they stand, forgets the list. Lists are made by readers, which own nothing, so each stands in
//! a cell that is written once; writers, which own everything, empty it.

use std::sync::OnceLock;

use super::bits;
use super::blocks::CHUNK_SLOTS;
use super::chunk::Chunk;
use super::ids::{SetId, WorkerId};
use super::sets::Entry;

/// Slots of a section. More make a list longer than is made anew when one of them changes, fewer
/// make a scan ask more often.
const SECTION_SLOTS: usize = 256;
const SECTIONS: usize = CHUNK_SLOTS / SECTION_SLOTS;

/// Most workers that depart at one edge: to weigh the sets costs as much as to list more.
const AT_ONCE: u32 = 4;

/// Most departures of a section, 8 bytes for each of its slots.
const LISTED_MAX: usize = SECTION_SLOTS;

/// Most entries of the sets at an edge that is listed.
const ENTRIES_MAX: usize = 64;

/// A list is made for a scan that meets so many edges in the section.
const WORTH_LISTING: usize = 4;

/// That a worker holds no block of a chain from a slot on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Departure {
    pub(crate) worker: WorkerId,
    /// Of its chunk.
    pub(crate) slot: u32,
}

/// The departures of a section.
#[derive(Debug, PartialEq, Eq)]
struct Departures {
    /// Ascending by slot, those of one slot descending by worker.
    listed: Box<[Departure]>,
    /// The edges at which sets have to be weighed, as bits of the section's slots.
    others: [u64; SECTION_SLOTS / 64],
}

/// What departs on the way through a section, up to a place where sets have to be weighed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leg<'a> {
    pub(crate) departures: &'a [Departure],
    /// The slot to which it leads, and whether sets have to be weighed there.
    pub(crate) to: usize,
    pub(crate) weigh: bool,
}

/// The lists of a chunk that were asked for and still hold.
#[derive(Debug, Default)]
pub(super) struct Sections(OnceLock<Box<[OnceLock<Box<Departures>>; SECTIONS]>>);

impl Sections {
    fn bytes(&self) -> usize {
        let Some(sections) = self.0.get() else { return 0 };
        let lists = sections.iter().filter_map(OnceLock::get);
        let bytes = |list: &Departures| size_of::<Departures>() + size_of_val(&*list.listed);
        size_of_val(&**sections) + lists.map(|list| bytes(list)).sum::<usize>()
    }
}

impl Chunk {
    /// The leg from slot `from` to at most `to`, and the end of the section in which it meets an edge.
    #[inline]
    pub(super) fn leg<'e>(&self, from: usize, to: usize, entries: impl Fn(SetId) -> &'e [Entry]) -> Leg<'_> {
        let edge = bits::next(from, to, |word| self.marks[word].edge);
        if edge == to {
            return Leg { departures: &[], to, weigh: false };
        }
        let section = edge / SECTION_SLOTS;
        let to = to.min((section + 1) * SECTION_SLOTS);
        let known = self.sections.0.get().and_then(|sections| sections[section].get()).map(Box::as_ref);
        match known.or_else(|| self.list(section, edge, to, entries)) {
            Some(departures) => departures.leg(section, from, to),
            None => Leg { departures: &[], to: edge, weigh: true },
        }
    }

    /// Lists the departures of a section if it has edges enough in `from..to`.
    #[inline(never)]
    fn list<'e>(
        &self,
        section: usize,
        from: usize,
        to: usize,
        entries: impl Fn(SetId) -> &'e [Entry],
    ) -> Option<&Departures> {
        bits::ones(from, to, |word| self.marks[word].edge).nth(WORTH_LISTING - 1)?;
        let listed = Box::new(Departures::of(self, section, entries));
        let sections = self.sections.0.get_or_init(|| Box::new([const { OnceLock::new() }; SECTIONS]));
        // Two that made it at once have made the same; neither waits for the other.
        Some(sections[section].get_or_init(|| listed))
    }

    /// Forgets what the sets of the slots `from..to` said.
    #[inline]
    pub(super) fn forget_departures(&mut self, from: usize, to: usize) {
        if self.sections.0.get().is_some() {
            self.forget_sections(from, to);
        }
    }

    /// The same of a chunk with lists.
    #[inline(never)]
    fn forget_sections(&mut self, from: usize, to: usize) {
        if let Some(sections) = self.sections.0.get_mut() {
            // Who departs behind them depends on their last.
            for section in &mut sections[from / SECTION_SLOTS..=(to / SECTION_SLOTS).min(SECTIONS - 1)] {
                section.take();
            }
        }
    }

    /// Bytes of its lists.
    pub(super) fn departure_bytes(&self) -> usize {
        self.sections.bytes()
    }

    /// The first slot of a section whose list is another than would be made now.
    pub(super) fn audit_departures<'e>(&self, entries: impl Fn(SetId) -> &'e [Entry]) -> Option<usize> {
        let differs = |(section, list): (usize, &OnceLock<Box<Departures>>)| {
            list.get().is_some_and(|list| **list != Departures::of(self, section, &entries))
        };
        let section = self.sections.0.get()?.iter().enumerate().position(differs)?;
        Some(section * SECTION_SLOTS)
    }
}

impl Departures {
    fn of<'e>(chunk: &Chunk, section: usize, entries: impl Fn(SetId) -> &'e [Entry]) -> Departures {
        let first = section * SECTION_SLOTS;
        let mut listed = Vec::new();
        let mut others = [0; SECTION_SLOTS / 64];
        for slot in bits::ones(first, first + SECTION_SLOTS, |word| chunk.marks[word].edge) {
            let before = slot.checked_sub(1).map_or(SetId::EMPTY, |before| chunk.sets[before]);
            if !depart(entries(before), entries(chunk.sets[slot]), slot, &mut listed) {
                bits::put(&mut others[(slot - first) / 64], slot, true);
            }
        }
        Departures { listed: listed.into_boxed_slice(), others }
    }

    #[inline]
    fn leg(&self, section: usize, from: usize, to: usize) -> Leg<'_> {
        let first = section * SECTION_SLOTS;
        let from = from.max(first);
        let stop = bits::next(from, to, |word| self.others[word - first / 64]);
        let before = |slot: usize| self.listed.partition_point(|departure| (departure.slot as usize) < slot);
        let begin = if from == first { 0 } else { before(from) };
        let end = if stop == first + SECTION_SLOTS { self.listed.len() } else { before(stop) };
        Leg { departures: &self.listed[begin..end], to: stop, weigh: stop < to }
    }
}

/// Lists who departs between sets with these entries; `false` and nobody if that is not all that they tell.
fn depart(before: &[Entry], after: &[Entry], slot: usize, listed: &mut Vec<Departure>) -> bool {
    if before.len() > ENTRIES_MAX || after.is_empty() {
        return false;
    }
    let listed_before = listed.len();
    let mut rest = after;
    let only_depart = before.chunk_by(|left, right| left.word() == right.word()).rev().all(|before| {
        let word = before[0].word();
        let after = rest.iter().rev().take_while(|entry| entry.word() == word).count();
        let (below, after) = rest.split_at(rest.len() - after);
        rest = below;
        let held = |entries: &[Entry]| entries.iter().fold(0, |held, entry| held | entry.bits);
        let mut departing = held(before) & !held(after);
        let others = before.iter().map(|entry| entry.of(entry.bits & !departing));
        let few = departing.count_ones() <= AT_ONCE;
        if !few || !others.filter(|entry| entry.bits != 0).eq(after.iter().copied()) {
            return false;
        }
        while let Some(bit) = departing.checked_ilog2() {
            departing ^= 1 << bit;
            let worker = WorkerId(word as u32 * 64 + bit);
            listed.push(Departure { worker, slot: slot as u32 });
        }
        true
    });
    let few = listed.len() - listed_before <= AT_ONCE as usize && listed.len() <= LISTED_MAX;
    if only_depart && few && rest.is_empty() {
        return true;
    }
    listed.truncate(listed_before);
    false
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::ids::Tier;
    use super::super::mix::Mix;
    use super::super::sets::{Holder, Sets};
    use super::*;

    /// A chunk, the sets that its slots have, and who holds them at HBM without components.
    struct Chain {
        sets: Sets,
        chunk: Chunk,
        held: Vec<Vec<u32>>,
        first: usize,
    }

    /// An edge, and who departs there; `None` where sets are to be weighed.
    type Told = (usize, Option<Vec<u32>>);

    impl Chain {
        /// Slots from `first` on, each held by these workers.
        fn new(first: usize, held: Vec<Vec<u32>>) -> Chain {
            let (sets, chunk) = (Sets::new(Mix::fixed()), Chunk::new());
            let mut chain = Chain { sets, chunk, held: vec![Vec::new(); held.len()], first };
            held.into_iter().enumerate().for_each(|(place, held)| chain.put(place, held));
            chain
        }

        fn put(&mut self, place: usize, held: Vec<u32>) {
            let holders: Vec<(u32, Tier)> = held.iter().map(|worker| (*worker, Tier::Hbm)).collect();
            self.put_at(place, &holders);
            self.held[place] = held;
        }

        fn put_at(&mut self, place: usize, held: &[(u32, Tier)]) {
            let slot = self.first + place;
            let join = |set, (worker, tier): &(u32, Tier)| {
                self.sets.change(set, 1, Holder::new(WorkerId(*worker), *tier, 0), Some(0)).set
            };
            self.chunk.sets[slot] = held.iter().fold(SetId::EMPTY, join);
            self.chunk.mend_edges(slot, slot + 1);
        }

        /// What legs tell of the places from `from` to before `to`.
        fn told(&self, from: usize, to: usize) -> Vec<Told> {
            let mut told: Vec<Told> = Vec::new();
            let (mut at, to) = (self.first + from, self.first + to);
            while at < to {
                let leg = self.chunk.leg(at, to, |set| self.sets.entries(set));
                for departures in leg.departures.chunk_by(|left, right| left.slot == right.slot) {
                    let workers = departures.iter().map(|departure| departure.worker.0).collect();
                    told.push((departures[0].slot as usize - self.first, Some(workers)));
                }
                if leg.weigh {
                    told.push((leg.to - self.first, None));
                }
                at = leg.to + usize::from(leg.weigh);
            }
            told
        }

        /// The same from who holds what.
        fn expected(&self, from: usize, to: usize) -> Vec<Told> {
            let edges = (from..to).filter_map(|place| {
                let before = place.checked_sub(1).map_or(&[][..], |before| &self.held[before]);
                let after = &self.held[place];
                let gone: Vec<u32> =
                    before.iter().rev().filter(|worker| !after.contains(worker)).copied().collect();
                let nobody_comes = after.iter().all(|worker| before.contains(worker));
                let words: BTreeSet<u32> = before.iter().map(|worker| worker / 64).collect();
                let listed = nobody_comes && !after.is_empty() && gone.len() <= 4 && words.len() <= 64;
                (before != after).then(|| (place, listed.then_some(gone)))
            });
            edges.collect()
        }

        fn assert_told(&self) {
            let blocks = self.held.len();
            for (from, to) in [(0, blocks), (1, blocks), (0, blocks - 1), (blocks / 3, blocks / 2)] {
                assert_eq!(self.told(from, to), self.expected(from, to), "{from}..{to}");
            }
        }
    }

    /// The workers of `held` without these.
    fn without(held: &[u32], gone: &[u32]) -> Vec<u32> {
        held.iter().filter(|worker| !gone.contains(worker)).copied().collect()
    }

    #[test]
    fn legs_tell_of_everybody_who_departs_along_sections() {
        let all: Vec<u32> = (0..200).collect();
        // One after another, in turn from each word, then several at once.
        let mut held = vec![all];
        for round in 0..60 {
            let last = &held[held.len() - 1];
            let one = without(last, &[last[round * 7 % last.len()]]);
            held.extend([one.clone(), one.clone(), without(&one, &one[3..3 + round % 3])]);
        }
        for first in [0, 100, SECTION_SLOTS - 1, SECTION_SLOTS, CHUNK_SLOTS - held.len()] {
            Chain::new(first, held.clone()).assert_told();
        }
    }

    #[test]
    fn words_that_lose_their_last_worker_are_told_of() {
        let all: Vec<u32> = (0..64).map(|word| word * 64 + 5).collect();
        let held: Vec<Vec<u32>> = (0..60).map(|gone| without(&all, &all[64 - gone..])).collect();
        let chain = Chain::new(10, held);
        chain.assert_told();
        assert!(chain.told(1, 60).iter().all(|(_, gone)| gone.is_some()));
    }

    #[test]
    fn where_more_happens_than_few_departures_sets_are_weighed() {
        let all: Vec<u32> = (0..140).collect();
        let mut held = vec![all.clone()];
        for gone in [&[3, 70, 71, 139][..], &[1, 2, 3, 4, 5], &[], &[0], &(0..64).collect::<Vec<_>>(), &[]] {
            held.extend([without(&all, gone), all.clone(), without(&all, &[7])]);
        }
        held.extend([
            vec![],
            vec![7],
            vec![],
            vec![7, 8],
            vec![8],
            vec![1],
            vec![65],
            vec![64, 65],
            vec![64],
        ]);
        Chain::new(SECTION_SLOTS - 9, held).assert_told();
        let wide: Vec<u32> = (0..70).map(|word| word * 64).collect();
        Chain::new(0, (0..20).map(|gone| without(&wide, &wide[70 - gone..])).collect()).assert_told();
    }

    #[test]
    fn who_stays_at_another_tier_does_not_depart() {
        let [hbm, dram] = [Tier::Hbm, Tier::Dram];
        let all = [(1, hbm), (2, hbm), (3, dram), (65, hbm), (1, dram), (65, dram)];
        let mut chain = Chain::new(0, vec![Vec::new(); 10]);
        let others: [&[(u32, Tier)]; 5] = [
            &all[..4],
            &[(2, hbm), (3, dram), (65, hbm), (65, dram)],
            &[(2, hbm)],
            &[(1, hbm), (2, dram), (3, dram), (65, hbm), (1, dram), (65, dram)],
            &[(1, hbm), (2, hbm), (3, dram), (1, dram), (66, hbm)],
        ];
        for (number, others) in others.into_iter().enumerate() {
            chain.put_at(2 * number, &all);
            chain.put_at(2 * number + 1, others);
        }
        let gone = [None, Some(vec![1]), Some(vec![65, 3, 1]), None, None];
        let told = |(number, gone)| [(2 * number, None), (2 * number + 1, gone)];
        let expected: Vec<Told> = gone.into_iter().enumerate().flat_map(told).collect();
        assert_eq!(chain.told(0, 10), expected);
    }

    #[test]
    fn a_section_lists_no_more_than_has_room() {
        let all: Vec<u32> = (0..1_024).collect();
        let held: Vec<Vec<u32>> = (0..250).map(|gone| all[..1_024 - gone * 4].to_vec()).collect();
        let told = Chain::new(SECTION_SLOTS, held).told(1, 250);
        let listed = told.iter().take_while(|(_, gone)| gone.as_ref().is_some_and(|gone| gone.len() == 4));
        assert_eq!(listed.count() * 4, LISTED_MAX);
        assert!(told[LISTED_MAX / 4..].iter().all(|(_, gone)| gone.is_none()));
        assert_eq!(told.len(), 249);
    }

    #[test]
    fn a_few_edges_are_weighed_until_somebody_asks_for_more() {
        let held = [vec![1, 2, 3], vec![1, 2], vec![1], vec![1, 2], vec![2], vec![2, 3], vec![2]];
        let chain = Chain::new(7, held.to_vec());
        let weighed = |to| (1..to).map(|place| (place, None)).collect::<Vec<Told>>();
        assert_eq!(chain.told(1, WORTH_LISTING), weighed(WORTH_LISTING));
        assert_eq!(chain.chunk.departure_bytes(), 0);
        assert_eq!(chain.told(1, 7), chain.expected(1, 7));
        assert!(chain.chunk.departure_bytes() > 0);
        assert_eq!(chain.told(1, WORTH_LISTING), chain.expected(1, WORTH_LISTING));
    }

    #[test]
    fn whatever_changes_at_an_edge_is_told_of() {
        let all: Vec<u32> = (0..80).collect();
        let held: Vec<Vec<u32>> = (0..70).map(|gone| all[gone..].to_vec()).collect();
        // Within a section, and on both sides of where one begins.
        for place in [0, 1, 34, 35, 36, 68, 69] {
            let mut chain = Chain::new(SECTION_SLOTS - 35, held.clone());
            chain.assert_told();
            for gone in [&[79][..], &[70, 79], &[]] {
                chain.put(place, without(&held[place], gone));
                chain.assert_told();
            }
        }
    }
}
