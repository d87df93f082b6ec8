//! `replay`: a recording as a publisher, or straight to a server.
//!
//! As a publisher it binds a ZeroMQ socket and sends the messages of one stream as they
//! were recorded. That socket is the `zeromq` crate's, which reserves as many bytes as a
//! frame of its peer announces and aborts when there are not so many: bind it to
//! addresses that only trusted subscribers reach. To a server it reports what a bridge
//! would, one batch after the other, each until the server has taken it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Args, ValueEnum};
use zeromq::{Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

use super::feed::{Feed, FeedArguments, Feeds};
use super::recording::{Recording, What};
use super::remote::{Remote, ServerArguments, failed};
use super::{Environment, Failure, Outcome};

/// Changes that are gathered before they are sent, when nothing waits for them.
const GATHERED_BYTES: usize = 256 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pace {
    /// As fast as it is taken.
    Fast,
    /// At the recorded times.
    Recorded,
}

#[derive(Debug, Args)]
pub(super) struct Replay {
    /// A recording, or a capture in lines of JSON.
    file: PathBuf,
    /// Publishes the messages at this endpoint, tcp://HOST:PORT or ipc://PATH, instead of reporting to a
    /// server. Bind it to addresses that only trusted subscribers reach: an enormous frame ends the process.
    #[arg(long, value_name = "ENDPOINT", conflicts_with_all = ["servers", "worker", "address", "settings"])]
    publish: Option<String>,
    /// Ends once everything is published; otherwise the publisher stays, as an idle engine, until ctrl-c.
    #[arg(long, requires = "publish")]
    leave: bool,
    /// How fast.
    #[arg(long, default_value = "fast")]
    pace: Pace,
    #[command(flatten)]
    feed: FeedArguments,
    #[command(flatten)]
    server: ServerArguments,
}

impl Replay {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let recording = Recording::open(&self.file)?;
        match &self.publish {
            Some(endpoint) => {
                let clock = Clock::new(self.pace);
                publish(recording, endpoint, self.feed.stream.as_deref(), self.leave, clock, environment)
                    .await
            }
            None => self.report(recording, environment).await,
        }
    }

    async fn report(
        self,
        recording: Recording,
        environment: &mut Environment<'_>,
    ) -> Result<Outcome, Failure> {
        let mut client = self.server.client(environment)?;
        let mut feeds = Feeds::new(self.feed)?;
        let mut clock = Clock::new(self.pace);
        let progress = recording.progress.clone();
        let mut reports = 0;
        let mut stopped = false;
        for entry in recording {
            let entry = entry?;
            tokio::select! {
                biased;
                () = &mut environment.shutdown => {
                    stopped = true;
                    break;
                }
                () = clock.reach(entry.at) => {}
            }
            let Some(feed) = feeds.of(&entry.stream)? else { continue };
            feed.take(&entry.what);
            if self.pace == Pace::Recorded || feed.waiting() >= GATHERED_BYTES {
                reports += send(feed, &mut client).await?;
            }
        }
        for feed in feeds.all() {
            reports += send(feed, &mut client).await?;
        }
        progress.finish_and_clear();
        for feed in feeds.all() {
            writeln!(environment.out, "{}: {}", feed.worker(), feed.health())?;
        }
        let how = if stopped { ", stopped before the end" } else { "" };
        writeln!(environment.out, "{reports} reports sent{how}")?;
        Ok(Outcome::found(!feeds.is_empty()))
    }
}

/// Sends all that waits; returns how many reports that were.
async fn send(feed: &mut Feed, client: &mut Remote) -> Result<u64, Failure> {
    let mut sent = 0;
    while let Some(report) = feed.report() {
        client.apply_external_kv_batch(report).await.map_err(|status| failed(&status))?;
        sent += 1;
    }
    Ok(sent)
}

async fn publish(
    recording: Recording,
    endpoint: &str,
    wanted: Option<&str>,
    leave: bool,
    mut clock: Clock,
    environment: &mut Environment<'_>,
) -> Result<Outcome, Failure> {
    let mut publisher = Publisher::bind(endpoint).await?;
    writeln!(environment.out, "{}: waiting for a subscriber", publisher.endpoint)?;
    environment.out.flush()?;
    tokio::select! {
        biased;
        () = &mut environment.shutdown => return Ok(Outcome::Negative),
        () = publisher.joined() => {}
    }
    let progress = recording.progress.clone();
    let mut wanted: Option<Arc<str>> = wanted.map(Arc::from);
    let (mut sent, mut others) = (0_u64, 0_u64);
    for entry in recording {
        let entry = entry?;
        let What::Message(frames) = entry.what else { continue };
        if *wanted.get_or_insert_with(|| Arc::clone(&entry.stream)) != entry.stream {
            others += 1;
            continue;
        }
        tokio::select! {
            biased;
            () = &mut environment.shutdown => break,
            sending = async {
                clock.reach(entry.at).await;
                publisher.send(frames).await
            } => sending?,
        }
        sent += 1;
    }
    progress.finish_and_clear();
    let stream = wanted.unwrap_or_default();
    writeln!(
        environment.out,
        "{sent} messages of stream {stream:?} sent, {others} of other streams left out"
    )?;
    environment.out.flush()?;
    if !leave {
        (&mut environment.shutdown).await;
    }
    publisher.socket.close().await;
    Ok(Outcome::found(sent > 0))
}

/// A bound socket. It is an XPUB, which shows who subscribes; to a subscriber it is a PUB.
struct Publisher {
    socket: XPubSocket,
    endpoint: String,
}

impl Publisher {
    async fn bind(endpoint: &str) -> Result<Self, Failure> {
        let mut socket = XPubSocket::new();
        let bound = socket.bind(endpoint).await;
        let bound = bound.map_err(|error| Failure::Input(format!("{endpoint}: {error}")))?;
        Ok(Publisher { socket, endpoint: bound.to_string() })
    }

    /// Waits for a subscriber.
    async fn joined(&mut self) {
        loop {
            // An error is a connection that broke; the next one may hold.
            let Ok(message) = self.socket.recv().await else { continue };
            if message.get(0).is_some_and(|frame| frame.first() == Some(&1)) {
                return;
            }
        }
    }

    async fn send(&mut self, frames: Vec<Bytes>) -> Result<(), Failure> {
        // A message without frames is none.
        let Ok(message) = ZmqMessage::try_from(frames) else { return Ok(()) };
        self.socket.send(message).await.map_err(|error| Failure::NoAnswer(format!("cannot publish: {error}")))
    }
}

/// When the next message is due.
struct Clock {
    pace: Pace,
    /// When the first message was, here and in the recording.
    began: Option<(Instant, Duration)>,
}

impl Clock {
    fn new(pace: Pace) -> Self {
        Clock { pace, began: None }
    }

    /// Waits until what was recorded `at` this time is due.
    async fn reach(&mut self, at: Duration) {
        if self.pace == Pace::Fast {
            return;
        }
        let (began, first) = *self.began.get_or_insert_with(|| (Instant::now(), at));
        let due = began.checked_add(at.saturating_sub(first));
        match due {
            Some(due) => tokio::time::sleep_until(due.into()).await,
            // A time past all clocks never comes.
            None => std::future::pending().await,
        }
    }
}
