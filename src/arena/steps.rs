//! Steps: who leaves from one placement set to the next along a chain.
//!
//! A chain that many workers hold, each to another depth, goes through as many sets,
//! and each is the one before it less one worker. A scan that has weighed two such
//! sets remembers in the latter who that is, so that the next scan need not look at
//! the entries of either. The step is told by the stamp of the set before, which no
//! other set ever had and which goes with any change of entries; it is forgotten when the
//! set that it leads to changes. So a step that is found is true.

use std::sync::atomic::{AtomicU64, Ordering};

use super::sets::Entry;

/// What no other set ever had, and a set has no more once its entries change: a multiple of
/// [`Stamp::EACH`]. 0 is no set's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Stamp(u64);

impl Stamp {
    /// Between two stamps; below it a step has room for its leaver.
    const EACH: u64 = 1 << 14;

    /// The next stamp.
    pub(super) fn next(self) -> Stamp {
        // Of 2^50 the last is not given in years of nothing but new sets.
        Stamp(self.0 + Stamp::EACH)
    }
}

/// The one worker that leaves from a set to the next, or that nobody or more than one do.
///
/// By bits: the worker's in its entry, the place of the entry among those of the set before,
/// and whether the entry goes too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leaver(u64);

impl Leaver {
    /// Entries among which a leaver can be named.
    pub(crate) const PLACES: usize = 64;
    const NOBODY: Leaver = Leaver((Leaver::PLACES as u64) << 6);
    const SEVERAL: Leaver = Leaver((Leaver::PLACES as u64 + 1) << 6);
    const ENTRY_GOES: u64 = Stamp::EACH >> 1;

    /// Who leaves from a set with these entries to the next.
    fn of(before: &[Entry], entries: &[Entry]) -> Leaver {
        if before.len() > Leaver::PLACES {
            return Leaver::SEVERAL;
        }
        let mut leaver = Leaver::NOBODY;
        let mut next = entries.iter().peekable();
        for (place, before) in before.iter().enumerate() {
            let same = next.next_if(|entry| entry.apart(*before) == 0);
            let left = before.bits & !same.map_or(0, |entry| entry.bits);
            if left == 0 {
                continue;
            }
            if leaver != Leaver::NOBODY || !left.is_power_of_two() {
                return Leaver::SEVERAL;
            }
            let goes = if same.is_none() { Leaver::ENTRY_GOES } else { 0 };
            leaver = Leaver(goes | (place as u64) << 6 | u64::from(left.trailing_zeros()));
        }
        if next.next().is_none() { leaver } else { Leaver::SEVERAL }
    }

    /// Whether more than one worker leaves, or an entry stands in the next set that is about another
    /// workers' word, tier, generation or mask.
    #[inline]
    pub(crate) fn is_several(self) -> bool {
        self == Leaver::SEVERAL
    }

    /// The place of the leaver's entry; that of no entry if not one worker leaves.
    #[inline]
    pub(crate) fn place(self) -> usize {
        ((self.0 & !Leaver::ENTRY_GOES) >> 6) as usize
    }

    /// The leaver's bit in its entry.
    #[inline]
    pub(crate) fn bit(self) -> u32 {
        (self.0 & 63) as u32
    }

    /// Whether its entry has no other worker, and so is none of the next set's.
    #[inline]
    pub(crate) fn takes_entry(self) -> bool {
        self.0 & Leaver::ENTRY_GOES != 0
    }
}

/// Where no step is remembered: of a stamp that is never given.
const NO_STEP: u64 = !0;

/// What a scan knows of a set without its entries: its stamp and one step to it.
#[derive(Debug)]
pub(crate) struct Stamped {
    stamp: Stamp,
    /// Stamp of the set before plus [`Leaver`], or [`NO_STEP`].
    step: AtomicU64,
}

impl Stamped {
    /// What stands where there is no set.
    pub(super) const fn none() -> Self {
        Stamped::new(Stamp(0))
    }

    pub(super) const fn new(stamp: Stamp) -> Self {
        Stamped { stamp, step: AtomicU64::new(NO_STEP) }
    }

    #[inline]
    pub(crate) fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Who leaves from the set with the stamp `before` to this one, if that is remembered.
    #[inline]
    pub(crate) fn leaver(&self, before: Stamp) -> Option<Leaver> {
        let leaver = self.step.load(Ordering::Relaxed) ^ before.0;
        (leaver < Stamp::EACH).then_some(Leaver(leaver))
    }

    /// The stamp of the set from which a step is remembered, one that is never given if none is.
    pub(super) fn before(&self) -> Stamp {
        Stamp(self.step.load(Ordering::Relaxed) / Stamp::EACH * Stamp::EACH)
    }

