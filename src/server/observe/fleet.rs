//! When each worker last reported, and whether its reports come in order.
//!
//! The index knows no time, so this stands beside it. A bridge numbers its
//! reports from 1; a number that jumps ahead means that a report went elsewhere or
//! was lost, which no answer shows. One short lock per apply; queries never come here.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Instant, SystemTime};

use crate::server::readiness::{PATIENCE, Stream, Waiting};

/// What one worker's reports tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) struct Heard {
    /// When the last report was applied, for people and for reckoning.
    pub(super) at: SystemTime,
    when: Instant,
    /// What it said of its stream.
    stream: Option<Stream>,
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
    /// A report of a worker was applied; says whether the worker was not known here.
    pub(super) fn heard(&self, worker_id: &str, seq: u64, stream: Option<Stream>) -> bool {
        let (at, when) = (SystemTime::now(), Instant::now());
        let mut workers = self.lock();
        match workers.get_mut(worker_id) {
            Some(heard) => {
                heard.next(seq);
                *heard = Heard { at, when, stream, ..*heard };
                false
            }
            None => {
                let heard = Heard { at, when, stream, seq, reports: 1, gaps: 0, restarts: 0 };
                workers.insert(worker_id.into(), heard);
                true
            }
        }
    }

    /// Workers whose last report said that it synchronises, and is not older than [`PATIENCE`] at `now`.
    pub(super) fn synchronising(&self, now: Instant) -> Waiting {
        let mut waiting = Waiting::default();
        let is_waited_for = |heard: &Heard| {
            heard.stream == Some(Stream::Synchronising)
                && now.saturating_duration_since(heard.when) < PATIENCE
        };
        let workers = self.lock();
        workers.iter().filter(|(_, heard)| is_waited_for(heard)).for_each(|(id, _)| waiting.add(id));
        waiting
    }

    /// What is known of these workers.
    pub(super) fn of<'a>(&self, worker_ids: impl Iterator<Item = &'a str>) -> Vec<Option<Heard>> {
        let workers = self.lock();
        worker_ids.map(|worker_id| workers.get(worker_id).copied()).collect()
    }

    /// Forgets a worker that was removed.
    pub(super) fn forget(&self, worker_id: &str) {
        self.lock().remove(worker_id);
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
    /// When the last report was applied.
    pub(in crate::server) fn when(&self) -> Instant {
        self.when
    }

    /// What the last report said of its stream.
    pub(in crate::server) fn stream(&self) -> Option<Stream> {
        self.stream
    }

    fn next(&mut self, seq: u64) {
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn numbers_tell_gaps_from_retries_and_restarts() {
        let reports = Reports::default();
        for seq in [1, 2, 2, 3, 7, 8, 1, 2] {
            reports.heard("w", seq, None);
        }
        let heard = reports.of(["w", "x"].into_iter());
        let row = heard[0].map(|heard| (heard.reports, heard.gaps, heard.restarts));
        assert_eq!((row, heard[1]), (Some((8, 1, 1)), None));
    }

    #[test]
    fn a_gone_worker_is_forgotten() {
        let reports = Reports::default();
        assert!(["a", "b", "c"].into_iter().all(|worker| reports.heard(worker, 1, None)), "new ones");
        reports.keep(|worker| worker != "b");
        assert_eq!((reports.len(), reports.of(["b"].into_iter())), (2, vec![None]));
    }

    #[test]
    fn who_synchronises_is_waited_for_until_it_has_or_has_said_nothing_for_long() {
        let reports = Reports::default();
        let states = [("a", Some(Stream::Synchronising)), ("b", Some(Stream::Synchronised)), ("c", None)];
        assert!(states.into_iter().all(|(worker, stream)| reports.heard(worker, 1, stream)), "new ones");
        let waiting = |after| reports.synchronising(Instant::now() + after).named;
        assert_eq!(waiting(Duration::ZERO), ["a"]);
        assert_eq!(waiting(PATIENCE), [""; 0]);
        for (stream, expected) in [(Some(Stream::Synchronising), &["a"][..]), (None, &[])] {
            reports.heard("a", 2, stream);
            assert_eq!(waiting(Duration::ZERO), expected, "{stream:?}");
        }
        reports.heard("c", 2, Some(Stream::Synchronising));
        reports.forget("c");
        assert_eq!(waiting(Duration::ZERO), [""; 0]);
    }
}
