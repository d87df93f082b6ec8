//! The prefix rules, for 64 workers at a time and a run of blocks at a time.
//!
//! What counts of a worker is, by its cache spec:
//!
//! | worker | its prefix grows over blocks that | a boundary `n` is good where |
//! |---|---|---|
//! | plain: no spec | it holds at any tier | always |
//! | FULL | have FULL at a tier of its spec | always |
//! | … and SWA | the same | block `n-1` has SWA, and the SWA run up to it starts at the head or has the window's tokens |
//! | … and MAMBA | the same | block `n-1` has MAMBA |
//!
//! The answer is the last good boundary before the prefix stops growing. A
//! [`Verdict`] says of one set, as bits, whose prefix grows and who has SWA or
//! MAMBA. Within a run of blocks the verdict is the same, so the best boundary of
//! a run is its end: the tokens of an SWA run only become more. Boundaries are
//! therefore tried where a bit goes away: where the prefix stops, where SWA ends
//! and where MAMBA ends, and at the end of the request. That is O(1) state per
//! candidate, where its SWA run started and its best boundary so far, and it is
//! touched at changes of its own bits only.
//!
//! A plain worker that has components at any block asked for, also past its
//! gap, fails closed. Only a plain worker with such placements anywhere can: the
//! fleet's `masked` bits say who is to be watched beyond the end of its prefix.

use std::cmp::Reverse;

use crate::arena::{CacheSpec, Entry, FleetWord, ReadView, WorkerId};

use super::PrefixMatch;

/// What a set says of the 64 workers of a word, each under its own rule.
#[derive(Debug, Clone, Copy, Default)]
struct Verdict {
    grows: u64,
    swa: u64,
    mamba: u64,
    /// Plain, and has components here.
    fails: u64,
}

impl Verdict {
    /// Weighs the entries of one word.
    #[inline]
    fn of(fleet: &FleetWord, entries: &[Entry]) -> Verdict {
        let mut verdict = Verdict::default();
        for entry in entries {
            let held = fleet.current(*entry);
            verdict.grows |= held & fleet.plain;
            let mask = entry.mask();
            if mask != 0 {
                let tier = entry.tier_index();
                let has = |component: u32| if mask & component == 0 { 0 } else { held };
                verdict.grows |= has(CacheSpec::FULL) & fleet.full_tiers[tier];
                verdict.swa |= has(CacheSpec::SWA) & fleet.swa_tiers[tier];
                verdict.mamba |= has(CacheSpec::MAMBA) & fleet.mamba_tiers[tier];
                verdict.fails |= held & fleet.plain;
            }
        }
        verdict
    }
}

/// The candidates of one word of the fleet.
#[derive(Debug, Clone, Copy)]
struct Word {
    number: usize,
    /// Whose prefix has grown over every block so far.
    growing: u64,
    /// Who has SWA, or MAMBA, at the last block, of those that need it.
    swa: u64,
    mamba: u64,
    /// Plain workers that may fail closed, and those that have.
    watched: u64,
    failed: u64,
}

/// State of a candidate whose boundary depends on components.
#[derive(Debug, Clone, Copy, Default)]
struct Boundary {
    /// Tokens of the prompt before its current SWA run, and whether that is its head.
    swa_from: u64,
    swa_at_head: bool,
    /// Its last good boundary that has been tried; 0 if none.
    best: u32,
}

/// Everybody whose prefix is being measured.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// Ascending by number.
    words: Vec<Word>,
    /// 64 for each of `words`, if any candidate needs SWA or MAMBA.
    boundaries: Vec<Boundary>,
    needs_components: bool,
    needs_tokens: bool,
    any_failed: bool,
    /// Number of words with anybody whose answer is open.
    open: usize,
    /// In the order in which prefixes ended, later workers first: `rank` turns it round.
    matches: Vec<PrefixMatch>,
}

/// The set bits of a word from the highest down.
fn bits_down(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = bits.checked_ilog2()?;
        bits ^= 1 << bit;
        Some(bit)
    })
}

