//! Bounds, deadlines and permits, over real connections.
//!
//! Nothing here depends on how fast the machine is: all tasks of a test share one
//! thread, or one of several waits for a lock that the test holds; permits are held by
//! the test itself, and a deadline is either past when its headers are sent or waited for.

use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use prost::Message;
use sgl_kv_indexer::arena::{Batch, Index};
use sgl_kv_indexer::limits::{HASHES_PER_CALL_MAX, MESSAGE_BYTES_MAX, STREAMS_PER_CONNECTION_MAX};
use sgl_kv_indexer::pb;
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::server::{Admission, Config, Server};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::Channel;

const PREFIX: &str = "MatchExternalKvPrefix";
const APPLY: &str = "ApplyExternalKvBatch";

/// After this a test is stuck; none comes near it.
const STUCK: Duration = Duration::from_secs(120);

/// A server with an empty index, on a port of its own.
struct Running {
    address: SocketAddr,
    admission: Arc<Admission>,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<std::io::Result<()>>,
}

impl Running {
    async fn start(permits: usize) -> Self {
        Running::start_with(permits, Arc::new(Index::new())).await
    }

    async fn start_with(permits: usize, index: Arc<Index>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let config = Config { prefix_queries_in_flight_max: permits, ..Config::default() };
        let server = Server::new(config, index);
        let admission = server.admission();
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(server.serve(listener, async {
            let _ = stopped.await;
        }));
        Running { address, admission, stop, ended }
    }

    async fn client(&self) -> KvIndexerClient<Channel> {
        let endpoint = format!("http://{}", self.address);
        KvIndexerClient::connect(endpoint).await.expect("a server").max_decoding_message_size(usize::MAX)
    }

    async fn raw(&self) -> Raw {
        let stream = TcpStream::connect(self.address).await.expect("a server");
        let (sender, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
        tokio::spawn(connection.into_future());
        Raw { sender: sender.ready().await.expect("a connection"), address: self.address }
    }
}

/// A client that can do what a generated one cannot: leave a call half sent.
struct Raw {
    sender: SendRequest<Bytes>,
    address: SocketAddr,
}

impl Raw {
    /// Sends a call's headers; its body is up to the caller.
    fn begin(&mut self, method: &str, timeout: Option<&str>) -> (ResponseFuture, SendStream<Bytes>) {
        let mut request =
            http::Request::post(format!("http://{}/kv_indexer.v1.KVIndexer/{method}", self.address))
                .header("content-type", "application/grpc")
                .header("te", "trailers");
        if let Some(timeout) = timeout {
            request = request.header("grpc-timeout", timeout);
        }
        let request = request.body(()).expect("a request");
        self.sender.send_request(request, false).expect("an open connection")
    }

    /// Sends a whole call; the answer is for later.
    fn send(&mut self, method: &str, timeout: Option<&str>, message: &[u8]) -> ResponseFuture {
        let (response, mut body) = self.begin(method, timeout);
        let mut frame = BytesMut::with_capacity(message.len() + 5);
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.len()).expect("a length that gRPC has"));
        frame.put_slice(message);
        body.send_data(frame.freeze(), true).expect("an open stream");
        response
    }

    async fn call(&mut self, method: &str, timeout: Option<&str>, message: &[u8]) -> Code {
        code(self.send(method, timeout, message)).await
    }
}

/// The status of a call, from its trailers or from headers that are all there is.
async fn code(response: ResponseFuture) -> Code {
    let (head, mut body) = response.await.expect("headers").into_parts();
    let status = match head.headers.get("grpc-status") {
        Some(status) => status.clone(),
        None => {
            while let Some(data) = body.data().await {
                let data = data.expect("a body");
                body.flow_control().release_capacity(data.len()).expect("what was received");
            }
            let trailers = body.trailers().await.expect("an end").expect("trailers");
            trailers.get("grpc-status").expect("a status").clone()
        }
    };
    Code::from_bytes(status.as_bytes())
}

fn query(hashes: usize) -> pb::MatchExternalKvPrefixRequest {
    pb::MatchExternalKvPrefixRequest { hashes: vec![7; hashes], max_blocks: 0 }
}

fn empty_apply() -> Vec<u8> {
    pb::ApplyExternalKvBatchRequest { worker_id: "w".into(), ..Default::default() }.encode_to_vec()
}

#[tokio::test]
async fn a_query_without_a_permit_is_refused_at_once() {
    let server = Running::start(1).await;
    let mut client = server.client().await;
    let permit = server.admission.admit().expect("the only permit");
    let refused = client.match_external_kv_prefix(query(3)).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    // What is not valid is said first, whatever the load.
    let invalid = client.match_external_kv_prefix(query(0)).await.unwrap_err();
    assert_eq!(invalid.code(), Code::InvalidArgument, "{invalid}");
    assert_eq!((server.admission.overloaded(), server.admission.scans()), (1, 0));
    drop(permit);
    let answer = client.match_external_kv_prefix(query(3)).await.expect("an answer").into_inner();
    assert_eq!((answer.matches.len(), answer.blocks_read), (0, 1));
    assert_eq!((server.admission.overloaded(), server.admission.scans()), (1, 1));
}

