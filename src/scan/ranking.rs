//! The matches of a scan, longest prefix first, equal ones by ascending worker.
//!
//! Prefixes end one after another, the shortest first. A ranking is therefore
//! filled from its back: what is written last stands first, and nothing has to be
//! turned round or sorted at the end unless boundaries lie before the end of a
//! prefix. The buffer only ever grows, to the most candidates that a scan had.

use std::cmp::Reverse;

use crate::arena::{Departure, WorkerId};

use super::PrefixMatch;

/// Up to this many runs of neighbouring workers are written run by run. Of more,
/// writing all 64 workers costs less: no branch that cannot be foreseen.
const FEW_RUNS: u32 = 6;

/// What fills places of the buffer that are not matches.
const NOTHING: PrefixMatch = PrefixMatch { worker: WorkerId(0), blocks: 0 };

/// Matches in order, the next one to be written before `first`.
///
/// Invariant: `1 <= first <= buffer.len()` once there is room for a candidate. The
/// place before the first match may be written at will.
#[derive(Debug, Default)]
pub(super) struct Ranking {
    buffer: Vec<PrefixMatch>,
    first: usize,
}

impl Ranking {
    pub(super) fn matches(&self) -> &[PrefixMatch] {
        &self.buffer[self.first..]
    }

    /// Forgets all matches and makes room for those of `candidates` workers.
    pub(super) fn clear(&mut self, candidates: usize) {
        // One place more, which stays free.
        if self.buffer.len() <= candidates {
            self.buffer.resize(candidates + 1, NOTHING);
        }
        self.first = self.buffer.len();
    }

    /// Adds a match that is at least as long as those before it.
    #[inline]
    pub(super) fn add(&mut self, worker: WorkerId, blocks: u32) {
        self.first -= 1;
        self.buffer[self.first] = PrefixMatch { worker, blocks };
    }

    /// Adds a match for each departure, its blocks being `first` more than its slot.
    #[inline]
    pub(super) fn add_all(&mut self, departures: &[Departure], first: u32) {
        let rest = self.first - departures.len();
        for (found, departure) in self.buffer[rest..self.first].iter_mut().rev().zip(departures) {
            let blocks = departure.slot.wrapping_add(first);
            *found = PrefixMatch { worker: departure.worker, blocks };
        }
        self.first = rest;
    }

    /// Adds an equally long match for each of `workers`, as bits from worker `lowest` on.
    #[inline]
    pub(super) fn add_word(&mut self, lowest: WorkerId, workers: u64, blocks: u32) {
        if workers.is_power_of_two() {
            self.add(WorkerId(lowest.0 + workers.trailing_zeros()), blocks);
        } else {
            self.add_workers(lowest, workers, blocks);
        }
    }

    /// The same for any number of them but one.
    #[inline(never)]
    fn add_workers(&mut self, lowest: WorkerId, workers: u64, blocks: u32) {
        let runs = (workers & !(workers << 1)).count_ones();
        if workers == !0 {
            let first = self.first - 64;
            for (bit, found) in self.buffer[first..self.first].iter_mut().enumerate() {
                *found = PrefixMatch { worker: WorkerId(lowest.0 + bit as u32), blocks };
            }
            self.first = first;
        } else if runs <= FEW_RUNS {
            let mut rest = workers;
            while rest != 0 {
                let above = rest.leading_zeros();
                let run = (rest << above).leading_ones();
                let bit = 64 - above - run;
                let first = self.first - run as usize;
                for (place, found) in self.buffer[first..self.first].iter_mut().enumerate() {
                    *found = PrefixMatch { worker: WorkerId(lowest.0 + bit + place as u32), blocks };
                }
                self.first = first;
                rest &= (1u64 << bit) - 1;
            }
        } else {
            // Without a branch per worker: write all 64 and keep those that count.
            let mut first = self.first;
            for bit in (0..64).rev() {
                self.buffer[first - 1] = PrefixMatch { worker: WorkerId(lowest.0 + bit), blocks };
                first -= (workers >> bit & 1) as usize;
            }
            self.first = first;
        }
    }

    /// Leaves out the matches of workers that `fails` names.
    pub(super) fn leave_out(&mut self, fails: impl Fn(WorkerId) -> bool) {
        let mut kept = self.buffer.len();
        for place in (self.first..self.buffer.len()).rev() {
            if !fails(self.buffer[place].worker) {
                kept -= 1;
                self.buffer[kept] = self.buffer[place];
            }
        }
        self.first = kept;
    }

    /// Puts matches into order that were not added in it.
    pub(super) fn sort(&mut self) {
        let matches = &mut self.buffer[self.first..];
        let rank = |found: &PrefixMatch| (Reverse(found.blocks), found.worker);
        if !matches.is_sorted_by_key(rank) {
            matches.sort_unstable_by_key(rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_any_number_of_workers_are_ranked_alike() {
        for workers in [!0, 0, 1, 1 << 63, 0xffff_0000_0000_0001, !0 ^ 1 << 40, 0b1010, 0x5555_5555_5555_5555]
        {
            let mut ranking = Ranking::default();
            ranking.clear(65);
            ranking.add(WorkerId(7), 1);
            ranking.add_word(WorkerId(64), workers, 2);
            let mut expected: Vec<(u32, u32)> =
                (0..64).filter(|bit| workers >> bit & 1 == 1).map(|bit| (64 + bit, 2)).collect();
            expected.push((7, 1));
            let found: Vec<(u32, u32)> =
                ranking.matches().iter().map(|found| (found.worker.0, found.blocks)).collect();
            assert_eq!(found, expected, "{workers:#x}");
        }
    }

    #[test]
    fn leaving_out_keeps_the_order_of_the_rest() {
        let mut ranking = Ranking::default();
        ranking.clear(5);
        for worker in 0..5 {
            ranking.add(WorkerId(worker), 10 + worker);
        }
        ranking.leave_out(|worker| worker.0 % 2 == 1);
        let kept: Vec<u32> = ranking.matches().iter().map(|found| found.worker.0).collect();
        assert_eq!(kept, [4, 2, 0]);
    }

    #[test]
    fn a_smaller_scan_sees_nothing_of_a_larger_one_before_it() {
        let mut ranking = Ranking::default();
        ranking.clear(100);
        (0..100).for_each(|worker| ranking.add(WorkerId(worker), 1));
        ranking.clear(3);
        ranking.add(WorkerId(9), 2);
        assert_eq!(ranking.matches(), [PrefixMatch { worker: WorkerId(9), blocks: 2 }]);
    }
}