fn worker(word: usize, bit: u32) -> WorkerId {
    WorkerId(word as u32 * 64 + bit)
}

impl Candidates {
    pub(super) fn matches(&self) -> &[PrefixMatch] {
        &self.matches
    }

    pub(super) fn clear(&mut self) {
        self.words.clear();
        self.boundaries.clear();
        self.matches.clear();
        self.needs_components = false;
        self.needs_tokens = false;
        self.any_failed = false;
        self.open = 0;
    }

    /// Whether tokens matter to any candidate.
    #[inline]
    pub(super) fn weigh_tokens(&self) -> bool {
        self.needs_tokens
    }

    /// Takes the routable holders of the prompt's first block as candidates; says whether there are any.
    pub(super) fn begin(&mut self, view: &ReadView, entries: &[Entry]) -> bool {
        for entries in entries.chunk_by(|left, right| left.word() == right.word()) {
            let number = entries[0].word();
            let fleet = &view.fleet()[number];
            let verdict = Verdict::of(fleet, entries);
            let candidates = verdict.grows & fleet.routable;
            let growing = candidates & !verdict.fails;
            if growing == 0 {
                continue;
            }
            let (swa, mamba) = (verdict.swa & fleet.swa, verdict.mamba & fleet.mamba);
            let watched = growing & fleet.plain & fleet.masked;
            self.words.push(Word { number, growing, swa, mamba, watched, failed: 0 });
            self.needs_components |= growing & (fleet.swa | fleet.mamba) != 0;
            self.needs_tokens |= growing & fleet.swa != 0;
        }
        if self.needs_components {
            let at_head = Boundary { swa_from: 0, swa_at_head: true, best: 0 };
            self.boundaries.resize(self.words.len() * 64, at_head);
        }
        self.open = self.words.len();
        self.open > 0
    }

    /// Goes over from blocks with the set `left` to blocks with the set `entered`.
    ///
    /// They meet at position `at`, with `tokens` before it. Says whether anything
    /// from there on can still change the answer.
    pub(super) fn step(
        &mut self,
        view: &ReadView,
        left: &[Entry],
        entered: &[Entry],
        at: usize,
        tokens: u64,
    ) -> bool {
        if left.len() == entered.len() && left.len() == self.words.len() {
            // Mostly a word or two differ, and each word has one entry in both.
            let mut alike = true;
            for place in (0..entered.len()).rev() {
                let (old, new) = (left[place], entered[place]);
                if old == new {
                    continue;
                }
                if !old.same_place(new) || new.word() != self.words[place].number || !single(entered, place) {
                    alike = false;
                    break;
                }
                let verdict = Verdict::of(&view.fleet()[new.word()], &entered[place..=place]);
                self.step_word(view, place, verdict, at, tokens);
            }
            if alike {
                return self.open > 0;
            }
        }
        // Steps are idempotent, so it does no harm that some words were stepped already.
        let mut rest = entered;
        for place in (0..self.words.len()).rev() {
            let number = self.words[place].number;
            let above = rest.iter().rev().take_while(|entry| entry.word() > number).count();
            rest = &rest[..rest.len() - above];
            let here = rest.iter().rev().take_while(|entry| entry.word() == number).count();
            let (below, entries) = rest.split_at(rest.len() - here);
            rest = below;
            let verdict = Verdict::of(&view.fleet()[number], entries);
            self.step_word(view, place, verdict, at, tokens);
        }
        self.open > 0
    }

