//! When a server has caught up with its bridges.
//!
//! A server starts with an empty index, and routers that ask it then would find nothing and
//! scatter prompts over the fleet. So it says that it is not ready until its bridges have had
//! time to find it, `KV_INDEXER_SETTLE_MS`, and have brought it up to date: a bridge marks its
//! batches with the metadata [`HEADER`], `synchronising` at first and `synchronised` from then on.
//! With the latter it names the instance that it has brought up to date: a bridge that has not
//! noticed yet that this server is another one says so of its predecessor.
//! Calls are answered all the same. A worker whose bridge says nothing further for
//! [`PATIENCE`], or that is removed, is waited for no longer; one whose bridge does not
//! mark its batches never is.
//!
//! Once ready, a server stays so until it drains: one new worker that is brought up to
//! date later does not make the answers about all others worse.
//!
//! What this costs an apply is the look-up of a header; whoever waits asks [`EVERY`] so often.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tonic::metadata::MetadataMap;

use super::instance::Instance;
use super::observe::Recorder;

/// The metadata of a batch that says what its bridge is about.
const HEADER: &str = "kv-indexer-stream";

/// How long a bridge that synchronises may say nothing and still be waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Pause between two looks while not ready.
const EVERY: Duration = Duration::from_millis(50);

/// Workers that are named to those who ask what is waited for.
const NAMED_MAX: usize = 8;

/// Longest part of a worker's name in that, in characters.
const NAME_CHARS_MAX: usize = 64;

/// What a bridge says that its stream to this server is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    /// It brings the server up to date.
    Synchronising,
    /// The server is up to date, and batches are news.
    Synchronised,
}

impl Stream {
    /// What the metadata of a batch says to this instance; a word of another time counts as none.
    pub(super) fn of(metadata: &MetadataMap, instance: &Instance) -> Option<Self> {
        match metadata.get(HEADER)?.as_bytes() {
            b"synchronised" if instance.is_meant_by(metadata) => Some(Stream::Synchronised),
            b"synchronised" | b"synchronising" => Some(Stream::Synchronising),
            _ => None,
        }
    }
}

/// Workers whose bridges synchronise.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Waiting {
    /// How many.
    pub(super) workers: usize,
    /// Some of their names.
    pub(super) named: Vec<String>,
}

impl Waiting {
    /// One more worker.
    pub(super) fn add(&mut self, worker_id: &str) {
        self.workers += 1;
        if self.named.len() < NAMED_MAX {
            self.named.push(worker_id.chars().take(NAME_CHARS_MAX).collect());
        }
    }
}

/// How it stands with a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    /// Bridges have this long to find it.
    Settling(Duration),
    /// Bridges bring it up to date.
    Synchronising(Waiting),
    /// Its answers are as good as they get.
    Ready,
    /// It takes no new calls.
    Draining,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Standing::Settling(left) => {
                write!(f, "not ready: bridges have {} ms more to find this server", left.as_millis())
            }
            Standing::Synchronising(waiting) => {
                // As they are quoted, names cannot break the line.
                write!(f, "not ready: {} workers synchronise: {:?}", waiting.workers, waiting.named)?;
                if waiting.named.len() < waiting.workers { write!(f, " and more") } else { Ok(()) }
            }
            Standing::Ready => f.write_str("ready"),
            Standing::Draining => f.write_str("draining"),
        }
    }
}

/// What a server that does not drain waits for, `age` after its start.
fn standing(age: Duration, settle: Duration, waiting: impl FnOnce() -> Waiting) -> Standing {
    if settle.is_zero() {
        return Standing::Ready;
    }
    if age < settle {
        return Standing::Settling(settle - age);
    }
    match waiting() {
        waiting if waiting.workers > 0 => Standing::Synchronising(waiting),
        _ => Standing::Ready,
    }
}

/// Whether a server is ready, from its start to its drain.
#[derive(Debug)]
pub(super) struct Readiness {
    settle: Duration,
    started: Instant,
    recorder: Arc<Recorder>,
    // Each goes from false to true once and orders nothing else, so `Relaxed` is enough.
    reached: AtomicBool,
    draining: AtomicBool,
}

impl Readiness {
    /// Of a server that starts now; a `settle` of zero makes it ready at once.
    pub(super) fn new(settle: Duration, recorder: Arc<Recorder>) -> Self {
        let (reached, draining) = (AtomicBool::new(false), AtomicBool::new(false));
        Readiness { settle, started: Instant::now(), recorder, reached, draining }
    }

