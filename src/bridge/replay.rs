//! Asks a publisher's replay socket for batches, one question at a time.
//!
//! The socket is a ROUTER: one question brings every batch that it still has from a
//! number on, then an end marker. It says nothing of batches that it no longer has or
//! that were lost on the way; the numbers show those, and [`super::follow`] reads them.
//! Each question has a connection of its own, so that what is left of an earlier
//! answer cannot be taken for this one's.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tracing::debug;

use super::backoff::Backoff;
use super::config::Source;
use super::event;
use super::follow::Batch;
use super::framing::{self, FrameError};
use super::zmtp::{self, Connection, Role, ZmtpError};

/// What came of a question.
#[derive(Debug)]
pub(super) enum Answer {
    /// One batch of it.
    Batch(Batch),
    /// Its end marker.
    Ended,
    /// The socket stopped answering before that.
    Failed,
}

/// Asks one replay socket.
pub(super) struct Replayer {
    endpoint: Option<String>,
    heartbeat: Duration,
    backoff: Backoff,
    state: State,
}

/// Invariant: whatever is waited for is stored here, so that a cancelled `next` loses nothing.
enum State {
    Idle,
    Asking(Pin<Box<dyn Future<Output = Result<Connection, ZmtpError>> + Send>>),
    Answering { connection: Box<Connection>, until: Instant },
}

impl Replayer {
    /// Asks nothing yet; without a replay socket it never answers.
    pub(super) fn new(source: &Source) -> Self {
        let Source { replay, heartbeat, .. } = source;
        let (endpoint, heartbeat) = (replay.clone(), *heartbeat);
        Replayer { endpoint, heartbeat, backoff: Backoff::default(), state: State::Idle }
    }

    /// Longest that the socket may take to connect, and then be silent in the middle of an
    /// answer. It is served between batches, up to 0.1 s late, and live batches wait for
    /// it, so that it gets half the patience of a quiet publisher.
    fn silence_max(&self) -> Duration {
        self.heartbeat / 2
    }

    /// Asks for every batch from `from` on, and forgets an answer under way.
    pub(super) fn ask(&mut self, from: u64, again: bool) {
        let Some(endpoint) = self.endpoint.clone() else { return };
        if !again {
            self.backoff = Backoff::default();
        }
        let (heartbeat, silence_max) = (self.heartbeat, self.silence_max());
        let pause = if again { self.backoff.wait() } else { Duration::ZERO };
        self.state = State::Asking(Box::pin(async move {
            tokio::time::sleep(pause).await;
            let connecting = zmtp::connect(&endpoint, &Role::Dealer, heartbeat);
            let connected = tokio::time::timeout(silence_max, connecting).await;
            let mut connection = connected.unwrap_or(Err(ZmtpError::Silent))?;
            connection.queue(&[b"", &from.to_be_bytes()]);
            Ok(connection)
        }));
    }

    /// Forgets an answer under way.
    pub(super) fn stop(&mut self) {
        self.state = State::Idle;
    }

    /// What comes next of the answer. Cancelling it loses nothing.
    pub(super) async fn next(&mut self) -> Answer {
        let silence_max = self.silence_max();
        loop {
            match &mut self.state {
                State::Idle => std::future::pending().await,
                State::Asking(attempt) => match attempt.await {
                    Ok(connection) => {
                        let until = Instant::now() + silence_max;
                        self.state = State::Answering { connection: Box::new(connection), until };
                    }
                    Err(error) => return self.failed(&error),
                },
                State::Answering { connection, until } => {
                    let received = tokio::select! {
                        biased;
                        received = connection.recv() => received,
                        () = tokio::time::sleep_until(*until) => Err(ZmtpError::Silent),
                    };
                    let frames = match received {
                        Ok(frames) => frames,
                        Err(error) => return self.failed(&error),
                    };
                    *until = Instant::now() + silence_max;
                    match answer(&frames) {
                        Some(Answer::Ended) => {
                            self.state = State::Idle;
                            return Answer::Ended;
                        }
                        Some(answer) => return answer,
                        None => debug!("skipped a message of the replay socket that is no batch"),
                    }
                }
            }
        }
    }

    fn failed(&mut self, error: &ZmtpError) -> Answer {
        debug!(endpoint = self.endpoint, "the replay socket failed: {error}");
        self.state = State::Idle;
        Answer::Failed
    }
}

/// Reads one message of an answer: an empty frame, then the batch in three frames or two.
fn answer(frames: &[Bytes]) -> Option<Answer> {
    let [delimiter, frames @ ..] = frames else { return None };
    if !delimiter.is_empty() {
        return None;
    }
    // The end marker comes without its topic, and a publisher has one topic only.
    match framing::parse(frames, "") {
        Ok(frame) => Some(Answer::Batch(Batch {
            sequence: frame.sequence,
            time: event::time_of(&frame.payload),
            payload: frame.payload,
        })),
        Err(FrameError::EndMarker) => Some(Answer::Ended),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_framings_are_read() {
        const SEVEN: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 7];
        let rows: [(&[&'static [u8]], &str); 7] = [
            (&[b"", b"kv", SEVEN, b"x"], "7"),
            (&[b"", SEVEN, b"x"], "7"),
            (&[b"", b"", &[0xff; 8], b""], "end"),
            (&[b"", &[0xff; 8], b""], "end"),
            (&[b"kv", SEVEN, b"x"], "none"),
            (&[b"", SEVEN], "none"),
            (&[], "none"),
        ];
        for (frames, expected) in rows {
            let frames: Vec<Bytes> = frames.iter().map(|frame| Bytes::from_static(frame)).collect();
            let found = match answer(&frames) {
                Some(Answer::Batch(batch)) => batch.sequence.to_string(),
                Some(_) => "end".to_owned(),
                None => "none".to_owned(),
            };
            assert_eq!(found, expected, "{frames:?}");
        }
    }
}
