//! Departures: who leaves a chain, and where.
//!
//! A chain that many workers hold, each to another depth, goes through as many placement sets,
//! and each is the one before it less a worker. To weigh set against set costs a scan more than
//! the blocks between them. So it asks for a list of who departs where, which is made when it is
//! first asked for and kept: a scan whose candidates are the set's holders copies it into its answer.
//!
//! A worker departs where the set before has placements of it and the set after none. At an edge that is
//! listed at most [`AT_ONCE`] workers do, and all other placements stay. Others may come: that changes
//! nothing for a candidate of which only the length of its prefix is asked, and is noted for the rest. At any
//! other edge, at one of a free slot and at those beyond [`LISTED_MAX`] departures of a section, sets have to be
//! weighed.
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
use super::sets::{Entry, Sets};

/// Slots of a section. More make a list longer than is made anew when one of them changes, fewer
/// make a scan ask more often.
const SECTION_SLOTS: usize = 256;
const SECTIONS: usize = CHUNK_SLOTS / SECTION_SLOTS;

/// Most workers that depart at one edge: to weigh the sets costs as much as to list more.
const AT_ONCE: usize = 4;

/// Most departures of a section: a list takes at most 8.4 bytes for each slot.
const LISTED_MAX: usize = SECTION_SLOTS;

/// Most entries of the sets at an edge that is listed.
const ENTRIES_MAX: usize = 64;

/// A list is made for a scan that meets so many edges in the section, and one in so many of all that it has.
const WORTH_LISTING: usize = 4;
const WORTH_LISTING_SHARE: usize = 8;

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
    weigh: SectionBits,
    /// Those of the others at which somebody comes.
    arrivals: SectionBits,
}

/// One bit for each slot of a section.
type SectionBits = [u64; SECTION_SLOTS / 64];

/// What departs on the way through a section, up to an edge at which more happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leg<'a> {
    /// Their slots are those of the chunk.
    pub(crate) departures: &'a [Departure],
    /// Up to where it leads: a slot of the chunk, or a place of the lane if a lane says it.
    pub(crate) to: usize,
    pub(crate) stop: Stop,
    /// Where sets have to be weighed, up to where they have to at every edge: behind this one, or the end of
    /// what is not listed.
    pub(crate) until: usize,
}

/// What ends a leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The section does, or what was asked for.
    End,
    /// An edge at which somebody comes.
    Arrival,
    /// One at which sets have to be weighed.
    Weigh,
}

/// What a list says of an edge.
enum Edge {
    Departures,
    Arrivals,
    Weigh,
}

/// The lists of a chunk that were asked for and still hold.
#[derive(Debug, Default)]
pub(super) struct Sections(OnceLock<Box<[OnceLock<Box<Departures>>; SECTIONS]>>);

impl Sections {
    pub(super) fn bytes(&self) -> usize {
        let Some(sections) = self.0.get() else { return 0 };
        let lists = sections.iter().filter_map(OnceLock::get);
        let bytes = |list: &Departures| size_of::<Departures>() + size_of_val(&*list.listed);
        size_of_val(&**sections) + lists.map(|list| bytes(list)).sum::<usize>()
    }
}

