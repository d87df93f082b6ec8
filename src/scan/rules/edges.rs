//! The rules along edges at which nothing happens but that workers depart, as the arena lists them.
//!
//! One after another, a departure ends one prefix. Of several lists in a row it costs less to rank all who
//! are listed and to read the candidates that stay from the last set, where that comes to the same: where
//! everybody who holds the blocks is a candidate, and nobody's boundary depends on where the prefix ends.

use crate::arena::{Departure, Entry, FleetWord, ReadView, SetId, Slots, Stop};

use super::{Candidates, Word, has_all, place_in, worker};

/// How far a lane has been passed.
#[derive(Debug, Clone, Copy)]
pub(in crate::scan) struct Passed {
    /// Up to this place of it.
    pub(in crate::scan) place: usize,
    /// The same as a position of the request, and the tokens before it.
    pub(in crate::scan) at: usize,
    pub(in crate::scan) tokens: u64,
}

/// Who of a set's holders are candidates, where it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Unknown,
    All,
    /// Whoever departs has to be looked for.
    NotAll,
}

impl Candidates {
    /// Passes the edges of `slots` from place `from` to before `to` up to the first at which sets are to be
    /// weighed, or that settles the answer; returns that.
    ///
    /// What has been `passed` of it ends before `from`, and the place before `from` has been entered.
    #[inline(never)]
    pub(in crate::scan) fn pass_edges(
        &mut self,
        view: &ReadView,
        slots: Slots<'_>,
        from: usize,
        to: usize,
        passed: Passed,
    ) -> Option<usize> {
        if self.needs_components || self.watches {
            return self.pass_edges_by_rule(view, slots, from, to, passed);
        }
        let start = passed.at - passed.place;
        let first = (start as u32).wrapping_sub(slots.first() as u32);
        let (mut at, mut who) = (from, Who::Unknown);
        loop {
            let leg = view.leg(slots, at, to, who != Who::NotAll);
            if who == Who::Unknown && !leg.departures.is_empty() {
                let all = self.aligned == view.entries(slots.set(at - 1));
                who = if all { Who::All } else { Who::NotAll };
            }
            if who == Who::All {
                self.ranking.add_all(leg.departures, first);
            } else if let Some(last) = self.depart_some(leg.departures, first) {
                return Some(last as usize - start);
            }
            at = leg.to;
            if who == Who::All && (leg.stop != Stop::End || at == to) {
                self.aligned.clear();
                self.aligned.extend_from_slice(view.entries(slots.set(at - 1)));
                self.open = self.aligned.len();
            }
            match leg.stop {
                Stop::End if at == to => return None,
                Stop::End => {}
                Stop::Arrival => who = Who::NotAll,
                Stop::Weigh => {
                    while at < leg.until {
                        if !self.step_aligned(view.entries(slots.set(at)), start + at) || self.open == 0 {
                            return Some(at);
                        }
                        at = slots.next_edge(at + 1, leg.until);
                    }
                    who = Who::Unknown;
                }
            }
        }
    }

    /// Ends the prefixes of those who depart and are candidates of whom only the length is asked; the blocks
    /// of a match are `first` more than the slot. Gives the last one's if nobody is left.
    #[inline(never)]
    fn depart_some(&mut self, departures: &[Departure], first: u32) -> Option<u32> {
        for departure in departures {
            let (number, bit) = (departure.worker.index() / 64, departure.worker.0 % 64);
            let growing = match place_in(&self.aligned, number, |aligned| aligned.word()) {
                Some(place) => &mut self.aligned[place].bits,
                None => match place_in(&self.words, number, |word| word.number) {
                    Some(place) => &mut self.words[place].growing,
                    None => continue,
                },
            };
            if *growing >> bit & 1 == 0 {
                continue;
            }
            *growing ^= 1 << bit;
            self.open -= usize::from(*growing == 0);
            let blocks = departure.slot.wrapping_add(first);
            self.ranking.add(departure.worker, blocks);
            if self.open == 0 {
                return Some(blocks);
            }
        }
        None
    }

