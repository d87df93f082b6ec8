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

mod edges;

use crate::arena::{CacheSpec, Entry, FleetWord, ReadView, SetId, WorkerId};

use super::PrefixMatch;
use super::ranking::Ranking;

pub(super) use edges::Passed;

/// Words that an aligned step can note as bits: 4,096 workers.
const ALIGNED_WORDS_MAX: usize = u64::BITS as usize;

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
#[derive(Debug, Clone, Copy, Default)]
struct Word {
    number: usize,
    /// Whose prefix has grown over every block so far.
    growing: u64,
    /// Who has SWA, or MAMBA, at the last block, of those that need it.
    swa: u64,
    mamba: u64,
    /// Whose SWA run, if they have SWA at the last block, starts at the prompt's head.
    at_head: u64,
    /// Plain workers that may fail closed, and those that have.
    watched: u64,
    failed: u64,
}

/// State of a candidate whose boundary depends on components.
#[derive(Debug, Clone, Copy, Default)]
struct Boundary {
    /// Tokens of the prompt before its current SWA run.
    swa_from: u64,
    /// Its last good boundary that has been tried; 0 if none.
    best: u32,
}

/// Everybody whose prefix is being measured.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// While nothing but the length of prefixes is asked for and a set has one entry
    /// for each word of candidates: these entries, with the candidates as bits.
    aligned: Vec<Entry>,
    /// Otherwise the words themselves, ascending by number.
    words: Vec<Word>,
    /// 64 for each of `words`, if any candidate needs SWA or MAMBA.
    boundaries: Vec<Boundary>,
    needs_components: bool,
    needs_tokens: bool,
    any_failed: bool,
    /// Whether any boundary lay before the end of its prefix, so that matches are out of order.
    any_behind: bool,
    /// Whether any plain candidate may fail closed.
    watches: bool,
    /// Number of words with anybody whose answer is open.
    open: usize,
    ranking: Ranking,
}

/// The set bits of a word from the highest down.
fn bits_down(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = bits.checked_ilog2()?;
        bits ^= 1 << bit;
        Some(bit)
    })
}

/// The place of a word in a list that is ascending by number: mostly all words are there from the first on.
#[inline(always)]
fn place_in<T>(words: &[T], number: usize, number_of: impl Fn(&T) -> usize) -> Option<usize> {
    let place = number.checked_sub(number_of(words.first()?))?;
    match words.get(place) {
        Some(word) if number_of(word) == number => Some(place),
        None if number > number_of(words.last()?) => None,
        _ => words.binary_search_by_key(&number, number_of).ok(),
    }
}

fn worker(word: usize, bit: u32) -> WorkerId {
    WorkerId(word as u32 * 64 + bit)
}

impl Candidates {
    pub(super) fn matches(&self) -> &[PrefixMatch] {
        self.ranking.matches()
    }

    pub(super) fn clear(&mut self) {
        self.aligned.clear();
        self.words.clear();
        self.boundaries.clear();
        self.ranking.clear(0);
        self.needs_components = false;
        self.needs_tokens = false;
        self.any_failed = false;
        self.any_behind = false;
        self.watches = false;
        self.open = 0;
    }

    /// Whether tokens matter to any candidate.
    #[inline]
    pub(super) fn weigh_tokens(&self) -> bool {
        self.needs_tokens
    }

    /// Takes the routable holders of the prompt's first block as candidates; says whether there are any.
    #[inline]
    pub(super) fn begin(&mut self, view: &ReadView, entries: &[Entry]) -> bool {
        if !self.begin_aligned(view, entries) {
            self.aligned.clear();
            self.begin_words(view, entries);
        }
        // One place for each that could be, as counting them would take longer.
        self.ranking.clear(64 * self.open);
        self.open > 0
    }

    /// Takes candidates as entries, if the set has one for each of their words and they need no more.
    fn begin_aligned(&mut self, view: &ReadView, entries: &[Entry]) -> bool {
        let fleet = view.fleet();
        let mut word_before = usize::MAX;
        for entry in entries.iter().take(ALIGNED_WORDS_MAX + 1) {
            let word = &fleet[entry.word()];
            let verdict = Verdict::of(word, std::slice::from_ref(entry));
            let growing = verdict.grows & word.routable & !verdict.fails;
            let more_is_asked = growing & (word.swa | word.mamba | word.plain & word.masked) != 0;
            if entry.word() == word_before || growing == 0 || more_is_asked {
                return false;
            }
            word_before = entry.word();
            self.aligned.push(entry.of(growing));
        }
        self.open = self.aligned.len();
        self.open <= ALIGNED_WORDS_MAX
    }

