//! The event socket: messages in, with word of every connection made and lost.
//!
//! It knows no batch and no event. It connects to the publisher, or binds where
//! the publisher is the one that connects, and keeps doing so with a growing wait.
//!
//! It holds one partly received message and no queue. A bridge that stops reading
//! fills the kernel's buffers and then the publisher's queue, which drops messages
//! past its mark and never blocks the engine.
//!
//! Where it binds, the newest publisher counts: the one before may have vanished
//! without a word, and a stream has one publisher. A peer that is no publisher
//! never takes its place.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Sleep;
use tracing::{debug, warn};

use super::backoff::Backoff;
use super::config::Source;
use super::health::is_loud;
use super::zmtp::{self, Connection, Listener, Role, ZmtpError};

/// Longest that connecting and shaking hands may take.
const OPEN_MAX: Duration = Duration::from_secs(5);

/// What the socket has to tell.
#[derive(Debug)]
pub(super) enum Signal {
    /// A publisher is connected.
    Connected,
    /// A publisher's connection is gone.
    Disconnected,
    /// One message's frames.
    Message(Vec<Bytes>),
}

type Opening<T> = Pin<Box<dyn Future<Output = Result<T, ZmtpError>> + Send>>;

/// A subscription that is kept up.
pub(super) struct Subscriber {
    source: Source,
    backoff: Backoff,
    failures: u64,
    state: State,
}

/// Invariant: whatever is waited for is stored here, so that a cancelled `next` loses nothing.
enum State {
    Waiting(Pin<Box<Sleep>>),
    Connecting(Opening<Connection>),
    Connected(Box<Connection>),
    Binding(Opening<Listener>),
    Bound(Box<Bound>),
}

impl Subscriber {
    pub(super) fn new(source: Source) -> Self {
        let state = State::opening(&source);
        Subscriber { source, backoff: Backoff::default(), failures: 0, state }
    }

    /// The next signal. Cancelling it loses nothing.
    pub(super) async fn next(&mut self) -> Signal {
        loop {
            match &mut self.state {
                State::Waiting(wait) => {
                    wait.await;
                    self.state = State::opening(&self.source);
                }
                State::Connecting(attempt) => match attempt.await {
                    Ok(connection) => {
                        self.state = State::Connected(Box::new(connection));
                        return Signal::Connected;
                    }
                    Err(error) => self.failed(&error),
                },
                State::Binding(attempt) => match attempt.await {
                    Ok(listener) => {
                        let endpoint = &self.source.endpoint;
                        tracing::info!(endpoint, "waiting for the publisher to connect");
                        let heartbeat = self.source.heartbeat;
                        let bound =
                            Bound { listener, heartbeat, joining: None, publisher: None, untold: false };
                        self.state = State::Bound(Box::new(bound));
                    }
                    Err(error) => self.failed(&error),
                },
                State::Connected(connection) => match connection.recv().await {
                    Ok(frames) => {
                        self.backoff = Backoff::default();
                        self.failures = 0;
                        return Signal::Message(frames);
                    }
                    Err(error) => {
                        debug!("the event socket failed: {error}");
                        self.state = State::Waiting(Box::pin(tokio::time::sleep(self.backoff.wait())));
                        return Signal::Disconnected;
                    }
                },
                State::Bound(bound) => return bound.next(&role(&self.source)).await,
            }
        }
    }

    fn failed(&mut self, error: &ZmtpError) {
        self.state = State::Waiting(Box::pin(tokio::time::sleep(self.backoff.wait())));
        self.failures += 1;
        if is_loud(self.failures, 1) {
            let (endpoint, failures) = (&self.source.endpoint, self.failures);
            let verb = if self.source.bind { "bind" } else { "connect" };
            warn!(endpoint, failures, "cannot {verb} the event socket: {error}");
        }
    }
}

impl State {
    fn opening(source: &Source) -> Self {
        let endpoint = source.endpoint.clone();
        if source.bind {
            return State::Binding(Box::pin(async move { Listener::bind(&endpoint).await }));
        }
        let (role, heartbeat) = (role(source), source.heartbeat);
        State::Connecting(in_time(async move { zmtp::connect(&endpoint, &role, heartbeat).await }))
    }
}

fn role(source: &Source) -> Role {
    Role::Sub { topic: source.topic.clone() }
}

fn in_time(
    attempt: impl Future<Output = Result<Connection, ZmtpError>> + Send + 'static,
) -> Opening<Connection> {
    Box::pin(async move { tokio::time::timeout(OPEN_MAX, attempt).await.unwrap_or(Err(ZmtpError::Silent)) })
}

/// A bound endpoint and whoever came to it.
struct Bound {
    listener: Listener,
    heartbeat: Duration,
    /// One at a time: a crowd of strangers waits in the kernel's queue, each for at most [`OPEN_MAX`].
    joining: Option<Opening<Connection>>,
    publisher: Option<Box<Connection>>,
    /// Whether the publisher is yet to be told of.
    untold: bool,
}

impl Bound {
    async fn next(&mut self, role: &Role) -> Signal {
        loop {
            if std::mem::take(&mut self.untold) {
                return Signal::Connected;
            }
            let Bound { listener, joining, publisher, heartbeat, .. } = self;
            tokio::select! {
                biased;
                received = receive(publisher) => match received {
                    Ok(frames) => return Signal::Message(frames),
                    Err(error) => {
                        debug!("the publisher's connection failed: {error}");
                        self.publisher = None;
                        return Signal::Disconnected;
                    }
                },
                joined = join(joining) => match joined {
                    Ok(connection) => {
                        self.untold = true;
                        if self.publisher.replace(Box::new(connection)).is_some() {
                            return Signal::Disconnected;
                        }
                    }
                    Err(error) => debug!("no publisher: {error}"),
                },
                accepted = listener.accept(*heartbeat), if joining.is_none() => {
                    let role = role.clone();
                    *joining = Some(in_time(async move {
                        match accepted {
                            Ok(pending) => Connection::shake_hands(pending, &role).await,
                            // The system is short of something; asking again at once would not help.
                            Err(error) => {
                                tokio::time::sleep(Duration::from_secs(1)).await;
                                Err(error)
                            }
                        }
                    }));
                }
            }
        }
    }
}

/// Cancelling it loses nothing.
async fn receive(publisher: &mut Option<Box<Connection>>) -> Result<Vec<Bytes>, ZmtpError> {
    match publisher {
        Some(publisher) => publisher.recv().await,
        None => std::future::pending().await,
    }
}

/// Cancelling it loses nothing.
async fn join(joining: &mut Option<Opening<Connection>>) -> Result<Connection, ZmtpError> {
    let joined = match joining {
        Some(attempt) => attempt.await,
        None => std::future::pending().await,
    };
    *joining = None;
    joined
}