    /// The step for one word.
    #[inline]
    fn step_word(&mut self, view: &ReadView, place: usize, verdict: Verdict, at: usize, tokens: u64) {
        let word = self.words[place];
        let failed = word.failed | verdict.fails & word.watched;
        let ended = word.growing & !verdict.grows & !failed;
        let growing = word.growing & verdict.grows & !failed;
        self.any_failed |= failed != 0;
        let fleet = &view.fleet()[word.number];
        if self.needs_components && (word.growing & (fleet.swa | fleet.mamba)) != 0 {
            let (swa, mamba) = (verdict.swa & fleet.swa, verdict.mamba & fleet.mamba);
            let had = has_all(fleet, word.swa, word.mamba);
            let lost = word.growing & had & !(growing & has_all(fleet, swa, mamba));
            self.try_boundaries(view, place, lost & (fleet.swa | fleet.mamba), at, tokens);
            for bit in bits_down(growing & swa & !word.swa) {
                let boundary = &mut self.boundaries[place * 64 + bit as usize];
                boundary.swa_from = tokens;
                boundary.swa_at_head = false;
            }
            self.words[place].swa = swa;
            self.words[place].mamba = mamba;
        }
        self.words[place].failed = failed;
        self.words[place].growing = growing;
        if ended != 0 {
            self.emit(view, place, ended, at);
        }
        let was_open = word.growing | word.watched & !word.failed != 0;
        let is_open = growing | word.watched & !failed != 0;
        self.open -= usize::from(was_open && !is_open);
    }

    /// Ends the request at position `at`, with `tokens` before it.
    pub(super) fn end(&mut self, view: &ReadView, at: usize, tokens: u64) {
        for place in (0..self.words.len()).rev() {
            let word = self.words[place];
            if self.needs_components {
                let fleet = &view.fleet()[word.number];
                let good = word.growing & has_all(fleet, word.swa, word.mamba);
                self.try_boundaries(view, place, good & (fleet.swa | fleet.mamba), at, tokens);
            }
            self.emit(view, place, word.growing, at);
        }
    }

    /// Tries the boundary `at` for workers that have every component they need right before it.
    fn try_boundaries(&mut self, view: &ReadView, place: usize, workers: u64, at: usize, tokens: u64) {
        let number = self.words[place].number;
        for bit in bits_down(workers) {
            let boundary = &mut self.boundaries[place * 64 + bit as usize];
            let windowless = view.fleet()[number].swa >> bit & 1 == 0;
            let in_window = || tokens - boundary.swa_from >= view.swa_window(worker(number, bit));
            if windowless || boundary.swa_at_head || in_window() {
                boundary.best = at as u32;
            }
        }
    }

    /// Writes the matches of workers whose prefix ends before position `at`.
    fn emit(&mut self, view: &ReadView, place: usize, workers: u64, at: usize) {
        let number = self.words[place].number;
        let fleet = &view.fleet()[number];
        let by_boundary = fleet.swa | fleet.mamba;
        for bit in bits_down(workers) {
            let blocks = if by_boundary >> bit & 1 == 0 {
                at as u32
            } else {
                self.boundaries[place * 64 + bit as usize].best
            };
            if blocks > 0 {
                self.matches.push(PrefixMatch { worker: worker(number, bit), blocks });
            }
        }
    }

    /// Leaves out who failed closed and puts the longest prefixes first.
    ///
    /// Prefixes were noted as they ended, so the order is there already, turned
    /// round, unless boundaries lie before the end of a prefix.
    pub(super) fn rank(&mut self) {
        if self.any_failed {
            let words = &self.words;
            let failed = |worker: WorkerId| {
                let word = words.binary_search_by_key(&(worker.index() / 64), |word| word.number);
                word.is_ok_and(|place| words[place].failed >> (worker.0 % 64) & 1 == 1)
            };
            self.matches.retain(|found| !failed(found.worker));
        }
        if self.needs_components {
            self.matches.sort_unstable_by_key(|found| (Reverse(found.blocks), found.worker));
        } else {
            self.matches.reverse();
        }
    }
}

/// Whether the entry at `place` is the only one of its word.
fn single(entries: &[Entry], place: usize) -> bool {
    let same_word = |other: Option<&Entry>| other.is_some_and(|other| other.word() == entries[place].word());
    !same_word(entries.get(place + 1))
        && !same_word(place.checked_sub(1).and_then(|before| entries.get(before)))
}

/// Workers that have each of the components that they need.
fn has_all(fleet: &FleetWord, swa: u64, mamba: u64) -> u64 {
    (swa | !fleet.swa) & (mamba | !fleet.mamba)
}