#[tokio::test]
async fn a_burst_is_admitted_up_to_the_permits_and_the_rest_refused() {
    const PERMITS: usize = 32;
    const CONNECTIONS: usize = 2;
    const CALLS: usize = 60;
    let server = Running::start(PERMITS).await;
    let message = query(64).encode_to_vec();
    let mut calls = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut raw = server.raw().await;
        // One answered call first, so that the connection knows its settings.
        assert_eq!(raw.call(PREFIX, None, &query(0).encode_to_vec()).await, Code::InvalidArgument);
        // No await in between: the connection sends all of them in one go.
        calls.extend((0..CALLS).map(|_| raw.send(PREFIX, None, &message)));
    }
    let (mut answered, mut refused) = (0, 0);
    for call in calls {
        match code(call).await {
            Code::Ok => answered += 1,
            Code::ResourceExhausted => refused += 1,
            other => panic!("a query was answered {other:?}"),
        }
    }
    assert_eq!(answered + refused, CONNECTIONS * CALLS);
    assert!(refused > 0, "the limit never bit");
    assert!(answered >= PERMITS, "{answered} answered of {PERMITS} that could be admitted at once");
    assert_eq!(server.admission.scans(), answered as u64);
    assert_eq!(server.admission.overloaded(), refused as u64);
    assert!(server.admission.admit().is_ok(), "permits come back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn queries_on_several_threads_share_the_permits() {
    // One that is scanned by the call's own thread, and one that is handed to another.
    for hashes in [3, 100_000] {
        let held = tokio::time::timeout(STUCK, share_a_permit(hashes)).await;
        assert!(held.is_ok(), "a query of {hashes} hashes waits for the lock without a permit");
    }
}

/// Has a query wait for the lock with the only permit, while another one comes.
async fn share_a_permit(hashes: usize) {
    let index = Arc::new(Index::new());
    let server = Running::start_with(1, Arc::clone(&index)).await;
    let (mut first, mut second) = (server.client().await, server.client().await);
    let ((locked, is_locked), (release, released)) = (oneshot::channel(), std::sync::mpsc::channel());
    let writer = std::thread::spawn(move || {
        let batch = Batch { worker_id: "w", worker_address: "", cache_spec: None, seq: 0, actions: &[] };
        let hold = || locked.send(()).is_ok() && released.recv().is_ok();
        index.apply_if(&batch, hold).expect("a good batch");
    });
    is_locked.await.expect("the writer");
    let waiting = tokio::spawn(async move { first.match_external_kv_prefix(query(hashes)).await });
    while server.admission.running() == 0 {
        tokio::task::yield_now().await;
    }
    let refused = second.match_external_kv_prefix(query(hashes)).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(!waiting.is_finished(), "the lock is held");
    release.send(()).expect("the writer");
    writer.join().expect("no panic");
    assert_eq!(waiting.await.expect("no panic").expect("an answer").into_inner().blocks_read, 1);
    assert!(second.match_external_kv_prefix(query(hashes)).await.is_ok(), "the permit came back");
    assert_eq!((server.admission.overloaded(), server.admission.scans()), (1, 2));
}

#[tokio::test]
async fn a_deadline_that_ran_out_comes_before_everything_else() {
    let server = Running::start(1).await;
    let mut raw = server.raw().await;
    let permit = server.admission.admit().expect("the only permit");
    let ragged = [0x0a, 1, 0];
    for message in [query(3).encode_to_vec(), query(0).encode_to_vec(), ragged.to_vec()] {
        assert_eq!(raw.call(PREFIX, Some("0n"), &message).await, Code::DeadlineExceeded);
    }
    assert_eq!(raw.call(PREFIX, Some("1n"), &query(3).encode_to_vec()).await, Code::DeadlineExceeded);
    assert_eq!(raw.call(PREFIX, None, &ragged).await, Code::InvalidArgument);
    drop(permit);
    let admission = &server.admission;
    assert_eq!((admission.late(), admission.overloaded(), admission.scans()), (4, 0, 0));
    // Far away, or not to be read: it does not matter.
    for timeout in ["99999999H", "soon"] {
        assert_eq!(raw.call(PREFIX, Some(timeout), &query(3).encode_to_vec()).await, Code::Ok);
    }
}

#[tokio::test]
async fn a_body_that_never_comes_is_answered_at_its_deadline() {
    let server = Running::start(1).await;
    let mut raw = server.raw().await;
    let (nothing, _body) = raw.begin(PREFIX, Some("5m"));
    let (part, mut body) = raw.begin(PREFIX, Some("5m"));
    body.send_data(Bytes::from_static(&[0, 0, 0, 0, 9, 1]), false).expect("an open stream");
    assert_eq!(code(nothing).await, Code::DeadlineExceeded);
    assert_eq!(code(part).await, Code::DeadlineExceeded);
    assert_eq!((server.admission.late(), server.admission.scans()), (2, 0));
}

