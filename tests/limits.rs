//! What a peer that nobody trusts can make a server hold: nothing that grows.
//!
//! Whatever is sent and left there, `/metrics` says how much of it is held, and the
//! bounds are small enough here to be passed by a test. Clocks are paused where a bound
//! is one of time, so that nothing depends on the machine.

use std::future::IntoFuture;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use prost::Message;
use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::limits::{HASHES_PER_CALL_MAX, MESSAGE_BYTES_MAX, STREAMS_PER_CONNECTION_MAX};
use sgl_kv_indexer::pb;
use sgl_kv_indexer::server::{Config, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;

const MIB: usize = 1 << 20;

struct Running {
    rpc: SocketAddr,
    http: SocketAddr,
}

impl Running {
    async fn start(config: Config) -> Self {
        let [listener, port] = [
            TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
            TcpListener::bind("127.0.0.1:0").await.expect("a free port"),
        ];
        let (rpc, http) = (listener.local_addr().expect("bound"), port.local_addr().expect("bound"));
        let server = Server::new(config, Arc::new(Index::new())).with_http(port);
        tokio::spawn(server.serve(listener, std::future::pending()));
        Running { rpc, http }
    }

    async fn peer(&self) -> Peer {
        Peer::connect(self.rpc).await
    }

    /// The value of a series.
    async fn value(&self, series: &str) -> f64 {
        let mut stream = TcpStream::connect(self.http).await.expect("a server");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("an answer");
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{series} is not in {text}"))
    }

    async fn until(&self, series: &str, is_right: impl Fn(f64) -> bool) -> f64 {
        let mut last = f64::NAN;
        for _ in 0..2_000 {
            last = self.value(series).await;
            if is_right(last) {
                return last;
            }
            tokio::task::yield_now().await;
        }
        panic!("{series} stays {last}");
    }

    async fn rejections(&self, reason: &str) -> f64 {
        self.value(&format!("kv_indexer_rejections_total{{reason=\"{reason}\"}}")).await
    }
}

const HELD: &str = "kv_indexer_message_memory_bytes";

/// The real binary, with 32 MiB for messages; killed when its test ends.
struct Binary(Child);

impl Binary {
    fn start() -> (Self, SocketAddr) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kv-indexer-server"));
        command.env_clear().envs([
            ("KV_INDEXER_LISTEN_ADDR", "127.0.0.1:0"),
            ("KV_INDEXER_HTTP_ADDR", "off"),
            ("KV_INDEXER_MESSAGE_MEMORY_MIB", "32"),
        ]);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("a binary");
        let mut log = BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok);
        let line = log.find(|line| line.contains("listening")).expect("a server that listens");
        // Read to its end, so that the server never waits for room in its log.
        std::thread::spawn(move || log.for_each(drop));
        let address = line.rsplit_once("address=").expect("an address").1;
        (Binary(child), address.parse().expect("an address"))
    }

    /// Bytes of memory that the process has touched.
    fn resident(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).expect("a process");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
        line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
    }
}

impl Drop for Binary {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client that sends what it likes and reads when it likes.
struct Peer {
    sender: SendRequest<Bytes>,
    connection: tokio::task::JoinHandle<Result<(), h2::Error>>,
}

impl Peer {
    async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("a server");
        let (sender, connection) =
            h2::client::Builder::new().initial_window_size(1 << 16).handshake(stream).await.expect("HTTP/2");
        let connection = tokio::spawn(connection.into_future());
        Peer { sender: sender.ready().await.expect("a connection"), connection }
    }