    /// From now on the server is not ready for new calls.
    pub(super) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// How it stands now.
    pub(super) fn standing(&self) -> Standing {
        if self.draining.load(Ordering::Relaxed) {
            return Standing::Draining;
        }
        if self.reached.load(Ordering::Relaxed) {
            return Standing::Ready;
        }
        let now = Instant::now();
        let found = standing(now - self.started, self.settle, || self.recorder.synchronising(now));
        if found == Standing::Ready {
            self.reached.store(true, Ordering::Relaxed);
        }
        found
    }

    pub(super) fn is_ready(&self) -> bool {
        self.standing() == Standing::Ready
    }

    /// Returns once the server is ready.
    pub(super) async fn reached(&self) {
        let mut has_waited = false;
        loop {
            match self.standing() {
                Standing::Ready => break,
                waiting @ Standing::Synchronising(_) if !has_waited => {
                    has_waited = true;
                    tracing::info!("{waiting}");
                }
                _ => {}
            }
            tokio::time::sleep(EVERY).await;
        }
        let after_ms = self.started.elapsed().as_millis() as u64;
        tracing::info!(after_ms, "ready");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Batch, Index};

    const SETTLE: Duration = Duration::from_secs(3);

    fn waiting(names: &[&str]) -> Waiting {
        let mut waiting = Waiting::default();
        names.iter().for_each(|name| waiting.add(name));
        waiting
    }

    #[test]
    fn a_server_settles_then_waits_then_is_ready() {
        let ms = Duration::from_millis;
        let synchronise = || waiting(&["w"]);
        for (age, settle, waits, expected) in [
            (ms(0), SETTLE, false, Standing::Settling(SETTLE)),
            (ms(2_999), SETTLE, true, Standing::Settling(ms(1))),
            (SETTLE, SETTLE, true, Standing::Synchronising(synchronise())),
            (SETTLE, SETTLE, false, Standing::Ready),
            (ms(0), ms(0), true, Standing::Ready),
        ] {
            let found = standing(age, settle, || if waits { synchronise() } else { Waiting::default() });
            assert_eq!(found, expected, "{age:?} {waits}");
        }
    }

    #[test]
    fn once_ready_it_stays_so_until_the_drain() {
        let recorder = Arc::new(Recorder::new());
        let readiness = Readiness::new(Duration::from_nanos(1), Arc::clone(&recorder));
        let index = Index::new();
        let say = |seq, stream| {
            let batch = Batch { worker_id: "w", worker_address: "", cache_spec: None, seq, actions: &[] };
            index.apply(&batch).expect("applied");
            recorder.applied(&index, &batch, 0, Some(stream));
        };
        say(1, Stream::Synchronising);
        // By the second look a nanosecond has passed for sure.
        while matches!(readiness.standing(), Standing::Settling(_)) {}
        assert_eq!(readiness.standing(), Standing::Synchronising(waiting(&["w"])));
        say(2, Stream::Synchronised);
        assert!(readiness.is_ready());
        say(3, Stream::Synchronising);
        assert!(readiness.is_ready());
        readiness.drain();
        assert_eq!(readiness.standing(), Standing::Draining);
    }

    #[test]
    fn hostile_names_stay_short_and_in_their_line() {
        let long = "x".repeat(10_000);
        let mut names = vec!["a\nready", &long];
        names.extend(["w"; 100]);
        let text = Standing::Synchronising(waiting(&names)).to_string();
        assert!(text.len() < 1_000 && !text.contains('\n') && text.contains("102 workers"), "{text}");
        assert!(text.ends_with(" and more"), "{text}");
    }

    #[test]
    fn only_known_words_count() {
        let (this, other) = (Instance::random(), Instance::random());
        let of = |value: &'static str, meant: Option<&Instance>| {
            let mut metadata = MetadataMap::new();
            metadata.insert(HEADER, tonic::metadata::MetadataValue::from_static(value));
            if let Some(meant) = meant {
                metadata.insert("kv-indexer-instance", meant.as_str().parse().expect("hex"));
            }
            Stream::of(&metadata, &this)
        };
        for meant in [None, Some(&this), Some(&other)] {
            assert_eq!(of("synchronising", meant), Some(Stream::Synchronising));
            for word in ["", "Synchronised", "synchronised ", "ready"] {
                assert_eq!(of(word, meant), None, "{word:?}");
            }
        }
        assert_eq!(of("synchronised", Some(&this)), Some(Stream::Synchronised));
        assert_eq!(of("synchronised", Some(&other)), Some(Stream::Synchronising), "of its predecessor");
        assert_eq!(of("synchronised", None), Some(Stream::Synchronising));
        assert_eq!(Stream::of(&MetadataMap::new(), &this), None);
    }
}
