//! `record`: an engine's event stream to a file.
//!
//! The bridge's own subscriber takes the messages, so that a stranger at the other end
//! can do no more harm than there, and they are written as they came, with word of every
//! connection made and lost. A publisher keeps no history: what it sent before counts
//! as missed in the recording too.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use serde_json::json;

use super::recording::{What, Writer};
use super::{Environment, Failure, Outcome, output};
use crate::bridge::zmtp::{self, Connection, Listener, Role, ZmtpError};
use crate::limits::RECONNECT_BACKOFF;

/// Longest that connecting and shaking hands may take.
const OPEN_MAX: Duration = Duration::from_secs(5);

/// Silence after which a publisher is asked whether it is there: the bridge's default.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// How often what was received is brought into the file.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(super) struct Record {
    /// The publisher: tcp://HOST:PORT or ipc://PATH.
    endpoint: String,
    /// File to write; it must not exist.
    file: PathBuf,
    /// Overwrites the file.
    #[arg(long)]
    force: bool,
    /// Binds the endpoint, for a publisher that connects.
    #[arg(long)]
    bind: bool,
    /// Takes messages of topics that begin with this.
    #[arg(long, value_name = "TOPIC", default_value = "")]
    topic: String,
    /// Name of the stream in the recording, usually the worker's.
    #[arg(long, value_name = "NAME", default_value = "w0")]
    stream: String,
    /// Ends after this many messages instead of at ctrl-c.
    #[arg(long, value_name = "MESSAGES", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

impl Record {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let failed = |error: std::io::Error| Failure::Input(format!("{}: {error}", self.file.display()));
        let role = Role::Sub { topic: self.topic.clone() };
        let mut opener = Opener::new(&self.endpoint, self.bind, &role).await?;
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut about = json!({
            "stream": self.stream,
            "endpoint": self.endpoint,
            "topic": self.topic,
            "started_unix_ms": u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
        });
        let mut writer = Writer::create(&self.file, self.force, &mut about).map_err(failed)?;
        let spinner = output::spinner("messages");
        let began = Instant::now();
        let mut messages = 0;
        let mut flush = tokio::time::interval(FLUSH_INTERVAL);
        let mut connection: Option<Connection> = None;
        while self.count.is_none_or(|count| messages < count) {
            let connected = connection.is_some();
            let received = async {
                match &mut connection {
                    Some(connection) => connection.recv().await.map(Received::Message),
                    None => opener.open(environment.err).await.map(Received::Connection),
                }
            };
            let what = tokio::select! {
                biased;
                () = &mut environment.shutdown => break,
                // Not while a connection is made, which a tick would give up.
                _ = flush.tick(), if connected => {
                    writer.flush().map_err(failed)?;
                    spinner.tick();
                    continue;
                }
                received = received => match received {
                    Ok(Received::Connection(opened)) => {
                        connection = Some(opened);
                        What::Connected
                    }
                    Ok(Received::Message(frames)) => {
                        messages += 1;
                        spinner.set_position(messages);
                        What::Message(frames)
                    }
                    Err(error) => {
                        connection = None;
                        spinner.set_message(format!("lost the publisher: {error}"));
                        What::Disconnected
                    }
                },
            };
            writer.append(began.elapsed(), &what).map_err(failed)?;
            if what == What::Disconnected {
                writer.flush().map_err(failed)?;
            }
        }
        writer.finish().map_err(failed)?;
        spinner.finish_and_clear();
        writeln!(environment.out, "{messages} messages recorded in {}", self.file.display())?;
        Ok(Outcome::Done)
    }
}

/// What a recorder waits for.
enum Received {
    Connection(Connection),
    Message(Vec<bytes::Bytes>),
}

/// Opens connections, one after the other.
struct Opener<'a> {
    endpoint: &'a str,
    role: &'a Role,
    listener: Option<Listener>,
    said: bool,
}

impl<'a> Opener<'a> {
    async fn new(endpoint: &'a str, bind: bool, role: &'a Role) -> Result<Self, Failure> {
        let failed = |error: ZmtpError| Failure::Input(format!("{endpoint}: {error}"));
        if !["tcp://", "ipc://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
            return Err(failed(ZmtpError::Endpoint));
        }
        let listener = if bind { Some(Listener::bind(endpoint).await.map_err(failed)?) } else { None };
        Ok(Opener { endpoint, role, listener, said: false })
    }

    /// A connection, however long it takes; only losing one is an error.
    async fn open(&mut self, err: &mut dyn std::io::Write) -> Result<Connection, ZmtpError> {
        loop {
            match tokio::time::timeout(OPEN_MAX, self.attempt()).await {
                Ok(Ok(connection)) => {
                    self.said = false;
                    return Ok(connection);
                }
                Ok(Err(error)) => self.say(err, &error.to_string()),
                // Nobody came to where it is bound, or nobody shook hands.
                Err(_) => self.say(err, "nobody is there"),
            }
            tokio::time::sleep(RECONNECT_BACKOFF.0).await;
        }
    }

    async fn attempt(&self) -> Result<Connection, ZmtpError> {
        match &self.listener {
            Some(listener) => Connection::shake_hands(listener.accept(HEARTBEAT).await?, self.role).await,
            None => zmtp::connect(self.endpoint, self.role, HEARTBEAT).await,
        }
    }

    /// Says once per wait why it waits.
    fn say(&mut self, err: &mut dyn std::io::Write, why: &str) {
        if !std::mem::replace(&mut self.said, true) {
            // Nobody to read it is no reason to stop recording.
            let _ = writeln!(err, "waiting for the publisher at {}: {why}", self.endpoint);
        }
    }
}
