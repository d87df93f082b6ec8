//! From an engine's event stream to a server.
//!
//! One loop per stream: the subscriber hands it messages, [`stream`] turns
//! them into changes, [`chunker`] packs those into RPCs, `mirror` takes them, and each
//! server's `feed` has one RPC under way. While it is, arriving changes join the RPCs
//! that wait, so a slow server gets fewer and fuller ones. All of a stream is one task: no
//! queue between tasks, and order holds by construction. The mirror is shared with
//! the other streams of the process; what happens under its lock is short.
//!
//! A server that is new, began anew or fell behind is told everything from the mirror:
//! see `replica`. So nothing that a server does stops the socket from being read.
//!
//! Bounds, for each stream: [`PENDING_BYTES_MAX`] of changes for each server, beyond which
//! they are dropped and the server is told everything instead; for the process: the
//! mirror's blocks. One message's changes take at most [`CHANGE_BYTES_RATIO`] times its bytes.

mod backoff;
pub mod chunker;
pub mod config;
pub mod copies;
pub mod credentials;
mod dial;
pub mod event;
mod feed;
pub mod follow;
mod framing;
pub mod health;
mod mirror;
mod msgpack;
pub mod observe;
mod replay;
mod replica;
mod sender;
pub mod status;
mod store;
pub mod stream;
pub mod streams;
mod subscriber;
pub mod zmtp;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

pub use self::sender::{Refused, ServerError};

use self::chunker::Chunker;
use self::config::Config;
use self::feed::Feeds;
use self::mirror::Mirror;
use self::replay::{Answer, Replayer};
use self::status::{EndGuard, Reporter, Statuses};
use self::store::Keeper;
use self::stream::{Rules, Stream};
use self::subscriber::{Signal, Subscriber};
use crate::arena::Index;

/// Most bytes of changes that wait for a server before it is told everything anew
/// instead: two million blocks, more than most engines hold.
pub const PENDING_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Most bytes of changes per byte of a message. The worst is a clear, of 18 bytes
/// on the wire and one action per tier; engines' stores stay under 4.
pub const CHANGE_BYTES_RATIO: usize = 48;
const _: () = assert!(3 * chunker::ACTION_BYTES <= 18 * CHANGE_BYTES_RATIO);
const _: () = assert!(chunker::HASH_BYTES <= CHANGE_BYTES_RATIO);

/// Longest that a stopping bridge goes on sending what it has received.
pub const DRAIN_MAX: Duration = Duration::from_secs(5);

/// Why a bridge stopped by itself.
#[derive(Debug)]
pub enum RunError {
    /// The server's address cannot be used.
    Server(ServerError),
    /// The server refused a batch for good.
    Refused(Refused),
    /// A stream met a bug in this crate.
    Panicked,
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Server(error) => error.fmt(f),
            RunError::Refused(error) => error.fmt(f),
            RunError::Panicked => f.write_str("a stream was ended by a bug; its message is above"),
        }
    }
}

impl std::error::Error for RunError {}

impl From<ServerError> for RunError {
    fn from(error: ServerError) -> Self {
        RunError::Server(error)
    }
}

impl From<Refused> for RunError {
    fn from(error: Refused) -> Self {
        RunError::Refused(error)
    }
}

/// The streams of a process, each followed in a task of its own.
#[derive(Debug)]
pub struct Bridge {
    streams: Vec<(Config, Reporter)>,
}

impl Bridge {
    /// Is ready to follow the streams and connects to nothing yet.
    pub fn new(configs: Vec<Config>) -> Self {
        let streams = configs.into_iter().map(|config| {
            let reporter = Reporter::new(&config);
            (config, reporter)
        });
        Bridge { streams: streams.collect() }
    }

    /// What the streams are going through, to be read while they are followed and after.
    pub fn statuses(&self) -> Statuses {
        Statuses::new(self.streams.iter().map(|(_, reporter)| reporter.clone()))
    }

    /// Follows all streams until `shutdown` is done, then sends what they have received,
    /// for at most [`DRAIN_MAX`]. One that ends by itself is told of and the others go on.
    ///
    /// # Errors
    /// The first error of any stream, once all have stopped.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), RunError> {
        let index = Arc::new(Index::new());
        let (stop, stopped) = tokio::sync::watch::channel(());
        let mut running = tokio::task::JoinSet::new();
        for (config, reporter) in self.streams {
            let mut stopped = stopped.clone();
            let mirror = Mirror::new(Arc::clone(&index), &config.worker_id, config.mirror_blocks_max);
            running.spawn(async move {
                let worker = config.worker_id.clone();
                let shutdown = async move {
                    // Its end, a dropped sender, is the word to stop.
                    while stopped.changed().await.is_ok() {}
                };
                let _guard = EndGuard(reporter.clone());
                let ended = follow(config, mirror, &reporter, shutdown).await;
                let why = ended.as_ref().err().map(RunError::to_string).unwrap_or_default();
                reporter.end(&why);
                if ended.is_err() {
                    warn!(worker, "the stream has ended: {why}");
                }
                ended
            });
        }
        let mut shutdown = pin!(shutdown);
        let (mut stop, mut first) = (Some(stop), Ok(()));
        loop {
            let ended = tokio::select! {
                () = &mut shutdown, if stop.is_some() => {
                    stop = None;
                    continue;
                }
                ended = running.join_next() => ended,
            };
            match ended {
                Some(Ok(ended)) => first = first.and(ended),
                // A stream is never aborted, and a panic has told where it was.
                Some(Err(_)) => first = first.and(Err(RunError::Panicked)),
                None => return first,
            }
        }
    }
}

