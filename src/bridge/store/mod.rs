//! A stream's mirror on disk, for a start without the engine's help.
//!
//! Each stream has a file of its own in a directory: a log of what the stream did to the
//! mirror. A *record* is what came of one message or replayed batch: the actions that the
//! mirror took, what changed of copies, and last the *mark* with the publisher's last
//! batch and the stream's completeness. So mark and content are always of one moment. A
//! tail without its mark, torn or damaged, is not there; see `format` for the bytes.
//!
//! A file that is behind does no harm: what is loaded counts for nothing until the
//! publisher has been found to go on from exactly its mark (see [`follow`](super::follow)).
//! So records are written as they come and not synced, and a kill loses at most the last ones.
//!
//! Writing is done by a thread of each stream, as a disk may hold up whoever writes to it
//! for seconds and a stream must go on. Records wait for it in memory, at most
//! [`QUEUED_BYTES_MAX`]. Once the log is several times what the worker holds, the thread
//! writes the holdings anew, see `writer`.
//!
//! Whatever goes wrong is told once, ends the keeping for that stream until the next start,
//! and removes the file. A file of another stream, other settings or another format is
//! begun anew.

mod file;
mod format;
mod writer;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, SystemTime};

use tokio::sync::oneshot;
use tracing::{info, warn};

pub(super) use self::file::OpenError;
pub(super) use self::format::Identity;

use self::format::{Bodies, MarkBody};
use self::writer::Writer;
use super::config::Config;
use super::copies::Copies;
use super::follow::Mark;
use super::health::Incomplete;
use super::mirror::Mirror;
use super::stream::Kept;
use crate::pb::ExternalKvAction;
use crate::settings::Setting;

/// Where the mirrors are kept.
pub(super) const MIRROR_DIR: Setting = Setting {
    name: "KV_INDEXER_MIRROR_DIR",
    value: "DIRECTORY",
    default: None,
    help: "Directory in which each stream's mirror is kept, so that a bridge that starts can go on where the last one \
           was if the publisher's numbers still fit. Without it a start begins from empty.",
};

/// Most bytes of records that wait for the disk: what is beyond ends the keeping.
const QUEUED_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Bytes of log past which the holdings are written anew, beside those that they take themselves.
const LOG_BYTES_MIN: u64 = 256 * 1024;

/// What a stream's end and its thread both see.
#[derive(Debug, Default)]
struct Shared {
    /// Number of the last message whose changes the mirror may have. Written before the mirror
    /// takes them; `SeqCst` pairs with the thread's read after its last page.
    begun: AtomicU64,
    /// Bytes that wait.
    queued_bytes: AtomicUsize,
    /// Whether the next record is to bring all that is known of copies.
    wants_copies: AtomicBool,
    /// Whether the file is kept no longer.
    failed: AtomicBool,
}

/// What the thread is told, in order.
#[derive(Debug)]
enum Message {
    Record { number: u64, bodies: Bodies, mark: MarkBody, copies: Option<Bodies> },
    Empty { number: u64 },
}

/// A stream's own end: tells the thread what happened.
#[derive(Debug)]
pub(super) struct Keeper {
    worker_id: Arc<str>,
    /// Gone once the file is kept no longer.
    messages: Option<Sender<Message>>,
    ended: Option<oneshot::Receiver<()>>,
    shared: Arc<Shared>,
    /// Of the record being made.
    bodies: Bodies,
    begun: bool,
    /// The mark that the thread was told last.
    told: Option<MarkBody>,
}

impl Keeper {
    /// Opens the file of a stream, loads what it has into the mirror and starts its thread. It
    /// reads the whole file, so it is for a thread that may block.
    ///
    /// # Errors
    /// The file cannot be kept. Then it is another process's, or is removed.
    pub(super) fn open(config: &Config, mirror: &Mirror) -> Result<(Keeper, Option<Kept>), OpenError> {
        let directory = config.mirror_dir.as_deref().unwrap_or(Path::new("."));
        let copies = Copies::new(config.copies, config.cache_spec.is_some());
        let (file, kept) = file::open(directory, &Identity::of(config), mirror, copies)?;
        let shared = Arc::new(Shared::default());
        let told = kept.as_ref().map(|kept| format::mark_body(&kept.mark, kept.incomplete));
        let (messages, received) = channel();
        let (ends, ended) = oneshot::channel();
        let writer = Writer::new(file, mirror.clone(), Arc::clone(&shared), &config.worker_id);
        let spawned = std::thread::Builder::new().name("mirror-file".to_owned()).spawn(move || {
            writer.run(&received);
            // The other end may have stopped waiting.
            let _ = ends.send(());
        });
        if let Err(error) = spawned {
            mirror.empty();
            return Err(OpenError::Io("start a thread for", error));
        }
        let keeper = Keeper {
            worker_id: config.worker_id.as_str().into(),
            messages: Some(messages),
            ended: Some(ended),
            shared,
            bodies: Bodies::default(),
            begun: false,
            told,
        };
        Ok((keeper, kept))
    }

