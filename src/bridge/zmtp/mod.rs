//! A small ZeroMQ client: one SUB or DEALER connection over TCP or a Unix socket.
//!
//! [`wire`] has the bytes; this has the sockets. It exists because the `zeromq`
//! crate aborts on a header that declares 2^62 bytes, speaks no heartbeat and
//! gives no hold of the TCP socket, so that it can neither be fed by a stranger
//! nor notice a half-open connection. It retries nothing: a connection that failed
//! is dropped and its owner opens the next.
//!
//! A peer that vanished without a word is noticed: one that speaks ZMTP 3.1 is
//! sent a PING after a heartbeat's time of silence and has as long to say anything;
//! below that, and for any peer on TCP, the kernel probes the connection as often, but
//! counts in whole seconds.
//!
//! Memory: at most twice [`wire::MESSAGE_BYTES_MAX`], as a buffer that grew may have
//! room for as much again, and [`OUT_BYTES_MAX`] of answers.

pub mod wire;

use std::fmt;
use std::io;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::Instant;

use self::wire::{Command, Item, Reader, WireError};

/// Most bytes of answers to a peer that does not read them.
pub const OUT_BYTES_MAX: usize = 64 * 1024;

/// Least room that a read is given.
const READ_BYTES: usize = 64 * 1024;

/// Why a connection is of no more use.
#[derive(Debug)]
pub enum ZmtpError {
    /// The socket failed.
    Io(io::Error),
    /// The peer closed it.
    Closed,
    /// What the peer sent cannot be followed.
    Wire(WireError),
    /// The peer is silent.
    Silent,
    /// The endpoint is neither `tcp://` nor `ipc://`.
    Endpoint,
}

impl fmt::Display for ZmtpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ZmtpError::Io(error) => error.fmt(f),
            ZmtpError::Closed => f.write_str("the peer closed the connection"),
            ZmtpError::Wire(error) => error.fmt(f),
            ZmtpError::Silent => f.write_str("the peer does not answer"),
            ZmtpError::Endpoint => f.write_str("an endpoint is tcp://HOST:PORT or ipc://PATH"),
        }
    }
}

impl std::error::Error for ZmtpError {}

impl From<io::Error> for ZmtpError {
    fn from(error: io::Error) -> Self {
        ZmtpError::Io(error)
    }
}

impl From<WireError> for ZmtpError {
    fn from(error: WireError) -> Self {
        ZmtpError::Wire(error)
    }
}

/// What this side's socket is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// Takes messages that begin with the topic.
    Sub {
        /// Prefix of the first frame.
        topic: String,
    },
    /// Talks to a ROUTER.
    Dealer,
}

impl Role {
    fn name(&self) -> &'static str {
        match self {
            Role::Sub { .. } => "SUB",
            Role::Dealer => "DEALER",
        }
    }

    fn fits(&self, peer: &[u8]) -> bool {
        match self {
            Role::Sub { .. } => matches!(peer, b"PUB" | b"XPUB"),
            Role::Dealer => matches!(peer, b"ROUTER" | b"REP" | b"DEALER"),
        }
    }
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Probes of the kernel's that a silent peer may leave unanswered.
const PROBES: u32 = 4;

/// A socket whose peer has not been greeted yet.
pub struct Pending {
    socket: Box<dyn Duplex>,
    heartbeat: Duration,
}

impl Pending {
    fn tcp(socket: TcpStream, heartbeat: Duration) -> io::Result<Self> {
        let second = Duration::from_secs(1);
        let (idle, between) = (heartbeat.max(second), (heartbeat / PROBES).max(second));
        let probes = TcpKeepalive::new().with_time(idle).with_interval(between).with_retries(PROBES);
        SockRef::from(&socket).set_tcp_keepalive(&probes)?;
        socket.set_nodelay(true)?;
        Ok(Pending { socket: Box::new(socket), heartbeat })
    }

    fn unix(socket: UnixStream, heartbeat: Duration) -> Self {
        Pending { socket: Box::new(socket), heartbeat }
    }
}

/// Connects to an endpoint, without a time limit of its own, and shakes hands. A peer
/// that is silent for `heartbeat` is asked whether it is there.
///
/// # Errors
/// Nobody answers there, or no fitting ZeroMQ socket does.
pub async fn connect(endpoint: &str, role: &Role, heartbeat: Duration) -> Result<Connection, ZmtpError> {
    let pending = if let Some(address) = endpoint.strip_prefix("tcp://") {
        Pending::tcp(TcpStream::connect(address).await?, heartbeat)?
    } else if let Some(path) = endpoint.strip_prefix("ipc://") {
        Pending::unix(UnixStream::connect(path).await?, heartbeat)
    } else {
        return Err(ZmtpError::Endpoint);
    };
    Connection::shake_hands(pending, role).await
}

/// A bound endpoint.
#[derive(Debug)]
pub enum Listener {
    /// Of a host.
    Tcp(TcpListener),
    /// Of a path.
    Unix(UnixListener),
}

