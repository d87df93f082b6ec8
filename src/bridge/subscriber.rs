//! The ZeroMQ socket: messages in, with word of every connection made and lost.
//!
//! It knows no batch and no event. It connects to the publisher, or binds where
//! the publisher is the one that connects, and keeps doing so with a growing wait.
//!
//! What the `zeromq` crate does, and what follows for this file:
//!
//! - A SUB socket reads from TCP only when polled. It holds no queue of messages,
//!   one partly received message and a read buffer of 64 KiB. A bridge that stops
//!   reading fills the kernel's buffers and then the publisher's queue, which
//!   drops messages past its mark and never blocks the engine.
//! - A message may have any number of frames of any length, and the reader
//!   reserves what a header declares: one of 2^62 bytes aborts the process. So the
//!   bridge trusts its publisher to be an engine.
//! - `recv` does not tell of a lost connection; the monitor does, always before
//!   a message of the next connection, since the end of one is read by the same
//!   poll. The crate then reconnects by itself after 100 ms to 30 s, untold, so
//!   the socket is dropped at once and opened anew by this file's rule.
//! - Within one attempt the crate retries a refused connection by itself, from
//!   50 ms on; so an attempt lasts as long as the wait it is part of.
//! - No heartbeat, no TCP keep-alive and no access to the TCP socket: a peer that
//!   vanishes without a word is not noticed. A peer that sends the heartbeat of
//!   ZMTP 3.1 is dropped, as the crate speaks 3.0.

use std::pin::Pin;

use bytes::Bytes;
use futures::StreamExt;
use futures::channel::mpsc::Receiver;
use tokio::time::{Instant, Sleep};
use tracing::{debug, warn};
use zeromq::{Socket, SocketEvent, SocketOptions, SocketRecv, SubSocket, ZmqError};

use super::backoff::Backoff;
use super::config::Source;
use super::health::is_loud;

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

/// A subscription that is kept up.
pub(super) struct Subscriber {
    source: Source,
    backoff: Backoff,
    failures: u64,
    state: State,
}

type Opening = Pin<Box<dyn Future<Output = Result<Open, OpenError>> + Send>>;

/// Invariant: whatever is waited for is stored here, so that a cancelled `next` loses nothing.
enum State {
    Waiting(Pin<Box<Sleep>>),
    Opening { attempt: Opening, until: Instant },
    Open(Box<Open>),
}

struct Open {
    socket: SubSocket,
    monitor: Receiver<SocketEvent>,
    /// Whether the connection was told of: connecting makes one, binding none yet.
    told: bool,
}

enum OpenError {
    Socket(ZmqError),
    TimedOut,
}

impl Subscriber {
    pub(super) fn new(source: Source) -> Self {
        let mut backoff = Backoff::default();
        let state = State::opening(&source, &mut backoff);
        Subscriber { source, backoff, failures: 0, state }
    }

    /// The next signal. Cancelling it loses nothing.
    pub(super) async fn next(&mut self) -> Signal {
        loop {
            match &mut self.state {
                State::Waiting(wait) => {
                    wait.await;
                    self.state = State::opening(&self.source, &mut self.backoff);
                }
                State::Opening { attempt, until } => match attempt.await {
                    Ok(open) => self.state = State::Open(Box::new(open)),
                    Err(error) => {
                        let wait = tokio::time::sleep_until(*until);
                        self.state = State::Waiting(Box::pin(wait));
                        self.failures += 1;
                        if is_loud(self.failures, 1) {
                            self.warn(&error);
                        }
                    }
                },
                State::Open(open) => match open.next(self.source.bind).await {
                    Some(signal) => {
                        if matches!(signal, Signal::Message(_)) {
                            self.backoff = Backoff::default();
                            self.failures = 0;
                        }
                        return signal;
                    }
                    None => {
                        let wait = tokio::time::sleep(self.backoff.wait());
                        self.state = State::Waiting(Box::pin(wait));
                        return Signal::Disconnected;
                    }
                },
            }
        }
    }

    fn warn(&self, error: &OpenError) {
        let (endpoint, failures) = (&self.source.endpoint, self.failures);
        let verb = if self.source.bind { "bind" } else { "connect" };
        match error {
            OpenError::Socket(error) => warn!(endpoint, failures, "cannot {verb} the event socket: {error}"),
            OpenError::TimedOut => {
                warn!(endpoint, failures, "cannot {verb} the event socket: nobody answers")
            }
        }
    }
}

impl State {
    fn opening(source: &Source, backoff: &mut Backoff) -> Self {
        let until = Instant::now() + backoff.wait();
        let source = source.clone();
        let attempt = Box::pin(async move {
            tokio::time::timeout_at(until, open(&source)).await.map_err(|_| OpenError::TimedOut)?
        });
        State::Opening { attempt, until }
    }
}

async fn open(source: &Source) -> Result<Open, OpenError> {
    let mut options = SocketOptions::default();
    options.no_connect_timeout();
    let mut socket = SubSocket::with_options(options);
    let monitor = socket.monitor();
    socket.subscribe(&source.topic).await.map_err(OpenError::Socket)?;
    if source.bind {
        let endpoint = socket.bind(&source.endpoint).await.map_err(OpenError::Socket)?;
        tracing::info!(%endpoint, "waiting for the publisher to connect");
    } else {
        socket.connect(&source.endpoint).await.map_err(OpenError::Socket)?;
    }
    Ok(Open { socket, monitor, told: false })
}

impl Open {
    /// The next signal; `None` when this socket is of no more use.
    async fn next(&mut self, bound: bool) -> Option<Signal> {
        if !bound && !self.told {
            self.told = true;
            return Some(Signal::Connected);
        }
        loop {
            let event = match self.monitor.try_recv() {
                Ok(event) => event,
                Err(_) => tokio::select! {
                    biased;
                    message = self.socket.recv() => match message {
                        Ok(message) => return Some(Signal::Message(message.into_vec())),
                        // The connection is gone; the monitor tells of it next.
                        Err(error) => {
                            debug!("the event socket failed: {error}");
                            continue;
                        }
                    },
                    event = self.monitor.next() => event?,
                },
            };
            match event {
                SocketEvent::Disconnected(_) if bound => return Some(Signal::Disconnected),
                SocketEvent::Disconnected(_) => return None,
                SocketEvent::Accepted(..) => return Some(Signal::Connected),
                _ => {}
            }
        }
    }
}