    /// The mirror is about to take changes.
    pub(super) fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            self.shared.begun.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The mirror has taken these, after [`Keeper::begin`].
    pub(super) fn note(&mut self, actions: &[ExternalKvAction]) {
        if self.messages.is_some() && !actions.is_empty() {
            self.bodies.push(|body| format::put_actions(body, actions));
        }
    }

    /// Everything up to this mark has been noted. Says whether the keeping has ended since it was last asked.
    pub(super) fn commit(
        &mut self,
        mark: Option<Mark>,
        incomplete: Option<(SystemTime, Incomplete)>,
        copies: &mut Copies,
    ) -> bool {
        if self.messages.is_none() {
            return false;
        }
        format::put_notes(&mut self.bodies, copies.take_notes().into_iter());
        let Some(mark) = mark.map(|mark| format::mark_body(&mark, incomplete)) else {
            if self.told.is_some() || self.begun {
                self.empty();
            }
            return self.has_ended();
        };
        if !self.begun && self.bodies.is_empty() && self.told == Some(mark) {
            return self.has_ended();
        }
        let copies = self.shared.wants_copies.swap(false, Ordering::Relaxed).then(|| {
            let mut all = Bodies::default();
            format::put_notes(&mut all, copies.all_notes());
            all
        });
        let number = self.number();
        let bodies = std::mem::take(&mut self.bodies);
        self.tell(Message::Record { number, bodies, mark, copies });
        self.told = Some(mark);
        self.has_ended()
    }

    /// Nothing is to be found at the next start, until there is a next record.
    pub(super) fn empty(&mut self) {
        self.bodies = Bodies::default();
        let number = self.number();
        self.tell(Message::Empty { number });
        self.told = None;
        // What the mirror holds at tiers that a clear leaves alone is in no record.
        self.shared.wants_copies.store(true, Ordering::Relaxed);
    }

    /// The number of the message that is complete now.
    fn number(&mut self) -> u64 {
        self.begin();
        self.begun = false;
        self.shared.begun.load(Ordering::SeqCst)
    }

    fn tell(&mut self, message: Message) {
        let Some(messages) = &self.messages else { return };
        let queued = self.shared.queued_bytes.load(Ordering::Relaxed);
        if queued > QUEUED_BYTES_MAX {
            let worker = &*self.worker_id;
            warn!(worker, queued, "the mirror is kept on disk no longer: the disk is slower than the stream");
            self.shared.failed.store(true, Ordering::SeqCst);
            return;
        }
        self.shared.queued_bytes.fetch_add(message.bytes(), Ordering::Relaxed);
        if messages.send(message).is_err() {
            self.shared.failed.store(true, Ordering::SeqCst);
        }
    }

    /// Whether the keeping ended; told once. The thread removes the file.
    fn has_ended(&mut self) -> bool {
        let ended = self.messages.is_some() && self.shared.failed.load(Ordering::SeqCst);
        if ended {
            self.messages = None;
            self.bodies = Bodies::default();
        }
        ended
    }

    /// Waits until everything is on disk, at most for `limit`.
    pub(super) async fn finish(mut self, limit: Duration) {
        self.messages = None;
        if let Some(ended) = self.ended.take()
            && tokio::time::timeout(limit, ended).await.is_err()
        {
            warn!(worker = &*self.worker_id, "stopped before the disk took all of the mirror");
        }
    }
}

impl Message {
    /// Bytes that it takes in memory.
    fn bytes(&self) -> usize {
        match self {
            Message::Record { bodies, copies, .. } => {
                size_of::<Message>() + bodies.bytes() + copies.as_ref().map_or(0, Bodies::bytes)
            }
            Message::Empty { .. } => size_of::<Message>(),
        }
    }
}

/// Opens a stream's file if the settings ask for one; what it had is in the mirror then.
pub(super) async fn open(
    config: &Config,
    mirror: &Mirror,
) -> Option<Result<(Keeper, Option<Kept>), OpenError>> {
    config.mirror_dir.as_ref()?;
    let (worker_id, config, mirror) = (config.worker_id.clone(), config.clone(), mirror.clone());
    let opened = tokio::task::spawn_blocking(move || Keeper::open(&config, &mirror)).await;
    let opened = opened.unwrap_or(Err(OpenError::Panicked));
    match &opened {
        Ok((_, Some(kept))) => {
            let last = kept.mark.sequence;
            info!(worker = worker_id, last, "loaded what was kept; it counts once the publisher fits it");
        }
        Ok((_, None)) => info!(worker = worker_id, "the mirror is kept on disk from now on"),
        Err(error) => warn!(worker = worker_id, "the mirror is not kept on disk: {error}"),
    }
    Some(opened)
}