impl Chunk {
    /// The leg from slot `from` to at most `to`, and the end of the section in which it meets an edge; an
    /// arrival ends it if `arrivals` says so.
    #[inline]
    pub(super) fn leg(&self, from: usize, to: usize, arrivals: bool, sets: &Sets) -> Leg<'_> {
        let edge = bits::next(from, to, |word| self.marks[word].edge);
        if edge == to {
            return Leg { departures: &[], to, stop: Stop::End, until: to };
        }
        let section = edge / SECTION_SLOTS;
        let to = to.min((section + 1) * SECTION_SLOTS);
        let known = self.sections.0.get().and_then(|sections| sections[section].get()).map(Box::as_ref);
        match known.or_else(|| self.list(section, edge, to, sets)) {
            Some(departures) => departures.leg(section, from, to, arrivals),
            None => Leg { departures: &[], to: edge, stop: Stop::Weigh, until: to },
        }
    }

    /// Lists the departures of a section if it has edges enough in `from..to`.
    #[inline(never)]
    fn list(&self, section: usize, from: usize, to: usize, sets: &Sets) -> Option<&Departures> {
        let edges = |from, to| bits::count_range(from, to, |word| self.marks[word].edge);
        let met = edges(from, to);
        let first = section * SECTION_SLOTS;
        if met < WORTH_LISTING || met * WORTH_LISTING_SHARE < edges(first, first + SECTION_SLOTS) {
            return None;
        }
        // Two that made it at once have made the same.
        let listed = Box::new(Departures::of(self, section, sets));
        let sections = self.sections.0.get_or_init(|| Box::new([const { OnceLock::new() }; SECTIONS]));
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

    /// The first slot of a section whose list is another than would be made now.
    pub(super) fn audit_departures(&self, sets: &Sets) -> Option<usize> {
        let differs = |(section, list): (usize, &OnceLock<Box<Departures>>)| {
            list.get().is_some_and(|list| **list != Departures::of(self, section, sets))
        };
        let section = self.sections.0.get()?.iter().enumerate().position(differs)?;
        Some(section * SECTION_SLOTS)
    }
}

impl Departures {
    fn of(chunk: &Chunk, section: usize, sets: &Sets) -> Departures {
        let first = section * SECTION_SLOTS;
        let mut listed = Vec::with_capacity(SECTION_SLOTS);
        let (mut weigh, mut arrivals) = (SectionBits::default(), SectionBits::default());
        // The set before an edge is the one after the last.
        let mut before = sets.entries(first.checked_sub(1).map_or(SetId::EMPTY, |before| chunk.sets[before]));
        for slot in bits::ones(first, first + SECTION_SLOTS, |word| chunk.marks[word].edge) {
            let after = sets.entries(chunk.sets[slot]);
            let edge = list_edge(before, after, slot, &mut listed);
            before = after;
            let bits = match edge {
                Edge::Departures => continue,
                Edge::Arrivals => &mut arrivals,
                Edge::Weigh => &mut weigh,
            };
            bits::put(&mut bits[(slot - first) / 64], slot, true);
        }
        Departures { listed: listed.into_boxed_slice(), weigh, arrivals }
    }

    #[inline]
    fn leg(&self, section: usize, from: usize, to: usize, arrivals: bool) -> Leg<'_> {
        let first = section * SECTION_SLOTS;
        let from = from.max(first);
        let next = |bits: &SectionBits, to| bits::next(from, to, |word| bits[word - first / 64]);
        let weigh = next(&self.weigh, to);
        let stop = if arrivals { next(&self.arrivals, weigh) } else { weigh };
        let before = |slot: usize| self.listed.partition_point(|departure| (departure.slot as usize) < slot);
        let begin = if from == first { 0 } else { before(from) };
        let end = if stop == first + SECTION_SLOTS { self.listed.len() } else { before(stop) };
        let kind = match stop {
            _ if stop < weigh => Stop::Arrival,
            _ if stop < to => Stop::Weigh,
            _ => Stop::End,
        };
        Leg { departures: &self.listed[begin..end], to: stop, stop: kind, until: to.min(stop + 1) }
    }
}

/// Lists who departs between sets with these entries; nobody if they have to be weighed.
fn list_edge(before: &[Entry], after: &[Entry], slot: usize, listed: &mut Vec<Departure>) -> Edge {
    if before.is_empty() || after.is_empty() || before.len().max(after.len()) > ENTRIES_MAX {
        return Edge::Weigh;
    }
    let listed_before = listed.len();
    let told = list_aligned(before, after, slot, listed).or_else(|| list_words(before, after, slot, listed));
    let few = listed.len() - listed_before <= AT_ONCE && listed.len() <= LISTED_MAX;
    told.filter(|_| few).unwrap_or_else(|| {
        listed.truncate(listed_before);
        Edge::Weigh
    })
}