impl Listener {
    /// Binds an endpoint. A socket that somebody left at the path is replaced.
    ///
    /// # Errors
    /// The endpoint is taken, or none of this machine's.
    pub async fn bind(endpoint: &str) -> Result<Self, ZmtpError> {
        if let Some(address) = endpoint.strip_prefix("tcp://") {
            return Ok(Listener::Tcp(TcpListener::bind(address).await?));
        }
        let path = endpoint.strip_prefix("ipc://").ok_or(ZmtpError::Endpoint)?;
        // A socket of a process that died stays and cannot be bound; one that answers is not ours to take.
        if UnixStream::connect(path)
            .await
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        {
            std::fs::remove_file(path)?;
        }
        Ok(Listener::Unix(UnixListener::bind(path)?))
    }

    /// The next peer that connects, with the heartbeat that it will have. Cancelling it loses nobody.
    ///
    /// # Errors
    /// The system cannot accept now.
    pub async fn accept(&self, heartbeat: Duration) -> Result<Pending, ZmtpError> {
        match self {
            Listener::Tcp(listener) => Ok(Pending::tcp(listener.accept().await?.0, heartbeat)?),
            Listener::Unix(listener) => Ok(Pending::unix(listener.accept().await?.0, heartbeat)),
        }
    }
}

/// A connection whose peer is a fitting ZeroMQ socket.
pub struct Connection {
    read: ReadHalf<Box<dyn Duplex>>,
    write: WriteHalf<Box<dyn Duplex>>,
    reader: Reader,
    out: BytesMut,
    /// Whether the peer knows PING.
    heartbeats: bool,
    heartbeat: Duration,
    /// When the silence has lasted too long to do nothing.
    deadline: Instant,
    asked: bool,
}

impl Connection {
    /// Greets a peer; the caller sets the time limit.
    ///
    /// # Errors
    /// The peer is no ZeroMQ socket that fits `role`.
    pub async fn shake_hands(pending: Pending, role: &Role) -> Result<Self, ZmtpError> {
        let (read, write) = tokio::io::split(pending.socket);
        let mut connection = Connection {
            read,
            write,
            reader: Reader::default(),
            out: BytesMut::new(),
            heartbeats: false,
            heartbeat: pending.heartbeat,
            deadline: Instant::now() + pending.heartbeat,
            asked: false,
        };
        wire::write_greeting(&mut connection.out);
        let minor = loop {
            if let Some(minor) = connection.reader.greeting()? {
                break minor;
            }
            connection.exchange().await?;
        };
        wire::write_ready(&mut connection.out, role.name());
        let body = loop {
            match connection.reader.item()? {
                Some(Item::Command(body)) => break body,
                Some(Item::Message(_)) => return Err(WireError::Command.into()),
                None => connection.exchange().await?,
            }
        };
        match wire::command(&body)? {
            Command::Ready(peer) if role.fits(peer) => {}
            Command::Ready(_) => return Err(WireError::SocketType.into()),
            Command::Error => return Err(WireError::Refused.into()),
            Command::Ping(_) | Command::Other => return Err(WireError::Command.into()),
        }
        if let Role::Sub { topic } = role {
            // The form of ZMTP 3.0, which later ones take too.
            wire::write_message(&mut connection.out, &[&[&[1], topic.as_bytes()].concat()]);
        }
        while !connection.out.is_empty() {
            connection.flush().await?;
        }
        connection.heartbeats = minor >= 1;
        connection.heard();
        Ok(connection)
    }

    /// Queues a message; it goes out while the next is received.
    pub fn queue(&mut self, frames: &[&[u8]]) {
        wire::write_message(&mut self.out, frames);
    }

    /// The next message. Cancelling it loses nothing.
    ///
    /// # Errors
    /// The connection is gone or of no use.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        loop {
            match self.reader.item()? {
                Some(Item::Message(frames)) => return Ok(frames),
                Some(Item::Command(body)) => match wire::command(&body)? {
                    Command::Ping(context) => {
                        wire::write_pong(&mut self.out, context);
                        if self.out.len() > OUT_BYTES_MAX {
                            return Err(ZmtpError::Silent);
                        }
                    }
                    Command::Error => return Err(WireError::Refused.into()),
                    Command::Ready(_) | Command::Other => {}
                },
                None => self.exchange().await?,
            }
        }
    }

    /// Reads once, or writes once, or minds the silence, whichever can be done first.
    async fn exchange(&mut self) -> Result<(), ZmtpError> {
        self.reader.buffer.reserve(READ_BYTES);
        // Reading comes first: after a pause of this side's own an answer may long be there.
        tokio::select! {
            biased;
            read = self.read.read_buf(&mut self.reader.buffer) => {
                if read? == 0 {
                    return Err(ZmtpError::Closed);
                }
                self.heard();
            }
            written = self.write.write(&self.out), if !self.out.is_empty() => {
                self.out.advance(written?);
            }
            () = tokio::time::sleep_until(self.deadline), if self.heartbeats => {
                if self.asked {
                    return Err(ZmtpError::Silent);
                }
                self.asked = true;
                self.deadline = Instant::now() + self.heartbeat;
                wire::write_ping(&mut self.out);
            }
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        let written = self.write.write(&self.out).await?;
        self.out.advance(written);
        Ok(())
    }

    fn heard(&mut self) {
        self.asked = false;
        self.deadline = Instant::now() + self.heartbeat;
    }
}