    /// Whether the step that is remembered is that from a set with entries `left` to one with `entries`.
    pub(super) fn is_true(&self, left: &[Entry], entries: &[Entry]) -> bool {
        self.leaver(self.before()) == Some(Leaver::of(left, entries))
    }

    /// Remembers who leaves from the set `before`, with entries `left`, to this one, with `entries`.
    ///
    /// A step from another set stays, unless `replace` says otherwise: where a set follows many,
    /// readers would take its cache line from each other.
    pub(super) fn remember(&self, before: Stamp, left: &[Entry], entries: &[Entry], replace: bool) {
        if self.step.load(Ordering::Relaxed) == NO_STEP || replace && self.leaver(before).is_none() {
            self.step.store(before.0 | Leaver::of(left, entries).0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ids::{SetId, Tier, WorkerId};
    use super::super::mix::Mix;
    use super::super::sets::{Holder, Sets};
    use super::*;

    /// The entries of the set that these workers have.
    fn held_by(workers: impl IntoIterator<Item = u32>) -> Vec<Entry> {
        let mut sets = Sets::new(Mix::fixed());
        let add = |set, worker| sets.change(set, 1, Holder::new(WorkerId(worker), Tier::Hbm, 0), Some(0)).set;
        let set = workers.into_iter().fold(SetId::EMPTY, add);
        sets.entries(set).to_vec()
    }

    fn leaver(before: &[u32], after: &[u32]) -> Leaver {
        Leaver::of(&held_by(before.iter().copied()), &held_by(after.iter().copied()))
    }

    #[test]
    fn one_worker_that_leaves_is_named_up_to_the_last_place() {
        for place in 0..Leaver::PLACES as u32 {
            for others in [0, 1] {
                let all = |word: u32| (0..=others).map(move |bit| word * 64 + 5 + bit);
                let before = held_by((0..Leaver::PLACES as u32).flat_map(all));
                let left = place * 64 + 5;
                let after =
                    held_by((0..Leaver::PLACES as u32).flat_map(all).filter(|worker| *worker != left));
                let leaver = Leaver::of(&before, &after);
                let found = (leaver.place(), leaver.bit(), leaver.takes_entry(), leaver.is_several());
                assert_eq!(found, (place as usize, 5, others == 0, false));
            }
        }
    }

    #[test]
    fn among_more_entries_than_there_are_places_nobody_is_named() {
        for words in [Leaver::PLACES as u32 + 1, 300] {
            let before = held_by((0..words).map(|word| word * 64));
            for left in [0, words - 1] {
                let after = held_by((0..words).filter(|word| *word != left).map(|word| word * 64));
                assert_eq!(Leaver::of(&before, &after), Leaver::SEVERAL, "{left} of {words}");
            }
        }
    }

    #[test]
    fn who_comes_is_nobody_who_leaves_unless_an_entry_comes_too() {
        assert_eq!(leaver(&[1, 70], &[1, 2, 70]), Leaver::NOBODY);
        assert_eq!(leaver(&[1, 2, 70], &[1, 3, 70]).bit(), 2);
        for (before, after) in [
            (&[1, 70], &[1, 70, 130][..]),
            (&[1, 130], &[1, 70, 130]),
            (&[1, 70], &[1, 130]),
            (&[1, 2], &[70]),
        ] {
            assert_eq!(leaver(before, after), Leaver::SEVERAL, "{before:?} {after:?}");
        }
        assert_eq!(leaver(&[1, 2, 70], &[70]), Leaver::SEVERAL);
    }

    #[test]
    fn a_step_is_found_from_the_set_it_begins_at_and_stays_unless_replaced() {
        let [one, two] = [1, 2].map(|times| (0..times).fold(Stamp::default(), |stamp, _| stamp.next()));
        let stamped = Stamped::new(two.next());
        let [before, other, after] = [&[1, 2][..], &[1, 3], &[1]].map(|set| held_by(set.iter().copied()));
        assert_eq!(stamped.leaver(Stamp::default()), None);
        stamped.remember(one, &before, &after, false);
        let bits = |from| stamped.leaver(from).map(Leaver::bit);
        assert_eq!((bits(one), bits(two), bits(Stamp::default())), (Some(2), None, None));
        stamped.remember(two, &other, &after, false);
        assert_eq!((bits(one), bits(two)), (Some(2), None));
        stamped.remember(two, &other, &after, true);
        assert_eq!((bits(one), bits(two)), (None, Some(3)));
    }
}