    fn begin_words(&mut self, view: &ReadView, entries: &[Entry]) {
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
            self.words.push(Word { number, growing, swa, mamba, at_head: swa, watched, failed: 0 });
            self.watches |= watched != 0;
            self.needs_components |= growing & (fleet.swa | fleet.mamba) != 0;
            self.needs_tokens |= growing & fleet.swa != 0;
        }
        if self.needs_components {
            self.boundaries.resize(self.words.len() * 64, Boundary::default());
        }
        self.open = self.words.len();
        self.align(entries);
    }

    /// Goes over to blocks with the set `entered`.
    ///
    /// It begins at position `at`, with `tokens` before it. Says whether anything
    /// from there on can still change the answer.
    pub(super) fn step(&mut self, view: &ReadView, entered: SetId, at: usize, tokens: u64) -> bool {
        let entries = view.entries(entered);
        if self.step_aligned(entries, at) {
            return self.open > 0;
        }
        self.step_words(view, entries, at, tokens)
    }

    /// The step between any two sets.
    #[inline]
    fn step_words(&mut self, view: &ReadView, entered: &[Entry], at: usize, tokens: u64) -> bool {
        if entered.is_empty() && self.words.is_empty() {
            // Nobody holds the block, and nobody is watched.
            self.end_aligned(at);
            return false;
        }
        self.weigh_words(view, entered, at, tokens)
    }

    /// The same where somebody holds the block or is watched.
    #[inline(never)]
    fn weigh_words(&mut self, view: &ReadView, entered: &[Entry], at: usize, tokens: u64) -> bool {
        self.words.extend(self.aligned.drain(..).map(|aligned| Word {
            number: aligned.word(),
            growing: aligned.bits,
            ..Word::default()
        }));
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
        self.align(entered);
        self.open > 0
    }

    /// The step between sets whose entries differ in nothing but bits, if these are such.
    ///
    /// All candidates of a word grow by its one entry. What the rules make of the
    /// entry's tier, generation and mask stays as it was, so a prefix goes on
    /// exactly if its worker's bit does. Which word changes cannot be foreseen, so
    /// words are weighed without a branch and only those that change are visited.
    #[inline(always)]
    fn step_aligned(&mut self, entered: &[Entry], at: usize) -> bool {
        if self.aligned.len() != entered.len() || entered.is_empty() {
            return false;
        }
        let (mut apart, mut changed) = (0, 0u64);
        let mut weigh = |aligned: &Entry, entered: &Entry| {
            apart |= aligned.apart(*entered);
            changed = changed << 1 | u64::from(aligned.bits & !entered.bits != 0);
        };
        let (fours, rest) = self.aligned.as_chunks::<4>();
        let (entered_fours, entered_rest) = entered.as_chunks::<4>();
        rest.iter().zip(entered_rest).rev().for_each(|(aligned, entered)| weigh(aligned, entered));
        for (aligned, entered) in fours.iter().zip(entered_fours).rev() {
            aligned.iter().zip(entered).rev().for_each(|(aligned, entered)| weigh(aligned, entered));
        }
        if apart != 0 {
            return false;
        }
        while let Some(place) = changed.checked_ilog2() {
            changed ^= 1 << place;
            let aligned = &mut self.aligned[place as usize];
            let ended = aligned.bits & !entered[place as usize].bits;
            aligned.bits ^= ended;
            self.open -= usize::from(aligned.bits == 0);
            self.ranking.add_word(worker(aligned.word(), 0), ended, at as u32);
        }
        true
    }

    /// Lets go of words without candidates and aligns the others if `entries` stand one to each.
    ///
    /// Only where nothing but the length of prefixes is asked for: components and
    /// workers that may fail closed need the whole step.
    fn align(&mut self, entries: &[Entry]) {
        if self.needs_components || self.watches {
            return;
        }
        self.words.retain(|word| word.growing != 0);
        let own = |(entry, word): (&Entry, &Word)| entry.word() == word.number;
        let one_each = entries.len() == self.words.len() && entries.len() <= ALIGNED_WORDS_MAX;
        if one_each && entries.iter().zip(&self.words).all(own) {
            let words = self.words.drain(..);
            self.aligned.extend(words.zip(entries).map(|(word, entry)| entry.of(word.growing)));
        }
    }

    /// The step for one word.
    #[inline]
    fn step_word(&mut self, view: &ReadView, place: usize, verdict: Verdict, at: usize, tokens: u64) {
        let word = self.words[place];
        let failed = word.failed | verdict.fails & word.watched;
        let ended = word.growing & !verdict.grows & !failed;
        let growing = word.growing & verdict.grows & !failed;
        self.any_failed |= failed != 0;
        let mut whole = ended;
        if self.needs_components {
            let fleet = &view.fleet()[word.number];
            let (swa, mamba) = (verdict.swa & fleet.swa, verdict.mamba & fleet.mamba);
            let by_boundary = fleet.swa | fleet.mamba;
            let had = word.growing & has_all(fleet, word.swa, word.mamba);
            let lost = had & !(growing & has_all(fleet, swa, mamba));
            let good = self.good(view, place, lost & by_boundary, tokens);
            for bit in bits_down(good & growing) {
                self.boundaries[place * 64 + bit as usize].best = at as u32;
            }
            for bit in bits_down(growing & swa & !word.swa) {
                self.boundaries[place * 64 + bit as usize].swa_from = tokens;
            }
            whole = ended & (good | !by_boundary);
            self.words[place].swa = swa;
            self.words[place].mamba = mamba;
            self.words[place].at_head &= swa;
        }
        self.words[place].failed = failed;
        self.words[place].growing = growing;
        if ended != 0 {
            self.emit(place, ended, whole, at);
        }
        let was_open = word.growing | word.watched & !word.failed != 0;
        let is_open = growing | word.watched & !failed != 0;
        self.open -= usize::from(was_open && !is_open);
    }

    /// Ends the request at position `at`, with `tokens` before it.
    pub(super) fn end(&mut self, view: &ReadView, at: usize, tokens: u64) {
        self.end_aligned(at);
        for place in (0..self.words.len()).rev() {
            let word = self.words[place];
            let mut whole = word.growing;
            if self.needs_components {
                let fleet = &view.fleet()[word.number];
                let by_boundary = fleet.swa | fleet.mamba;
                let had = word.growing & has_all(fleet, word.swa, word.mamba);
                whole &= self.good(view, place, had & by_boundary, tokens) | !by_boundary;
            }
            self.emit(place, word.growing, whole, at);
        }
    }

    /// Ends the prefixes of all aligned candidates.
    fn end_aligned(&mut self, at: usize) {
        for aligned in self.aligned.iter().rev() {
            self.ranking.add_word(worker(aligned.word(), 0), aligned.bits, at as u32);
        }
        self.aligned.clear();
    }

    /// For which of `workers`, who have all they need right before a boundary, it is good.
    ///
    /// They all have SWA there if they need it, so only its run's length is asked for.
    #[inline]
    fn good(&self, view: &ReadView, place: usize, workers: u64, tokens: u64) -> u64 {
        let word = &self.words[place];
        let mut good = workers & (!view.fleet()[word.number].swa | word.at_head);
        for bit in bits_down(workers & !good) {
            let from = self.boundaries[place * 64 + bit as usize].swa_from;
            if tokens - from >= view.swa_window(worker(word.number, bit)) {
                good |= 1 << bit;
            }
        }
        good
    }

    /// Ranks workers whose prefix ends before position `at`: those of `whole` have all
    /// of it, the others what their last good boundary leaves them.
    fn emit(&mut self, place: usize, workers: u64, whole: u64, at: usize) {
        let number = self.words[place].number;
        if workers == whole {
            self.ranking.add_word(worker(number, 0), workers, at as u32);
            return;
        }
        self.any_behind = true;
        for bit in bits_down(workers) {
            let ends_here = whole >> bit & 1 == 1;
            let blocks = if ends_here { at as u32 } else { self.boundaries[place * 64 + bit as usize].best };
            if blocks > 0 {
                self.ranking.add(worker(number, bit), blocks);
            }
        }
    }

    /// Leaves out who failed closed and puts the longest prefixes first.
    ///
    /// They stand so already unless boundaries lie before the end of a prefix.
    pub(super) fn rank(&mut self) {
        if self.any_failed {
            let words = &self.words;
            self.ranking.leave_out(|worker| {
                let word = words.binary_search_by_key(&(worker.index() / 64), |word| word.number);
                word.is_ok_and(|place| words[place].failed >> (worker.0 % 64) & 1 == 1)
            });
        }
        if self.any_behind {
            self.ranking.sort();
        }
    }
}

/// Workers that have each of the components that they need.
fn has_all(fleet: &FleetWord, swa: u64, mamba: u64) -> u64 {
    (swa | !fleet.swa) & (mamba | !fleet.mamba)
}
