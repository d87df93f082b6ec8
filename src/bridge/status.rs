//! What the streams of a process are going through, for others to read at any time.
//!
//! Each stream's task writes its status after everything it does; whoever asks gets a
//! copy. A copy is of one moment, so its numbers fit each other, and of one stream:
//! two streams' copies may be of different moments. Nothing is ever computed for a
//! reader, so a curious one holds no stream up for longer than a copy takes.
//!
//! Cost: a few hundred bytes written under a lock that hardly anybody else wants, for each
//! message.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::config::Config;
use super::health::Health;

/// One stream, at one moment.
#[derive(Debug, Clone)]
pub struct StreamStatus {
    /// The worker, as it is named in the index.
    pub worker_id: Arc<str>,
    /// Where routers reach it; empty when they cannot.
    pub worker_address: Arc<str>,
    /// The publisher's endpoint.
    pub endpoint: Arc<str>,
    /// The publisher's replay socket, if it has one.
    pub replay_endpoint: Option<Arc<str>>,
    /// The servers that are told, in the order of the settings.
    pub servers: Vec<ServerStatus>,
    /// The data-parallel rank that batches have to be of.
    pub rank: Option<i64>,
    /// Counts since the bridge started, and whether all is known.
    pub health: Health,
    /// Number of the last batch applied in the present life of the publisher. A stream
    /// without one has seen nothing: it may be complete only because nothing is known.
    pub last_sequence: Option<u64>,
    /// Whether a replay is asked for or being taken.
    pub repairing: bool,
    /// Why the stream is followed no longer; empty when it was told to stop.
    pub ended: Option<Arc<str>>,
}

/// A server, as one stream sees it.
#[derive(Debug, Clone)]
pub struct ServerStatus {
    /// Its URL.
    pub server: Arc<str>,
    /// Whether it was told everything and is told each change as it comes.
    pub synchronised: bool,
    /// Times that it was brought up to date from the mirror.
    pub synchronisations: u64,
    /// Most bytes that the changes take which wait for it.
    pub pending_bytes: usize,
    /// RPCs that it has taken.
    pub sent_rpcs: u64,
    /// Attempts in a row that it did not take; 0 while it takes them.
    pub failures: u64,
    /// Whether it refused a batch for good and is told nothing any more.
    pub refused: bool,
}

impl ServerStatus {
    fn new(server: &str) -> Self {
        ServerStatus {
            server: server.into(),
            synchronised: false,
            synchronisations: 0,
            pending_bytes: 0,
            sent_rpcs: 0,
            failures: 0,
            refused: false,
        }
    }
}

impl StreamStatus {
    fn new(config: &Config) -> Self {
        StreamStatus {
            worker_id: config.worker_id.as_str().into(),
            worker_address: config.worker_address.as_str().into(),
            endpoint: config.source.endpoint.as_str().into(),
            replay_endpoint: config.source.replay.as_deref().map(Arc::from),
            servers: config.servers.iter().map(|server| ServerStatus::new(server)).collect(),
            rank: config.rank,
            health: Health::default(),
            last_sequence: None,
            repairing: false,
            ended: None,
        }
    }
}

/// The stream's own end of its status.
#[derive(Debug, Clone)]
pub(super) struct Reporter(Arc<Mutex<StreamStatus>>);

impl Reporter {
    pub(super) fn new(config: &Config) -> Self {
        Reporter(Arc::new(Mutex::new(StreamStatus::new(config))))
    }

    /// Writes what has changed; `change` is short and cannot fail.
    pub(super) fn update(&self, change: impl FnOnce(&mut StreamStatus)) {
        change(&mut self.lock());
    }

    /// Notes that the stream is followed no longer, and why.
    pub(super) fn end(&self, why: &str) {
        self.update(|status| {
            status.health.connected = false;
            status.repairing = false;
            status.ended.get_or_insert_with(|| why.into());
        });
    }

    fn lock(&self) -> MutexGuard<'_, StreamStatus> {
        // A status is numbers only, so one that a panic left half written is still the best there is.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notes the end of a stream that a bug has ended, when it is dropped before any other end.
pub(super) struct EndGuard(pub(super) Reporter);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.end("a bug");
    }
}

/// The statuses of all streams of a process; copies show the same ones.
#[derive(Debug, Clone)]
pub struct Statuses(Arc<[Reporter]>);

impl Statuses {
    pub(super) fn new(reporters: impl Iterator<Item = Reporter>) -> Self {
        Statuses(reporters.collect())
    }

    /// Every stream as it is now, in the order of the settings, also those that have ended.
    pub fn snapshot(&self) -> Vec<StreamStatus> {
        self.0.iter().map(|reporter| reporter.lock().clone()).collect()
    }
}