/// The same for sets with one entry to a word, which differ in nothing but bits; else `None`, nothing being listed.
fn list_aligned(before: &[Entry], after: &[Entry], slot: usize, listed: &mut Vec<Departure>) -> Option<Edge> {
    let alone = before.windows(2).all(|pair| pair[0].word() < pair[1].word());
    let apart = before.iter().zip(after).fold(0, |apart, (before, after)| apart | before.apart(*after));
    if !alone || apart != 0 || before.len() != after.len() {
        return None;
    }
    let mut come = 0;
    for (before, after) in before.iter().zip(after).rev() {
        come |= after.bits & !before.bits;
        push(before.word(), before.bits & !after.bits, slot, listed);
    }
    Some(if come == 0 { Edge::Departures } else { Edge::Arrivals })
}

/// The same for any sets; `None` if a placement goes whose worker has others after it.
fn list_words(before: &[Entry], after: &[Entry], slot: usize, listed: &mut Vec<Departure>) -> Option<Edge> {
    let (mut rest, mut stay) = (after, 0);
    for before in before.chunk_by(|left, right| left.word() == right.word()).rev() {
        let word = before[0].word();
        let above = rest.iter().rev().take_while(|entry| entry.word() > word).count();
        rest = &rest[..rest.len() - above];
        let here = rest.iter().rev().take_while(|entry| entry.word() == word).count();
        let (below, after) = rest.split_at(rest.len() - here);
        rest = below;
        let held = |entries: &[Entry]| entries.iter().fold(0, |held, entry| held | entry.bits);
        let departing = held(before) & !held(after);
        let mut later = after;
        for entry in before {
            later = &later[later.partition_point(|after| *after < entry.of(0))..];
            let same = later.first().filter(|after| after.apart(*entry) == 0).map_or(0, |after| after.bits);
            if entry.bits & !departing & !same != 0 {
                return None;
            }
            stay += usize::from(same != 0 && same & !entry.bits == 0);
        }
        push(word, departing, slot, listed);
    }
    Some(if stay == after.len() { Edge::Departures } else { Edge::Arrivals })
}