#[tokio::test]
async fn headers_without_a_body_hold_no_permit() {
    let server = Running::start(1).await;
    let mut raw = server.raw().await;
    let held: Vec<_> = (1..STREAMS_PER_CONNECTION_MAX).map(|_| raw.begin(PREFIX, None)).collect();
    // Frames keep their order, so once this is answered the server has met all of them.
    assert_eq!(raw.call(PREFIX, None, &query(0).encode_to_vec()).await, Code::InvalidArgument);
    drop(server.admission.admit().expect("the only permit"));
    assert_eq!(raw.call(PREFIX, None, &query(3).encode_to_vec()).await, Code::Ok);
    assert_eq!(server.admission.overloaded(), 0);
    drop(held);
}

#[tokio::test]
async fn applies_are_never_shed() {
    let server = Running::start(1).await;
    let mut raw = server.raw().await;
    let _permit = server.admission.admit().expect("the only permit");
    for timeout in [None, Some("0n"), Some("1n")] {
        assert_eq!(raw.call(APPLY, timeout, &empty_apply()).await, Code::Ok);
    }
    assert_eq!((server.admission.late(), server.admission.overloaded()), (0, 0));
}

#[tokio::test]
async fn a_message_over_the_limit_is_out_of_range() {
    let server = Running::start(1).await;
    let mut raw = server.raw().await;
    let over = vec![0; MESSAGE_BYTES_MAX + 1];
    assert_eq!(raw.call(PREFIX, None, &over).await, Code::OutOfRange);
    assert_eq!(raw.call(APPLY, None, &over).await, Code::OutOfRange);
    // A generated client meets the refusal while it still sends.
    let mut client = server.client().await;
    let status = client.match_external_kv_prefix(query(MESSAGE_BYTES_MAX / 8)).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    let status = client.match_external_kv_prefix(query(0)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "the connection is usable: {status}");
}

#[tokio::test]
async fn a_message_just_within_the_limit_is_answered() {
    let server = Running::start(1).await;
    let mut client = server.client().await;
    let status = client.match_external_kv_prefix(query(MESSAGE_BYTES_MAX / 8 - 2)).await;
    assert_eq!(status.expect("an answer").into_inner().blocks_read, 1);
}

#[tokio::test]
async fn floods_are_refused_by_their_bound() {
    let server = Running::start(1).await;
    let mut raw = server.raw().await;
    let actions = [0x1a, 0].repeat(MESSAGE_BYTES_MAX / 2);
    assert_eq!(raw.call(APPLY, None, &actions).await, Code::ResourceExhausted);
    let mut client = server.client().await;
    let hashes = vec![7; HASHES_PER_CALL_MAX + 1];
    let looked_up = pb::MatchExternalKvRequest { hashes: hashes.clone(), count_as_hit: true };
    let status = client.match_external_kv(looked_up).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    let counted = pb::GetExternalKvHitCountsRequest { hashes };
    let status = client.get_external_kv_hit_counts(counted).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
}

#[tokio::test]
async fn what_is_not_protobuf_is_an_invalid_argument() {
    let server = Running::start(1).await;
    let mut raw = server.raw().await;
    for method in [APPLY, "MatchExternalKv", PREFIX, "GetExternalKvHitCounts"] {
        for message in [&b"\x0a"[..], b"\x0a\x7f", b"\x07", b"\x00", b"\x0c", b"\xff\xff\xff"] {
            assert_eq!(raw.call(method, None, message).await, Code::InvalidArgument, "{message:?}");
        }
    }
    assert_eq!(raw.call("NoSuchMethod", None, b"").await, Code::Unimplemented);
}

#[tokio::test]
async fn a_drain_lets_running_calls_end_and_then_cuts() {
    let server = Running::start(1).await;
    let mut raw = server.raw().await;
    let (running, mut body) = raw.begin(PREFIX, None);
    let (stuck, _body) = raw.begin(PREFIX, None);
    assert_eq!(raw.call(PREFIX, None, &query(0).encode_to_vec()).await, Code::InvalidArgument);
    // From here the clock moves on only when there is nothing else to do.
    tokio::time::pause();
    server.stop.send(()).expect("a running server");
    let empty = Bytes::from_static(&[0, 0, 0, 0, 0]);
    body.send_data(empty, true).expect("an open stream");
    assert_eq!(code(running).await, Code::InvalidArgument);
    assert!(stuck.await.is_err(), "a call that never ends is cut");
    assert!(server.ended.await.expect("no panic").is_ok());
    assert!(TcpStream::connect(server.address).await.is_err(), "nobody listens any more");
}
