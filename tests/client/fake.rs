//! A server that misbehaves as it is told, down to the frames of HTTP/2.

use bytes::{BufMut, Bytes, BytesMut};
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::mpsc;

/// What it does with every query.
#[derive(Debug, Clone)]
pub(crate) enum Behaviour {
    /// Answers with this message.
    Answer(Bytes),
    /// Answers with this gRPC status.
    Status(u32),
    /// Answers with this HTTP status and nothing else.
    Http(u16),
    /// Keeps the query.
    Never,
    /// Sends the first bytes of an answer and drops the connection.
    Half,
    /// Sends the first bytes of an answer and resets the call.
    Reset,
    /// Ends an answer without a status.
    NoStatus,
    /// Speaks another protocol.
    Babble,
    /// Drops every connection once something came over it.
    HangUp,
}

/// A query that it got.
#[derive(Debug)]
pub(crate) struct Query {
    /// Its `grpc-timeout`, in nanoseconds.
    pub(crate) timeout: u128,
    /// Its message.
    pub(crate) message: Bytes,
}

/// A running fake.
pub(crate) struct Fake {
    pub(crate) endpoint: String,
    pub(crate) queries: mpsc::UnboundedReceiver<Query>,
}

impl Fake {
    /// Serves on a free port.
    pub(crate) async fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Fake::serve(listener, behaviour)
    }

    /// Serves on this listener.
    pub(crate) fn serve(listener: TcpListener, behaviour: Behaviour) -> Self {
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let (got, queries) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(connection(socket, behaviour.clone(), got.clone()));
            }
        });
        Fake { endpoint, queries }
    }

    /// Serves at a path.
    pub(crate) fn serve_unix(path: &std::path::Path, behaviour: Behaviour) -> Self {
        let listener = UnixListener::bind(path).expect("a free path");
        let (got, queries) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(speak(socket, behaviour.clone(), got.clone()));
            }
        });
        Fake { endpoint: format!("unix:{}", path.display()), queries }
    }

    /// How many queries came that nobody has looked at.
    pub(crate) fn waiting(&self) -> usize {
        self.queries.len()
    }
}

async fn connection(mut socket: TcpStream, behaviour: Behaviour, got: mpsc::UnboundedSender<Query>) {
    match behaviour {
        Behaviour::Babble => {
            let _ = socket.write_all(b"220 mail.example ESMTP\r\n").await;
        }
        Behaviour::HangUp => {
            let _ = socket.readable().await;
        }
        behaviour => speak(socket, behaviour, got).await,
    }
}

async fn speak<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    socket: S,
    behaviour: Behaviour,
    got: mpsc::UnboundedSender<Query>,
) {
    let Ok(mut connection) = h2::server::Builder::new()
        .initial_window_size(1 << 24)
        .initial_connection_window_size(1 << 25)
        .handshake::<_, Bytes>(socket)
        .await
    else {
        return;
    };
    let (drop_connection, mut dropped) = mpsc::channel::<()>(1);
    loop {
        tokio::select! {
            _ = dropped.recv() => return,
            call = connection.accept() => match call {
                Some(Ok((request, answer))) => {
                    let (behaviour, got) = (behaviour.clone(), got.clone());
                    tokio::spawn(reply(request, answer, behaviour, got, drop_connection.clone()));
                }
                _ => return,
            }
        }
    }
}

async fn reply(
    request: Request<h2::RecvStream>,
    mut answer: SendResponse<Bytes>,
    behaviour: Behaviour,
    got: mpsc::UnboundedSender<Query>,
    drop_connection: mpsc::Sender<()>,
) {
    assert_eq!(request.uri().path(), "/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix");
    let timeout = nanoseconds(request.headers()["grpc-timeout"].to_str().expect("text"));
    let mut body = request.into_body();
    let mut message = BytesMut::new();
    while let Some(Ok(data)) = body.data().await {
        let _ = body.flow_control().release_capacity(data.len());
        message.put(data);
    }
    let declared = u32::from_be_bytes(message[1..5].try_into().expect("four bytes"));
    assert_eq!(declared as usize, message.len() - 5, "one message of that length");
    let _ = got.send(Query { timeout, message: message.freeze().slice(5..) });

    let head = |status: u16| {
        Response::builder()
            .status(status)
            .header("content-type", "application/grpc")
            .body(())
            .expect("a head")
    };
    match behaviour {
        Behaviour::Never => std::future::pending().await,
        Behaviour::Http(status) => {
            let _ = answer.send_response(head(status), true);
        }
        Behaviour::Status(code) => {
            let Ok(mut stream) = answer.send_response(head(200), false) else { return };
            let _ = stream.send_trailers(status(code));
        }
        Behaviour::Answer(message) => {
            let Ok(mut stream) = answer.send_response(head(200), false) else { return };
            let _ = stream.send_data(framed(&message), false);
            let _ = stream.send_trailers(status(0));
        }
        Behaviour::NoStatus => {
            let Ok(mut stream) = answer.send_response(head(200), false) else { return };
            let _ = stream.send_data(framed(b""), true);
        }
        Behaviour::Half => {
            let Ok(mut stream) = answer.send_response(head(200), false) else { return };
            let _ = stream.send_data(HALF, false);
            let _ = drop_connection.send(()).await;
            // Dropped before its connection, the call would be cancelled, which is no crash.
            std::future::pending().await
        }
        Behaviour::Reset => {
            let Ok(mut stream) = answer.send_response(head(200), false) else { return };
            let _ = stream.send_data(HALF, false);
            stream.send_reset(h2::Reason::INTERNAL_ERROR);
        }
        Behaviour::Babble | Behaviour::HangUp => unreachable!("no HTTP/2 is spoken"),
    }
}

/// The head of a message of 255 bytes, and its first one.
const HALF: Bytes = Bytes::from_static(b"\0\0\0\0\xff\x0a");

/// A message as gRPC frames it.
fn framed(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(message.len() as u32);
    frame.put_slice(message);
    frame.freeze()
}

fn status(code: u32) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", code.into());
    trailers.insert("grpc-message", "as told".parse().expect("a value"));
    trailers
}

/// A `grpc-timeout`: up to eight digits and a unit.
fn nanoseconds(text: &str) -> u128 {
    let (digits, unit) = text.split_at(text.len() - 1);
    assert!(digits.len() <= 8, "{text}");
    let count: u128 = digits.parse().expect("digits");
    count
        * match unit {
            "H" => 3_600_000_000_000,
            "M" => 60_000_000_000,
            "S" => 1_000_000_000,
            "m" => 1_000_000,
            "u" => 1_000,
            "n" => 1,
            _ => panic!("unit of {text}"),
        }
}