/// Follows one stream until `shutdown` is done, then sends what has been received.
async fn follow(
    config: Config,
    mirror: Mirror,
    reporter: &Reporter,
    shutdown: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let opened = store::open(&config, &mirror).await;
    let mut feeds = Feeds::new(&config, mirror, reporter)?;
    let mut stream = Stream::new(Rules {
        worker_id: config.worker_id.clone(),
        topic: config.source.topic.clone(),
        clear_tiers: config.clear_tiers.clone(),
        replays: config.source.replay.is_some(),
        copies: config.copies,
        components: config.cache_spec.is_some(),
        rank: config.rank,
    });
    let mut keeper = None;
    match opened {
        Some(Ok((kept_by, kept))) => {
            keeper = Some(kept_by);
            stream.copies().note_changes();
            if let Some(kept) = kept {
                feeds.withhold();
                stream.resume(kept);
            }
        }
        Some(Err(_)) => stream.not_kept(),
        None => {}
    }
    let mut subscriber = Subscriber::new(config.source.clone());
    let mut replayer = Replayer::new(&config.source);
    let mut asks_again = false;
    let mut grace = Grace::new(config.grace);
    let mut changes = Chunker::default();
    let mut shutdown = pin!(shutdown);
    info!(
        worker = config.worker_id,
        source = config.source.endpoint,
        servers = config.servers.join(","),
        "bridge starts"
    );
    loop {
        take_changes(&mut changes, &mut stream, &mut feeds, keeper.as_mut());
        feeds.start();
        if let Some(from) = stream.question() {
            replayer.ask(from, asks_again);
        }
        reporter.update(|status| {
            status.health.clone_from(stream.health());
            status.last_sequence = stream.last_sequence();
            status.repairing = stream.repairing();
            feeds.report(&mut status.servers);
        });
        // Not biased: neither a flood of live batches nor a long replay may keep the other waiting.
        tokio::select! {
            () = &mut shutdown => break,
            () = grace.over() => {
                warn!(worker = config.worker_id, "the worker is gone: its placements are withdrawn");
                stream.withdraw(&mut changes);
            }
            answer = replayer.next() => {
                asks_again = matches!(answer, Answer::Failed);
                match answer {
                    Answer::Batch(batch) => stream.replayed(batch, &mut changes),
                    Answer::Ended => stream.replay_ended(&mut changes),
                    Answer::Failed => stream.replay_failed(&mut changes),
                }
                if !stream.repairing() {
                    replayer.stop();
                }
            }
            advanced = feeds.advance() => advanced?,
            signal = subscriber.next() => match signal {
                Signal::Connected => {
                    info!(worker = config.worker_id, "connected to the publisher");
                    grace.stop();
                    stream.connected();
                }
                Signal::Disconnected => {
                    grace.start();
                    stream.disconnected();
                    replayer.stop();
                    let last = stream.last_sequence();
                    warn!(worker = config.worker_id, last, "lost the publisher: {}", stream.health());
                }
                Signal::Message(frames) => stream.message(&frames, &mut changes),
            },
        }
    }
    drop(subscriber);
    let kept = async {
        if let Some(keeper) = keeper {
            keeper.finish(DRAIN_MAX).await;
        }
    };
    let drained = tokio::time::timeout(DRAIN_MAX, async {
        while !feeds.is_idle() {
            feeds.start();
            feeds.advance().await?;
        }
        Ok::<(), Refused>(())
    });
    let (drained, ()) = tokio::join!(drained, kept);
    match drained {
        Ok(sent) => sent?,
        Err(_) => {
            warn!(worker = config.worker_id, "stopped before every server took everything that was received")
        }
    }
    info!(worker = config.worker_id, last = stream.last_sequence(), "bridge stops: {}", stream.health());
    Ok(())
}

/// Gives what the stream has made to the mirror, the servers and the file.
fn take_changes(
    changes: &mut Chunker,
    stream: &mut Stream,
    feeds: &mut Feeds,
    mut keeper: Option<&mut Keeper>,
) {
    match stream.outcome() {
        Some(true) => feeds.release(),
        Some(false) => {
            feeds.drop_withheld();
            if let Some(keeper) = &mut keeper {
                keeper.empty();
            }
        }
        None => {}
    }
    while let Some(mut actions) = changes.pop() {
        if let Some(keeper) = &mut keeper {
            keeper.begin();
        }
        stream.left_out(feeds.push(&mut actions));
        if let Some(keeper) = &mut keeper {
            keeper.note(&actions);
        }
    }
    if let Some(keeper) = keeper {
        let (mark, incomplete) = (stream.mark(), stream.health().incomplete);
        if keeper.commit(mark, incomplete, stream.copies()) {
            stream.not_kept();
        }
    }
}

/// How long the worker may still be gone.
struct Grace {
    limit: Option<Duration>,
    until: Option<Instant>,
}

impl Grace {
    /// The worker is not there yet.
    fn new(limit: Option<Duration>) -> Self {
        let mut grace = Grace { limit, until: None };
        grace.start();
        grace
    }

    fn start(&mut self) {
        self.until = self.limit.map(|limit| Instant::now() + limit);
    }

    fn stop(&mut self) {
        self.until = None;
    }

    /// Waits until the worker has been gone for too long; told once. Cancelling it loses nothing.
    async fn over(&mut self) {
        match self.until {
            Some(until) => tokio::time::sleep_until(until).await,
            None => std::future::pending().await,
        }
        self.until = None;
    }
}
