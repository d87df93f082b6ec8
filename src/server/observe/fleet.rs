//! When each worker last reported, and whether its reports come in order.
//!
//! The index knows no time, so this stands beside it. A bridge numbers its
//! reports from 1; a number that jumps ahead means that a report went elsewhere or
//! was lost, which no answer shows. One short lock per apply; queries never come here.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::SystemTime;

/// What one worker's reports tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) struct Heard {
    /// When the last report was applied.
    pub(super) at: SystemTime,
    /// Its number.
    seq: u64,
    /// Reports applied.
    pub(super) reports: u64,
    /// Times that a number was past the next one.
    pub(super) gaps: u64,
    /// Times that numbers began anew: restarts of a bridge.
    pub(super) restarts: u64,
}

/// All workers' reports.
///
/// Invariant: names are of workers that the index had when they were heard, so
/// there are no more than it takes; [`Reports::keep`] forgets those it has no more.
#[derive(Debug, Default)]
pub(in crate::server) struct Reports(Mutex<HashMap<Box<str>, Heard>>);

impl Reports {
    /// A report of a worker was applied.
    pub(super) fn heard(&self, worker_id: &str, seq: u64) {
        let at = SystemTime::now();
        let mut workers = self.lock();
        match workers.get_mut(worker_id) {
            Some(heard) => heard.next(seq, at),
            None => {
                workers.insert(worker_id.into(), Heard { at, seq, reports: 1, gaps: 0, restarts: 0 });
            }
        }
    }

    /// What is known of these workers.
    pub(super) fn of<'a>(&self, worker_ids: impl Iterator<Item = &'a str>) -> Vec<Option<Heard>> {
        let workers = self.lock();
        worker_ids.map(|worker_id| workers.get(worker_id).copied()).collect()
    }

    /// Forgets workers that are not worth keeping.
    pub(super) fn keep(&self, is_known: impl Fn(&str) -> bool) {
        self.lock().retain(|worker_id, _| is_known(worker_id));
    }

    /// How many workers are known here.
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Box<str>, Heard>> {
        // A panic under this lock leaves whole records, so they are as good as before.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Heard {
    fn next(&mut self, seq: u64, at: SystemTime) {
        self.at = at;
        self.reports += 1;
        // The same number again is a retry of a report whose answer was lost.
        if seq < self.seq {
            self.restarts += 1;
        } else if seq > self.seq.saturating_add(1) {
            self.gaps += 1;
        }
        self.seq = seq;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_tell_gaps_from_retries_and_restarts() {
        let reports = Reports::default();
        for seq in [1, 2, 2, 3, 7, 8, 1, 2] {
            reports.heard("w", seq);
        }
        let heard = reports.of(["w", "x"].into_iter());
        let row = heard[0].map(|heard| (heard.reports, heard.gaps, heard.restarts));
        assert_eq!((row, heard[1]), (Some((8, 1, 1)), None));
    }

    #[test]
    fn a_gone_worker_is_forgotten() {
        let reports = Reports::default();
        ["a", "b", "c"].into_iter().for_each(|worker| reports.heard(worker, 1));
        reports.keep(|worker| worker != "b");
        assert_eq!((reports.len(), reports.of(["b"].into_iter())), (2, vec![None]));
    }
}
