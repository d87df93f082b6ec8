//! What calls write down about themselves.
//!
//! Every series is a field, so recording is additions and no look-up; the cost of
//! a prefix query is about ten of them and four looks at the clock. Nothing here
//! knows how a value is shown.

use std::sync::Arc;
use std::time::Instant;

use tonic::Code;

use super::fleet::{Heard, Reports};
use crate::arena::{Batch, Index};
use crate::metrics::{BLOCKS, CALL_NANOSECONDS, Counter, Histogram, Level, Scale, WORK_NANOSECONDS};
use crate::server::readiness::{Stream, Waiting};

/// Every code of gRPC, each at the place of its number, with its name.
pub(super) const CODES: [(Code, &str); 17] = [
    (Code::Ok, "OK"),
    (Code::Cancelled, "CANCELLED"),
    (Code::Unknown, "UNKNOWN"),
    (Code::InvalidArgument, "INVALID_ARGUMENT"),
    (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (Code::NotFound, "NOT_FOUND"),
    (Code::AlreadyExists, "ALREADY_EXISTS"),
    (Code::PermissionDenied, "PERMISSION_DENIED"),
    (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (Code::FailedPrecondition, "FAILED_PRECONDITION"),
    (Code::Aborted, "ABORTED"),
    (Code::OutOfRange, "OUT_OF_RANGE"),
    (Code::Unimplemented, "UNIMPLEMENTED"),
    (Code::Internal, "INTERNAL"),
    (Code::Unavailable, "UNAVAILABLE"),
    (Code::DataLoss, "DATA_LOSS"),
    (Code::Unauthenticated, "UNAUTHENTICATED"),
];

/// What a call asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) enum Method {
    Apply,
    Match,
    MatchPrefix,
    HitCounts,
    /// Any call of the admin service.
    Admin,
    /// Probes, reflection, and what there is not.
    Other,
}

impl Method {
    pub(super) const ALL: [Method; 6] =
        [Method::Apply, Method::Match, Method::MatchPrefix, Method::HitCounts, Method::Admin, Method::Other];

    /// The method at a path.
    pub(in crate::server) fn of(path: &str) -> Self {
        match path.strip_prefix("/kv_indexer.v1.KVIndexer/") {
            Some("MatchExternalKvPrefix") => Method::MatchPrefix,
            Some("ApplyExternalKvBatch") => Method::Apply,
            Some("MatchExternalKv") => Method::Match,
            Some("GetExternalKvHitCounts") => Method::HitCounts,
            Some(_) => Method::Other,
            None if path.starts_with("/kv_indexer.admin.v1.Admin/") => Method::Admin,
            None => Method::Other,
        }
    }

    /// Its name in the contract.
    pub(in crate::server) fn name(self) -> &'static str {
        match self {
            Method::Apply => "ApplyExternalKvBatch",
            Method::Match => "MatchExternalKv",
            Method::MatchPrefix => "MatchExternalKvPrefix",
            Method::HitCounts => "GetExternalKvHitCounts",
            Method::Admin => "admin",
            Method::Other => "other",
        }
    }
}

/// What a prefix query was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) enum Outcome {
    /// No worker can reuse even the first block, and the scan ended there. Were it
    /// always so, router and engines would hash differently or cut pages differently.
    FirstUnknown,
    /// No worker can reuse anything, though blocks were found.
    Nothing,
    /// The best worker can reuse a part.
    Part,
    /// The best worker can reuse all that was asked for.
    Whole,
}

impl Outcome {
    pub(super) const ALL: [Outcome; 4] =
        [Outcome::FirstUnknown, Outcome::Nothing, Outcome::Part, Outcome::Whole];

    /// The outcome of a query of `asked` blocks of which the best worker has `best`.
    pub(in crate::server) fn of(asked: usize, best: u32, blocks_read: u32) -> Self {
        match best {
            0 if blocks_read <= 1 => Outcome::FirstUnknown,
            0 => Outcome::Nothing,
            best if best as usize >= asked => Outcome::Whole,
            _ => Outcome::Part,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Outcome::FirstUnknown => "first_block_unknown",
            Outcome::Nothing => "nothing",
            Outcome::Part => "part",
            Outcome::Whole => "whole",
        }
    }
}

/// Why a call or a connection was turned away by the port itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::server) enum Refused {
    /// The call showed no valid token or certificate.
    Unauthenticated,
    /// It showed one that allows other calls.
    NotAllowed,
    /// The connection's TLS handshake failed or took too long.
    Handshake,
    /// The messages on their way took all the memory there is for them.
    Memory,
    /// All places for connections were taken.
    Connections,
    /// The peer did not speak HTTP/2, or did not take its answers.
    Unresponsive,
}

