//! ZeroMQ peers made of a TCP socket and the bridge's own frames, so that they can do what no
//! library's socket does: fall silent, lose what they like, and show when they are not read.

use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use sgl_kv_indexer::bridge::zmtp::wire::{self, Command, Item, Reader};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// A free port, and the endpoint it is.
pub async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("tcp://{}", listener.local_addr().expect("its address"));
    (listener, endpoint)
}

/// One connection whose hands are shaken.
pub struct Peer {
    socket: TcpStream,
    reader: Reader,
}

impl Peer {
    /// Waits for a peer and greets it as a socket of this type. Nobody who only knocks counts.
    pub async fn accept(listener: &TcpListener, socket_type: &str) -> Self {
        loop {
            let (socket, _) = listener.accept().await.expect("a connection");
            let mut peer = Peer { socket, reader: Reader::default() };
            let mut out = BytesMut::new();
            wire::write_greeting(&mut out);
            wire::write_ready(&mut out, socket_type);
            if peer.socket.write_all(&out).await.is_err() {
                continue;
            }
            while peer.reader.greeting().expect("a greeting").is_none() {
                if !peer.read().await {
                    break;
                }
            }
            if let Some(Item::Command(body)) = peer.next().await {
                assert!(matches!(wire::command(&body), Ok(Command::Ready(_))), "{body:?}");
                return peer;
            }
        }
    }

    /// Reads once; whether anything came.
    async fn read(&mut self) -> bool {
        let mut bytes = [0; 4_096];
        let read = self.socket.read(&mut bytes).await.unwrap_or(0);
        self.reader.push(&bytes[..read]);
        read > 0
    }

    /// The next message or command; `None` when the other side has closed.
    pub async fn next(&mut self) -> Option<Item> {
        loop {
            if let Some(item) = self.reader.item().expect("frames") {
                return Some(item);
            }
            if !self.read().await {
                return None;
            }
        }
    }

    /// Sends one message; whether the other side still takes any.
    pub async fn send(&mut self, frames: &[Bytes]) -> bool {
        let mut out = BytesMut::new();
        wire::write_message(&mut out, &frames.iter().map(|frame| &frame[..]).collect::<Vec<_>>());
        self.socket.write_all(&out).await.is_ok()
    }

    /// Answers a PING.
    pub async fn pong(&mut self, context: &[u8]) -> bool {
        let mut out = BytesMut::new();
        wire::write_pong(&mut out, context);
        self.socket.write_all(&out).await.is_ok()
    }
}

/// A publisher with a mark: what a subscriber does not read in time is dropped, as ZeroMQ does.
pub struct Dropping {
    queue: mpsc::Sender<Vec<Bytes>>,
}

impl Dropping {
    /// Waits for a subscriber; at most `mark` messages wait for it.
    pub async fn accept(listener: &TcpListener, mark: usize) -> Self {
        let mut peer = Peer::accept(listener, "PUB").await;
        assert!(matches!(peer.next().await, Some(Item::Message(_))), "a subscription");
        let (queue, mut queued) = mpsc::channel::<Vec<Bytes>>(mark);
        tokio::spawn(async move {
            while let Some(frames) = queued.recv().await {
                if !peer.send(&frames).await {
                    return;
                }
            }
        });
        Dropping { queue }
    }

    /// Sends a message if it has room; whether it had.
    pub fn send(&self, frames: Vec<Bytes>) -> bool {
        self.queue.try_send(frames).is_ok()
    }

    /// Sends a message once it has room.
    pub async fn send_in_time(&self, frames: Vec<Bytes>) {
        self.queue.send(frames).await.expect("a subscriber");
    }
}

/// What a replay socket does with one question.
pub struct Answer {
    /// Messages of a publisher: topic, sequence, payload.
    pub batches: Vec<Vec<Bytes>>,
    /// Whether the end marker follows; without it the socket falls silent.
    pub ended: bool,
}

/// A replay socket that answers as it is told.
pub struct Replay {
    pub endpoint: String,
    asked: Arc<Mutex<Vec<u64>>>,
}

impl Replay {
    /// Serves on a free port. `answer` gets the number of questions before and the sequence asked from.
    pub async fn start(answer: impl Fn(usize, u64) -> Answer + Send + Sync + 'static) -> Self {
        let (listener, endpoint) = listen().await;
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (all, answer) = (Arc::clone(&asked), Arc::new(answer));
        tokio::spawn(async move {
            loop {
                let peer = Peer::accept(&listener, "ROUTER").await;
                tokio::spawn(serve(peer, Arc::clone(&all), Arc::clone(&answer)));
            }
        });
        Replay { endpoint, asked }
    }

    /// From where it was asked, in order.
    pub fn asked(&self) -> Vec<u64> {
        self.asked.lock().expect("no panic").clone()
    }
}

async fn serve(mut peer: Peer, asked: Arc<Mutex<Vec<u64>>>, answer: Arc<impl Fn(usize, u64) -> Answer>) {
    while let Some(item) = peer.next().await {
        let Item::Message(question) = item else { continue };
        let [delimiter, from] = &question[..] else { panic!("{question:?}") };
        assert!(delimiter.is_empty());
        let from = u64::from_be_bytes(from[..].try_into().expect("8 bytes"));
        let Answer { batches, ended } = {
            let mut asked = asked.lock().expect("no panic");
            asked.push(from);
            answer(asked.len() - 1, from)
        };
        let end = vec![Bytes::new(), vec![0xff; 8].into(), Bytes::new()];
        for batch in batches.into_iter().chain(ended.then_some(end)) {
            if !peer.send(&[vec![Bytes::new()], batch].concat()).await {
                return;
            }
        }
    }
}