    /// The same as [`Candidates::pass_edges`] where a departure has to be weighed as the rules say.
    fn pass_edges_by_rule(
        &mut self,
        view: &ReadView,
        slots: Slots<'_>,
        from: usize,
        to: usize,
        passed: Passed,
    ) -> Option<usize> {
        let first = ((passed.at - passed.place) as u32).wrapping_sub(slots.first() as u32);
        let (mut at, mut passed, mut all_whole) = (from, passed, None);
        loop {
            let leg = view.leg(slots, at, to, true);
            let many = leg.departures.len() > self.words.len();
            if many && *all_whole.get_or_insert_with(|| self.are_whole(view, slots.set(at - 1))) {
                self.ranking.add_all(leg.departures, first);
                self.keep_holders(view.entries(slots.set(leg.to - 1)));
            } else if let Some(last) = self.depart_each(view, slots, leg.departures, &mut passed) {
                return Some(last);
            }
            at = leg.to;
            if leg.stop != Stop::End || at == to {
                return (leg.stop != Stop::End).then_some(at);
            }
        }
    }

    /// Whether all who hold blocks with a set are candidates, and all candidates' boundaries are good wherever
    /// they depart.
    fn are_whole(&self, view: &ReadView, set: SetId) -> bool {
        let is_whole = |word: &Word| word.growing & !good_at_head(&view.fleet()[word.number], word) == 0;
        let is_growing = |entry: &Entry| {
            let place = place_in(&self.words, entry.word(), |word| word.number);
            place.is_some_and(|place| entry.bits & !self.words[place].growing == 0)
        };
        self.words.iter().all(is_whole) && view.entries(set).iter().all(is_growing)
    }

    /// Keeps those candidates that hold blocks of a set, who departed being ranked already.
    fn keep_holders(&mut self, entries: &[Entry]) {
        let mut rest = entries;
        self.open = 0;
        for word in &mut self.words {
            let here = rest.iter().take_while(|entry| entry.word() <= word.number).count();
            let (entries, behind) = rest.split_at(here);
            rest = behind;
            word.growing &= entries.iter().fold(0, |held, entry| held | entry.bits);
            self.open += usize::from(word.growing | word.watched & !word.failed != 0);
        }
    }

    /// Ends the prefixes of those who depart and are candidates, one by one; gives the place of the last if
    /// nobody's answer is open after it.
    fn depart_each(
        &mut self,
        view: &ReadView,
        slots: Slots<'_>,
        departures: &[Departure],
        passed: &mut Passed,
    ) -> Option<usize> {
        let start = passed.at - passed.place;
        for departure in departures {
            let (number, bit) = (departure.worker.index() / 64, departure.worker.0 % 64);
            let Some(place) = place_in(&self.words, number, |word| word.number) else { continue };
            let word = &mut self.words[place];
            if word.growing >> bit & 1 == 0 {
                continue;
            }
            let edge = departure.slot as usize - slots.first();
            let whole = good_at_head(&view.fleet()[number], word);
            word.growing ^= 1 << bit;
            self.open -= usize::from(word.growing | word.watched & !word.failed == 0);
            if whole >> bit & 1 == 1 {
                self.ranking.add(departure.worker, (start + edge) as u32);
            } else {
                if self.needs_tokens {
                    passed.tokens += slots.tokens(passed.place, edge);
                }
                passed.at = start + edge;
                passed.place = edge;
                self.depart(view, place, bit, *passed);
            }
            if self.open == 0 {
                return Some(edge);
            }
        }
        None
    }

    /// Ends the prefix of one worker, that of a bit of a word, whose boundary depends on tokens or lies before.
    #[inline(never)]
    fn depart(&mut self, view: &ReadView, place: usize, bit: u32, passed: Passed) {
        let word = self.words[place];
        let fleet = &view.fleet()[word.number];
        let had = 1 << bit & has_all(fleet, word.swa, word.mamba);
        if self.good(view, place, had, passed.tokens) != 0 {
            self.ranking.add(worker(word.number, bit), passed.at as u32);
        } else if let best @ 1.. = self.boundaries[place * 64 + bit as usize].best {
            self.any_behind = true;
            self.ranking.add(worker(word.number, bit), best);
        }
    }
}

/// For which workers a boundary is good, wherever it is: if they need components, they have all at the last
/// block, and an SWA run that starts at the prompt's head.
#[inline]
fn good_at_head(fleet: &FleetWord, word: &Word) -> u64 {
    !(fleet.swa | fleet.mamba) | has_all(fleet, word.swa, word.mamba) & (!fleet.swa | word.at_head)
}