impl Refused {
    pub(super) const ALL: [Refused; 6] = [
        Refused::Unauthenticated,
        Refused::NotAllowed,
        Refused::Handshake,
        Refused::Memory,
        Refused::Connections,
        Refused::Unresponsive,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Refused::Unauthenticated => "unauthenticated",
            Refused::NotAllowed => "not_allowed",
            Refused::Handshake => "handshake",
            Refused::Memory => "memory",
            Refused::Connections => "connections",
            Refused::Unresponsive => "unresponsive",
        }
    }
}

/// Calls of one method.
#[derive(Debug)]
pub(super) struct Calls {
    pub(super) codes: [Counter; CODES.len()],
    pub(super) in_flight: Level,
    pub(super) time: Histogram,
}

/// What calls have recorded since the start.
#[derive(Debug)]
pub(in crate::server) struct Recorder {
    calls: [Calls; Method::ALL.len()],
    outcomes: [Counter; Outcome::ALL.len()],
    pub(super) asked: Histogram,
    pub(super) matched: Histogram,
    pub(super) scans: Histogram,
    pub(super) lock_waits: Histogram,
    pub(super) apply_hashes: Histogram,
    pub(super) connections: Level,
    pub(super) connections_total: Counter,
    pub(super) removed_for_silence: Counter,
    /// Workers removed as an operator asked.
    pub(super) dropped: Counter,
    /// 1 while the network is the suspect for workers' silence.
    pub(super) network_suspected: Level,
    pub(super) reports: Reports,
    refused: [Counter; Refused::ALL.len()],
}

impl Recorder {
    pub(in crate::server) fn new() -> Self {
        let calls = |_| Calls {
            codes: Default::default(),
            in_flight: Level::default(),
            time: Histogram::new(Scale::Seconds, CALL_NANOSECONDS),
        };
        Recorder {
            calls: Method::ALL.map(calls),
            outcomes: Default::default(),
            asked: Histogram::new(Scale::Count, BLOCKS),
            matched: Histogram::new(Scale::Count, BLOCKS),
            scans: Histogram::new(Scale::Seconds, WORK_NANOSECONDS),
            lock_waits: Histogram::new(Scale::Seconds, WORK_NANOSECONDS),
            apply_hashes: Histogram::new(Scale::Count, BLOCKS),
            connections: Level::default(),
            connections_total: Counter::default(),
            removed_for_silence: Counter::default(),
            dropped: Counter::default(),
            network_suspected: Level::default(),
            reports: Reports::default(),
            refused: Default::default(),
        }
    }

    /// Counts what was turned away and tells of the 1st, 2nd, 4th, 8th …
    pub(in crate::server) fn refused(&self, why: Refused, detail: &dyn std::fmt::Display) {
        let total = self.refused[why as usize].count_up();
        if total.is_power_of_two() {
            tracing::warn!(total, reason = why.name(), "turned away: {detail}");
        }
    }

    pub(super) fn refusals(&self) -> [(&'static str, u64); Refused::ALL.len()] {
        Refused::ALL.map(|why| (why.name(), self.refused[why as usize].get()))
    }

    pub(super) fn calls(&self, method: Method) -> &Calls {
        &self.calls[method as usize]
    }

    /// Calls of a method that have arrived and are not answered.
    pub(in crate::server) fn in_flight(&self, method: Method) -> u64 {
        self.calls(method).in_flight.get()
    }

    pub(super) fn outcomes(&self) -> [(Outcome, u64); Outcome::ALL.len()] {
        Outcome::ALL.map(|outcome| (outcome, self.outcomes[outcome as usize].get()))
    }

    /// A query that was scanned: what it asked, what it got, and how long each step took.
    pub(in crate::server) fn scanned(&self, asked: usize, best: u32, blocks_read: u32, times: ScanTimes) {
        self.outcomes[Outcome::of(asked, best, blocks_read) as usize].count();
        self.asked.record(asked as u64);
        self.matched.record(best.into());
        self.lock_waits.record_time(times.locked - times.began);
        self.scans.record_time(times.ended - times.locked);
    }

    /// A batch of this many hashes was applied, and this is what its bridge says of its stream.
    pub(in crate::server) fn applied(
        &self,
        index: &Index,
        batch: &Batch<'_>,
        hashes: usize,
        stream: Option<Stream>,
    ) {
        self.apply_hashes.record(hashes as u64);
        let is_new = self.reports.heard(batch.worker_id, batch.seq, stream);
        // Who removes a worker forgets it after that. So one that was removed before it was noted here
        // is found out now, and any other is forgotten by its remover.
        if is_new && index.read().find_worker(batch.worker_id).is_none() {
            self.reports.forget(batch.worker_id);
        }
    }

    /// What is known of these workers' reports.
    pub(in crate::server) fn heard<'a>(
        &self,
        worker_ids: impl Iterator<Item = &'a str>,
    ) -> Vec<Option<Heard>> {
        self.reports.of(worker_ids)
    }

