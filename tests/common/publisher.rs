//! A publisher of KV events that knows when its subscriber has joined.

use bytes::Bytes;
use rmp::encode;
use zeromq::{Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

/// Publishes as an engine does. The socket is an XPUB, which shows subscriptions:
/// a test waits for one and need not sleep.
pub struct Publisher {
    socket: XPubSocket,
    /// Where it is bound.
    pub endpoint: String,
    topic: &'static str,
    sequence: u64,
}

impl Publisher {
    /// Binds a free port.
    pub async fn bind(topic: &'static str) -> Self {
        Publisher::bind_at("tcp://127.0.0.1:0", topic).await
    }

    /// Binds this endpoint as soon as its last owner has let go of it.
    pub async fn bind_at(endpoint: &str, topic: &'static str) -> Self {
        loop {
            let mut socket = XPubSocket::new();
            if let Ok(bound) = socket.bind(endpoint).await {
                return Publisher { socket, endpoint: bound.to_string(), topic, sequence: 0 };
            }
            tokio::task::yield_now().await;
        }
    }

    /// Connects to a subscriber that binds.
    pub async fn connect(endpoint: &str, topic: &'static str) -> Self {
        let mut socket = XPubSocket::new();
        socket.connect(endpoint).await.expect("the subscriber binds");
        Publisher { socket, endpoint: endpoint.to_owned(), topic, sequence: 0 }
    }

    /// Waits until a subscriber has asked for a topic, and returns it.
    pub async fn joined(&mut self) -> String {
        loop {
            // An error is a connection that broke; the next one may hold.
            let Ok(message) = self.socket.recv().await else { continue };
            if let Some([1, topic @ ..]) = message.get(0).map(|frame| &frame[..]) {
                return String::from_utf8(topic.to_vec()).expect("UTF-8");
            }
        }
    }

    /// Sends one batch under the next number.
    pub async fn send(&mut self, payload: impl Into<Bytes>) {
        let sequence = self.sequence;
        self.sequence += 1;
        let frames = vec![
            Bytes::from_static(self.topic.as_bytes()),
            Bytes::copy_from_slice(&sequence.to_be_bytes()),
            payload.into(),
        ];
        self.send_frames(frames).await;
    }

    /// Sends these frames as they are.
    pub async fn send_frames(&mut self, frames: Vec<Bytes>) {
        self.socket.send(ZmqMessage::try_from(frames).expect("frames")).await.expect("sent");
    }

    /// Closes the socket and its port, and returns the endpoint.
    pub async fn close(self) -> String {
        self.socket.close().await;
        self.endpoint
    }
}

/// One event of a batch, as SGLang's arrays have it.
#[derive(Debug, Clone)]
pub enum Event {
    Stored(Vec<i64>),
    Removed(Vec<i64>),
    Cleared,
}

/// A batch of events on the device, with 16 tokens a block.
pub fn batch(events: &[Event]) -> Vec<u8> {
    let mut out = Vec::new();
    let write = &mut out;
    encode::write_array_len(write, 2).unwrap();
    encode::write_f64(write, 1.5).unwrap();
    encode::write_array_len(write, events.len() as u32).unwrap();
    for event in events {
        match event {
            Event::Stored(hashes) => {
                encode::write_array_len(write, 7).unwrap();
                encode::write_str(write, "BlockStored").unwrap();
                write_hashes(write, hashes);
                encode::write_nil(write).unwrap();
                encode::write_array_len(write, hashes.len() as u32 * 16).unwrap();
                (0..hashes.len() as u64 * 16).for_each(|token| {
                    encode::write_uint(write, token * 7919 % 150_000).unwrap();
                });
                encode::write_uint(write, 16).unwrap();
                encode::write_nil(write).unwrap();
                encode::write_str(write, "GPU").unwrap();
            }
            Event::Removed(hashes) => {
                encode::write_array_len(write, 3).unwrap();
                encode::write_str(write, "BlockRemoved").unwrap();
                write_hashes(write, hashes);
                encode::write_str(write, "GPU").unwrap();
            }
            Event::Cleared => {
                encode::write_array_len(write, 1).unwrap();
                encode::write_str(write, "AllBlocksCleared").unwrap();
            }
        }
    }
    out
}

fn write_hashes(write: &mut Vec<u8>, hashes: &[i64]) {
    encode::write_array_len(write, hashes.len() as u32).unwrap();
    for hash in hashes {
        encode::write_sint(write, *hash).unwrap();
    }
}