/// Lists workers of a word, given as bits, unless they are too many anyway; they count as many then.
#[inline]
fn push(word: usize, mut departing: u64, slot: usize, listed: &mut Vec<Departure>) {
    let mut most = AT_ONCE + 1;
    while let Some(bit) = departing.checked_ilog2().filter(|_| most > 0) {
        departing ^= 1 << bit;
        most -= 1;
        listed.push(Departure { worker: WorkerId(word as u32 * 64 + bit), slot: slot as u32 });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::ids::Tier;
    use super::super::mix::Mix;
    use super::super::sets::Holder;
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

        /// What legs tell of the places from `from` to before `to`, with or without a stop at each arrival.
        fn told(&self, from: usize, to: usize, arrivals: bool) -> Vec<Told> {
            let mut told: Vec<Told> = Vec::new();
            let (mut at, to) = (self.first + from, self.first + to);
            while at < to {
                let leg = self.chunk.leg(at, to, arrivals, &self.sets);
                for departures in leg.departures.chunk_by(|left, right| left.slot == right.slot) {
                    let workers = departures.iter().map(|departure| departure.worker.0).collect();
                    told.push((departures[0].slot as usize - self.first, Some(workers)));
                }
                assert!(arrivals || leg.stop != Stop::Arrival);
                let stops = leg.stop != Stop::End;
                if stops {
                    told.push((leg.to - self.first, None));
                }
                at = leg.to + usize::from(stops);
            }
            told
        }

        /// The same from who holds what.
        fn expected(&self, from: usize, to: usize, arrivals: bool) -> Vec<Told> {
            let edges = (from..to).filter_map(|place| {
                let before = place.checked_sub(1).map_or(&[][..], |before| &self.held[before]);
                let after = &self.held[place];
                let gone = without(before, after);
                let gone: Vec<u32> = gone.into_iter().rev().collect();
                let words =
                    |held: &[u32]| held.iter().map(|worker| worker / 64).collect::<BTreeSet<_>>().len();
                let stops = before.is_empty()
                    || after.is_empty()
                    || gone.len() > 4
                    || words(before).max(words(after)) > 64
                    || arrivals && !without(after, before).is_empty();
                (before != after && (stops || !gone.is_empty())).then(|| (place, (!stops).then_some(gone)))
            });
            edges.collect()
        }

        fn assert_told(&self) {
            let blocks = self.held.len();
            for (from, to) in [(0, blocks), (1, blocks), (0, blocks - 1), (blocks / 3, blocks / 2)] {
                for arrivals in [true, false] {
                    let (told, expected) = (self.told(from, to, arrivals), self.expected(from, to, arrivals));
                    assert_eq!(told, expected, "{from}..{to}, stops at arrivals: {arrivals}");
                }
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
        assert!(chain.told(1, 60, true).iter().all(|(_, gone)| gone.is_some()));
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
        // Whose placement goes while another stays, or comes, has not departed: 65 at place 1, 2 at 7 and 8.
        let (one, three) = (Some(vec![1]), Some(vec![65, 3, 1]));
        let stops = [(0, None), (1, None), (7, None), (8, None)];
        let told = |more: &[Told]| {
            let mut told = [&stops[..], &[(3, one.clone()), (5, three.clone())], more].concat();
            told.sort_unstable_by_key(|(place, _)| *place);
            told
        };
        assert_eq!(chain.told(0, 10, true), told(&[(2, None), (4, None), (6, None), (9, None)]));
        assert_eq!(chain.told(0, 10, false), told(&[(9, Some(vec![65]))]));
    }

    #[test]
    fn a_section_lists_no_more_than_has_room() {
        let all: Vec<u32> = (0..1_024).collect();
        let held: Vec<Vec<u32>> = (0..250).map(|gone| all[..1_024 - gone * 4].to_vec()).collect();
        let told = Chain::new(SECTION_SLOTS, held).told(1, 250, true);
        let listed = told.iter().take_while(|(_, gone)| gone.as_ref().is_some_and(|gone| gone.len() == 4));
        assert_eq!(listed.count() * 4, LISTED_MAX);
        assert!(told[LISTED_MAX / 4..].iter().all(|(_, gone)| gone.is_none()));
        assert_eq!(told.len(), 249);
    }

    #[test]
    fn a_few_edges_are_weighed_until_somebody_asks_for_more() {
        let held = [vec![1, 2, 3], vec![1, 2], vec![1], vec![1, 2], vec![2], vec![2, 3], vec![2]];
        let chain = Chain::new(7, held.to_vec());
        let bytes = chain.chunk.bytes();
        let weighed = |to| (1..to).map(|place| (place, None)).collect::<Vec<Told>>();
        assert_eq!(chain.told(1, WORTH_LISTING, true), weighed(WORTH_LISTING));
        assert_eq!(chain.chunk.bytes(), bytes);
        assert_eq!(chain.told(1, 7, true), chain.expected(1, 7, true));
        assert!(chain.chunk.bytes() > bytes, "lists are counted");
        assert_eq!(chain.told(1, WORTH_LISTING, true), chain.expected(1, WORTH_LISTING, true));
    }

    #[test]
    fn a_small_share_of_a_sections_edges_is_weighed() {
        let all: Vec<u32> = (0..80).collect();
        let chain = Chain::new(0, (0..64).map(|gone| all[gone..].to_vec()).collect());
        let weighed = |to| (1..to).map(|place| (place, None)).collect::<Vec<Told>>();
        // There is an edge at each of the 64 slots, and one behind them.
        assert_eq!(chain.told(1, 9, true), weighed(9));
        assert_eq!(chain.told(1, 10, true), chain.expected(1, 10, true));
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