    /// Workers whose bridges synchronise and have said so not too long before `now`.
    pub(in crate::server) fn synchronising(&self, now: Instant) -> Waiting {
        self.reports.synchronising(now)
    }

    /// A worker was removed as an operator asked.
    pub(in crate::server) fn dropped(&self, worker_id: &str) {
        self.dropped.count();
        self.reports.forget(worker_id);
    }

    /// A worker was removed as nothing was heard of it.
    pub(in crate::server) fn removed_for_silence(&self, worker_id: &str) {
        self.removed_for_silence.count();
        self.reports.forget(worker_id);
    }

    /// The network is suspected to be why workers are silent, or no longer.
    pub(in crate::server) fn suspect_network(&self, suspected: bool) {
        if suspected {
            self.network_suspected.rise();
        } else {
            self.network_suspected.fall();
        }
    }

    /// A connection was opened; it counts until the guard is dropped.
    pub(in crate::server) fn connected(self: &Arc<Self>) -> Connected {
        self.connections.rise();
        self.connections_total.count();
        Connected(Arc::clone(self))
    }
}

/// When a scan waited for the lock, had it, and let it go.
#[derive(Debug, Clone, Copy)]
pub(in crate::server) struct ScanTimes {
    pub(in crate::server) began: Instant,
    pub(in crate::server) locked: Instant,
    pub(in crate::server) ended: Instant,
}

/// An open connection.
#[derive(Debug)]
pub(in crate::server) struct Connected(Arc<Recorder>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connections.fall();
    }
}

/// A call under way; one that is dropped without an answer was cancelled by its caller.
#[derive(Debug)]
pub(in crate::server) struct Running {
    recorder: Arc<Recorder>,
    method: Method,
    began: Instant,
    code: Code,
}

impl Running {
    pub(in crate::server) fn begin(recorder: Arc<Recorder>, method: Method) -> Self {
        recorder.calls(method).in_flight.rise();
        Running { recorder, method, began: Instant::now(), code: Code::Cancelled }
    }

    /// The call is answered with this code.
    pub(in crate::server) fn answered(&mut self, code: Code) {
        self.code = code;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let calls = self.recorder.calls(self.method);
        calls.in_flight.fall();
        calls.codes[self.code as usize].count();
        calls.time.record_time(self.began.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_stand_at_their_numbers() {
        for (place, (code, _)) in CODES.iter().enumerate() {
            assert_eq!(*code as usize, place, "{code:?}");
        }
        assert!(Method::ALL.iter().enumerate().all(|(place, method)| *method as usize == place));
        assert!(Refused::ALL.iter().enumerate().all(|(place, why)| *why as usize == place));
        assert!(Outcome::ALL.iter().enumerate().all(|(place, outcome)| *outcome as usize == place));
    }

    #[test]
    fn outcomes_tell_an_unknown_prompt_from_one_that_cannot_be_reused() {
        let rows = [
            ((4, 0, 1), Outcome::FirstUnknown),
            ((4, 0, 0), Outcome::FirstUnknown),
            ((4, 0, 3), Outcome::Nothing),
            ((4, 3, 4), Outcome::Part),
            ((4, 4, 4), Outcome::Whole),
            ((1, 1, 1), Outcome::Whole),
        ];
        for ((asked, best, read), expected) in rows {
            assert_eq!(Outcome::of(asked, best, read), expected, "{asked} {best} {read}");
        }
    }

    #[test]
    fn a_call_that_is_dropped_was_cancelled() {
        let recorder = Arc::new(Recorder::new());
        let mut answered = Running::begin(Arc::clone(&recorder), Method::Apply);
        let dropped = Running::begin(Arc::clone(&recorder), Method::Apply);
        let calls = recorder.calls(Method::Apply);
        assert_eq!(calls.in_flight.get(), 2);
        answered.answered(Code::Ok);
        drop((answered, dropped));
        let codes = [Code::Ok, Code::Cancelled].map(|code| calls.codes[code as usize].get());
        assert_eq!((codes, calls.in_flight.get(), calls.time.read().count()), ([1, 1], 0, 2));
    }
}