    /// Begins a call with the head of a message of so many bytes.
    async fn begin(&mut self, method: &str, bytes: usize) -> (ResponseFuture, SendStream<Bytes>) {
        let request = http::Request::post(format!("http://x/kv_indexer.v1.KVIndexer/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        self.sender = self.sender.clone().ready().await.expect("a place for a stream");
        let request = request.body(()).expect("a request");
        let (response, mut body) = self.sender.send_request(request, false).expect("an open connection");
        let mut head = BytesMut::new();
        head.put_u8(0);
        head.put_u32(u32::try_from(bytes).expect("a length that gRPC has"));
        body.send_data(head.freeze(), false).expect("an open stream");
        (response, body)
    }

    async fn call(&mut self, method: &str, message: &impl Message) -> ResponseFuture {
        let message = message.encode_to_vec();
        let (response, mut body) = self.begin(method, message.len()).await;
        body.send_data(message.into(), true).expect("an open stream");
        response
    }
}

/// The status of a call that is refused, or else of its trailers.
async fn code(response: ResponseFuture) -> Code {
    let (head, mut body) = response.await.expect("headers").into_parts();
    if let Some(status) = head.headers.get("grpc-status") {
        return Code::from_bytes(status.as_bytes());
    }
    while let Some(data) = body.data().await {
        let data = data.expect("a body");
        body.flow_control().release_capacity(data.len()).expect("what was received");
    }
    let trailers = body.trailers().await.expect("an end").expect("trailers");
    Code::from_bytes(trailers.get("grpc-status").expect("a status").as_bytes())
}

#[tokio::test]
async fn messages_on_their_way_are_bounded_over_all_connections() {
    const BOUND: usize = 16 * MIB;
    let server = Running::start(Config { message_memory_bytes: BOUND, ..Config::default() }).await;
    let (mut peers, mut stuck) = (Vec::new(), Vec::new());
    // Each promises a large message and sends all of it but the last byte: 48 MiB in all.
    for _ in 0..3 {
        let mut peer = server.peer().await;
        for _ in 0..2 {
            let (response, mut body) = peer.begin("MatchExternalKvPrefix", MESSAGE_BYTES_MAX).await;
            body.send_data(vec![0; MESSAGE_BYTES_MAX - 1].into(), false).expect("an open stream");
            stuck.push((tokio::spawn(code(response)), body));
        }
        peers.push(peer);
    }
    // Two messages fit. The others are told, whatever has come of them by then.
    let reason = "kv_indexer_rejections_total{reason=\"memory\"}";
    server.until(reason, |count| count >= 4.0).await;
    assert!(server.value(HELD).await <= BOUND as f64);
    let mut refused = 0;
    for (answer, body) in stuck {
        if answer.is_finished() {
            assert_eq!(answer.await.expect("no panic"), Code::ResourceExhausted);
            refused += 1;
        } else {
            answer.abort();
        }
        drop(body);
    }
    assert!(refused > 0, "nobody was told");
    // With the streams all that they held is gone, and others are served.
    server.until(HELD, |held| held == 0.0).await;
    let query = pb::MatchExternalKvPrefixRequest { hashes: vec![7; 1_000], max_blocks: 0 };
    let mut peer = server.peer().await;
    assert_eq!(code(peer.call("MatchExternalKvPrefix", &query).await).await, Code::Ok);
}

#[tokio::test]
async fn promises_and_floods_do_not_make_the_process_grow() {
    const CONNECTIONS: usize = 8;
    const GROWTH_MAX: usize = 192 * MIB;
    let (server, address) = Binary::start();
    let before = server.resident();
    let (mut peers, mut open) = (Vec::new(), Vec::new());
    // 4 GiB are promised, and hardly anything is sent.
    for _ in 0..CONNECTIONS {
        let mut peer = Peer::connect(address).await;
        for _ in 0..STREAMS_PER_CONNECTION_MAX {
            open.push(peer.begin("MatchExternalKvPrefix", MESSAGE_BYTES_MAX).await);
        }
        peers.push(peer);
    }
    let mut last = Peer::connect(address).await;
    let query = pb::MatchExternalKvPrefixRequest { hashes: vec![7], max_blocks: 0 };
    assert_eq!(code(last.call("MatchExternalKvPrefix", &query).await).await, Code::Ok);
    let promised = server.resident().saturating_sub(before);
    assert!(promised < GROWTH_MAX, "{promised} bytes for promises");
    // Then as much is sent as each connection takes, 1 GiB in all if nobody refused.
    let piece = Bytes::from(vec![0; 2 * MIB]);
    let mut answers = Vec::new();
    for (response, mut body) in open {
        // A stream that was refused takes no more.
        let _ = body.send_data(piece.clone(), false);
        answers.push((tokio::spawn(code(response)), body));
    }
    // Waits for refusals, and looks at what is held meanwhile.
    for tries in 0.. {
        let flooded = server.resident().saturating_sub(before);
        assert!(flooded < GROWTH_MAX, "{flooded} bytes for a flood");
        let refused = answers.iter().filter(|(answer, _)| answer.is_finished()).count();
        if refused >= answers.len() / 2 {
            break;
        }
        assert!(tries < 3_000, "{refused} of {} were refused", answers.len());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    for (answer, _) in answers.into_iter().filter(|(answer, _)| answer.is_finished()) {
        assert_eq!(answer.await.expect("no panic"), Code::ResourceExhausted);
    }
}

#[tokio::test]
async fn a_message_that_never_ends_is_answered_and_let_go() {
    let server = Running::start(Config::default()).await;
    let mut peer = server.peer().await;
    let (response, mut body) = peer.begin("ApplyExternalKvBatch", MIB).await;
    body.send_data(vec![0; MIB / 2].into(), false).expect("an open stream");
    server.until(HELD, |held| held > 500_000.0).await;
    // From here the clock moves on only when there is nothing else to do.
    tokio::time::pause();
    assert_eq!(code(response).await, Code::DeadlineExceeded);
    tokio::time::resume();
    server.until(HELD, |held| held == 0.0).await;
}

#[tokio::test]
async fn answers_that_are_not_read_are_charged_and_their_connection_is_cut() {
    let server = Running::start(Config::default()).await;
    let mut peer = server.peer().await;
    let hashes: Vec<i64> = (1..=HASHES_PER_CALL_MAX as i64).collect();
    let action = pb::ExternalKvAction { r#type: 1, tier: 1, hashes: hashes.clone(), ..Default::default() };
    let apply = pb::ApplyExternalKvBatchRequest {
        worker_id: "w".into(),
        actions: vec![action],
        ..Default::default()
    };
    assert_eq!(code(peer.call("ApplyExternalKvBatch", &apply).await).await, Code::Ok);
    let ask = pb::MatchExternalKvRequest { hashes, count_as_hit: false };
    let mut unread = Vec::new();
    for _ in 0..8 {
        unread.push(peer.call("MatchExternalKv", &ask).await.await.expect("headers"));
    }
    let held = server.until(HELD, |held| held > 1_000_000.0).await;
    assert!(held < (8 * 2 * 8 * HASHES_PER_CALL_MAX) as f64, "{held} bytes are held");
    tokio::time::pause();
    // Cut, it ends in whatever way the client finds it.
    let _ = peer.connection.await.expect("no panic");
    tokio::time::resume();
    server.until(HELD, |held| held == 0.0).await;
    assert_eq!(server.rejections("unresponsive").await, 1.0);
}

#[tokio::test]
async fn connections_have_a_bound_and_silent_ones_are_cut() {
    let server = Running::start(Config { connections_max: 2, ..Config::default() }).await;
    let mut silent = Vec::new();
    for _ in 0..2 {
        silent.push(TcpStream::connect(server.rpc).await.expect("a server"));
    }
    server.until("kv_indexer_connections", |open| open == 2.0).await;
    let mut refused = TcpStream::connect(server.rpc).await.expect("accepted, then closed");
    let mut nothing = Vec::new();
    let _ = refused.read_to_end(&mut nothing).await;
    assert_eq!((nothing.len(), server.rejections("connections").await), (0, 1.0));
    // One says nothing, one half of what HTTP/2 opens with.
    silent[0].write_all(b"PRI * HTTP/2.0\r\n").await.expect("sent");
    tokio::time::pause();
    for stream in &mut silent {
        let _ = stream.read_to_end(&mut nothing).await;
    }
    tokio::time::resume();
    server.until("kv_indexer_connections", |open| open == 0.0).await;
    assert_eq!(server.rejections("unresponsive").await, 2.0);
    let query = pb::MatchExternalKvPrefixRequest { hashes: vec![7], max_blocks: 0 };
    assert_eq!(code(server.peer().await.call("MatchExternalKvPrefix", &query).await).await, Code::Ok);
}

#[tokio::test]
async fn a_quiet_connection_is_asked_to_leave_in_good_order() {
    let server = Running::start(Config::default()).await;
    let mut peer = server.peer().await;
    let query = pb::MatchExternalKvPrefixRequest { hashes: vec![7], max_blocks: 0 };
    assert_eq!(code(peer.call("MatchExternalKvPrefix", &query).await).await, Code::Ok);
    tokio::time::pause();
    let quiet_since = tokio::time::Instant::now();
    peer.connection.await.expect("no panic").expect("a good end");
    assert!(quiet_since.elapsed().as_secs() >= 600, "{:?}", quiet_since.elapsed());
}

#[tokio::test]
async fn headers_and_streams_of_a_connection_are_bounded() {
    let server = Running::start(Config::default()).await;
    let mut peer = server.peer().await;
    let mut open = Vec::new();
    for _ in 0..STREAMS_PER_CONNECTION_MAX {
        open.push(peer.begin("MatchExternalKvPrefix", 8).await);
    }
    let series = "kv_indexer_rpcs_in_flight{method=\"MatchExternalKvPrefix\"}";
    server.until(series, |calls| calls == f64::from(STREAMS_PER_CONNECTION_MAX)).await;
    // One more waits in the client until a place is free.
    let more =
        tokio::time::timeout(std::time::Duration::from_millis(1), peer.begin("MatchExternalKvPrefix", 8))
            .await;
    for _ in 0..5 {
        assert!(server.value(series).await <= f64::from(STREAMS_PER_CONNECTION_MAX));
    }
    drop((more, open, peer));

    let mut peer = server.peer().await;
    let request = http::Request::post("http://x/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix");
    let request = request.header("x", "y".repeat(64 * 1024)).body(()).expect("a request");
    let (response, _) = peer.sender.send_request(request, true).expect("an open connection");
    let refused = match response.await {
        Ok(response) => response.status() == http::StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        Err(_) => true,
    };
    assert!(refused, "a large head was taken");
}
